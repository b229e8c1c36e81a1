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
new integers. Prompt rows and decode rows are two launches of the same source with two tile shapes.

Softmax, kept online as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; the split over keys: Flash-Decoding,
Dao et al. 2023): m is the largest score so far, l the sum of exp(score - m), acc the sum of exp(score - m) · value.
"""

# ruff: noqa: E741 (l is the papers' name for the running sum)

from __future__ import annotations

import triton
import triton.language as tl

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
