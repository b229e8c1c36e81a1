"""How long one step takes on the GPU, beside its serial roof.

A case is a batch: so many decodes at a history, and at most one prompt chunk. Several copies of it with other blocks
and other tokens take turns, so that nothing is read from the L2 cache that a real step would read from memory. Each
replay is timed with CUDA events while a spinning kernel keeps the GPU busy, so that the host's part is not in it
(`idle` measures that part, through the real Engine). Cases are measured there and back: A B C C B A.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from minichunk import Engine, SamplingParams
from minichunk.attention import make_backend
from minichunk.bench.machine import about, clocks, roof_gpu
from minichunk.blocks import num_blocks_needed
from minichunk.costmodel import serial_roof
from minichunk.graphs import Bucket, Graphs
from minichunk.models import load
from minichunk.packing import PackedBatch
from minichunk.request import Chunk, Request
from minichunk.runner import ModelRunner

BLOCK_SIZE = 16
SPIN = 2_000_000  # cycles, about a millisecond: longer than the host needs to launch a graph
COPIES = 3  # batches that take turns

# (name, model shape, [(history, new tokens), …]) of the table of issue 3
CASES = [
    ("256 decodes at 1024", "llama-3-8b", [(1024, 1)] * 256),
    ("2048 chunk at 4096 + 128 decodes at 1024", "llama-3-8b", [(4096, 2048)] + [(1024, 1)] * 128),
    ("2×512 chunks at 0 and 512 + 30 decodes at 2048", "llama-3-8b", [(0, 512), (512, 512)] + [(2048, 1)] * 30),
    ("64 decodes at 1024", "qwen3-0.6b", [(1024, 1)] * 64),
    ("256 decodes at 1024", "qwen3-0.6b", [(1024, 1)] * 256),
    ("2×512 chunks at 0 and 512 + 30 decodes at 2048", "qwen3-0.6b", [(0, 512), (512, 512)] + [(2048, 1)] * 30),
    ("192 decodes at 100 … 2010", "qwen3-0.6b", [(100 + 10 * i, 1) for i in range(192)]),
    ("14 prompts of 578 + 100 decodes at 560", "qwen3-0.6b", [(0, 578)] * 14 + [(560, 1)] * 100),
]
SWEEP = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 255, 256, 257, 384, 511, 512, 513, 768, 1024, 1536, 2048, 3072, 4096)


def make_batch(chunks: Sequence[tuple[int, int]], num_blocks: int, rng: random.Random) -> PackedBatch:
    """A batch of these (start, length), its blocks and tokens drawn at random, every chunk the last of its request."""
    free = rng.sample(range(num_blocks), num_blocks)
    made, tables = [], []
    for i, (start, length) in enumerate(chunks):
        tokens = [0] * start + rng.choices(range(10000), k=length)  # only the new ones are read
        request = Request(i, tokens, max(1, start if length == 1 else start + length))
        request.num_computed = start
        made.append(Chunk.of(request, length))
        tables.append([free.pop() for _ in range(num_blocks_needed(start + length, BLOCK_SIZE))])
    return PackedBatch.build(made, tables, BLOCK_SIZE)


def make_runner(
    shape: str, batches: Sequence[Sequence[tuple[int, int]]], attention: str = "triton", **options
) -> ModelRunner:
    """A runner of random weights whose pool holds the largest batch; keys and values are random too."""
    loaded = load(f"random:{shape}", device="cuda", dtype=torch.bfloat16)
    blocks = max(sum(num_blocks_needed(a + n, BLOCK_SIZE) for a, n in chunks) for chunks in batches)
    options = {"compile": True, "merge": True, **options}
    backend = make_backend(attention, torch.device("cuda"))
    runner = ModelRunner(loaded.model, loaded.layers, backend, int(1.1 * blocks) + 8, BLOCK_SIZE, **options)
    for tensor in (t for pair in runner.kv for t in pair):
        tensor.normal_()
    return runner


def bucket_of(chunks: Sequence[tuple[int, int]]) -> Bucket:
    """The bucket of exactly this batch (one row is padded to two, as in the engine)."""
    tokens, longest = sum(n for _, n in chunks), max(a + n for a, n in chunks)
    seqs = len(chunks) if tokens > 1 else 2
    return Bucket(max(2, tokens), seqs, num_blocks_needed(longest, BLOCK_SIZE), all(n == 1 for _, n in chunks))


def time_graph(
    graphs: Graphs, bucket: Bucket, batches: Sequence[PackedBatch], repeats: int, warm: int = 3
) -> list[float]:
    """Milliseconds of each replay."""
    events = []
    for i in range(warm + repeats):
        torch.cuda._sleep(SPIN)
        graphs.stage(bucket, batches[i % len(batches)])
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs.replay(bucket)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in events[warm:]]


def time_plain(runner: ModelRunner, batches: Sequence[PackedBatch], repeats: int, warm: int = 2) -> list[float]:
    """Milliseconds of each step of a runner without graphs, host and all."""
    times = []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.run(batches[i % len(batches)])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times[warm:]


def spread(times: Sequence[float]) -> dict:
    """P5, P50, P95 and every repeat, in milliseconds."""
    p5, p50, p95 = np.percentile(times, [5, 50, 95])
    return {
        "p5": round(float(p5), 4),
        "p50": round(float(p50), 4),
        "p95": round(float(p95), 4),
        "repeats": [round(t, 4) for t in times],
    }


def roof_ms(shape: str, chunks: Sequence[tuple[int, int]]) -> float:
    return serial_roof(shape, list(chunks), roof_gpu()) * 1e3


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def steps(repeats: int = 30, attention: str = "triton", profile: bool = False, cases: Sequence = CASES) -> dict:
    """The table of issue 3: each case as one CUDA graph of compiled layers."""
    rows = []
    for shape in dict.fromkeys(case[1] for case in cases):
        rows += _steps_of(
            shape, [(name, chunks) for name, s, chunks in cases if s == shape], repeats, attention, profile
        )
        torch.cuda.empty_cache()
    return {**about(), "what": "one step as one CUDA graph of compiled layers", "steps": rows, "clocks_after": clocks()}


def _steps_of(shape: str, cases: list[tuple[str, list]], repeats: int, attention: str, profile: bool) -> list[dict]:
    buckets = [bucket_of(chunks) for _, chunks in cases]
    runner = make_runner(shape, [c for _, c in cases], attention, buckets=([], sorted(buckets, key=lambda b: b.tokens)))
    graphs, rng, rows = _need_graphs(runner), random.Random(0), []
    batches = [[make_batch(chunks, runner.num_blocks, rng) for _ in range(COPIES)] for _, chunks in cases]
    times: list[list[float]] = [[] for _ in cases]
    start = time.perf_counter()
    with torch.inference_mode():
        for i in [*range(len(cases)), *reversed(range(len(cases)))]:
            times[i] += time_graph(graphs, buckets[i], batches[i], repeats)
        for i, (name, chunks) in enumerate(cases):
            roof, row = roof_ms(shape, chunks), spread(times[i])
            share = round(roof / row["p50"], 4)
            rows.append({"model": shape, "case": name, "roof_ms": round(roof, 4), "share_of_roof": share, **row})
            say(f"{shape:11} {name:48} {row['p50']:8.3f} ms  roof {roof:7.3f}  {share:.2f}")
            if profile:
                rows[-1]["kernels"] = kernels(graphs, buckets[i], batches[i][0])
    say(f"{shape}: {time.perf_counter() - start:.0f} s; {runner.explain()}")
    return rows


def _need_graphs(runner: ModelRunner) -> Graphs:
    if runner.graphs is None:
        raise RuntimeError(f"steps are timed as CUDA graphs, and this runner has none: {runner.explain()}")
    return runner.graphs


def kernels(graphs: Graphs, bucket: Bucket, batch: PackedBatch, most: int = 14) -> list[dict]:
    """Where a step's time goes: kernels by total time, microseconds."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    graphs.run(bucket, batch)
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        graphs.run(bucket, batch)
        torch.cuda.synchronize()
    total, count = Counter(), Counter()
    for event in found.events():
        total[event.name] += event.device_time_total
        count[event.name] += 1
    table = [{"kernel": name[:90], "count": count[name], "us": round(us, 1)} for name, us in total.most_common(most)]
    for row in table:
        say(f"    {row['us']:9.1f} µs {row['count']:5} × {row['kernel']}")
    say(f"    {sum(total.values()):9.1f} µs in {sum(count.values())} kernels")
    return table


def free_lunch(
    shape: str = "llama-3-8b", repeats: int = 12, eager_repeats: int = 5, decodes: Sequence[int] = (0, 32, 128), sizes: Sequence[int] = SWEEP,
    history: int = 1024,
    most_seconds: float = 600.0,
) -> dict:  # fmt: skip
    """What a prompt chunk of so many tokens costs beside so many decodes: one graph for exactly each size, and eager.

    most_seconds: the way back ends early after that long; every point has been measured once by then.
    """
    stop = time.perf_counter() + most_seconds
    points = [(n, size) for n in decodes for size in (0, *sizes) if n + size]
    chunks_of = {p: [(0, p[1])] * (p[1] > 0) + [(history, 1)] * p[0] for p in points}
    buckets = {p: bucket_of(chunks) for p, chunks in chunks_of.items()}
    largest_first = sorted(set(buckets.values()), key=lambda b: b.tokens)
    runner = make_runner(shape, list(chunks_of.values()), buckets=([], largest_first))
    graphs, rng = _need_graphs(runner), random.Random(0)
    eager = runner.plain()
    order = list(points)
    rng.shuffle(order)  # clocks drift: neighbours in size must not be neighbours in time
    times: dict[str, dict] = {"graph": {}, "eager": {}}
    with torch.inference_mode():
        for turn, todo in enumerate((order, order[::-1])):
            for p in todo:
                if turn and time.perf_counter() > stop:
                    break
                batches = [make_batch(chunks_of[p], runner.num_blocks, rng) for _ in range(COPIES)]
                sides = [
                    ("graph", lambda: time_graph(graphs, buckets[p], batches, repeats)),
                    ("eager", lambda: time_plain(eager, batches, eager_repeats)),
                ]
                for side, measure in sides if turn == 0 else sides[::-1]:
                    times[side].setdefault(p, []).extend(measure())
                graphs.captured.pop(buckets[p], None)
    rows = []
    for p in points:
        roof = roof_ms(shape, chunks_of[p])
        rows.append(
            {
                "decodes": p[0],
                "chunk": p[1],
                "roof_ms": round(roof, 4),
                "graph": spread(times["graph"][p]),
                "eager": spread(times["eager"][p]),
            }
        )
        g, e = rows[-1]["graph"]["p50"], rows[-1]["eager"]["p50"]
        say(f"{p[0]:4} decodes + {p[1]:5} tokens: graph {g:8.3f} ms, eager {e:8.3f}, roof {roof:8.3f} ({roof / g:.2f})")
    return {**about(), "what": "a prompt chunk from position 0 beside decodes", "model": shape, "history": history,
            "points": rows, "clocks_after": clocks()}  # fmt: skip


class TimedGraphs:
    """Stands before a runner's Graphs and marks the start and the end of each replay on the GPU."""

    def __init__(self, graphs: Graphs):
        self._graphs, self.marks = graphs, []

    def __getattr__(self, name: str):
        return getattr(self._graphs, name)

    def run(self, bucket: Bucket, batch: PackedBatch, feed: np.ndarray | None = None) -> torch.Tensor:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._graphs.stage(bucket, batch, feed)
        start.record()
        logits = self._graphs.replay(bucket)
        end.record()
        self.marks.append((start, end))
        return logits


def _alone(timed: TimedGraphs, repeats: int = 20) -> float:
    """Median milliseconds of the last graph, replayed behind a spinning kernel."""
    graphs, events = timed._graphs, []
    for _ in range(repeats):
        torch.cuda._sleep(SPIN)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs.replay(graphs.last)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def idle(
    shape: str = "qwen3-0.6b",
    requests: int = 64,
    history: int = 1000,
    most_steps: int = 120,
    temperature: float = 0.0,
    overlap: bool = False,
) -> dict:
    """GPU idle between the decode steps of the real Engine: from the end of one step's graph to the start of the next.

    An event before a graph fires before the graph's launch has reached the GPU, so the start is taken as the graph's end
    less the time it needs when nothing waits for the host. Sampling and the copy of the tokens count as idle.
    """
    rng = random.Random(0)
    with Engine(
        f"random:{shape}", device="cuda", dtype="bfloat16", max_requests=requests, max_batch_tokens=4096, max_model_len=2048,
        overlap=overlap,
    ) as engine:  # fmt: skip
        for _ in range(requests):
            prompt = [rng.randrange(10000) for _ in range(history)]
            engine.add(prompt, SamplingParams(max_tokens=most_steps + 60, ignore_eos=True, temperature=temperature))
        while engine.scheduler.waiting or any(r.num_left > 1 for r in engine.scheduler.running):
            engine.step()
        for _ in range(20):
            engine.step()
        timed = engine.runner.graphs = TimedGraphs(_need_graphs(engine.runner))
        for _ in range(most_steps):
            engine.step()
        torch.cuda.synchronize()
        busy_alone = _alone(timed)
        marks, records = timed.marks, engine.run.steps[-most_steps:]
        whole = [before[1].elapsed_time(after[1]) for before, after in zip(marks, marks[1:])]
        gaps = [step - busy_alone for step in whole]
        share = [gap / step for gap, step in zip(gaps, whole)]
        parts = {k: round(1e3 * statistics.median(r.times[k] for r in records), 4) for k in records[-1].times}
        result = {
            **about(), "model": shape, "requests": requests, "history": history, "temperature": temperature, "overlap": overlap,
            "idle_share": spread(share), "gap_ms": spread(gaps), "graph_ms": busy_alone, "step_ms": spread(whole),
            "marked_ms": spread([a.elapsed_time(b) for a, b in marks]),
            "host_ms": parts, "explain": engine.explain(),
        }  # fmt: skip
    say(f"{shape}, {requests} decodes, temperature {temperature}, overlap {overlap}: graph {busy_alone:.3f} ms, gap {result['gap_ms']['p50']:.3f} ms, "
        f"idle {result['idle_share']['p50']:.1%} of the step; host ms {parts}")  # fmt: skip
    return result
