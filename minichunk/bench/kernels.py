"""minichunk bench kernels: attention alone, on the five batches of docs/kernels.md, ours beside others.

Each contender computes the same batch over the same pages, checked against float64 first. A measurement is a CUDA
graph of one call for each KV buffer (together at least 300 MB, several times the L2 cache, so that no call finds its
keys there), replayed; the time of a call is the graph's divided by its calls. Contenders take turns, and the order turns
round after every round. The roof beside each time is max(FLOPs / 790e12, bytes / 4.3e12): what an H200 was seen to reach
in a large bf16 product and in a copy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta

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
    """One batch on the card: metadata, and enough KV buffers and queries that each call finds cold ones."""

    def __init__(self, sizes: list[tuple[int, int]], block_size: int, seed: int = 0):
        self.sizes, self.block_size = sizes, block_size
        rng = np.random.default_rng(seed)
        counts = [-(-k // block_size) for _, k in sizes]
        self.num_blocks = sum(counts)
        ids = rng.permutation(self.num_blocks).astype(np.int32)
        starts = np.cumsum([0, *counts])
        tables = np.zeros((len(sizes), max(counts)), np.int32)
        for i, n in enumerate(counts):
            tables[i, :n] = ids[starts[i] : starts[i + 1]]
        rows, keys = np.array(sizes).T
        cu = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        slots = [tables[i, p // block_size].astype(np.int64) * block_size + p % block_size
                 for i, (q, k) in enumerate(sizes) for p in [np.arange(k - q, k)]]  # fmt: skip
        put = lambda a: torch.from_numpy(a).cuda()  # noqa: E731
        self.meta = StepMeta(
            put(cu),
            put(keys.astype(np.int32)),
            put(tables),
            put(np.concatenate(slots)),
            int(rows.max()),
            int(keys.max()),
        )
        self.kv_indptr = put(starts.astype(np.int32))
        self.kv_indices = put(ids)
        self.last_page_len = put(((keys - 1) % block_size + 1).astype(np.int32))
        self.cu_seqlens_k = put(np.concatenate([[0], np.cumsum(keys)]).astype(np.int32))
        shape = (self.num_blocks, block_size, KV_HEADS, HEAD_DIM)
        pool_bytes = 4 * int(np.prod(shape))
        self.buffers = max(2, -(-300_000_000 // pool_bytes))
        draw = torch.Generator("cuda").manual_seed(seed)
        make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=draw)  # noqa: E731
        self.inputs = [(make(int(cu[-1]), HEADS, HEAD_DIM), make(*shape), make(*shape)) for _ in range(self.buffers)]

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
# Each: Case → a function (query, key_cache, value_cache) → out, ready to be captured; None: not for this batch.


def ours(**options) -> Callable:
    from minichunk.attention.triton_backend import TritonAttention

    def ready(case: Case) -> Callable:
        backend = TritonAttention(**options)
        backend.plan(case.meta)
        return lambda q, k, v: backend.attend(q, k, v, case.meta, LAYER)

    return ready


def flashinfer_prefill(kind: str) -> Callable:
    def ready(case: Case) -> Callable:
        import flashinfer

        space = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=kind)
        wrapper.plan(
            case.meta.cu_seqlens_q, case.kv_indptr, case.kv_indices, case.last_page_len, HEADS, KV_HEADS, HEAD_DIM,
            case.block_size, causal=True, sm_scale=LAYER.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda q, k, v: wrapper.run(q, (k, v))

    return ready


def flashinfer_decode(case: Case) -> Callable | None:
    import flashinfer

    if case.meta.max_seqlen_q > 1:
        return None
    space = torch.zeros(1 << 29, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    wrapper.plan(
        case.kv_indptr, case.kv_indices, case.last_page_len, HEADS, KV_HEADS, HEAD_DIM, case.block_size,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=LAYER.scale,
    )  # fmt: skip
    return lambda q, k, v: wrapper.run(q, (k, v))


def flashinfer_batch(case: Case) -> Callable:
    import flashinfer

    wrapper = flashinfer.BatchAttention("NHD")
    wrapper.plan(
        case.meta.cu_seqlens_q, case.kv_indptr, case.kv_indices, case.meta.seq_lens_k, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM,
        case.block_size, causal=True, sm_scale=LAYER.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q, k, v: wrapper.run(q, (k, v))[0]


def flash_attn_varlen(case: Case) -> Callable:
    from flash_attn import flash_attn_varlen_func

    return lambda q, k, v: flash_attn_varlen_func(
        q, k, v, case.meta.cu_seqlens_q, case.cu_seqlens_k, case.meta.max_seqlen_q, case.meta.max_seqlen_k,
        softmax_scale=LAYER.scale, causal=True, block_table=case.meta.block_tables,
    )  # fmt: skip


def flash_attn_kvcache(case: Case) -> Callable | None:
    from flash_attn import flash_attn_with_kvcache

    if case.meta.max_seqlen_q > 1:
        return None
    return lambda q, k, v: flash_attn_with_kvcache(
        q[:, None], k, v, cache_seqlens=case.meta.seq_lens_k, block_table=case.meta.block_tables,
        softmax_scale=LAYER.scale, causal=True,
    )[:, 0]  # fmt: skip


def contenders() -> dict[str, tuple[int, Callable]]:
    """name: (block size, contender)."""
    return {
        "triton": (16, ours()),
        "flashinfer prefill fa2": (16, flashinfer_prefill("fa2")),
        "flashinfer prefill fa3": (16, flashinfer_prefill("fa3")),
        "flashinfer decode, tensor cores": (16, flashinfer_decode),
        "flashinfer BatchAttention": (16, flashinfer_batch),
        "flash-attn varlen": (256, flash_attn_varlen),
        "flash-attn with_kvcache": (256, flash_attn_kvcache),
    }


# ------------------------------------------------------------------------------------------- measuring


def captured(calls: list[Callable]) -> torch.cuda.CUDAGraph:
    """The calls, one after the other, as a CUDA graph; each ran twice before."""
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


def prepare(name: str, ready: Callable, case: Case) -> Ready | None:
    """Checks the contender on the first and last buffer (a failing one is an error), then captures it."""
    run = ready(case)
    if run is None:
        return None
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
    low, median, high = np.percentile(times, [5, 50, 95])
    return {"p5": round(low, 2), "median": round(median, 2), "p95": round(high, 2)}


def environment() -> dict:
    """Versions, card and clocks, as they are at this moment."""
    packages = {}
    for name in ("torch", "triton", "flashinfer-python", "flash-attn"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    fields = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    card = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": sys.argv, "python": sys.version.split()[0],
        **packages, "card": torch.cuda.get_device_name(), "nvidia-smi": {"fields": fields, "after": card.stdout.strip()},
    }  # fmt: skip


def run(out: Path | None, rounds: int = 30, only: list[str] | None = None) -> dict:
    """All contenders that can be imported (or `only` these) on all batches. Writes the JSON to `out`, returns it.

    RuntimeError without a CUDA device, or when our result is wrong; others that fail are listed under "absent".
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench kernels times CUDA kernels: no CUDA device is here")
    chosen = {n: c for n, c in contenders().items() if only is None or n in only}
    result: dict = {"heads": [HEADS, KV_HEADS, HEAD_DIM], "dtype": "bfloat16", "unit": "µs a call", "batches": {}}
    absent: dict[str, dict] = {}
    for name, sizes in BATCHES.items():
        cases = {size: Case(sizes, size) for size in sorted({size for size, _ in chosen.values()})}
        entries = []
        for contender, (size, ready) in chosen.items():
            try:
                entry = prepare(contender, ready, cases[size])
            except (
                ImportError,
                RuntimeError,
            ) as error:  # not installed, will not compile, or wrong: said in the result
                if contender == "triton":
                    raise
                absent.setdefault(contender, {})[name] = str(error)[:300]
                continue
            if entry is not None:
                entries.append(entry)
        times = measure(entries, rounds)
        roof = roof_us(sizes)
        result["batches"][name] = {
            "roof": round(roof, 1), "buffers": {size: case.buffers for size, case in cases.items()},
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
    result |= {"absent": absent, **environment()}
    text = json.dumps(result, ensure_ascii=False, indent=1)
    out.write_text(text + "\n", encoding="utf-8") if out else print(text)
    return result


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
