"""The protocol that every attention backend keeps.

Once a step `plan(meta)`; then once a layer `append_kv` and `attend`. Keys and values of a layer are two tensors,
[blocks, block_size, kv_heads, head_dim] each; a backend never owns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minichunk.packing import PackedBatch


class Unsupported(ValueError):
    """This backend cannot compute that; the message says what and what to use instead."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asked for when it was called, learnt by the probe (families.py), never from the config."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    sliding_window: int | None = None  # a row at position p sees keys p - window + 1 … p
    softcap: float | None = None  # scores become cap · tanh(scores / cap)
    has_sinks: bool = False  # a learnt score per head that takes part in the softmax and carries no value


def refuse_layers(name: str, layers: list[LayerSpec], head_dims: tuple[int, ...]) -> None:
    """Raises Unsupported for the first layer with another head size, with values of another size than its keys, or with sinks."""
    for i, layer in enumerate(layers):
        if layer.head_dim not in head_dims or layer.value_dim != layer.head_dim:
            raise Unsupported(
                f"layer {i}: {name} serves head sizes {head_dims} here, not keys of size {layer.head_dim} and values of "
                f"size {layer.value_dim}: use attention='triton'"
            )
        if layer.has_sinks:
            raise Unsupported(f"layer {i}: {name} takes no sinks here: use attention='triton'")


@dataclass(slots=True)
class StepMeta:
    """The integers of a PackedBatch on the device. `host` is the batch itself, for planning in numpy.

    cu_seqlens_q int32 [S+1] · seq_lens_k int32 [S] · block_tables int32 [S, max_blocks] · slot_mapping int64 [T]
    In a CUDA graph S, T and max_blocks are those of the bucket and `host` is None while it is captured.
    """

    cu_seqlens_q: Tensor
    seq_lens_k: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    host: PackedBatch | None = None

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device | str) -> StepMeta:
        put = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
        return cls(
            put(batch.cu_seqlens_q), put(batch.seq_lens_k), put(batch.block_tables), put(batch.slot_mapping),
            int(batch.query_lens.max()), int(batch.seq_lens_k.max()), batch,
        )  # fmt: skip


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to compute a mixed batch's attention."""

    name: str

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises Unsupported when it cannot serve these layers. Called before any plan, and once more by each further
        runner; a backend may set itself up for these layers, so that an object of its own goes to each engine."""

    def plan(self, meta: StepMeta) -> None:
        """Once a step, before any layer: whatever this backend prepares from the batch's integers."""

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        """Scatters key, value [T, kv_heads, head_dim] to the slots of slot_mapping."""

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """query [T, heads, head_dim] → [T, heads, value_dim]. Row i of a sequence with q rows and k keys sees keys
        0 … k - q + i (causal, aligned bottom-right), through its row of block_tables. Does not change the cache."""

    def explain(self) -> str:
        """One line: which kernel ran for the last planned batch, and why."""


def make_backend(name: str, device: torch.device, graphs: bool = True) -> AttentionBackend:
    """The backend called `name`: torch, triton (needs the `triton` package; on a CPU only in its interpreter), flash_attn,
    flashinfer, flashinfer:PATH (flashinfer_backend.py), or auto, which on a CUDA device chooses by the kind of batch, and
    by whether steps run as CUDA graphs."""
    name, _, path = name.partition(":")
    if name == "auto" and not path:
        if device.type == "cuda":
            from minichunk.attention.auto import AutoAttention

            return AutoAttention(graphs)
        name = "torch"
    if name == "flashinfer":
        from minichunk.attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(path) if path else FlashInferAttention()
    if name == "torch" and not path:
        from minichunk.attention.torch_backend import TorchAttention

        return TorchAttention()
    if name == "triton" and not path:
        try:
            from minichunk.attention.triton_backend import TritonAttention
        except ModuleNotFoundError as error:
            raise Unsupported(
                f"attention='triton' needs the triton package ({error}): pip install triton, or use 'torch'"
            ) from error

        return TritonAttention()
    if name == "flash_attn" and not path:
        from minichunk.attention.flash_attn_backend import FlashAttention

        return FlashAttention()
    raise ValueError(
        f"attention must be auto, torch, triton, flash_attn, flashinfer, flashinfer:PATH or a backend object, "
        f"got {f'{name}:{path}' if path else name!r}"
    )
