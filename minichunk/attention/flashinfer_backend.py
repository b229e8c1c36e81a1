"""The flashinfer backend: FlashInfer's wrappers behind the AttentionBackend protocol.

A wrapper is planned once a step (on the host: which program does which piece) and run once a layer. The ways to cut a
mixed batch among wrappers, to compare and to choose from:

    path        prompt chunks                    decodes
    fa2         one prefill wrapper for all: a decode's few lines sit in a prompt's tile
    fa3         the same with Hopper's kernel
    default     the same with whatever FlashInfer's own backend="auto" takes
    split       a prefill wrapper (fa2)          a decode wrapper after it
    split_fa3   a prefill wrapper (fa3)          a decode wrapper after it
    batch       BatchAttention: one persistent kernel, tiles of both shapes

Layers that differ (heads, window, soft cap, scale) have plans of their own.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta, Unsupported, refuse_layers
from minichunk.attention.trial import rows_only, trial
from minichunk.cuda_tools import driver_cuda, nvcc, nvcc_cuda
from minichunk.packing import PackedBatch

PATHS = ("fa2", "fa3", "default", "split", "split_fa3", "batch")
LOWEST = (0, 6, 13)  # the version that was tried
HEAD_DIMS = (64, 128, 256)  # what all paths have kernels for; the trial shows whether they run here
TILE = 128  # most lines (rows × heads of a group) of a prefill tile
INSTALL = "pip install flashinfer-python (minichunk doctor gives the command that leaves torch as it is)"


def obstacle(path: str, device: torch.device) -> str | None:
    """Why FlashInfer cannot run here, or None: package, card, compiler. Imports it."""
    if device.type != "cuda":
        return f"flashinfer runs on a CUDA device, not on {device}: use attention='torch'"
    capability = torch.cuda.get_device_capability(device)
    found = ".".join(map(str, capability))
    if capability < (7, 5):
        return f"flashinfer needs compute capability 7.5 or above, this card has {found}: use attention='torch'"
    if path.endswith("fa3") and capability[0] != 9:
        return f"flashinfer's fa3 kernels are for compute capability 9.0 (Hopper), this card has {found}: use path 'fa2' or 'split'"
    try:
        has = version("flashinfer-python")
        import flashinfer  # noqa: F401
    except PackageNotFoundError:
        return f"flashinfer is not installed: {INSTALL}"
    except Exception as error:  # it imports much, and fails in many ways beside another torch
        return f"flashinfer does not load beside torch {torch.__version__} ({type(error).__name__}: {error}): install it again"
    if tuple(int(n) for n in re.findall(r"\d+", has)[:3]) < LOWEST:  # 0.6.13+cu130, 0.7.0rc1
        return f"flashinfer {has} is too old, at least {'.'.join(map(str, LOWEST))} is needed: {INSTALL}"
    if importlib.util.find_spec("flashinfer_jit_cache") is None:
        compiler, driver = nvcc(), driver_cuda()
        if compiler is None:
            return (
                "flashinfer compiles its kernels at first use, and no nvcc is here: set CUDA_HOME to a toolkit that has bin/nvcc, "
                "or use attention='triton'"
            )
        compiles_for = nvcc_cuda(compiler)
        if compiles_for and driver and compiles_for[0] > driver[0]:
            return (
                f"flashinfer would compile with CUDA {compiles_for[0]}.{compiles_for[1]} ({compiler}), and the driver runs only up to "
                f"{driver[0]}.{driver[1]}: update the driver, or set CUDA_HOME to a toolkit of CUDA {driver[0]}"
            )
        if shutil.which("ninja") is None:
            return "flashinfer compiles its kernels at first use, and no ninja is here: pip install ninja"
    return None


class FlashInferAttention:
    """bfloat16 and float16, head sizes 64, 128 and 256, any block size, sliding windows (not on path batch) and soft caps."""

    graph_safe = False  # a plan may launch other kernels for other lengths

    def __init__(self, path: str = "split"):
        if path not in PATHS:
            raise ValueError(f"a path of flashinfer is one of {', '.join(PATHS)}, got {path!r}")
        self.path, self.name = path, f"flashinfer:{path}"
        self._specs: list[LayerSpec] = []
        self._wrappers: dict = {}
        self._plans: dict[LayerSpec, list[tuple]] = {}
        self._space: Tensor | None = None
        self._last = "no batch yet"

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises Unsupported, naming what is missing or out of reach; then tries a few small batches, which compiles the
        kernels (25 to 90 s each at the first time)."""
        device = torch.device(device)
        problem = obstacle(self.path, device)
        if problem:
            raise Unsupported(problem)
        if dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported(f"flashinfer serves float16 and bfloat16, not {dtype}: use attention='triton'")
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            raise Unsupported("flashinfer needs compute capability 8.0 for bfloat16: use dtype='float16'")
        refuse_layers("flashinfer", layers, HEAD_DIMS)
        windowed = [i for i, layer in enumerate(layers) if layer.sliding_window is not None]
        if self.path == "batch" and windowed:
            raise Unsupported(f"layer {windowed[0]}: BatchAttention has no sliding window: use path 'split'")
        self._specs, self._dtype, self._device = list(dict.fromkeys(layers)), dtype, device
        self._wrappers, self._space = {}, torch.empty(workspace_bytes(layers, device), dtype=torch.uint8, device=device)
        trial(self, layers, block_size, dtype, device)

    # --- once a step -------------------------------------------------------------------------------------------------
    def plan(self, meta: StepMeta) -> None:
        """Cuts the batch among the wrappers and plans each, for every distinct layer.

        A wrapper writes its plan into a pinned buffer of its own and copies it without waiting. What keeps the next plan
        from writing over it is that copies from pageable memory (`put`, and the blocks in `_planned`) wait for the stream.
        """
        batch = meta.host
        put = lambda a, kind=np.int32: torch.from_numpy(np.ascontiguousarray(a, kind)).to(self._device)  # noqa: E731
        self._append = (
            put(np.repeat(np.arange(batch.num_seqs), batch.query_lens)), put(batch.positions),
            put(batch.kv_indices), put(batch.kv_indptr), put(batch.kv_last_page_len),
        )  # fmt: skip
        there = rows_only(batch)
        single = batch.query_lens[there] == 1
        if self.path.startswith("split"):
            parts = [(there[~single], "fa3" if self.path == "split_fa3" else "fa2"), (there[single], "decode")]
        else:
            parts = [(there, self.path)]
        parts = [(seqs, kind) for seqs, kind in parts if len(seqs)]
        self._plans = {
            spec: [(_rows(batch, seqs, put), self._planned(spec, batch, seqs, kind)) for seqs, kind in parts]
            for spec in self._specs
        }
        self._last = "flashinfer: " + " + ".join(f"{kind} wrapper, {len(seqs)} sequences" for seqs, kind in parts)

    def _planned(self, spec: LayerSpec, batch: PackedBatch, seqs: np.ndarray, kind: str):
        """The wrapper of this layer and kind, planned for these sequences. FlashInfer reads the integers on the host."""
        wrapper = self._wrappers.get((spec, kind))
        if wrapper is None:
            wrapper = self._wrappers[spec, kind] = self._make(kind)
        lens, page = batch.seq_lens_k[seqs], batch.block_size
        counts = -(-lens // page)
        ends = lambda a: torch.from_numpy(np.concatenate([[0], np.cumsum(a)]).astype(np.int32))  # noqa: E731
        used = np.arange(batch.block_tables.shape[1]) < counts[:, None]
        blocks = torch.from_numpy(batch.block_tables[seqs][used].astype(np.int32)).to(self._device)
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        same = dict(
            sm_scale=spec.scale, logits_soft_cap=spec.softcap, q_data_type=self._dtype, kv_data_type=self._dtype
        )
        window = -1 if spec.sliding_window is None else spec.sliding_window - 1
        if kind == "batch":
            wrapper.plan(
                ends(batch.query_lens[seqs]), ends(counts), blocks, torch.from_numpy(lens.astype(np.int32)), *heads,
                spec.head_dim, page, causal=True, **same,
            )  # fmt: skip
            return wrapper
        last = torch.from_numpy(((lens - 1) % page + 1).astype(np.int32))
        if kind == "decode":
            wrapper.plan(ends(counts), blocks, last, *heads, page, window_left=window, **same)
        else:
            rows = ends(batch.query_lens[seqs])
            wrapper.plan(rows, ends(counts), blocks, last, *heads, page, causal=True, window_left=window, **same)
        return wrapper

    def _make(self, kind: str):
        import flashinfer

        if kind == "batch":
            return flashinfer.BatchAttention("NHD", device=str(self._device))
        if kind == "decode":  # on tensor cores: a group's heads fill lines of a tile
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._space, "NHD", use_tensor_cores=True)
        backend = "auto" if kind == "default" else kind
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._space, "NHD", backend=backend)

    # --- once a layer ------------------------------------------------------------------------------------------------
    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        """Finds the slots by itself, from sequence, position and block table."""
        import flashinfer

        sequences, positions, indices, indptr, last = self._append
        flashinfer.append_paged_kv_cache(
            key.contiguous(), value.contiguous(), sequences, positions, (key_cache, value_cache), indices, indptr, last, "NHD"
        )  # fmt: skip

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend."""
        if layer not in self._plans or query.dtype != self._dtype:
            raise RuntimeError(
                f"{self.name} is set up for other layers or {self._dtype}: give each engine a backend object of its own"
            )
        parts = self._plans[layer]
        if len(parts) == 1 and parts[0][0] is None:
            return self._run(parts[0][1], query.contiguous(), key_cache, value_cache, layer)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, wrapper in parts:
            mine = query if rows is None else query[rows]
            out[slice(None) if rows is None else rows] = self._run(
                wrapper, mine.contiguous(), key_cache, value_cache, layer
            )
        return out

    def _run(self, wrapper, query: Tensor, key_cache: Tensor, value_cache: Tensor, layer: LayerSpec) -> Tensor:
        if self.path == "batch":  # the soft cap counts only where plan and run both say it
            return wrapper.run(query, (key_cache, value_cache), logits_soft_cap=layer.softcap or 0.0)[0]
        return wrapper.run(query, (key_cache, value_cache))

    def explain(self) -> str:
        """One line on the last batch planned."""
        return self._last


def _rows(batch: PackedBatch, seqs: np.ndarray, put) -> Tensor | slice | None:
    """The packed rows of these sequences: None for all, a slice where they lie together, else their indices."""
    starts, lens = batch.cu_seqlens_q[:-1][seqs], batch.query_lens[seqs]
    total = int(lens.sum())
    if total == batch.num_tokens:
        return None
    if int(starts[-1] + lens[-1] - starts[0]) == total:
        return slice(int(starts[0]), int(starts[0]) + total)
    return put(np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lens)]), np.int64)


def workspace_bytes(layers: list[LayerSpec], device: torch.device) -> int:
    """What the largest plan of the prefill and decode wrappers can ask for.

    Histories are cut only while the pieces fit on the card, two programs to a multiprocessor: at most
    2 · multiprocessors / kv_heads tiles of TILE lines for each KV head, float32 output and one sum a line. A batch with
    more tiles is not cut and needs nothing. So the budget does not matter; a graph's padding would make it matter.
    """
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    largest = max(max(1, programs // s.num_kv_heads) * s.num_heads * TILE * (s.value_dim + 1) * 4 for s in layers)
    return largest + (16 << 20)  # alignment, and room for kernels that count a little differently
