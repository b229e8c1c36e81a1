"""Whole forwards as CUDA graphs: one launch for hundreds of kernels.

A graph replays fixed kernels on fixed addresses, so batches are padded to the next bucket:

    bucket of 8 decodes       A B C D E · · ·                  8 rows, 8 sequences
    bucket of 64 tokens       A B D K K K K K K K K … · · ·    64 rows, as many sequences as may run at once
                                                    └ padding: token 0 at position 0, in no sequence,
                                                      its keys and values go to the spare block

A sequence of the bucket that the batch lacks has no rows and no keys. The integers of a step lie one after the other
in one buffer: filled with numpy in pinned memory, copied to the device in one piece, and not touched again until the
copy is over (`Staging`). Which attention backends launch by the bucket alone, and so may be captured, they say
themselves (`graph_safe`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minichunk.attention import StepMeta
from minichunk.packing import PackedBatch

MOST_GRAPHS = 24
SMALLEST_MIXED = 128  # tokens; an H200 is bound by arithmetic from about 200 on (data/recorded/h200/free_lunch.json)
ALIGN = 64  # bytes: every array of a bucket starts on its own cache line


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a graph is captured for. decodes: every sequence has one row, so that tokens == seqs."""

    tokens: int
    seqs: int
    max_blocks: int
    decodes: bool

    def __str__(self) -> str:
        return f"{self.tokens} decodes" if self.decodes else f"{self.tokens} tokens"


class Arrays(NamedTuple):
    """A PackedBatch's integers at a bucket's sizes, as numpy arrays or tensors that share one buffer."""

    token_ids: Tensor  # int64 [T]
    feed: Tensor  # int64 [T]: row of the last step's tokens that is this token; -1: the one in token_ids
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    logits_rows: Tensor  # int64 [S]
    cu_seqlens_q: Tensor  # int32 [S+1]
    seq_lens_k: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, max_blocks]


def shapes(bucket: Bucket) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each of `Arrays`."""
    t, s = bucket.tokens, bucket.seqs
    long, int32 = torch.int64, torch.int32
    return [
        *[(long, (t,))] * 4,
        (long, (s,)),
        (int32, (s + 1,)),
        (int32, (s,)),
        (int32, (s, bucket.max_blocks)),
    ]


def num_bytes(bucket: Bucket) -> int:
    """Size of the bucket's buffer."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for dtype, shape in shapes(bucket))


def views(buffer: Tensor, bucket: Bucket) -> Arrays:
    """The bucket's arrays in a uint8 buffer, one after the other."""
    at, found = 0, []
    for dtype, shape in shapes(bucket):
        size = math.prod(shape) * dtype.itemsize
        found.append(buffer[at : at + size].view(dtype).view(shape))
        at += -(-size // ALIGN) * ALIGN
    return Arrays(*found)


def fill(arrays: Arrays, batch: PackedBatch | None, spare_slot: int, feed: np.ndarray | None = None) -> None:
    """Writes the batch and its padding into numpy arrays; None is a batch of nothing but padding."""
    arrays.feed[:] = -1
    if feed is not None:
        arrays.feed[: len(feed)] = feed
    tokens, seqs, rows = (batch.num_tokens, batch.num_seqs, len(batch.logits_rows)) if batch else (0, 0, 0)
    if batch:
        arrays.token_ids[:tokens] = batch.token_ids
        arrays.positions[:tokens] = batch.positions
        arrays.slot_mapping[:tokens] = batch.slot_mapping
        arrays.logits_rows[:rows] = batch.logits_rows
        arrays.cu_seqlens_q[: seqs + 1] = batch.cu_seqlens_q
        arrays.seq_lens_k[:seqs] = batch.seq_lens_k
        arrays.block_tables[:seqs, : batch.block_tables.shape[1]] = batch.block_tables
    arrays.token_ids[tokens:] = 0
    arrays.positions[tokens:] = 0
    arrays.slot_mapping[tokens:] = spare_slot
    arrays.logits_rows[rows:] = 0
    arrays.cu_seqlens_q[seqs if not batch else seqs + 1 :] = tokens
    arrays.seq_lens_k[seqs:] = 0


def fed(token_ids: Tensor, feed: Tensor, last_tokens: Tensor) -> Tensor:
    """int64 [T]: last_tokens[feed] where feed ≥ 0, else token_ids. A last token of -1 (that row failed, what follows it
    is in vain) becomes 0: the embedding must not be asked for it."""
    return torch.where(feed >= 0, last_tokens[feed.clamp(min=0)].clamp(min=0), token_ids)


def make_buckets(max_requests: int, max_batch_tokens: int, max_blocks: int) -> tuple[list[Bucket], list[Bucket]]:
    """(decode buckets, mixed buckets), rising, at most MOST_GRAPHS in all.

    Decodes: 2, 4, 8, 16, then a half or a third more each time up to max_requests; the twelve largest. One row is padded
    to two: torch.compile would treat one as its own case. Mixed: down from the budget, which a step under load fills, by
    a factor of 1.2 or more, to SMALLEST_MIXED tokens: below, a step mostly reads the weights, so that padding costs
    little (Llama-3-8B on an H200: 5.2 ms with 16 tokens, 5.8 with 128).
    """
    decode_sizes = [n for n in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n < max_requests]
    decode_sizes = (decode_sizes + [max(2, max_requests)])[-MOST_GRAPHS // 2 :]
    room = MOST_GRAPHS - len(decode_sizes)
    smallest = min(SMALLEST_MIXED, max_batch_tokens)
    factor = max(1.2, (max_batch_tokens / smallest) ** (1 / max(1, room - 1)))
    sizes = {max_batch_tokens}
    for i in range(1, room):
        size = -(-int(max_batch_tokens / factor**i) // 8) * 8
        if size >= smallest:
            sizes.add(min(size, max_batch_tokens))
    decodes = [Bucket(n, n, max_blocks, True) for n in decode_sizes]
    return decodes, [Bucket(n, min(n, max_requests), max_blocks, False) for n in sorted(sizes) if n > 1]


def find_bucket(batch: PackedBatch, decodes: Sequence[Bucket], mixed: Sequence[Bucket]) -> Bucket | None:
    """The smallest bucket that holds the batch; None where it is too large for all of them."""
    tokens, seqs = batch.num_tokens, batch.num_seqs
    if tokens == seqs:
        for bucket in decodes:
            if seqs <= bucket.seqs:
                return bucket
    for bucket in mixed:
        if tokens <= bucket.tokens and seqs <= bucket.seqs and batch.block_tables.shape[1] <= bucket.max_blocks:
            return bucket
    return None


class Staging:
    """The step's integers on their way: one buffer on the device, `depth` pinned ones taken in turn."""

    def __init__(self, size: int, device: torch.device, depth: int = 2):
        self.device_buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(depth)]
        self._copied = [torch.cuda.Event() for _ in range(depth)]
        self._arrays: dict[Bucket, list[Arrays]] = {}
        self._turn = 0

    def send(self, bucket: Bucket, batch: PackedBatch | None, spare_slot: int, feed: np.ndarray | None = None) -> None:
        """Fills the next pinned buffer, after its last copy is over, and copies it: one copy a step."""
        if bucket not in self._arrays:
            self._arrays[bucket] = [Arrays(*(x.numpy() for x in views(b, bucket))) for b in self._pinned]
        turn = self._turn = (self._turn + 1) % len(self._pinned)
        self._copied[turn].synchronize()
        fill(self._arrays[bucket][turn], batch, spare_slot, feed)
        size = num_bytes(bucket)
        self.device_buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        self._copied[turn].record()


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    explanation: str  # the attention backend's, of the batch it was captured with


class Graphs:
    """The captured forwards of one runner, made when first needed.

    forward(arrays, meta) → logits [S, V] launches the whole step from tensors at fixed addresses; explain() is the
    attention backend's line on it. logits float32 [max_seqs, V] takes every graph's result. follow: tokens may come from
    `last_tokens`, where the step before left them (overlap.py).
    """

    def __init__(
        self, buckets: tuple[list[Bucket], list[Bucket]], forward: Callable[[Arrays, StepMeta], Tensor], explain: Callable[[], str],
        logits: Tensor, spare_slot: int, block_size: int, follow: bool,
    ):  # fmt: skip
        self.decodes, self.mixed = buckets
        self._forward, self._explain, self.logits = forward, explain, logits
        self._spare_slot, self._block_size, self._follow = spare_slot, block_size, follow
        self.last_tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self.captured: dict[Bucket, Captured] = {}
        self._staging = Staging(max(map(num_bytes, self.decodes + self.mixed)), logits.device)
        self._pool = torch.cuda.graph_pool_handle()
        self.last: Bucket | None = None

    def find(self, batch: PackedBatch) -> Bucket | None:
        return find_bucket(batch, self.decodes, self.mixed)

    def run(self, bucket: Bucket, batch: PackedBatch | None, feed: np.ndarray | None = None) -> Tensor:
        """Logits [S, V] of the bucket, valid until the next run; the rows after the batch's own mean nothing."""
        self.stage(bucket, batch, feed)
        return self.replay(bucket)

    def stage(self, bucket: Bucket, batch: PackedBatch | None, feed: np.ndarray | None = None) -> None:
        """Sends the batch's integers to the bucket's arrays on the device."""
        if bucket not in self.captured:
            self._capture(bucket)
        self._staging.send(bucket, batch, self._spare_slot, feed)

    def replay(self, bucket: Bucket) -> Tensor:
        """Runs the graph over what was staged last."""
        self.captured[bucket].graph.replay()
        self.last = bucket
        return self.logits[: bucket.seqs]

    def _capture(self, bucket: Bucket) -> None:
        """Runs the forward once on padding alone, so that kernels are compiled and loaded, then records it."""
        self._staging.send(bucket, None, self._spare_slot)
        arrays = views(self._staging.device_buffer, bucket)
        meta = StepMeta(
            arrays.cu_seqlens_q, arrays.seq_lens_k, arrays.block_tables, arrays.slot_mapping,
            1 if bucket.decodes else bucket.tokens, bucket.max_blocks * self._block_size,
        )  # fmt: skip

        def step():
            inputs = arrays
            if self._follow:
                inputs = arrays._replace(token_ids=fed(arrays.token_ids, arrays.feed, self.last_tokens))
            self.logits[: bucket.seqs].copy_(self._forward(inputs, meta))

        stream = torch.cuda.Stream(self.logits.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            step()
        self.captured[bucket] = Captured(graph, f"graph of {bucket}; {self._explain()}")

    def all_buckets(self) -> list[Bucket]:
        """Largest first, so that the smaller graphs reuse its memory."""
        return sorted(self.decodes + self.mixed, key=lambda b: -b.tokens)
