"""The torch backend against a dense float64 reference written here, over blocks in any order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minichunk import Chunk, PackedBatch, Request
from minichunk.attention import AttentionBackend, LayerSpec, StepMeta, make_backend


def dense(query, keys, values, spec, sinks):
    """One sequence: query [q, H, d], keys [k, K, d], values [k, K, dv], all float64 → [q, H, dv], row by row."""
    rows, total = len(query), len(keys)
    out = torch.zeros(rows, spec.num_heads, spec.value_dim, dtype=torch.float64)
    for i in range(rows):
        at = total - rows + i
        first = 0 if spec.sliding_window is None else max(0, at - spec.sliding_window + 1)
        for head in range(spec.num_heads):
            kv = head // (spec.num_heads // spec.num_kv_heads)
            score = keys[first : at + 1, kv] @ query[i, head] * spec.scale
            if spec.softcap is not None:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            if sinks is not None:
                score = torch.cat([score, sinks[head].double()[None]])
            weight = torch.softmax(score, 0)[: at + 1 - first]
            out[i, head] = weight @ values[first : at + 1, kv]
    return out


def run(spec, shapes, size, seed=0, garbage=float("nan")):
    """shapes: (start, length) of each sequence. Returns the backend's rows and the reference's.

    What no token was written to is `garbage`, block 0 (which fills unused table entries) included.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    blocks = [-(-(start + n) // size) for start, n in shapes]
    ids = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(n)] for n in blocks]
    chunks = [Chunk.of(Request(i, [0] * (a + n), a + n, num_computed=a), n) for i, (a, n) in enumerate(shapes)]
    batch = PackedBatch.build(chunks, tables, size)
    k_cache = torch.full((sum(blocks) + 1, size, spec.num_kv_heads, spec.head_dim), garbage)
    v_cache = torch.full((sum(blocks) + 1, size, spec.num_kv_heads, spec.value_dim), garbage)
    keys = [draw(a + n, spec.num_kv_heads, spec.head_dim) for a, n in shapes]
    values = [draw(a + n, spec.num_kv_heads, spec.value_dim) for a, n in shapes]
    for table, k, v, (start, _) in zip(tables, keys, values, shapes):
        for p in range(start):  # the history
            k_cache[table[p // size], p % size], v_cache[table[p // size], p % size] = k[p], v[p]
    sinks = draw(spec.num_heads) if spec.has_sinks else None
    query = draw(batch.num_tokens, spec.num_heads, spec.head_dim) * 2
    backend = make_backend("torch", torch.device("cpu"))
    meta = StepMeta.of(batch, "cpu")
    backend.plan(meta)
    new = lambda whole: torch.cat([x[start:] for x, (start, _) in zip(whole, shapes)])  # noqa: E731
    backend.append_kv(new(keys), new(values), k_cache, v_cache, meta)
    written = [k_cache.clone(), v_cache.clone()]
    got = backend.attend(query, k_cache, v_cache, meta, spec, sinks)
    for before, after in zip(written, (k_cache, v_cache)):
        assert torch.equal(before.nan_to_num(-7), after.nan_to_num(-7)), "attend must not change the cache"
    want, at = [], 0
    for k, v, (_, n) in zip(keys, values, shapes):
        want.append(dense(query[at : at + n].double(), k.double(), v.double(), spec, sinks))
        at += n
    return got, torch.cat(want)


MIXED = [(7, 1), (9, 12), (0, 3), (400, 1), (0, 1), (30, 1), (5, 2), (31, 33)]
SPECS = {
    "plain": {},
    "GQA": dict(num_kv_heads=2),
    "MQA": dict(num_kv_heads=1),
    "window of 6": dict(num_kv_heads=2, sliding_window=6),
    "window of 1": dict(sliding_window=1),
    "soft cap": dict(num_kv_heads=2, softcap=2.0),
    "sinks": dict(num_kv_heads=2, has_sinks=True),
    "window, soft cap and sinks": dict(num_kv_heads=2, sliding_window=6, softcap=2.0, has_sinks=True),
    "narrow values": dict(num_kv_heads=2, value_dim=4),
    "narrow values and soft cap": dict(num_kv_heads=2, value_dim=4, softcap=2.0),
    "own scale": dict(scale=0.9),
}


def layer(**options):
    return LayerSpec(**{**dict(num_heads=4, num_kv_heads=4, head_dim=8, value_dim=8, scale=0.35), **options})


@pytest.mark.parametrize("size", [1, 4, 16, 32])
@pytest.mark.parametrize("name", SPECS)
def test_a_mixed_batch_equals_the_dense_reference(name, size):
    got, want = run(layer(**SPECS[name]), MIXED, size)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("lengths", [[1, 2, 300, 301, 900, 5, 4000], [7] * 9, [1], [129, 258, 130]])
def test_single_rows_of_very_different_lengths(lengths):
    got, want = run(layer(num_kv_heads=2), [(n - 1, 1) for n in lengths], 16)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(1, 32), st.sampled_from(list(SPECS)), st.integers(0, 1000),
)  # fmt: skip
def test_any_batch_any_block_size_any_kind_of_layer(shapes, size, name, seed):
    got, want = run(layer(**SPECS[name]), shapes, size, seed)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", range(1, 14))
def test_a_window_at_the_borders_of_chunks(window):
    shapes = [(0, 4), (4, 4), (8, 3), (10, 1), (5, 1), (6, 1)]
    got, want = run(layer(sliding_window=window), shapes, 4)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["plain", "sinks", "soft cap"])
def test_what_lies_in_blocks_of_others_or_behind_the_last_token_never_shows(name, garbage):
    got, want = run(layer(**SPECS[name]), [(2, 1), (40, 1), (0, 3), (17, 5)], 16, garbage=garbage)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


def test_a_sequence_without_rows_is_left_out():
    """Padded decode batches have such: lengths of queries 0, 1, 0, 1."""
    backend, spec = make_backend("torch", torch.device("cpu")), layer(num_kv_heads=2)
    k_cache, v_cache, query = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8), torch.randn(2, 4, 8)
    request = Request(0, [0] * 4, 4)
    batch = PackedBatch.build([Chunk(request, 2, 1, False, False)] * 2, [[0], [1]], 4)
    meta = StepMeta.of(batch, "cpu")
    backend.plan(meta)
    want = backend.attend(query, k_cache, v_cache, meta, spec)
    batch.cu_seqlens_q = np.array([0, 0, 1, 1, 2], dtype=np.int32)
    batch.seq_lens_k = np.array([1, 3, 1, 3], dtype=np.int32)
    batch.block_tables = np.array([[0], [0], [0], [1]], dtype=np.int32)
    meta = StepMeta.of(batch, "cpu")
    backend.plan(meta)
    torch.testing.assert_close(backend.attend(query, k_cache, v_cache, meta, spec), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_reference(dtype):
    spec = layer(num_kv_heads=2, softcap=5.0)
    request = Request(0, [0] * 40, 40, num_computed=30)
    batch = PackedBatch.build([Chunk.of(request, 10)], [[2, 0, 1]], 16)
    k, v, q = (torch.randn(40 if i < 2 else 10, 2 if i < 2 else 4, 8).to(dtype) for i in range(3))
    k_cache, v_cache = torch.zeros(3, 16, 2, 8, dtype=dtype), torch.zeros(3, 16, 2, 8, dtype=dtype)
    for p in range(30):
        block = [2, 0, 1][p // 16]
        k_cache[block, p % 16], v_cache[block, p % 16] = k[p], v[p]
    backend, meta = make_backend("torch", torch.device("cpu")), StepMeta.of(batch, "cpu")
    backend.plan(meta)
    backend.append_kv(k[30:], v[30:], k_cache, v_cache, meta)
    got = backend.attend(q, k_cache, v_cache, meta, spec)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), dense(q.double(), k.double(), v.double(), spec, None), rtol=0.02, atol=0.02
    )


def test_it_keeps_the_protocol_and_says_what_ran():
    backend = make_backend("torch", torch.device("cpu"))
    assert isinstance(backend, AttentionBackend)
    chunks = [Chunk.of(Request(i, [0] * 9, 9, num_computed=a), 9 - a) for i, a in enumerate([0, 8, 8])]
    backend.plan(StepMeta.of(PackedBatch.build(chunks, [[0], [1], [2]], 16), "cpu"))
    assert "1 prompt chunk" in backend.explain() and "2 single rows" in backend.explain()
    with pytest.raises(ValueError, match="auto, torch, triton"):
        make_backend("flash", torch.device("cpu"))
