"""The integers that the flashinfer and flash_attn backends hand to their packages, on a CPU, over made-up packages that keep
their contracts."""

import random
import re
import sys
import types
from dataclasses import replace

import fake_flashinfer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import spec

from minichunk.attention import StepMeta, Unsupported, flashinfer_backend, trial
from minichunk.attention.flash_attn_backend import FlashAttention
from minichunk.attention.flashinfer_backend import PATHS, FlashInferAttention, workspace_bytes
from minichunk.packing import PackedBatch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def flashinfer():
    """FlashInferAttention on the CPU, over the made-up package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_flashinfer.module)
        patch.setattr(flashinfer_backend, "obstacle", lambda path, device: None)
        patch.setattr(flashinfer_backend, "workspace_bytes", lambda layers, device: 1)
        yield


def with_empty(batch: PackedBatch, at: int) -> PackedBatch:
    """The same batch with a sequence of no rows before sequence `at`."""
    rows = [0] * batch.block_tables.shape[1]
    return replace(
        batch, cu_seqlens_q=np.insert(batch.cu_seqlens_q, at, batch.cu_seqlens_q[at]), seq_lens_k=np.insert(batch.seq_lens_k, at, 1),
        block_tables=np.insert(batch.block_tables, at, rows, 0), chunks=[*batch.chunks, batch.chunks[0]],
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=5),
    st.sampled_from(PATHS), st.sampled_from([1, 3, 16]), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_path_of_flashinfer_plans_what_the_reference_computes(
    flashinfer, sizes, path, block_size, window, cap, empty
):
    layer = spec(sliding_window=6 if window and path != "batch" else None, softcap=2.0 if cap else None, scale=0.3)
    backend = FlashInferAttention(path)
    backend.check([layer, spec()], block_size, torch.float16, CPU)
    for one in (layer, spec()):  # two kinds of layers, each with its own plan, in one step
        assert trial.difference(backend, one, sizes, block_size, torch.float16, CPU) < trial.TOLERANCE[torch.float16]
    if empty:
        batch, _ = trial.scattered(sizes, block_size)
        more = with_empty(batch, len(sizes) // 2)
        query = torch.randn(4, batch.num_tokens, 64).half().transpose(0, 1)  # as models hand it over: not contiguous
        cache = [torch.randn(batch.block_tables.max() + 1, block_size, 2, 64).half() for _ in range(2)]
        outs = []
        for b in (batch, more):
            meta = StepMeta.of(b, CPU)
            backend.plan(meta)
            said = re.findall(r"(\d+) sequences", backend.explain())
            assert sum(map(int, said)) == len(sizes), "the sequence without rows is in no wrapper"
            backend.append_kv(*[c.new_ones(b.num_tokens, 2, 64) for c in cache], *cache, meta)
            outs.append(backend.attend(query, *cache, meta, layer))
        assert torch.equal(*outs)


def test_split_takes_rows_in_any_order(flashinfer):
    """Decodes before, between and behind chunks: rows that lie together are a slice, others are gathered."""
    backend = FlashInferAttention("split")
    backend.check([spec()], 4, torch.float16, CPU)
    for sizes in (
        [(5, 1), (9, 1), (0, 7)],
        [(0, 7), (5, 1), (9, 1)],
        [(5, 1), (0, 7), (9, 1), (3, 4)],
        [(5, 1)],
        [(0, 2)],
    ):
        assert trial.difference(backend, spec(), sizes, 4, torch.float16, CPU) < 8e-3, sizes
        singles = sum(rows == 1 for _, rows in sizes)
        assert ("decode wrapper, %d" % singles in backend.explain()) == bool(singles)


@pytest.mark.parametrize(
    "path, kernels",
    [
        ("fa2", ["fa2"]), ("fa3", ["fa3"]), ("default", ["auto"]), ("split", ["fa2", "decode"]),
        ("split_fa3", ["fa3", "decode"]), ("batch", ["batch"]),
    ],
)  # fmt: skip
def test_the_kernels_of_each_path(flashinfer, monkeypatch, path, kernels):
    made = []

    def noted(name, kind):
        real = getattr(fake_flashinfer, name)
        return lambda *given, **more: made.append(kind or more["backend"]) or real(*given, **more)

    for name, kind in [("BatchPrefillWithPagedKVCacheWrapper", None), ("BatchDecodeWithPagedKVCacheWrapper", "decode"), ("BatchAttention", "batch")]:  # fmt: skip
        monkeypatch.setattr(fake_flashinfer.module, name, noted(name, kind))
    backend = FlashInferAttention(path)
    backend.check([spec()], 16, torch.float16, CPU)
    assert sorted(made) == sorted(kernels)  # made once, however many steps there are
    backend.plan(StepMeta.of(trial.scattered([(5, 1), (0, 4)], 16)[0], CPU))
    assert len(made) == len(kernels)


def test_flashinfer_refuses_by_name(flashinfer):
    for layer, path, dtype, said in [
        (spec(head_dim=80), "fa2", torch.float16, r"layer 0.*head sizes \(64, 128, 256\).*80"),
        (spec(has_sinks=True), "fa2", torch.float16, "layer 0.*sinks"),
        (spec(sliding_window=8), "batch", torch.float16, "BatchAttention has no sliding window"),
        (spec(), "fa2", torch.float32, "float16 and bfloat16, not torch.float32"),
    ]:
        with pytest.raises(Unsupported, match=said):
            FlashInferAttention(path).check([layer], 16, dtype, CPU)
    with pytest.raises(ValueError, match="a path of flashinfer is one of fa2, fa3.*'fa4'"):
        FlashInferAttention("fa4")


@pytest.mark.parametrize("path", ["split", "batch"])
def test_a_backend_object_set_up_for_another_engine_says_so(flashinfer, monkeypatch, path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    backend, meta = FlashInferAttention(path), StepMeta.of(trial.scattered([(5, 1), (0, 4)], 16)[0], CPU)
    backend.check([spec()], 16, torch.float16, CPU)
    backend.check([spec(softcap=2.0)], 16, torch.bfloat16, CPU)  # a second engine with another model
    backend.plan(meta)
    cache = [torch.zeros(4, 16, 2, 64) for _ in range(2)]
    for layer, dtype in ((spec(), torch.float16), (spec(), torch.bfloat16), (spec(softcap=2.0), torch.float16)):
        with pytest.raises(RuntimeError, match="give each engine a backend object of its own"):
            backend.attend(torch.zeros(5, 4, 64, dtype=dtype), *(c.to(dtype) for c in cache), meta, layer)


def planned_bytes(sizes, heads, kv_heads, head_dim, page, programs):
    """What FlashInfer's planner asks of the workspace for (history, rows), after PrefillSplitQOKVIndptr of its scheduler.cuh:
    the finest cut of the pages that gives at most programs / kv_heads pieces; nothing for a batch that is not cut."""
    group = heads // kv_heads
    lines, pages = [rows * group for _, rows in sizes], [-(-(history + rows) // page) for history, rows in sizes]
    mean = sum(lines) // len(lines)
    tile = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 else 16
    pieces = lambda cut: sum(-(-n // tile) * -(-k // cut) for n, k in zip(lines, pages))  # noqa: E731
    low, high = max(128 // page, 1), max(pages)
    while low < high:
        mid = (low + high) // 2
        low, high = (mid + 1, high) if pieces(mid) > programs // kv_heads else (low, mid)
    return pieces(low) * heads * tile * (head_dim + 1) * 4 if low < max(pages) else 0


def test_no_plan_asks_for_more_than_the_workspace(monkeypatch):
    rng, most = random.Random(0), 0.0
    for _ in range(800):
        sms, (heads, kv_heads) = (
            rng.choice([40, 58, 108, 132, 170]),
            rng.choice([(32, 8), (32, 32), (8, 1), (64, 4), (14, 2)]),
        )
        layer = spec(heads=heads, kv_heads=kv_heads, head_dim=rng.choice([64, 128, 256]))
        properties = types.SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        sizes = [(rng.randint(0, 40000), rng.choice([1, 1, rng.randint(1, 4096)])) for _ in range(rng.choice([1, 2, 5, 40, 300]))]  # fmt: skip
        wanted = planned_bytes(sizes, heads, kv_heads, layer.head_dim, rng.choice([1, 16, 256]), 2 * sms)
        room = workspace_bytes([layer, spec(heads=2, kv_heads=1)], torch.device("cuda"))
        assert wanted <= room, (sizes, layer, sms)
        most = max(most, wanted / room)
    assert most > 0.5  # and not several times as much


def flash_attn():
    """The package's two calls over blocks: a window counts keys to the left and to the right, lengths are int32 tensors."""

    def paged(query, key_cache, value_cache, rows, lens, block_table, softmax_scale, causal, window_size, softcap):
        page = key_cache.shape[1]
        assert page % 256 == 0 and causal and window_size[1] in ((-1,) if window_size[0] < 0 else (0,))
        assert len(rows) == len(lens) + 1 == len(block_table) + 1 and int(rows[-1]) == len(query)
        assert all(t.dtype == torch.int32 for t in (rows, lens, block_table)) and (rows[1:] > rows[:-1]).all()
        counts = [-(-n // page) for n in lens.tolist()]
        indices = torch.cat([blocks[:count] for blocks, count in zip(block_table, counts)])
        pages = np.concatenate([[0], np.cumsum(counts)])
        return fake_flashinfer.attend(
            query, (key_cache, value_cache), rows, pages, indices, lens.tolist(), True, softmax_scale, window_size[0], softcap
        )  # fmt: skip

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, **same):
        lens = cu_seqlens_k.diff()
        assert max_seqlen_q > 1, "decodes alone have a call of their own"
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(lens.max()))
        return paged(q, k, v, cu_seqlens_q, lens, block_table, **same)

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, **same):
        rows = torch.arange(len(q) + 1, dtype=torch.int32)
        return paged(q[:, 0], k_cache, v_cache, rows, cache_seqlens, block_table, **same)[:, None]

    return types.SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache
    )


@pytest.mark.parametrize("sizes", [[(5, 1), (255, 1), (256, 1)], [(300, 1), (0, 7), (250, 20), (9, 1)], [(0, 3)]])
@pytest.mark.parametrize("more", [{}, dict(sliding_window=1), dict(sliding_window=6, softcap=2.0, scale=0.3)])
def test_flash_attn_plans_what_the_reference_computes(monkeypatch, sizes, more):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn())
    backend, layer = FlashAttention(), spec(**more)
    assert trial.difference(backend, layer, sizes, 256, torch.float16, CPU) < trial.TOLERANCE[torch.float16]
    assert ("decodes alone" in backend.explain()) == all(rows == 1 for _, rows in sizes)
    batch, _ = trial.scattered(sizes, 256)
    cache = [torch.randn(batch.block_tables.max() + 1, 256, 2, 64).half() for _ in range(2)]
    query, outs = torch.randn(4, batch.num_tokens, 64).half().transpose(0, 1), []
    for b in (batch, with_empty(batch, len(sizes) // 2)):
        meta = StepMeta.of(b, CPU)
        backend.plan(meta)
        outs.append(backend.attend(query, *cache, meta, layer))
    assert torch.equal(*outs)
