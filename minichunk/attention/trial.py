"""A few small batches before a package's kernels are trusted: they must run, and give the torch reference's output.

What goes wrong is found here, at the engine's door: a package built for another torch, a kernel that will not compile
(no nvcc, an old driver), a build that lacks a head size and answers all the same.
"""

from __future__ import annotations

import numpy as np
import torch

from minichunk.attention.base import AttentionBackend, LayerSpec, StepMeta, Unsupported
from minichunk.packing import PackedBatch
from minichunk.request import Chunk, Request

# (history, rows) of each sequence
BATCHES = {
    "decodes": [(0, 1), (6, 1), (39, 1), (300, 1)],
    "prompts": [(0, 5), (0, 70), (0, 33)],
    "mixed": [(19, 1), (290, 1), (33, 20), (0, 3)],
}
# Largest difference allowed where queries, keys and values are drawn from N(0, 1): two roundings of an output near 4.
TOLERANCE = {torch.float16: 8e-3, torch.bfloat16: 4e-2, torch.float32: 1e-4}


def rows_only(batch: PackedBatch) -> np.ndarray:
    """The sequences that have rows, int64 [n]; a bucket's padding and a broken-off chunk have none."""
    return np.flatnonzero(batch.query_lens)


def trial(backend: AttentionBackend, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, kinds=tuple(BATCHES)) -> None:  # fmt: skip
    """Raises Unsupported where `backend` fails on one of the kinds of batch, or differs from the reference."""
    for layer in dict.fromkeys(layers):  # each distinct one once
        for kind in kinds:
            try:
                error = difference(backend, layer, BATCHES[kind], block_size, dtype, device)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # whatever a package raises when it cannot
                raise Unsupported(
                    f"{backend.name} failed on a small batch ({kind}): {first_line(problem)}"
                ) from problem
            if not error <= TOLERANCE[dtype]:
                raise Unsupported(
                    f"{backend.name} is wrong on a small batch ({kind}, head size {layer.head_dim}): it differs from "
                    f"the reference by {error:.3g}, at most {TOLERANCE[dtype]} is rounding; build the package again"
                )


def difference(backend, layer: LayerSpec, sizes: list[tuple[int, int]], block_size: int, dtype: torch.dtype, device) -> float:  # fmt: skip
    """Largest difference between the backend's output, over keys and values that its own append_kv wrote, and the torch
    reference's in float32 (float64 for a backend in float32, whose user may have allowed TF32)."""
    from minichunk.attention.torch_backend import TorchAttention

    batch, tables = scattered(sizes, block_size)
    draw = torch.Generator(device).manual_seed(len(sizes))
    make = lambda *shape: torch.randn(*shape, generator=draw, device=device).to(dtype)  # noqa: E731
    blocks = 1 + max(map(max, tables))
    caches = [make(blocks, block_size, layer.num_kv_heads, d) for d in (layer.head_dim, layer.value_dim)]
    new = [make(batch.num_tokens, layer.num_kv_heads, d) for d in (layer.head_dim, layer.value_dim)]
    query = make(batch.num_tokens, layer.num_heads, layer.head_dim)
    sinks = make(layer.num_heads) if layer.has_sinks else None
    reference, meta = TorchAttention(), StepMeta.of(batch, device)
    exact = torch.float64 if dtype == torch.float32 else torch.float32  # never dtype itself: `wide` are copies
    wide = [x.to(exact) for x in (*new, *caches)]
    reference.plan(meta)
    reference.append_kv(*wide, meta)
    wanted = reference.attend(query.to(exact), *wide[2:], meta, layer, None if sinks is None else sinks.to(exact))
    backend.plan(meta)
    backend.append_kv(*new, *caches, meta)
    got = backend.attend(query, *caches, meta, layer, sinks)
    return (got.to(exact) - wanted).abs().nan_to_num(torch.inf).max().item()


def scattered(sizes: list[tuple[int, int]], block_size: int) -> tuple[PackedBatch, list[list[int]]]:
    """A batch of (history, rows) whose blocks lie in no order, and its tables."""
    counts = [-(-(history + rows) // block_size) for history, rows in sizes]
    ids = np.random.default_rng(0).permutation(sum(counts)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    requests = [Request(i, [0] * (h + n), h + n, num_computed=h) for i, (h, n) in enumerate(sizes)]
    return PackedBatch.build([Chunk.of(r, n) for r, (_, n) in zip(requests, sizes)], tables, block_size), tables


def first_line(error: BaseException) -> str:
    """The error's type and the first line that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
