"""Greedy tokens and plain temperature draws in two small kernels: what `sampling._draw` computes, in one read of the logits.

logits of a row   [ tile 0 | tile 1 | … | tile 37 ]     4,096 tokens a tile, one program each:
                    m, Σexp  m, Σexp                    its maximum m, where it is, and Σ exp((x - m) / T)
one program a row  joins the tiles, finds the tile in which u · total lies, and in that tile the token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


# A row count that is 1, or a multiple of 16, would be compiled anew in the middle of a run.
@triton.jit(do_not_specialize=["rows"])
def tile_kernel(logits, numbers, maxima, places, sums, rows, vocab, stride, TILE: tl.constexpr):
    """numbers: float64 [2, rows], temperatures and uniforms. Writes [rows, tiles] each."""
    row, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    m = tl.max(x, 0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0  # a maximum does not show a NaN
    tl.store(maxima + row * tiles + tile, tl.where(broken, float("nan"), m))
    tl.store(places + row * tiles + tile, tl.min(tl.where(x == m, at, vocab), 0))
    temperature = tl.load(numbers + row).to(tl.float32)
    if temperature > 0:
        weights = tl.where(x == float("-inf"), 0.0, tl.exp((x - m) / temperature))
        tl.store(sums + row * tiles + tile, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["rows"])
def pick_kernel(
    logits, numbers, maxima, places, sums, out, rows, vocab, stride, tiles, TILE: tl.constexpr, TILES: tl.constexpr
):
    """out int64 [rows]: the token, -1 where the row has no finite maximum."""
    row = tl.program_id(0)
    j = tl.arange(0, TILES)
    there = j < tiles
    m = tl.load(maxima + row * tiles + j, mask=there, other=float("-inf"))
    broken = tl.max((m != m).to(tl.int32), 0) > 0
    best = tl.max(m, 0)
    broken = broken | (best == float("inf")) | (best == float("-inf"))
    token = tl.min(tl.where(there & (m == best), tl.load(places + row * tiles + j, mask=there, other=vocab), vocab), 0)
    temperature = tl.load(numbers + row).to(tl.float32)
    if (temperature > 0) & (broken == 0):
        s = tl.load(sums + row * tiles + j, mask=there, other=0.0)
        w = tl.where(m == float("-inf"), 0.0, s * tl.exp((m - best) / temperature)).to(tl.float64)
        point = tl.load(numbers + rows + row) * tl.sum(w, 0)
        tile = tl.sum((there & (tl.cumsum(w, 0) <= point)).to(tl.int32), 0)
        tile = tl.minimum(tile, tl.max(tl.where(w > 0, j, 0), 0))  # rounding must not reach an empty tile
        rest = point - tl.sum(tl.where(j < tile, w, 0.0), 0)
        i = tl.arange(0, TILE)
        at = tile * TILE + i
        x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        v = tl.where(x == float("-inf"), 0.0, tl.exp((x - best) / temperature))
        place = tl.sum((tl.cumsum(v.to(tl.float64), 0) <= rest).to(tl.int32), 0)
        token = tile * TILE + tl.minimum(place, tl.max(tl.where(v > 0, i, 0), 0))
    tl.store(out + row, tl.where(broken, -1, token).to(tl.int64))


def pick(logits: Tensor, numbers: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [n, V], numbers float64 [2, n]: temperature (0 is greedy) and uniform of each row → int64 [n], -1 for a row
    without a finite maximum."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    new = lambda dtype: torch.empty((rows, tiles), dtype=dtype, device=logits.device)  # noqa: E731
    parts = new(torch.float32), new(torch.int32), new(torch.float32)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tile_kernel[(rows, tiles)](logits, numbers, *parts, rows, vocab, logits.stride(0), TILE=TILE, num_warps=8)
    pick_kernel[(rows,)](
        logits,
        numbers,
        *parts,
        out,
        rows,
        vocab,
        logits.stride(0),
        tiles,
        TILE=TILE,
        TILES=triton.next_power_of_2(tiles),
        num_warps=8,
    )
    return out
