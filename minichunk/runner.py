"""The transformers model over a packed batch, and the storage of keys and values.

The model sees one row [1, T] of tokens from many requests with their own positions. Its attention layers call back
(families.py), and the answer comes from the blocks of the pool through an attention backend.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minichunk import compiled, families
from minichunk.attention import AttentionBackend, LayerSpec, StepMeta
from minichunk.graphs import Arrays, Bucket, Graphs
from minichunk.packing import PackedBatch
from minichunk.request import Chunk, Request
from minichunk.sampling import choose_plain, sample


def block_bytes(layers: list[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(block_size * s.num_kv_heads * (s.head_dim + s.value_dim) * dtype.itemsize for s in layers)


@dataclass(slots=True)
class Step:
    """The step that is running, as the layers see it."""

    meta: StepMeta | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Layer:
    """One attention layer: its backend, its blocks [blocks, block_size, kv_heads, d], and the running step."""

    backend: AttentionBackend
    spec: LayerSpec
    key_cache: Tensor
    value_cache: Tensor
    step: Step = field(repr=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Stores key and value [T, kv_heads, d]; query [T, H, d] → [T, H, value_dim]."""
        meta = self.step.meta
        self.backend.append_kv(key, value, self.key_cache, self.value_cache, meta)
        return self.backend.attend(query, self.key_cache, self.value_cache, meta, self.spec, sinks)


class ModelRunner:
    """Runs the batches of one engine. The spare block, the last, takes the writes of padding rows; it is in no table.

    compile: run the decoder layers through torch.compile, on a twin of `model`; a callable is its backend. merge: join q, k, v and gate, up into one
        product each; only for weights that are nobody else's, since the parameters move.
    buckets: (decodes, mixed) of the CUDA graphs, or None for no graphs. Graphs need a backend that is `graph_safe`.
    overlap: steps may take up tokens of the step before (`launch`).
    What cannot be done is left out, and `explain` says why.
    """

    def __init__(
        self, model, layers: list[LayerSpec], backend: AttentionBackend, num_blocks: int, block_size: int, *,
        compile: bool | Callable = False, merge: bool = False, buckets: tuple[list[Bucket], list[Bucket]] | None = None, overlap: bool = False,
    ):  # fmt: skip
        parameter = next(model.parameters())
        self.model = self._given = model
        self.backend = backend
        self.device, self.dtype = parameter.device, parameter.dtype
        self.num_blocks, self.block_size = num_blocks, block_size
        backend.check(layers, block_size, self.dtype, self.device)
        self._step = Step()
        self._last_tokens = np.zeros(1, np.int64)
        self.layers = [Layer(backend, spec, *self._new_cache(spec), self._step) for spec in layers]
        self.notes: list[str] = []
        self.graphs: Graphs | None = None
        if buckets is None:
            self.notes.append("graphs off")
        elif not getattr(backend, "graph_safe", False):
            self.notes.append(f"no graphs: what {backend.name} attention launches depends on more than the bucket")
        else:
            self.graphs = self._make_graphs(buckets, overlap)
        self.compiled = bool(compile) and self._compile(None if compile is True else compile, merge)
        if not compile:
            self.notes.append("compile off")

    def _new_cache(self, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        shape = (self.num_blocks + 1, self.block_size, spec.num_kv_heads)
        return tuple(_zeros((*shape, dim), self.dtype, self.device) for dim in (spec.head_dim, spec.value_dim))

    @property
    def kv(self) -> list[tuple[Tensor, Tensor]]:
        """(keys, values) of each layer, [num_blocks + 1, block_size, kv_heads, d]."""
        return [(layer.key_cache, layer.value_cache) for layer in self.layers]

    # --- how steps run ---------------------------------------------------------------------------------------------------
    def _compile(self, compiler: Callable | None, merge: bool) -> bool:
        """Compiles the layers and tries them on a short batch; on failure they stay as they are, and a note says so."""
        try:
            self.model = families.twin(self._given)
            if merge:
                groups = compiled.merge_projections(self.model)
                self.notes.append(f"{groups} groups of projections merged")
            compiled.compile_layers(self.model, self.kv, compiler)
            compiled.homes.update({layer.key_cache.data_ptr(): layer for layer in self.layers})
            chunk_logits(self, [[1] * 16], [[(0, 0, min(16, self.num_blocks * self.block_size))]])
            return True
        except compiled.failures() as error:
            self.model = self._given
            if self.graphs:
                self.graphs.captured.clear()
            self.notes.append(f"layers not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return False

    def _make_graphs(self, buckets: tuple[list[Bucket], list[Bucket]], overlap: bool) -> Graphs:
        vocab = self.model.get_output_embeddings().weight.shape[0]
        most = max(bucket.seqs for bucket in [*buckets[0], *buckets[1]])
        logits = torch.zeros(most, vocab, dtype=torch.float32, device=self.device)
        return Graphs(
            buckets,
            self._forward,
            self.backend.explain,
            logits,
            self.num_blocks * self.block_size,
            self.block_size,
            overlap,
        )

    def plain(self) -> ModelRunner:
        """A runner over the same weights and pool that compiles and captures nothing."""
        other = copy.copy(self)
        other.model, other.graphs, other.compiled, other.notes = self._given, None, False, ["graphs off", "compile off"]
        return other

    @property
    def mode(self) -> str:
        """graph, compiled or eager."""
        return "graph" if self.graphs else "compiled" if self.compiled else "eager"

    def explain(self) -> str:
        layers = "compiled layers" if self.compiled else "layers as transformers wrote them"
        if self.graphs:
            sizes = [" ".join(str(b.tokens) for b in group) for group in (self.graphs.decodes, self.graphs.mixed)]
            how = (f"a step is one CUDA graph of {layers} (decodes by {sizes[0]}, mixed batches by {sizes[1]} tokens; "
                   f"{len(self.graphs.captured)} captured so far)")  # fmt: skip
        else:
            how = f"every step launches its kernels one by one, {layers}"
        return "; ".join([how, *self.notes])

    def explain_step(self) -> str:
        """One line on the last step: the graph that ran, or the attention backend's own words."""
        last = self.graphs.last if self.graphs else None
        return self.graphs.captured[last].explanation if last else self.backend.explain()

    @torch.inference_mode()
    def warmup(self, progress: Callable[[Iterable], Iterable] = iter) -> None:
        """Captures every graph now, and compiles the choice of tokens, so that no step has to. progress: wraps the list
        of buckets (tqdm will do)."""
        if self.graphs:
            choose_plain(self.graphs.logits[:1], [Request(0, [0], 1)])
            for bucket in progress(self.graphs.all_buckets()):
                self.graphs.run(bucket, None)
            torch.cuda.synchronize()

    # --- one step ----------------------------------------------------------------------------------------------------------
    def check_ranges(self, batch: PackedBatch) -> None:
        """Raises ValueError when a token, block or slot lies outside the vocabulary or the pool."""
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if batch.token_ids.max() >= vocab:
            raise ValueError(f"token_ids must lie below {vocab}, got {batch.token_ids.max()}")
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
        """Computes the batch, writes its keys and values; returns float32 logits [n, V] of the batch's logits_rows,
        valid until the next run."""
        bucket = self.graphs.find(batch) if self.graphs else None
        if bucket:
            return self.graphs.run(bucket, batch)[: len(batch.logits_rows)]
        if self.graphs:
            self.graphs.last = None
        meta = StepMeta.of(batch, self.device)
        put = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        arrays = Arrays(
            put(batch.token_ids), None, put(batch.positions), meta.slot_mapping, put(batch.logits_rows), meta.cu_seqlens_q,
            meta.seq_lens_k, meta.block_tables,
        )  # fmt: skip
        return self._forward(arrays, meta).float()

    @torch.inference_mode()
    def launch(self, batch: PackedBatch, feed: np.ndarray, sampled: list[Request]) -> Callable[[], list[int | None]]:
        """Starts a step and the choice of its tokens; the function returned waits for them (None: no finite logits).

        feed int64 [T]: the row of the last launch's tokens that a packed row's token is, -1 where token_ids has it.
        sampled: the requests of logits_rows, all plain (sampling.is_plain).
        """
        count = len(sampled)
        if self.graphs is None:
            batch.token_ids = np.where(feed >= 0, self._last_tokens[feed], batch.token_ids)
            tokens = sample(self.run(batch), sampled)[0] if count else self.run(batch).tolist()
            self._last_tokens = np.array([*(token or 0 for token in tokens), 0])
            return lambda: tokens
        logits = self.graphs.run(self.graphs.find(batch), batch, feed)[:count]
        if not count:
            return list
        tokens = torch.empty(count, dtype=torch.int64, pin_memory=True)
        tokens.copy_(choose_plain(logits, sampled, self.graphs.last_tokens[:count]), non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def wait() -> list[int | None]:
            there.synchronize()
            return [token if token >= 0 else None for token in tokens.tolist()]

        return wait

    def _forward(self, arrays: Arrays, meta: StepMeta) -> Tensor:
        """Logits [rows, V] in the model's dtype."""
        self._step.meta = meta
        self.backend.plan(meta)
        return families.forward_packed(
            self.model, arrays.token_ids, arrays.positions, arrays.logits_rows, self._attention
        )

    def _attention(
        self, module, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, **_
    ) -> Tensor:
        """What an eager layer calls (families.py): query [1, H, T, d] → [1, T, H, value_dim]."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.layers[module.layer_idx].attend(q, k, v, sinks)[None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU a page of memory is taken only when a block in it is first written (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def chunk_logits(runner: ModelRunner, sequences: list[list[int]], steps: list[list[tuple[int, int, int]]]) -> Tensor:
    """Logits [chunks, V] of each chunk's last row, for families.verify. Blocks go to the sequences in turn and in
    descending order, so that a table whose order is not respected shows."""
    free, tables, rows = list(range(runner.num_blocks)), [[] for _ in sequences], []
    for step in steps:
        chunks = [
            Chunk(Request(i, sequences[i], start + length), start, length, True, False) for i, start, length in step
        ]
        for chunk in chunks:
            while len(tables[chunk.id]) * runner.block_size < chunk.end:
                tables[chunk.id].append(free.pop())
        rows.append(runner.run(PackedBatch.build(chunks, [tables[c.id] for c in chunks], runner.block_size)).clone())
    return torch.cat(rows)
