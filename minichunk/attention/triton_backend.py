"""Our own attention over paged keys and values: one Triton source for the whole mixed batch.

A mixed batch of two sequences, GROUP = 2 query heads to a KV head, and how it becomes work:

    packed rows     0 | 1 2 3 4 5 6 7                   A: a decode that sees 11 keys · B: 7 new rows after 4 keys
                    A | B B B B B B B
    decode shape    [A0h0 A0h1  ·  · ]                  a tile is BLOCK_M = rows × GROUP lines: the heads that share
    prompt shape    [B4h0 B4h1 B5h0 B5h1 B6h0 B6h1 …]   a KV head are stacked, so that a key read once serves all
                    [B0h0 B0h1 B1h0 B1h1 B2h0 B2h1 …]   the later tile sees more keys and starts first

    keys of a tile  0 1 2 3 | 4 5 6 7 | 8 9 10          walked BLOCK_N at a time through the sequence's block table
    B, row i        sees keys 0 … 4+i                   causal, bottom-right: k - q + i
    A in two pieces [0 1 2 3 4 5 6 7] [8 9 10]          a long history is cut over programs, each with its own m, l, acc
                           └──── merge ────┘            and the pieces are weighed together (flash-decoding)

Three kernels and a copy: `append_kv` scatters new keys and values; `plan_kernel` turns the batch's integers into a
list of work items once a step, on the device; `attention_kernel` computes one item and one KV head per program;
`merge_kernel` joins the pieces of the tiles that were cut. The grids depend on the bucket alone (tokens, sequences),
never on the batch's content: programs beyond the list return at once, so a CUDA graph captured once can replay with
new integers. Prompt rows and decode rows are two launches of the same source with two tile shapes, side by side on
two streams: one is bound by arithmetic, the other by memory, and an SM has room for both.

Softmax, kept online as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; the split over keys: Flash-Decoding,
Dao et al. 2023): m is the largest score so far, l the sum of exp(score - m), acc the sum of exp(score - m) · value.
"""

# ruff: noqa: E741 (l is the papers' name for the running sum)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta, Unsupported

LOG2E = 1.4426950408889634  # scores are kept in base 2: exp2 is one instruction
ITEM = 8  # int32 fields of a work item: sequence, row, rows, position, begin, end, slot, pieces


# ---------------------------------------------------------------------------------------------- append_kv


@triton.jit
def append_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Token t's key and value [kv_heads, head_dim] go to slot_mapping[t]; a negative slot is skipped."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + t)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (d < HEAD_DIM)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k = tl.load(key + t * key_stride_t + head * key_stride_h + d, mask=inside)
    v = tl.load(value + t * value_stride_t + head * value_stride_h + d, mask=inside)
    tl.store(key_cache + block * k_stride_block + place * k_stride_slot + head * k_stride_head + d, k, mask=inside)
    tl.store(value_cache + block * v_stride_block + place * v_stride_slot + head * v_stride_head + d, v, mask=inside)


# --------------------------------------------------------------------------------------------------- plan


@triton.jit
def plan_kernel(
    cu_seqlens_q, seq_lens_k, items, total, num_seqs, target, min_piece,
    FEWEST_ROWS: tl.constexpr, MOST_ROWS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a sequence: it writes the items of its own tiles, knowing all sequences' sizes.

    Serves the sequences with FEWEST_ROWS … MOST_ROWS rows (0: no upper end). All tiles × keys are shared out in about `target`
    pieces; items are at most (number of tiles) + target, split ones at most 2 · target, whatever the batch holds.
    """
    me = tl.program_id(0)
    seq = tl.arange(0, SEQS)
    there = seq < num_seqs
    q_len = tl.load(cu_seqlens_q + seq + 1, mask=there, other=0) - tl.load(cu_seqlens_q + seq, mask=there, other=0)
    k_len = tl.load(seq_lens_k + seq, mask=there, other=0)
    served = (q_len >= FEWEST_ROWS) & ((q_len <= MOST_ROWS) | (MOST_ROWS == 0))
    tiles = tl.where(served, tl.cdiv(q_len, BLOCK_Q), 0)
    span = k_len  # keys that a tile may see, the most of its sequence
    if WINDOW > 0:
        span = tl.minimum(k_len, WINDOW + BLOCK_Q + BLOCK_N)

    # The size of a piece, and how many pieces each tile of each sequence gets (rounded to the nearest).
    share = tl.sum(tiles.to(tl.int64) * span) // target + 1
    piece = tl.maximum(min_piece, tl.cdiv(share, BLOCK_N) * BLOCK_N).to(tl.int32)
    pieces = tl.minimum(tl.maximum((span + piece // 2) // piece, 1), span)
    count = tiles * pieces

    # Heaviest sequence first, so that the last programs to start are short ones.
    mine = seq == me
    my_span = tl.sum(tl.where(mine, span, 0))
    before = (span > my_span) | ((span == my_span) & (seq < me))
    start = tl.sum(tl.where(before, count, 0))
    slot = tl.sum(tl.where(before & (pieces > 1), count, 0))
    my_pieces = tl.sum(tl.where(mine, pieces, 0))
    my_tiles = tl.sum(tl.where(mine, tiles, 0))
    my_count = tl.sum(tl.where(mine, count, 0))
    my_q = tl.sum(tl.where(mine, q_len, 0))
    my_k = tl.sum(tl.where(mine, k_len, 0))
    my_row = tl.load(cu_seqlens_q + me)
    if me == 0:
        tl.store(total, tl.sum(count))

    for first in range(0, my_count, LANES):
        i = first + tl.arange(0, LANES)
        write = i < my_count
        tile = my_tiles - 1 - i // my_pieces  # the last tile sees the most keys
        row = tile * BLOCK_Q
        rows = tl.minimum(BLOCK_Q, my_q - row)
        position = my_k - my_q + row  # of the tile's first row: it sees keys 0 … position
        stop = position + rows
        low = tl.zeros_like(stop)
        if WINDOW > 0:
            low = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        wanted = tl.minimum(tl.maximum((stop - low + piece // 2) // piece, 1), my_pieces)
        step = tl.cdiv(tl.cdiv(stop - low, wanted), BLOCK_N) * BLOCK_N
        parts = tl.cdiv(stop - low, tl.maximum(step, 1))
        part = i % my_pieces
        begin = low + part * step
        field = items + (start + i) * 8
        tl.store(field + 0, tl.zeros_like(i) + me, mask=write)
        tl.store(field + 1, my_row + row, mask=write)
        tl.store(field + 2, rows, mask=write)
        tl.store(field + 3, position, mask=write)
        tl.store(field + 4, begin, mask=write)
        tl.store(field + 5, tl.where(part < parts, tl.minimum(stop, begin + step), begin), mask=write)
        tl.store(field + 6, tl.where((parts > 1) | (part >= parts), slot + i, -1), mask=write)
        tl.store(field + 7, tl.where(part == 0, parts, 0), mask=write)


# ---------------------------------------------------------------------------------------- paged attention


@triton.jit
def attend_keys(
    q, m, l, acc, begin, end, stop, position, scale, softcap, table, k_base, v_base,
    k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The tile's rows meet keys begin … end-1, BLOCK_N at a time. MASKED: some rows may not see some of them."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # slot(p) = block_ids[p // block_size] * block_size + p % block_size
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0).to(OFFSET)
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(OFFSET)
        place = key % BLOCK_SIZE
        k_at = k_base + (block * k_stride_block + place * k_stride_slot)[None, :] + d[:, None]  # [D, N]
        v_at = v_base + (block * v_stride_block + place * v_stride_slot)[:, None] + d[None, :]  # [N, D]
        if MASKED:  # a slot nobody wrote may hold NaN, and 0 · NaN is NaN: read zeros there
            k = tl.load(k_at, mask=(key < stop)[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        elif BLOCK_D == HEAD_DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < HEAD_DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)  # [M, N]
        if SOFTCAP:  # cap · tanh(score / cap), tanh(x) = 1 - 2 / (exp(2x) + 1)
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * scale / softcap)) + 1))
            to_base2 = 1.4426950408889634
        else:
            to_base2 = scale
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & (key < stop)[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1) * to_base2)
        p = tl.exp2(scores * to_base2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if MASKED:
            v = tl.load(v_at, mask=(key < stop)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D == HEAD_DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def attention_kernel(
    query, key_cache, value_cache, out, part_acc, part_m, part_l, items, total, block_tables, sinks,
    scale, softcap, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One item and one KV head: BLOCK_M lines (token, head of the group) against keys begin … end-1."""
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(total):
        return
    field = items + item * 8
    sequence, row, rows, first = tl.load(field), tl.load(field + 1), tl.load(field + 2), tl.load(field + 3)
    begin, end, slot, pieces = tl.load(field + 4), tl.load(field + 5), tl.load(field + 6), tl.load(field + 7)

    line = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token, head = line // GROUP, kv_head * GROUP + line % GROUP
    live = (token < rows)[:, None] & (d < HEAD_DIM)[None, :]
    position = first + token
    at = (row + token).to(tl.int64)
    q = tl.load(query + (at * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=live, other=0.0)

    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a line that sees no key of this piece weighs 0 in the merge
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SINKS:  # a score that takes part in the softmax and carries no value: counted in the tile's first piece
        if pieces > 0:
            m = tl.load(sinks + head, mask=token < rows, other=0.0).to(tl.float32) * 1.4426950408889634
            l = tl.full([BLOCK_M], 1.0, tl.float32)

    # Keys that all lines see need no mask: up to the first row's own, from the last row's window on.
    stop = first + rows
    open_from = begin
    if WINDOW > 0:
        border = tl.maximum(stop - WINDOW - begin, 0)
        open_from = tl.minimum(begin + tl.cdiv(border, BLOCK_N) * BLOCK_N, end)
    open_to = tl.maximum(open_from, begin + (tl.minimum(end, first + 1) - begin) // BLOCK_N * BLOCK_N)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k_base, v_base = key_cache + kv_head * k_stride_head, value_cache + kv_head * v_stride_head
    if WINDOW > 0:
        m, l, acc = attend_keys(
            q, m, l, acc, begin, open_from, stop, position, scale, softcap, table, k_base, v_base,
            k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            True, WINDOW, SOFTCAP, PRECISION, OFFSET, BLOCK_SIZE, BLOCK_N, BLOCK_D, HEAD_DIM,
        )  # fmt: skip
    m, l, acc = attend_keys(
        q, m, l, acc, open_from, open_to, stop, position, scale, softcap, table, k_base, v_base,
        k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        False, WINDOW, SOFTCAP, PRECISION, OFFSET, BLOCK_SIZE, BLOCK_N, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    m, l, acc = attend_keys(
        q, m, l, acc, open_to, end, stop, position, scale, softcap, table, k_base, v_base,
        k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        True, WINDOW, SOFTCAP, PRECISION, OFFSET, BLOCK_SIZE, BLOCK_N, BLOCK_D, HEAD_DIM,
    )  # fmt: skip

    if slot < 0:
        to = out + (at * out_stride_t + head * out_stride_h)[:, None] + d[None, :]
        tl.store(to, (acc / l[:, None]).to(out.dtype.element_ty), mask=live)
    else:
        part = (slot.to(tl.int64) * tl.num_programs(0) + kv_head) * BLOCK_M + line
        tl.store(part_m + part, m)
        tl.store(part_l + part, l)
        tl.store(part_acc + part[:, None] * BLOCK_D + d[None, :], acc, mask=live)


@triton.jit
def merge_kernel(
    out, part_acc, part_m, part_l, items, total, out_stride_t, out_stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The pieces of one tile, weighed: m = max mⱼ, wⱼ = exp(mⱼ - m), out = Σ wⱼ·accⱼ / Σ wⱼ·lⱼ."""
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(total):
        return
    field = items + item * 8
    row, rows, slot, pieces = tl.load(field + 1), tl.load(field + 2), tl.load(field + 6), tl.load(field + 7)
    if pieces <= 1:
        return
    line = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token, head = line // GROUP, kv_head * GROUP + line % GROUP
    live = (token < rows)[:, None] & (d < HEAD_DIM)[None, :]
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j in range(0, pieces):
        part = ((slot + j).to(tl.int64) * tl.num_programs(0) + kv_head) * BLOCK_M + line
        m_j = tl.load(part_m + part)
        m_new = tl.maximum(m, m_j)
        alpha, w = tl.exp2(m - m_new), tl.exp2(m_j - m_new)
        l = l * alpha + w * tl.load(part_l + part)
        acc_j = tl.load(part_acc + part[:, None] * BLOCK_D + d[None, :], mask=live, other=0.0)
        acc = acc * alpha[:, None] + w[:, None] * acc_j
        m = m_new
    at = (row + token).to(tl.int64)
    to = out + (at * out_stride_t + head * out_stride_h)[:, None] + d[None, :]
    tl.store(to, (acc / l[:, None]).to(out.dtype.element_ty), mask=live)


# -------------------------------------------------------------------------------------------- the backend


INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 when this file was imported


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the attention kernel. `fill`: pieces wanted per multiprocessor, over all KV heads."""

    lines: int  # BLOCK_M: query rows × heads of a group
    keys: int  # BLOCK_N
    warps: int
    stages: int
    fill: int
    min_piece: int = 256  # keys: a shorter piece costs more to start and to merge than it saves
    registers: int | None = None  # a thread's at most, so that more programs fit on a multiprocessor


def default_tiles(dtype: torch.dtype, head_dim: int) -> tuple[Tile, Tile]:
    """(prompt, decode) shapes, chosen on an H200 (docs/kernels.md)."""
    if dtype == torch.float32:  # exact products on the plain units: small tiles, or the registers overflow
        return Tile(32 if head_dim <= 128 else 16, 16, 4, 2, 2), Tile(16, 16, 4, 2, 4)
    if head_dim > 128:
        return Tile(64, 32, 4, 3, 2), Tile(16, 32, 4, 3, 4)
    return Tile(128, 64, 8, 3, 2, registers=128), Tile(16, 64, 2, 3, 4)


@dataclass(slots=True)
class Work:
    """The items of one launch: `plan_kernel`'s output, and the grid that holds whatever it may write."""

    tile: Tile
    items: Tensor  # int32 [max_items, ITEM]
    total: Tensor  # int32 [1]
    max_parts: int  # pieces of cut tiles, at most


class TritonAttention:
    """The backend of this file. `num_sms` and `tiles` (prompt, decode) are for tests and tuning; by default they
    follow the card, the dtype and the head size."""

    name = "triton"
    graph_safe = True  # what it launches depends on the bucket alone

    def __init__(self, num_sms: int | None = None, tiles: tuple[Tile, Tile] | None = None, overlap: bool = True):
        self._num_sms, self._tiles, self._overlap = num_sms, tiles, overlap
        self._work: dict[tuple, list[Work]] = {}
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._last = "no batch yet"

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises Unsupported, naming the layer's number that is out of reach."""
        device = torch.device(device)
        if not INTERPRETED and device.type != "cuda":
            raise Unsupported(
                f"triton runs on a CUDA device, not on {device}: use attention='torch', or set TRITON_INTERPRET=1 to test"
            )
        if not INTERPRETED and torch.cuda.get_device_capability(device) < (8, 0):
            raise Unsupported("triton needs compute capability 8.0 or above (Ampere): use attention='torch'")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise Unsupported(f"triton serves float32, float16 and bfloat16, not {dtype}: use attention='torch'")
        if INTERPRETED and dtype == torch.bfloat16:
            raise Unsupported("Triton's interpreter multiplies bfloat16 wrongly: use float32 or float16 there")
        if block_size < 1:
            raise Unsupported(f"block_size must be at least 1, got {block_size}")
        for i, layer in enumerate(layers):
            size = layer.head_dim
            if layer.value_dim != size:
                raise Unsupported(
                    f"layer {i}: values of size {layer.value_dim} with keys of size {size}: use attention='torch'"
                )
            if not 8 <= size <= 256 or size % 8:
                raise Unsupported(
                    f"layer {i}: head size {size} is not a multiple of 8 in 8 … 256: use attention='torch'"
                )
            if layer.num_heads % layer.num_kv_heads:
                raise Unsupported(
                    f"layer {i}: {layer.num_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
                )
            if not layer.scale > 0:
                raise Unsupported(f"layer {i}: scale {layer.scale} is not positive: use attention='torch'")
            if layer.sliding_window is not None and layer.sliding_window < 1:
                raise Unsupported(f"layer {i}: a sliding window of {layer.sliding_window} keys")

    def plan(self, meta: StepMeta) -> None:
        """Forgets the last step's work lists. `attend` makes the new ones on the device, at the first layer of each
        (group, window): one small launch each, also inside a captured graph."""
        self._work = {}

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        """Scatters key, value [T, kv_heads, head_dim] to the slots of meta.slot_mapping."""
        append_kv(key, value, key_cache, value_cache, meta.slot_mapping)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend. Output rows outside every sequence (a bucket's padding) are left as they are.

        In a captured graph meta.max_seqlen_q is a bound for the bucket: 1 promises that all rows are decodes.
        """
        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window, query.dtype)
        works = self._work.get(key)
        if works is None:
            works = self._work[key] = self._make_work(meta, layer, query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        launches = [(out, query, key_cache, value_cache, meta.block_tables, work, layer, sinks) for work in works]
        if len(launches) == 2 and self._overlap and query.is_cuda:
            if query.device not in self._side:
                self._side[query.device] = torch.cuda.Stream(query.device)
            side = self._side[query.device]
            parts = [partials(work, layer, query) for work in works]  # from the main stream's memory: it waits below
            side.wait_stream(torch.cuda.current_stream())
            paged_attention(*launches[0], parts[0])
            with torch.cuda.stream(side):
                paged_attention(*launches[1], parts[1])
            torch.cuda.current_stream().wait_stream(side)
        else:
            for launch in launches:
                paged_attention(*launch, partials(launch[5], layer, query))
        return out

    def explain(self) -> str:
        """One line on the last batch planned."""
        return self._last

    def _make_work(self, meta: StepMeta, layer: LayerSpec, query: Tensor) -> list[Work]:
        tokens, seqs = query.shape[0], meta.seq_lens_k.shape[0]
        prompt, decode = self._tiles or default_tiles(query.dtype, layer.head_dim)
        group = layer.num_heads // layer.num_kv_heads
        prompt, decode = _fit(prompt, group), _fit(decode, group)
        num_sms = self._num_sms or (
            torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 4
        )
        few = decode.lines // group  # sequences of up to this many rows go in the decode shape
        works = [make_work(meta, decode, layer, num_sms, min(seqs, tokens), 1, few)]
        if meta.max_seqlen_q > few:
            most_tiles = tokens // (prompt.lines // group) + min(seqs, tokens // (few + 1))
            works.append(make_work(meta, prompt, layer, num_sms, most_tiles, few + 1, 0))
        shapes = " + ".join(f"{w.tile.lines}×{w.tile.keys}" for w in works)
        self._last = (
            f"triton: {tokens} rows of {seqs} sequences, tiles {shapes} (lines × keys), "
            f"{group} heads to a KV head, long histories split over up to {num_sms} multiprocessors"
        )
        return works


def _fit(tile: Tile, group: int) -> Tile:
    """A tile holds at least one row of the whole group."""
    lines = max(tile.lines, triton.next_power_of_2(group))
    return replace(tile, lines=lines)


def append_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatters key, value [T, kv_heads, head_dim] to slots of the caches [blocks, block_size, kv_heads, head_dim]."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    append_kv_kernel[(tokens,)](
        key, value, key_cache, value_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[1], HEADS=heads, HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


def make_work(
    meta: StepMeta, tile: Tile, layer: LayerSpec, num_sms: int, most_tiles: int, fewest_rows: int, most_rows: int
) -> Work:
    """Launches plan_kernel for the sequences with fewest_rows … most_rows rows (0: no upper end)."""
    group = layer.num_heads // layer.num_kv_heads
    target = max(1, num_sms * tile.fill // layer.num_kv_heads)
    device, seqs = meta.seq_lens_k.device, meta.seq_lens_k.shape[0]
    items = torch.empty((most_tiles + target, ITEM), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    plan_kernel[(seqs,)](
        meta.cu_seqlens_q, meta.seq_lens_k, items, total, seqs, target, tile.min_piece,
        FEWEST_ROWS=fewest_rows, MOST_ROWS=most_rows, WINDOW=layer.sliding_window or 0,
        BLOCK_Q=tile.lines // group, BLOCK_N=tile.keys, SEQS=triton.next_power_of_2(seqs), LANES=64, num_warps=4,
    )  # fmt: skip
    return Work(tile, items, total, 2 * target)


def partials(work: Work, layer: LayerSpec, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the acc, m and l of cut tiles, float32: [parts, kv_heads, lines, head_dim], [parts, kv_heads, lines] twice."""
    shape = (work.max_parts, layer.num_kv_heads, work.tile.lines)
    size = triton.next_power_of_2(max(layer.head_dim, 16))
    new = lambda *s: torch.empty(s, dtype=torch.float32, device=query.device)  # noqa: E731
    return new(*shape, size), new(*shape), new(*shape)


def paged_attention(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, work: Work, layer: LayerSpec,
    sinks: Tensor | None, parts: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Computes the rows of `out` that `work` names: attention_kernel, then merge_kernel, on the current stream."""
    tile, group = work.tile, layer.num_heads // layer.num_kv_heads
    grid = (layer.num_kv_heads, work.items.shape[0])
    block_d = triton.next_power_of_2(max(layer.head_dim, 16))
    cap = layer.softcap
    small = max(key_cache.stride(0) * key_cache.shape[0], value_cache.stride(0) * value_cache.shape[0]) < 2**31
    attention_kernel[grid](
        query, key_cache, value_cache, out, *parts, work.items, work.total, block_tables, query if sinks is None else sinks,
        layer.scale * LOG2E, cap or 0.0, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0),
        GROUP=group, HEAD_DIM=layer.head_dim, BLOCK_SIZE=key_cache.shape[1], WINDOW=layer.sliding_window or 0,
        SOFTCAP=bool(cap), SINKS=sinks is not None, PRECISION="ieee",
        OFFSET=tl.int32 if small else tl.int64, BLOCK_M=tile.lines, BLOCK_N=tile.keys, BLOCK_D=block_d,
        num_warps=tile.warps, num_stages=tile.stages, **({"maxnreg": tile.registers} if tile.registers else {}),
    )  # fmt: skip
    merge_kernel[grid](
        out, *parts, work.items, work.total, out.stride(0), out.stride(1),
        GROUP=group, HEAD_DIM=layer.head_dim, BLOCK_M=tile.lines, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
