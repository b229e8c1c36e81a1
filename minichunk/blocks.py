"""The block pool and the block table: contiguous in the table, scattered in memory.

A request's keys and values live in blocks of `block_size` tokens that may lie anywhere:

    table of K     31      7      90           position 37, block size 16:  37 // 16 = 2 → block 90
                 0…15   16…31   32…41                                       37 %  16 = 5 → slot 90 · 16 + 5

A block is *used* (in at least one table), *cached* (in none, but its content can be found again by its tokens) or
*empty*. num_free = num_empty + num_cached, and empty + cached + used == num_blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

import numpy as np

from minichunk.request import Request


class OutOfBlocks(Exception):
    """The pool cannot give the blocks that were asked for. Nothing was changed."""


def num_blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens. With `len(block_table)` it decides, here alone, when a block is taken."""
    return -(-num_tokens // block_size)


class BlockTable:
    """One request's logical → physical map."""

    __slots__ = ("block_ids", "block_size", "_array", "_source", "_known")

    def __init__(self, block_size: int, block_ids: list[int] | None = None):
        self.block_size = block_size
        self.block_ids: list[int] = list(block_ids or [])
        self._array, self._source, self._known = np.zeros(16, np.int32), self.block_ids, 0

    def __len__(self) -> int:
        return len(self.block_ids)

    def slot(self, position: int) -> int:
        """Where the token at `position` lives."""
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def as_array(self, count: int) -> np.ndarray:
        """The first `count` block ids, int32; not to be kept or changed. A table grows at its end, so only what is new
        since the last call is converted."""
        if self._source is not self.block_ids or self._known > len(self.block_ids):  # put back, or emptied
            self._source, self._known = self.block_ids, 0
        if self._known < count:
            if count > len(self._array):
                self._array = np.concatenate([self._array[: self._known], np.zeros(2 * count - self._known, np.int32)])
            self._array[self._known : count] = self.block_ids[self._known : count]
            self._known = count
        return self._array[:count]

    @property
    def slot_map(self) -> Mapping[int, int]:
        """{position: slot}, a view computed on each look: storing it would double what block_ids says."""
        return _SlotMap(self)

    def __repr__(self):
        return f"BlockTable({self.block_ids}, block_size={self.block_size})"


class _SlotMap(Mapping):
    def __init__(self, table: BlockTable):
        self._table = table

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise KeyError(position)
        return self._table.slot(position)

    def __len__(self) -> int:
        return len(self._table) * self._table.block_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class BlockKey:
    """What a whole block holds: its own tokens after those of the chain before it. Interned: equal means identical."""

    __slots__ = ("parent", "tokens", "__weakref__")

    def __init__(self, parent: BlockKey | None, tokens: tuple[int, ...]):
        self.parent, self.tokens = parent, tokens


class BlockPool:
    """Hands out blocks, counts who holds them, and finds computed blocks again by their tokens.

    The index compares tokens by value, chain and all: no hash function of our own, so no collision can serve
    somebody else's keys. Freed blocks keep their key until they are needed, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.ref_counts = [0] * num_blocks
        self.key_of: list[BlockKey | None] = [None] * num_blocks
        self._empty: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._index: dict[BlockKey, int] = {}
        self._interned: WeakValueDictionary[tuple, BlockKey] = WeakValueDictionary()
        self.given_up: dict[int, str] = {}  # blocks that became "cached" or "empty" since the engine last looked

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    # --- blocks ------------------------------------------------------------------------------------------------------
    def grow(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Appends blocks until the table holds `num_tokens` tokens; returns the new ones. All or nothing: OutOfBlocks."""
        wanted = num_blocks_needed(num_tokens, self.block_size) - len(table)
        if wanted > self.num_free:
            raise OutOfBlocks(f"{wanted} blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken = [self._take() for _ in range(wanted)]
        table.block_ids.extend(taken)
        return taken

    def _take(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._index[self.key_of[block]]
            self.key_of[block] = None
        self.ref_counts[block] = 1
        self.given_up.pop(block, None)
        return block

    def release(self, table: BlockTable) -> None:
        """Gives up the whole table, tail before head, so that the head of a prefix is the last to be reused."""
        for block in reversed(table.block_ids):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self.key_of[block] is None:
                    self._empty.append(block)
                    self.given_up[block] = "empty"
                else:
                    self._cached[block] = None
                    self.given_up[block] = "cached"
        table.block_ids.clear()

    # --- prefix index ------------------------------------------------------------------------------------------------
    def keys(self, request: Request, num_tokens: int) -> list[BlockKey]:
        """Keys of the whole blocks in the request's first `num_tokens` tokens; kept on the request, extended as it grows."""
        keys, size = request.keys, self.block_size
        for i in range(len(keys), num_tokens // size):
            parent = keys[-1] if keys else None
            tokens = tuple(request.token_ids[i * size : (i + 1) * size])
            key = self._interned.get((parent, tokens))
            if key is None:
                key = self._interned[(parent, tokens)] = BlockKey(parent, tokens)
            keys.append(key)
        return keys[: num_tokens // size]

    def find(self, request: Request) -> list[int]:
        """The blocks that already hold the request's first tokens. Whole blocks only, and never its last token:
        that one must be computed, or there would be no logits to sample from. Changes nothing."""
        if not self.prefix_cache:
            return []
        hits = []
        for key in self.keys(request, request.num_tokens - 1):
            block = self._index.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def share(self, table: BlockTable, request: Request) -> int:
        """Puts the found blocks at the head of an empty table; returns the tokens they hold."""
        hits = self.find(request)
        for block in hits:
            self._cached.pop(block, None)
            self.given_up.pop(block, None)
            self.ref_counts[block] += 1
        table.block_ids.extend(hits)
        return len(hits) * self.block_size

    def index(self, table: BlockTable, request: Request, start: int) -> None:
        """Makes the whole blocks that end in positions start … num_computed - 1 findable. Only computed ones:
        a hit must never read unwritten keys."""
        if not self.prefix_cache:
            return
        first, end = start // self.block_size, request.num_computed // self.block_size
        keys = self.keys(request, end * self.block_size) if first < end else []
        for i in range(first, end):
            if keys[i] not in self._index:  # else: computed twice at once, the first copy serves
                self._index[keys[i]] = table.block_ids[i]
                self.key_of[table.block_ids[i]] = keys[i]

    # --- whole-state helpers -----------------------------------------------------------------------------------------
    def snapshot(self) -> tuple:
        """What `restore` needs to undo a step that a learner's code broke off."""
        return (
            list(self.ref_counts),
            list(self.key_of),
            deque(self._empty),
            self._cached.copy(),
            dict(self._index),
            dict(self.given_up),
        )

    def restore(self, state: tuple) -> None:
        self.ref_counts, self.key_of, self._empty, self._cached, self._index, self.given_up = state

    def check(self, tables: list[BlockTable]) -> None:
        """Asserts the invariants against every live table; raises BlockError naming the block. O(num_blocks)."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.block_ids:
                held[block] += 1
        free = set(self._empty) | set(self._cached)
        _require(len(self._empty) + len(self._cached) == len(free), "a block is on the free list twice")
        for block, count in enumerate(held):
            _require(
                count == self.ref_counts[block],
                f"block {block}: {count} tables hold it, counted {self.ref_counts[block]}",
            )
            _require((count == 0) == (block in free), f"block {block}: held by {count} tables, free: {block in free}")
            key = self.key_of[block]
            _require(
                key is None or self._index.get(key) == block, f"block {block} has a key that the index gives to another"
            )
            _require(key is not None or block not in self._cached, f"block {block} is cached without a key")
            _require(key is None or block not in self._empty, f"block {block} is empty but has a key")
        _require(len(self._index) == sum(k is not None for k in self.key_of), "the index holds keys of no block")


class BlockError(RuntimeError):
    """An invariant of the engine does not hold: a bug in minichunk, or in a learner's own part."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BlockError(message)
