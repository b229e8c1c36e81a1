"""A mixed batch is a flat array of tokens and a few integer lists.

A decodes at length 8, B brings a 12-token chunk after 9 computed tokens, C is a new 3-token prompt:

    packed rows       0   1 2 3 4 5 6 7 8 9 10 11 12   13 14 15
    request           A   B ·  ·  ·  ·  ·  ·  ·   ·    C  ·  ·
    positions         7   9 10 11 12 ……………………………… 20    0  1  2
    cu_seqlens_q      0 | 1 …………………………………………………… | 13 …… | 16     where each request's rows begin
    seq_lens_k        8   21                           3          keys each request sees: history and new tokens
    logits_rows       0                         12*         15    the last row of each chunk that is_last

(* B's row only if its chunk is the last of its prompt: a partial chunk's logits are never sampled.)
FlashInfer's form, with blocks of 4: kv_indptr 0 2 8 9, kv_last_page_len 4 1 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np

from minichunk.request import Chunk


def pack_tokens(chunks: Sequence[Chunk]) -> tuple:
    """Lays the chunks' new tokens one after the other.

    Returns (token_ids [T], positions [T], cu_seqlens_q [S+1], seq_lens_k [S], logits_rows [n]), lists of int.
    """
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = [], [], [0], [], []
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.end))
        cu_seqlens_q.append(cu_seqlens_q[-1] + chunk.length)
        seq_lens_k.append(chunk.end)
        if chunk.is_last:
            logits_rows.append(cu_seqlens_q[-1] - 1)
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows


def place(chunks: Sequence[Chunk], tables: Sequence, block_size: int) -> tuple:
    """Where the tokens' keys and values live.

    tables: a BlockTable (or a list of block ids) per chunk, already grown to the chunk's end.
    Returns (block_tables: S lists of block ids, slot_mapping [T]: slot(p) = block_ids[p // B] * B + p % B).
    """
    block_tables, slot_mapping = [], []
    for chunk, table in zip(chunks, tables):
        block_ids = list(getattr(table, "block_ids", table))
        block_tables.append(block_ids[: -(-chunk.end // block_size)])
        slot_mapping.extend(
            block_ids[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.end)
        )
    return block_tables, slot_mapping


_place = place  # under a name that PackedBatch.build's argument does not hide


def _arrays(
    chunks: Sequence[Chunk], tables: Sequence, block_size: int, before: PackedBatch | None
) -> tuple[np.ndarray, ...]:
    """What `pack_tokens` and `place` say, in PackedBatch's order and dtypes, without a loop over tokens."""
    count = len(chunks)
    requests, first, rows, is_last, _ = zip(*chunks)
    starts, lengths = np.array(first, np.int64), np.array(rows, np.int64)
    ends = starts + lengths
    cu_seqlens_q = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    num_blocks = -(-ends // block_size)
    block_tables = _block_matrix(tables, num_blocks, before)
    if cu_seqlens_q[-1] == count:  # one token each: decodes
        token_ids = np.array([request.token_ids[start] for request, start in zip(requests, first)], np.int64)
        seqs, positions = np.arange(count), starts
    else:
        token_ids = np.array([token for c in chunks for token in c.token_ids], np.int64)
        seqs = np.repeat(np.arange(count), lengths)
        positions = np.arange(len(seqs)) + (starts - cu_seqlens_q[:-1])[seqs]
    slots = block_tables[seqs, positions // block_size] * np.int64(block_size) + positions % block_size
    logits_rows = cu_seqlens_q[1:][np.array(is_last)] - 1
    return token_ids, positions, cu_seqlens_q.astype(np.int32), ends.astype(np.int32), logits_rows, block_tables, slots


def _block_matrix(tables: Sequence, num_blocks: np.ndarray, before: PackedBatch | None) -> np.ndarray:
    """int32 [S, max_blocks]: the first num_blocks[i] blocks of each table."""
    matrix = np.zeros((len(tables), num_blocks.max()), np.int32)
    changed = range(len(tables))
    if before is not None and before.tables == tables:  # tables only grow while their request runs
        had = -(-before.seq_lens_k // before.block_size)
        if (num_blocks >= had).all():  # not so when that step was broken off, and this one cuts its chunks shorter
            matrix[:, : before.block_tables.shape[1]] = before.block_tables
            changed = np.flatnonzero(num_blocks > had).tolist()
    for i in changed:
        used = num_blocks[i]
        matrix[i, :used] = tables[i].as_array(used) if hasattr(tables[i], "as_array") else tables[i][:used]
    return matrix


@dataclass(eq=False, slots=True)
class PackedBatch:
    """The batch of one step as numpy arrays; T packed tokens, S sequences.

    token_ids int64 [T] · positions int64 [T] · cu_seqlens_q int32 [S+1] · seq_lens_k int32 [S] ·
    logits_rows int64 [n] · block_tables int32 [S, max_blocks], unused entries 0 · slot_mapping int64 [T]
    """

    chunks: list[Chunk]
    block_size: int
    token_ids: np.ndarray
    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens_k: np.ndarray
    logits_rows: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    tables: Sequence = ()  # the BlockTables themselves

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        tables: Sequence,
        block_size: int,
        pack: Callable = pack_tokens,
        place: Callable = place,
        before: PackedBatch | None = None,
    ) -> PackedBatch:
        """Packs and places; refuses arrays whose lengths or ranges cannot be a batch of these chunks (ValueError).

        Without a learner's own parts the same integers come from `_arrays`, a whole array at a time. before: the last
        step's batch; while the same requests run, most of its block tables still hold.
        """
        if chunks and pack is pack_tokens and place is _place:
            return cls(list(chunks), block_size, *_arrays(chunks, tables, block_size, before), tables)
        token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack(chunks)
        block_tables, slot_mapping = place(chunks, tables, block_size)
        batch = cls(
            chunks=list(chunks),
            block_size=block_size,
            token_ids=np.asarray(token_ids, dtype=np.int64),
            positions=np.asarray(positions, dtype=np.int64),
            cu_seqlens_q=np.asarray(cu_seqlens_q, dtype=np.int32),
            seq_lens_k=np.asarray(seq_lens_k, dtype=np.int32),
            logits_rows=np.asarray(logits_rows, dtype=np.int64),
            block_tables=_rectangle(block_tables),
            slot_mapping=np.asarray(slot_mapping, dtype=np.int64),
        )
        batch._check_shapes()
        return batch

    def _check_shapes(self) -> None:
        """Memory safety at the door: a kernel must never be handed a range outside its arrays.

        Whether the integers are *right* is for the lesson's check to say; here they only must not reach outside.
        """
        tokens, seqs = sum(c.length for c in self.chunks), len(self.chunks)
        wanted = {
            "token_ids": (self.token_ids.shape, (tokens,)),
            "positions": (self.positions.shape, (tokens,)),
            "slot_mapping": (self.slot_mapping.shape, (tokens,)),
            "cu_seqlens_q": (self.cu_seqlens_q.shape, (seqs + 1,)),
            "seq_lens_k": (self.seq_lens_k.shape, (seqs,)),
            "block_tables": (self.block_tables.shape[:1], (seqs,)),
        }
        for name, (got, want) in wanted.items():
            if got != want:
                raise ValueError(f"{name} has shape {got}, but {seqs} chunks of {tokens} tokens need {want}")
        cu = self.cu_seqlens_q
        if cu[0] != 0 or cu[-1] != tokens or (np.diff(cu) < 0).any():
            raise ValueError(f"cu_seqlens_q must rise from 0 to {tokens}, got {cu.tolist()}")
        room = self.block_tables.shape[1] * self.block_size
        if (self.seq_lens_k < 1).any() or (self.seq_lens_k > room).any():
            raise ValueError(
                f"seq_lens_k must lie in 1..{room} (the block tables' room), got {self.seq_lens_k.tolist()}"
            )
        if self.logits_rows.size and not (0 <= self.logits_rows.min() and self.logits_rows.max() < tokens):
            raise ValueError(f"logits_rows must lie in 0..{tokens - 1}, got {self.logits_rows.tolist()}")
        sampled = sum(c.is_last for c in self.chunks)
        if len(self.logits_rows) != sampled:
            raise ValueError(
                f"logits_rows has {len(self.logits_rows)} rows, but {sampled} chunks end their request's tokens"
            )
        if tokens and (self.positions.min() < 0 or self.token_ids.min() < 0 or self.slot_mapping.min() < 0):
            raise ValueError("token_ids, positions and slot_mapping must not be negative")
        if tokens and self.positions.max() >= room:
            raise ValueError(f"positions must lie below {room} (the block tables' room), got {self.positions.max()}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens_k)

    @property
    def query_lens(self) -> np.ndarray:
        return np.diff(self.cu_seqlens_q)

    # FlashInfer's form (compressed rows of the block table), derived here and nowhere else.
    @property
    def kv_indptr(self) -> np.ndarray:
        blocks = -(-self.seq_lens_k // self.block_size)
        return np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32)

    @property
    def kv_indices(self) -> np.ndarray:
        blocks = -(-self.seq_lens_k // self.block_size)
        return self.block_tables[np.arange(self.block_tables.shape[1]) < blocks[:, None]].astype(np.int32)

    @property
    def kv_last_page_len(self) -> np.ndarray:
        return ((self.seq_lens_k - 1) % self.block_size + 1).astype(np.int32)

    def _repr_html_(self) -> str:
        rows = []
        for i, chunk in enumerate(self.chunks):
            a, b = int(self.cu_seqlens_q[i]), int(self.cu_seqlens_q[i + 1])
            used = -(-int(self.seq_lens_k[i]) // self.block_size)
            cells = [
                chunk.id, "decode" if chunk.is_decode else "prompt chunk", f"{a}…{b - 1}", _short(self.token_ids[a:b]),
                _short(self.positions[a:b]), int(self.seq_lens_k[i]), _short(self.block_tables[i, :used]),
                _short(self.slot_mapping[a:b]), "yes" if chunk.is_last else "",
            ]  # fmt: skip
            rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
        head = ["request", "", "rows", "token_ids", "positions", "seq_lens_k", "blocks", "slots", "sampled"]
        table = "<tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>" + "".join(rows)
        return (
            f"<table>{table}</table><p>cu_seqlens_q {_short(self.cu_seqlens_q)} · "
            f"logits_rows {_short(self.logits_rows)} · {self.num_tokens} tokens, {self.num_seqs} sequences</p>"
        )


def _short(values, most: int = 8) -> str:
    values = [int(v) for v in values]
    if len(values) <= most:
        return " ".join(map(str, values))
    return f"{' '.join(map(str, values[:3]))} … {' '.join(map(str, values[-2:]))}"


def _rectangle(rows) -> np.ndarray:
    """Ragged block lists as int32 [S, max], filled with 0."""
    if isinstance(rows, np.ndarray):
        if rows.ndim != 2:
            raise ValueError(f"block_tables must have two dimensions, got shape {rows.shape}")
        return rows.astype(np.int32)
    out = np.zeros((len(rows), max((len(r) for r in rows), default=0)), dtype=np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
