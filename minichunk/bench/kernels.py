"""minichunk bench kernels: attention alone, on the five batches of docs/kernels.md, ours beside others.

Each contender computes the same batch over the same pages, checked against float64 first. A measurement is a CUDA
graph of one call for each KV buffer (together at least 300 MB, several times the L2 cache, so that no call finds its
keys there), replayed; the time of a call is the graph's divided by its calls. Contenders take turns, and the order turns
round after every round. The roof beside each time is max(FLOPs / 790e12, bytes / 4.3e12): what an H200 was seen to reach
in a large bf16 product and in a copy.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from minichunk.attention.auto import kind_of
from minichunk.attention.base import LayerSpec, StepMeta, Unsupported, make_backend
from minichunk.attention.trial import scattered
from minichunk.bench.machine import about

FLOPS, BYTES = 790e12, 4.3e12  # per second
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B
LAYER = LayerSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)
BATCHES = {  # name: (rows, keys) of each sequence, the rows' own keys counted
    "2×512 chunks (history 0, 512) + 30 decodes at 2048": [(512, 512), (512, 1024)] + [(1, 2048)] * 30,
    "1×2048 chunk at 8192 + 64 decodes at 4096": [(2048, 8192)] + [(1, 4096)] * 64,
    "256 decodes at 1024": [(1, 1024)] * 256,
    "64 decodes at 4096": [(1, 4096)] * 64,
    "4×2048 prefill": [(2048, 2048)] * 4,
}


def roof_us(sizes: list[tuple[int, int]]) -> float:
    """Microseconds: 4·heads·head_dim FLOPs for each (row, key it sees); keys and values read, rows read and written once."""
    pairs = sum(q * (k - q) + q * (q + 1) // 2 for q, k in sizes)
    keys, rows = sum(k for _, k in sizes), sum(q for q, _ in sizes)
    moved = 2 * 2 * KV_HEADS * HEAD_DIM * keys + 2 * 2 * HEADS * HEAD_DIM * rows
    return 1e6 * max(4 * HEADS * HEAD_DIM * pairs / FLOPS, moved / BYTES)


class Case:
    """One batch on the card: its integers, and enough KV buffers and queries that each call finds cold ones."""

    def __init__(self, sizes: list[tuple[int, int]], block_size: int, seed: int = 0):
        self.sizes, self.block_size = sizes, block_size
        self.batch, tables = scattered([(k - q, q) for q, k in sizes], block_size)
        self.meta = StepMeta.of(self.batch, "cuda")
        shape = (1 + max(map(max, tables)), block_size, KV_HEADS, HEAD_DIM)
        pool_bytes = 4 * int(np.prod(shape))
        self.buffers = max(2, -(-300_000_000 // pool_bytes))
        draw = torch.Generator("cuda").manual_seed(seed)
        make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=draw)  # noqa: E731
        self.inputs = [
            (make(self.batch.num_tokens, HEADS, HEAD_DIM), make(*shape), make(*shape)) for _ in range(self.buffers)
        ]

    def error(self, out: Tensor, buffer: int = 0) -> float:
        """Largest difference from float64 attention over some rows: each sequence's first, last and one between."""
        query, key_cache, value_cache = self.inputs[buffer]
        worst, at = 0.0, 0
        for i, (q, k) in enumerate(self.sizes):
            blocks = self.meta.block_tables[i, : -(-k // self.block_size)].long()
            keys = key_cache[blocks].reshape(-1, KV_HEADS, HEAD_DIM)[:k].double()
            values = value_cache[blocks].reshape(-1, KV_HEADS, HEAD_DIM)[:k].double()
            for r in sorted({0, q // 2 + 1 if q > 2 else 0, q - 1}):
                seen = k - q + r + 1
                row = query[at + r].double().view(KV_HEADS, -1, HEAD_DIM)
                weights = torch.softmax(torch.einsum("hgd,nhd->hgn", row, keys[:seen]) * LAYER.scale, -1)
                wanted = torch.einsum("hgn,nhd->hgd", weights, values[:seen]).reshape(HEADS, HEAD_DIM)
                worst = max(worst, (out[at + r].double() - wanted).abs().nan_to_num(1e9).max().item())
            at += q
        return worst


# ------------------------------------------------------------------------------------------ contenders

CONTENDERS = {  # name for make_backend: block size
    "triton": 16,
    "flashinfer:default": 16,  # one prefill wrapper with backend="auto": fa3 on Hopper
    "flashinfer:fa2": 16,
    "flashinfer:split": 16,
    "flashinfer:split_fa3": 16,
    "flashinfer:batch": 16,
    "flash_attn": 256,
}


def contender(name: str, case: Case) -> Callable:
    """(query, key_cache, value_cache) → out on this batch, planned, ready to be captured. Raises Unsupported."""
    backend = make_backend(name, torch.device("cuda"))
    backend.check([LAYER], case.block_size, torch.bfloat16, torch.device("cuda"))
    backend.plan(case.meta)
    return lambda q, k, v: backend.attend(q, k, v, case.meta, LAYER)


# ------------------------------------------------------------------------------------------- measuring


def captured(calls: list[Callable]) -> torch.cuda.CUDAGraph:
    """The calls, one after the other, as a CUDA graph; the first two ran twice before, so that all is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2] * 2:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_us(replay: Callable, calls: int, replays: int) -> float:
    """Microseconds a call, over `replays` replays between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (replays * calls)


@dataclass
class Ready:
    """A contender about to be timed on one batch."""

    name: str
    replay: Callable
    calls: int
    graph: bool
    error: float
    keep: tuple = ()  # what a graph reads must live as long as the graph


def prepare(name: str, case: Case) -> Ready:
    """Checks the contender on the first and last buffer (a failing one is an error), then captures it."""
    run = contender(name, case)
    outs = [(run(*case.inputs[i]).clone(), i) for i in (0, case.buffers - 1)]
    error = max(case.error(out, i) for out, i in outs)
    if not error < 0.02:
        raise RuntimeError(f"{name}: largest error {error} against float64")
    calls = [lambda x=x: run(*x) for x in case.inputs]
    try:
        graph = captured(calls)
        return Ready(name, graph.replay, len(calls), True, error, (run, calls))
    except RuntimeError:  # it synchronises or allocates pinned memory: timed as plain calls, and said so in the result
        torch.cuda.synchronize()
        return Ready(name, lambda: [call() for call in calls], len(calls), False, error)


def measure(entries: list[Ready], rounds: int, replays: int = 5) -> dict[str, list[float]]:
    """Rounds of all entries in turn, every other round backwards: microseconds a call, one figure a round."""
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for entry in entries:
        time_us(entry.replay, entry.calls, replays)
    for round in range(rounds):
        for entry in entries if round % 2 == 0 else entries[::-1]:
            times[entry.name].append(time_us(entry.replay, entry.calls, replays))
    return times


def summary(times: list[float]) -> dict:
    low, median, high = np.percentile(times, [5, 50, 95]).tolist()
    return {"p5": round(low, 2), "median": round(median, 2), "p95": round(high, 2)}


def run(rounds: int = 30, only: list[str] | None = None) -> dict:
    """All contenders that are installed (or `only` these) on all batches.

    RuntimeError without a CUDA device, or when our result is wrong; others that fail are listed under "absent".
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench kernels times CUDA kernels: no CUDA device is here")
    chosen = {n: size for n, size in CONTENDERS.items() if only is None or n in only}
    result: dict = {"heads": [HEADS, KV_HEADS, HEAD_DIM], "dtype": "bfloat16", "unit": "µs a call", "batches": {}}
    absent: dict[str, str] = {}
    for name, sizes in BATCHES.items():
        cases = {size: Case(sizes, size) for size in sorted(set(chosen.values()))}
        entries = []
        for one, size in chosen.items():
            try:
                entries += [] if one in absent else [prepare(one, cases[size])]
            except (Unsupported, RuntimeError) as error:  # not installed, will not compile, or wrong
                if one == "triton":
                    raise
                absent[one] = str(error)[:300]
        times = measure(entries, rounds)
        roof = roof_us(sizes)
        result["batches"][name] = {
            "kind": kind_of(cases[16].meta), "roof": round(roof, 1), "buffers": {size: case.buffers for size, case in cases.items()},
            "contenders": {
                e.name: {
                    **summary(times[e.name]), "of_roof": round(roof / float(np.median(times[e.name])), 3), "graph": e.graph,
                    "error": float(f"{e.error:.2g}"), "every": [round(t, 2) for t in times[e.name]],
                }
                for e in entries
            },
        }  # fmt: skip
        for e in entries:
            print(
                f"{name} | roof {roof:.0f} | {e.name}: {summary(times[e.name])} graph={e.graph} error={e.error:.1e}",
                file=sys.stderr,
            )
        del cases, entries
        torch.cuda.empty_cache()
    return {**about(), **result, "absent": absent}


def shares(result: dict) -> dict[str, dict[str, float]]:
    """{kind of batch: {contender: share of the roof}}: the geometric mean over the batches of the kind."""
    found: dict[str, dict[str, list[float]]] = {}
    for batch in result["batches"].values():
        for name, figures in batch["contenders"].items():
            found.setdefault(batch["kind"], {}).setdefault(name, []).append(figures["of_roof"])
    mean = lambda values: round(math.exp(sum(map(math.log, values)) / len(values)), 3)  # noqa: E731
    return {kind: {name: mean(values) for name, values in row.items()} for kind, row in found.items()}


def write_table(result: dict, path: Path) -> None:
    """Puts this card's row into the table that attention="auto" reads (data/attention.json)."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table[result["card"]] = {"date": result["date"], **shares(result)}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
