"""The triton backend against dense float64 attention written here; on a CPU in Triton's interpreter.

The interpreter multiplies bfloat16 wrongly, so the dtypes are float32 and float16. Tiles are small, so that a few
dozen tokens already cross tiles, pieces and block borders.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, its own helpers included
triton = pytest.importorskip("triton", reason="the triton package is not installed")

from minichunk.attention import triton_backend  # noqa: E402
from minichunk.attention.base import LayerSpec, StepMeta, Unsupported  # noqa: E402
from minichunk.attention.triton_backend import Tile, TritonAttention  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not type(triton.language.cdiv).__name__.startswith("Interpreted"):
    reason = "triton was imported before its interpreter was asked for: tests/test_triton_process.py runs this file"
    pytest.skip(reason, allow_module_level=True)

SMALL = (Tile(32, 16, 4, 2, 4, min_piece=16), Tile(16, 16, 4, 2, 8, min_piece=16))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def dense(query, keys, values, layer, sinks=None):
    """query [q, H, D], keys and values [k, K, D], all of one sequence → [q, H, D], in float64, row by row."""
    query, keys, values = query.double(), keys.double(), values.double()
    q, heads = query.shape[:2]
    k, kv_heads = keys.shape[:2]
    out = torch.zeros(q, heads, values.shape[2], dtype=torch.float64)
    for i in range(q):
        last = k - q + i
        first = 0 if layer.sliding_window is None else max(0, last - layer.sliding_window + 1)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = keys[first : last + 1, kv] @ query[i, h] * layer.scale
            if layer.softcap:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double()[None]])
            weights = torch.softmax(scores, 0)[: last + 1 - first]
            out[i, h] = weights @ values[first : last + 1, kv]
    return out


class Batch:
    """Sequences of `rows` new rows after `history` keys, scattered over a pool whose other slots hold NaN."""

    def __init__(self, sizes, layer, block_size, dtype, seed=0, padding=(0, 0), share=False, sinks=None):
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)
        make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)  # noqa: E731
        self.sizes, self.layer, self.dtype, self.sinks = sizes, layer, dtype, sinks
        lens = [history + rows for history, rows in sizes]
        counts = [-(-n // block_size) for n in lens]
        spare = sum(counts)  # the block for padding rows lies beside the others
        ids = rng.permutation(spare)
        tables, at = [], 0
        for n in counts:
            tables.append(ids[at : at + n].tolist())
            at += n
        self.keys = [make(n, layer.num_kv_heads, layer.head_dim) for n in lens]
        self.values = [make(n, layer.num_kv_heads, layer.head_dim) for n in lens]
        if share:  # the second sequence begins with the first one's leading whole blocks
            whole = min(lens[0], sizes[1][0]) // block_size
            tables[1][:whole] = tables[0][:whole]
            self.keys[1][: whole * block_size] = self.keys[0][: whole * block_size]
            self.values[1][: whole * block_size] = self.values[0][: whole * block_size]
        shape = (spare + 1, block_size, layer.num_kv_heads, layer.head_dim)
        self.key_cache = torch.full(shape, float("nan"), dtype=dtype)
        self.value_cache = torch.full(shape, float("nan"), dtype=dtype)
        self.key_cache[spare] = self.value_cache[spare] = 0
        self.slots = [
            [t[p // block_size] * block_size + p % block_size for p in range(n)] for t, n in zip(tables, lens)
        ]
        for keys, values, slots in zip(self.keys, self.values, self.slots):
            self.key_cache.view(-1, *shape[2:])[slots] = keys
            self.value_cache.view(-1, *shape[2:])[slots] = values
        more_rows, more_seqs = padding
        rows = [r for _, r in sizes]
        self.num_rows = sum(rows)
        self.query = make(self.num_rows + more_rows, layer.num_heads, layer.head_dim)
        cu = np.concatenate([[0], np.cumsum(rows), [self.num_rows] * more_seqs]).astype(np.int32)
        table = np.full((len(sizes) + more_seqs, max(counts)), spare, dtype=np.int32)
        for i, row in enumerate(tables):
            table[i, : len(row)] = row
        new = [s[h:] for s, (h, _) in zip(self.slots, sizes)]
        slot_mapping = np.array(sum(new, []) + [spare * block_size] * more_rows, dtype=np.int64)
        seq_lens = np.array(lens + [i % 2 for i in range(more_seqs)], dtype=np.int32)
        put = lambda a: torch.from_numpy(a).to(DEVICE)  # noqa: E731
        self.meta = StepMeta(put(cu), put(seq_lens), put(table), put(slot_mapping), max(rows), max(lens))

    def attend(self, backend):
        backend.plan(self.meta)
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        out = backend.attend(
            self.query.to(DEVICE), self.key_cache.to(DEVICE), self.value_cache.to(DEVICE), self.meta, self.layer, sinks
        )
        return out.cpu()

    def expected(self):
        at, out = 0, []
        for (_, rows), keys, values in zip(self.sizes, self.keys, self.values):
            out.append(dense(self.query[at : at + rows], keys, values, self.layer, self.sinks))
            at += rows
        return torch.cat(out)

    def check(self, backend=None):
        got = self.attend(backend or TritonAttention(num_sms=4, tiles=SMALL))[: self.num_rows].double()
        error = (got - self.expected()).abs().max().item()
        assert error < TOLERANCE[self.dtype], f"largest error {error} for (history, rows) {self.sizes}"


def spec(group=2, kv_heads=1, head_dim=16, **more):
    return LayerSpec(group * kv_heads, kv_heads, head_dim, head_dim, head_dim**-0.5, **more)


sizes = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))).filter(lambda s: sum(s) > 0),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes,
    st.sampled_from([1, 3, 4, 16, 24]),
    st.sampled_from([(1, 2), (2, 1), (4, 1), (7, 1), (8, 2)]),
    st.sampled_from([None, None, 1, 6, 33]),
    st.sampled_from([torch.float32, torch.float16]),
    st.tuples(st.integers(0, 9), st.integers(0, 3)),
    st.integers(0, 99),
)
def test_any_mixed_batch(sizes, block_size, heads, window, dtype, padding, seed):
    layer = spec(*heads, sliding_window=window)
    Batch(sizes, layer, block_size, dtype, seed, padding).check()


CASES = {
    "empty histories": [(0, 5), (0, 33), (0, 1)],
    "length-1 rows": [(1, 1), (15, 1), (16, 1), (63, 1)],
    "a row that sees one key": [(0, 1)],
    "chunk starts inside a block": [(5, 9), (17, 30)],
    "one block": [(3, 4), (0, 7)],
    "decodes and prompts in any order": [(40, 1), (0, 20), (9, 1), (30, 30), (2, 3)],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_batches_worth_a_name(name, dtype):
    Batch(CASES[name], spec(4), 8, dtype).check()


@pytest.mark.parametrize("history, rows", [(3000, 1), (2500, 40)])
def test_thousands_of_tokens_are_split_and_merged(history, rows):
    batch = Batch([(history, rows), (7, 1)], spec(2), 16, torch.float32)
    backend = TritonAttention(num_sms=4, tiles=(Tile(32, 64, 4, 2, 8), Tile(16, 64, 4, 2, 8)))
    batch.check(backend)
    used = [work.items[: int(work.total)] for works in backend._work.values() for work in works]
    assert max(int(items[:, 7].max()) for items in used if len(items)) >= 4, "the history was meant to be cut"


def test_shared_blocks():
    Batch([(32, 4), (40, 6)], spec(2), 8, torch.float32, share=True).check()


def test_window_at_chunk_borders():
    """A prompt of 11 in chunks of 4 under a window of 6: the chunk at 8 … 10 sees keys 3 … 10."""
    for history, rows in [(0, 4), (4, 4), (8, 3), (11, 1)]:
        Batch([(history, rows)], spec(2, sliding_window=6), 4, torch.float32).check()


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_groups(group):
    Batch([(20, 1), (6, 25)], spec(group, 2), 16, torch.float32).check()


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_head_sizes(head_dim):
    Batch([(20, 1), (3, 18)], spec(2, 1, head_dim), 16, torch.float32).check()


def test_softcap_changes_scores_as_defined():
    layer = spec(2, softcap=0.5)
    Batch([(40, 1), (3, 30)], layer, 16, torch.float32).check()
    Batch([(40, 1), (3, 30)], spec(2, softcap=0.5, sliding_window=9), 16, torch.float16).check()


def test_sinks_count_once_however_the_keys_are_cut():
    sinks = torch.tensor([3.0, -2.0, 0.5, 8.0])
    Batch([(200, 1), (3, 30)], spec(4, has_sinks=True), 16, torch.float32, sinks=sinks).check()
    Batch([(200, 1), (3, 30)], spec(4, has_sinks=True, sliding_window=50), 16, torch.float32, sinks=sinks).check()


def test_one_row_does_not_depend_on_its_company():
    """The same decode alone and among prompts agrees with the reference to the same tolerance, padding or not."""
    for sizes, padding in [([(50, 1)], (0, 0)), ([(50, 1)], (7, 5)), ([(50, 1), (0, 30), (60, 20)], (3, 4))]:
        Batch(sizes, spec(4), 16, torch.float32, padding=padding).check()


def test_default_tiles_and_query_strides():
    """The shapes that a card would use, on a query as transformers lays it out: heads before rows."""
    batch = Batch([(70, 1), (10, 40)], spec(4, 2, 64), 16, torch.float16)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    batch.check(TritonAttention())


def test_grids_depend_on_the_bucket_alone():
    """Two batches of one bucket: same number of work items launched, and room for the worst content."""
    layer, backend = spec(4), TritonAttention(num_sms=4, tiles=SMALL)
    shapes = []
    for sizes, padding in [([(0, 30), (200, 1)], (9, 2)), ([(10, 1), (0, 1), (8, 37), (3, 1)], (0, 0))]:
        batch = Batch(sizes, layer, 8, torch.float32, padding=padding)
        batch.check(backend)
        works = backend._work[next(iter(backend._work))]
        shapes.append([(work.items.shape, work.max_parts) for work in works])
        for work in works:
            items = work.items[: int(work.total)]
            assert int(work.total) <= work.items.shape[0]
            assert max([-1, *items[:, 6].tolist()]) < work.max_parts
    assert shapes[0] == shapes[1]


def test_padding_rows_are_not_written():
    batch = Batch([(20, 1), (4, 12)], spec(2), 8, torch.float32, padding=(5, 3))
    before = [batch.key_cache.clone(), batch.value_cache.clone()]
    backend = TritonAttention(num_sms=4, tiles=SMALL)
    batch.attend(backend)
    out = torch.full_like(batch.query, 777.0).to(DEVICE)
    inputs = [t.to(DEVICE) for t in (batch.query, batch.key_cache, batch.value_cache, batch.meta.block_tables)]
    (works,) = backend._work.values()
    for work in works:
        parts = triton_backend.partials(work, batch.layer, batch.query)
        triton_backend.paged_attention(out, *inputs, work, batch.layer, None, [p.to(DEVICE) for p in parts])
    assert (out[batch.num_rows :] == 777.0).all()
    assert not (out[: batch.num_rows] == 777.0).any()
    for cache, old in zip([batch.key_cache, batch.value_cache], before):
        assert torch.equal(cache.nan_to_num(5.0), old.nan_to_num(5.0))


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_append_writes_its_slots_and_no_other(block_size, dtype):
    rows, heads, size = 9, 3, 24
    draw = torch.Generator().manual_seed(1)
    key, value = (torch.randn(rows, heads, size, generator=draw).to(dtype) for _ in range(2))
    caches = [torch.randn(12, block_size, heads, size, generator=draw).to(dtype).to(DEVICE) for _ in range(2)]
    slots = torch.randperm(12 * block_size, generator=draw)[:rows]
    slots[4] = -1  # a row that belongs nowhere
    wanted = [cache.cpu().clone() for cache in caches]
    for r, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[0].view(-1, heads, size)[slot] = key[r]
            wanted[1].view(-1, heads, size)[slot] = value[r]
    meta = StepMeta(*(torch.zeros(1, dtype=torch.int32),) * 3, slots.to(DEVICE), 1, 1)
    value_strided = value.transpose(0, 1).contiguous().transpose(0, 1)
    TritonAttention().append_kv(key.to(DEVICE), value_strided.to(DEVICE), *caches, meta)
    assert torch.equal(caches[0].cpu(), wanted[0]) and torch.equal(caches[1].cpu(), wanted[1])


def test_roof_counts_each_row_and_key_once():
    from minichunk.bench import kernels

    sizes = [(3, 5), (1, 7), (4, 4)]
    pairs = sum(len(range(k - q + i + 1)) for q, k in sizes for i in range(q))
    flops = sum(2 * 2 * 128 * 32 for _ in range(pairs))  # a product with the key and one with the value, 32 heads
    moved = 2 * (5 + 7 + 4) * 8 * 128 * 2 + 2 * (3 + 1 + 4) * 32 * 128 * 2
    assert kernels.roof_us(sizes) == pytest.approx(1e6 * max(flops / 790e12, moved / 4.3e12))
    assert kernels.roof_us([(2048, 2048)] * 4) == pytest.approx(174, abs=1)  # bound by arithmetic


def test_check_refuses_by_name():
    backend, good = TritonAttention(), spec(4)
    backend.check([good], 1, torch.float32, DEVICE)
    bad = [
        (LayerSpec(4, 2, 64, 32, 0.1), torch.float16, 16, "values of size 32"),
        (spec(2, 1, 512), torch.float16, 16, "head size 512"),
        (spec(2, 1, 20), torch.float16, 16, "head size 20"),
        (LayerSpec(5, 2, 64, 64, 0.1), torch.float16, 16, "5 query heads"),
        (LayerSpec(4, 2, 64, 64, -0.1), torch.float16, 16, "scale -0.1"),
        (good, torch.float64, 16, "float64"),
        (good, torch.float16, 0, "block_size"),
        (spec(2, sliding_window=0), torch.float16, 16, "sliding window"),
    ]
    for layer, dtype, block_size, words in bad:
        with pytest.raises(Unsupported, match=words):
            backend.check([good, layer], block_size, dtype, DEVICE)


@pytest.mark.gpu
def test_a_captured_graph_replays_with_other_integers():
    """One bucket of 64 rows and 6 sequences, captured with its planning on one batch, replayed on two others."""
    layer, dtype = spec(4, 2, 64), torch.float16
    contents = [
        ([(0, 30), (200, 1), (9, 1)], (32, 3)),
        ([(300, 1), (5, 57), (0, 1), (77, 1), (64, 4)], (0, 1)),
        ([(n, 1) for n in (1, 500, 16, 31, 250)], (59, 1)),
    ]
    batches = [Batch(sizes, layer, 16, dtype, seed, padding) for seed, (sizes, padding) in enumerate(contents)]
    pool = [torch.zeros(80, 16, 2, 64, dtype=dtype, device=DEVICE) for _ in range(2)]
    query = torch.zeros(64, 8, 64, dtype=dtype, device=DEVICE)
    zeros = lambda *shape, kind=torch.int32: torch.zeros(*shape, dtype=kind, device=DEVICE)  # noqa: E731
    meta = StepMeta(zeros(7), zeros(6), zeros(6, 32), zeros(64, kind=torch.int64), 64, 512)

    def fill(batch):
        for old, new in zip(pool, (batch.key_cache, batch.value_cache)):
            old[: len(new)] = new.to(DEVICE)
        query.copy_(batch.query)
        for name in ("cu_seqlens_q", "seq_lens_k", "slot_mapping"):
            getattr(meta, name).copy_(getattr(batch.meta, name))
        meta.block_tables[:, : batch.meta.block_tables.shape[1]] = batch.meta.block_tables

    backend = TritonAttention()
    step = lambda: (backend.plan(meta), backend.attend(query, *pool, meta, layer))[1]  # noqa: E731
    fill(batches[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for batch in batches:
        fill(batch)
        graph.replay()
        error = (out[: batch.num_rows].cpu().double() - batch.expected()).abs().max().item()
        assert error < TOLERANCE[dtype], f"largest error {error} for {batch.sizes}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_default_tiles_of_each_dtype(dtype, tolerance, head_dim):
    batch = Batch([(300, 1), (10, 60), (0, 3)], spec(4, 2, head_dim), 16, dtype)
    got = batch.attend(TritonAttention())[: batch.num_rows].double()
    assert (got - batch.expected()).abs().max().item() < tolerance
