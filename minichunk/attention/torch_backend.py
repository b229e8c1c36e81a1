"""Paged attention in plain PyTorch: the reference on every device, and the fast path on a CPU.

Two shapes of work, two ways:
- prompt chunks: one call a sequence, [kv_heads, group, rows, d] against its gathered keys;
- single rows (decodes): all in one padded call, [seqs, kv_heads, group, d]: a group's heads are the rows.
Keys are gathered by whole blocks (one index_select), never token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta


@dataclass(slots=True)
class _Part:
    """Sequences that one call computes: `rows` of the packed batch, their blocks, how many keys each sees."""

    rows: Tensor  # int64 [n·q]
    blocks: Tensor  # int64 [n·blocks]
    num_seqs: int
    query_len: int
    seq_lens: Tensor  # int64 [n]
    max_len: int
    padding: Tensor  # int64: gathered keys, counted through all sequences, that lie behind a sequence's last
    masks: dict  # sliding window (or None) → bool mask [n, 1, q, max_len], or None where every key is visible


class TorchAttention:
    """Exact in the query's dtype; softmax as F.scaled_dot_product_attention has it."""

    name = "torch"

    def __init__(self):
        self._parts: list[_Part] = []

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Serves every layer, block size, dtype and device."""

    def plan(self, meta: StepMeta) -> None:
        batch = meta.host
        starts, query_lens, seq_lens = batch.cu_seqlens_q[:-1], batch.query_lens, batch.seq_lens_k
        singles = sorted((int(seq_lens[i]), i) for i in range(batch.num_seqs) if query_lens[i] == 1)
        groups: list[list[int]] = []
        for length, i in singles:  # one padded call, split where padding would more than double the shortest
            if groups and length <= 2 * int(seq_lens[groups[-1][0]]) + 128:
                groups[-1].append(i)
            else:
                groups.append([i])
        groups += [[i] for i in range(batch.num_seqs) if query_lens[i] > 1]
        device = meta.block_tables.device
        self._parts = []
        for group in groups:
            query_len, longest = int(query_lens[group[0]]), int(seq_lens[group].max())
            blocks = batch.block_tables[group, : -(-longest // batch.block_size)].reshape(-1)
            rows = torch.cat([torch.arange(int(starts[i]), int(starts[i]) + query_len) for i in group])
            lens = torch.from_numpy(seq_lens[group].astype("int64"))
            behind = torch.arange(-(-longest // batch.block_size) * batch.block_size) >= lens[:, None]
            self._parts.append(
                _Part(
                    rows.to(device),
                    torch.from_numpy(blocks).long().to(device),
                    len(group),
                    query_len,
                    lens.to(device),
                    longest,
                    behind.flatten().nonzero()[:, 0].to(device) if len(group) > 1 else lens.new_empty(0).to(device),
                    {},
                )
            )

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        append_kv(key, value, key_cache, value_cache, meta.slot_mapping)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
        group = layer.num_heads // layer.num_kv_heads
        for part in self._parts:
            n, rows = part.num_seqs, part.query_len
            k, v = (self._gather(part, cache) for cache in (key_cache, value_cache))
            # Head h reads kv head h // group: [n, kv_heads, group, rows, d].
            q = query[part.rows].view(n, rows, layer.num_kv_heads, group, layer.head_dim).permute(0, 2, 3, 1, 4)
            mask = self._mask(part, layer.sliding_window)
            if rows == 1:  # a decode: its group's heads are the rows of one call
                column = None if sinks is None else sinks.view(1, -1, group, 1)
                result = _softmax_attention(q.squeeze(3), k.squeeze(2), v.squeeze(2), mask, layer, column)
                result = result.reshape(n, layer.num_heads, layer.value_dim)
            else:  # one sequence: kv heads are the batch
                k, v = (x.squeeze(0).expand(-1, group, -1, -1) for x in (k, v))
                column = None if sinks is None else sinks.view(-1, group, 1, 1)
                result = _softmax_attention(q.squeeze(0), k, v, mask, layer, column)
                result = result.permute(2, 0, 1, 3).reshape(rows, layer.num_heads, layer.value_dim)
            out[part.rows] = result
        return out

    @staticmethod
    def _gather(part: _Part, cache: Tensor) -> Tensor:
        """A part's keys or values, a copy: [n, kv_heads, 1, max_len, d]. Behind a sequence's last token come zeros: what
        others left there may be NaN, and a weight of 0 would not hide it."""
        found = cache.index_select(0, part.blocks).flatten(0, 1)
        if part.padding.numel():
            found.index_fill_(0, part.padding, 0)
        return found.view(part.num_seqs, -1, *cache.shape[2:])[:, : part.max_len].permute(0, 2, 1, 3)[:, :, None]

    def _mask(self, part: _Part, window: int | None) -> Tensor | None:
        """bool [n, 1, q, keys]: row i of q sees keys up to seq_len - q + i, and `window` of them at most."""
        if window not in part.masks:
            keys = torch.arange(part.max_len, device=part.seq_lens.device)
            last = part.seq_lens[:, None] - part.query_len + torch.arange(part.query_len, device=keys.device)  # [n, q]
            mask = keys <= last[..., None]
            if window is not None:
                mask &= keys > last[..., None] - window
            part.masks[window] = None if bool(mask.all()) else mask[:, None]
        return part.masks[window]

    def explain(self) -> str:
        singles = [p.num_seqs for p in self._parts if p.query_len == 1]
        return (
            f"torch: {sum(p.query_len > 1 for p in self._parts)} prompt chunks in a call each, "
            f"{sum(singles)} single rows in {len(singles)} padded calls (the reference; runs everywhere)"
        )


def append_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatters key, value [T, kv_heads, d] to slots of the caches [blocks, block_size, kv_heads, d]."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, value)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerSpec, sinks: Tensor | None
) -> Tensor:
    """q [B, h, rows, d], k and v [B, h, keys, d]; sinks broadcast to [B, h, rows, 1]."""
    if layer.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # one more column in the softmax, then dropped: it takes weight and carries no value
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(-1).to(v.dtype) @ v
