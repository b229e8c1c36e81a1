"""The integers that the flashinfer backend hands to FlashInfer, on a CPU, over a made-up package that keeps its contract."""

import re
import sys
from dataclasses import replace

import fake_flashinfer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import spec

from minichunk.attention import StepMeta, Unsupported, flashinfer_backend, trial
from minichunk.attention.flashinfer_backend import PATHS, FlashInferAttention
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
