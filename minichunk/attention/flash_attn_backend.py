"""The flash_attn backend: FlashAttention-2's own package behind the AttentionBackend protocol.

    a mixed batch   flash_attn_varlen_func      one call, every sequence's rows in the tile of a prompt
    decodes alone   flash_attn_with_kvcache     splits long histories over the multiprocessors

Both read the blocks through `block_table`, causal and aligned bottom-right.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta, Unsupported, refuse_layers
from minichunk.attention.torch_backend import append_kv
from minichunk.attention.trial import rows_only, trial

HEAD_DIMS = (64, 128)  # the usual ones; the package itself serves more
PAGE = 256  # its kernels read blocks in multiples of this many slots
INSTALL = "pip install flash-attn --no-build-isolation (Linux, nvcc)"


class FlashAttention:
    """bfloat16, head sizes 64 and 128, blocks of 256 slots or a multiple."""

    name = "flash_attn"
    graph_safe = False  # max_seqlen_q and max_seqlen_k are integers of the launch

    def __init__(self):
        self._last = "no batch yet"

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises Unsupported, naming the number that is out of reach; then tries a few small batches on the card."""
        device = torch.device(device)
        if device.type != "cuda":
            raise Unsupported(f"flash_attn runs on a CUDA device, not on {device}: use attention='torch'")
        if torch.cuda.get_device_capability(device) < (8, 0):
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise Unsupported(f"flash_attn needs compute capability 8.0 or above, this card has {found}")
        if block_size % PAGE:
            nearest = -(-block_size // PAGE) * PAGE
            raise Unsupported(
                f"flash_attn reads blocks that are multiples of {PAGE} slots, not of {block_size}: "
                f"give the engine block_size={nearest}, or use attention='triton'"
            )
        if dtype != torch.bfloat16:
            raise Unsupported(f"flash_attn is tested here in bfloat16, not {dtype}: use attention='triton'")
        refuse_layers("flash_attn", layers, HEAD_DIMS)
        try:
            import flash_attn  # noqa: F401
        except ModuleNotFoundError as error:
            raise Unsupported(f"flash_attn is not installed ({error}): {INSTALL}") from error
        except (ImportError, OSError) as error:  # the usual cause: torch was changed after flash-attn was built
            raise Unsupported(
                f"flash_attn does not load beside torch {torch.__version__} ({error}): build it again, {INSTALL}"
            ) from error
        trial(self, layers, block_size, dtype, device)

    def plan(self, meta: StepMeta) -> None:
        """Leaves out sequences without rows, which the varlen kernel does not survive when all others are decodes."""
        batch, device = meta.host, meta.block_tables.device
        keep = rows_only(batch)
        lens, seq_lens = batch.query_lens[keep], batch.seq_lens_k[keep]
        whole = len(keep) == batch.num_seqs
        put = lambda a: torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)  # noqa: E731
        ends = lambda a: put(np.concatenate([[0], np.cumsum(a)]))  # noqa: E731
        self._table = meta.block_tables if whole else put(batch.block_tables[keep])
        self._seq_lens = meta.seq_lens_k if whole else put(seq_lens)
        self._cu_q, self._cu_k = ends(lens), ends(seq_lens)
        self._most = int(lens.max()), int(seq_lens.max())
        call = "flash_attn_with_kvcache, decodes alone" if self._most[0] == 1 else "flash_attn_varlen_func, one call"
        self._last = f"flash_attn: {call}, {len(keep)} sequences, blocks of {batch.block_size}"

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        """The package writes new keys only for decodes, so both kinds of batch use torch's index_copy_."""
        append_kv(key, value, key_cache, value_cache, meta.slot_mapping)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend."""
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        same = dict(softmax_scale=layer.scale, causal=True, window_size=window, softcap=layer.softcap or 0.0)
        if self._most[0] == 1:
            out = flash_attn_with_kvcache(
                query[:, None], key_cache, value_cache, cache_seqlens=self._seq_lens, block_table=self._table, **same
            )
            return out[:, 0]
        return flash_attn_varlen_func(
            query, key_cache, value_cache, self._cu_q, self._cu_k, *self._most, block_table=self._table, **same
        )

    def explain(self) -> str:
        """One line on the last batch planned."""
        return self._last
