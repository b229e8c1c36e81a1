"""The transformers model over a packed batch, and the storage of keys and values.

The model sees one row [1, T] of tokens from many requests with their own positions. Its attention layers call back
(families.py), and the answer comes from the blocks of the pool through an attention backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk import families
from minichunk.attention import AttentionBackend, LayerSpec, StepMeta
from minichunk.packing import PackedBatch
from minichunk.request import Chunk, Request


def block_bytes(layers: list[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(block_size * s.num_kv_heads * (s.head_dim + s.value_dim) * dtype.itemsize for s in layers)


class ModelRunner:
    """Runs the batches of one engine. The spare block, the last, takes the writes of padding rows; it is in no table."""

    mode = "eager"

    def explain(self) -> str:
        return "every step launches its kernels one by one (eager)"

    def __init__(self, model, layers: list[LayerSpec], backend: AttentionBackend, num_blocks: int, block_size: int):
        parameter = next(model.parameters())
        self.model, self.layers, self.backend = model, layers, backend
        self.device, self.dtype = parameter.device, parameter.dtype
        self.num_blocks, self.block_size = num_blocks, block_size
        backend.check(layers, block_size, self.dtype, self.device)
        new = lambda heads, dim: torch.zeros(
            num_blocks + 1, block_size, heads, dim, dtype=self.dtype, device=self.device
        )  # noqa: E731
        self.kv = [(new(s.num_kv_heads, s.head_dim), new(s.num_kv_heads, s.value_dim)) for s in layers]

    def check_ranges(self, batch: PackedBatch) -> None:
        """Raises ValueError when a block or slot lies outside the pool."""
        if batch.block_tables.size and not (
            0 <= batch.block_tables.min() and batch.block_tables.max() < self.num_blocks
        ):
            raise ValueError(
                f"block_tables must name blocks 0..{self.num_blocks - 1}, got up to {batch.block_tables.max()}"
            )
        if batch.slot_mapping.max() >= self.num_blocks * self.block_size:
            raise ValueError(
                f"slot_mapping must lie below {self.num_blocks * self.block_size}, got {batch.slot_mapping.max()}"
            )

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> Tensor:
        """Computes the batch, writes its keys and values; returns float32 logits [n, V] of the batch's logits_rows."""
        meta = StepMeta.of(batch, self.device)
        self.backend.plan(meta)

        def attention(module, query, key, value, *, sinks=None, **_):
            # query [1, H, T, d] → [T, H, d]; keys and values likewise.
            layer = module.layer_idx
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            self.backend.append_kv(k, v, *self.kv[layer], meta)
            return self.backend.attend(q, *self.kv[layer], meta, self.layers[layer], sinks)[None]

        put = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        logits = families.forward_packed(
            self.model, put(batch.token_ids), put(batch.positions), put(batch.logits_rows), attention
        )
        return logits.float()


def chunk_logits(runner: ModelRunner, sequences: list[list[int]], steps: list[list[tuple[int, int, int]]]) -> Tensor:
    """Logits [chunks, V] of each chunk's last row, for families.verify. Blocks go to the sequences in turn and in
    descending order, so that a table whose order is not respected shows."""
    free, tables, rows = list(range(runner.num_blocks)), [[] for _ in sequences], []
    for step in steps:
        chunks = [Chunk(Request(i, sequences[i], start + length), start, length, True, False) for i, start, length in step]
        for chunk in chunks:
            while len(tables[chunk.id]) * runner.block_size < chunk.end:
                tables[chunk.id].append(free.pop())
        rows.append(runner.run(PackedBatch.build(chunks, [tables[c.id] for c in chunks], runner.block_size)))
    return torch.cat(rows)
