"""The block pool: who holds what, what can be found again, in which order it is reused."""

import gc
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minichunk import BlockPool, BlockTable, Request
from minichunk.blocks import BlockError, OutOfBlocks, num_blocks_needed


def computed(pool, tokens, table=None):
    """A request whose tokens are all in the cache and findable."""
    request = Request(0, list(tokens), len(tokens))
    request.table = table or BlockTable(pool.block_size)
    pool.grow(request.table, len(tokens))
    request.num_computed = len(tokens)
    pool.index(request.table, request, 0)
    return request


def found(pool, tokens):
    return pool.find(Request(1, list(tokens), len(tokens)))


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_a_block_is_needed_exactly_when_the_last_one_is_full(size):
    for n in range(50):
        assert num_blocks_needed(n, size) == len({p // size for p in range(n)})


def test_slot_map_is_a_view_of_the_block_ids():
    table = BlockTable(16, [31, 7, 90])
    assert table.slot(37) == 90 * 16 + 5
    view = table.slot_map
    assert dict(view) == {p: table.block_ids[p // 16] * 16 + p % 16 for p in range(48)}
    table.block_ids[2] = 2
    assert view[37] == 2 * 16 + 5
    with pytest.raises(KeyError):
        view[48]
    with pytest.raises(KeyError):
        view[-1]


def test_growing_is_all_or_nothing():
    pool, table = BlockPool(3, 4), BlockTable(4)
    assert pool.grow(table, 5) == [0, 1] and pool.grow(table, 8) == []
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 3 free"):
        pool.grow(table, 13)
    assert table.block_ids == [0, 1] and pool.num_free == 1
    pool.check([table])


@pytest.mark.parametrize("blocks, size", [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(blocks, size):
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(blocks, size)


@pytest.mark.parametrize("length, blocks", [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_hits_are_whole_blocks_and_never_the_last_token(length, blocks):
    pool = BlockPool(8, 4)
    computed(pool, range(12))
    assert len(found(pool, range(length))) == blocks == (length - 1) // 4


def test_a_hit_stops_at_the_first_block_that_differs_even_when_a_later_one_is_the_same():
    pool = BlockPool(8, 2)
    computed(pool, [1, 2, 3, 4, 5, 6])
    assert found(pool, [1, 2, 9, 9, 5, 6, 0]) == [0]
    assert found(pool, [3, 4, 5, 6, 0]) == []  # the same tokens at another place are other keys


@pytest.mark.parametrize("a, b", [(0, 2**61 - 1), (65, 321), (-1, -2), (1, 1 + 2**61 - 1)])
def test_tokens_whose_hashes_collide_are_told_apart(a, b):
    pool = BlockPool(8, 1)
    computed(pool, [a, a])
    assert len(found(pool, [a, a, 5])) == 2
    assert found(pool, [b, b, 5]) == [] and found(pool, [a, b, 5]) == [0]


def test_only_computed_whole_blocks_are_findable():
    pool, request = BlockPool(8, 4), Request(0, list(range(12)), 12)
    request.table = BlockTable(4)
    pool.grow(request.table, 12)
    assert found(pool, range(12)) == []
    for start, end, blocks in [(0, 3, 0), (3, 4, 1), (4, 11, 2)]:
        request.num_computed = end
        pool.index(request.table, request, start)
        assert len(found(pool, [*range(12), 99])) == blocks


def test_freed_blocks_are_reused_least_recently_used_first_and_tail_before_head():
    pool = BlockPool(6, 2)
    first, second = computed(pool, [1, 2, 3, 4]), computed(pool, [5, 6, 7, 8])  # blocks 0 1, 2 3; 4 5 empty
    pool.release(first.table)
    pool.release(second.table)
    assert (pool.num_empty, pool.num_cached, pool.num_used) == (2, 4, 0)
    assert found(pool, [1, 2, 3, 4, 0]) == [0, 1]
    assert pool.grow(BlockTable(2), 12) == [4, 5, 1, 0, 3, 2]
    assert found(pool, [1, 2, 0]) == [] == found(pool, [5, 6, 0])


def test_a_hit_on_the_free_list_makes_a_block_the_most_recently_used():
    pool = BlockPool(3, 2)
    requests = [computed(pool, [i, i]) for i in range(3)]
    for r in requests:
        pool.release(r.table)
    table = BlockTable(2)
    assert pool.share(table, Request(9, [0, 0, 7], 3)) == 2
    assert (table.block_ids, pool.num_free, pool.num_cached) == ([0], 2, 2)
    pool.release(table)
    assert pool.grow(BlockTable(2), 6) == [1, 2, 0]


def test_a_reallocated_block_is_no_longer_found_under_its_old_tokens():
    pool = BlockPool(1, 2)
    pool.release(computed(pool, [1, 2]).table)
    other = computed(pool, [3, 4])
    assert found(pool, [1, 2, 0]) == [] and found(pool, [3, 4, 0]) == [0]
    pool.check([other.table])


def test_a_shared_block_stays_used_until_the_last_table_gives_it_up():
    pool = BlockPool(4, 2)
    owner = computed(pool, [1, 2, 3])
    table = BlockTable(2)
    pool.share(table, Request(1, [1, 2, 9], 3))
    assert pool.ref_counts[0] == 2
    pool.release(owner.table)
    assert pool.ref_counts[0] == 1 and pool.num_cached == 0
    pool.check([table])
    pool.release(table)
    assert (pool.num_cached, pool.num_empty) == (1, 3)


def test_the_same_text_computed_twice_at_once_is_served_by_the_first_copy():
    pool = BlockPool(4, 2)
    first, second = computed(pool, [1, 2]), computed(pool, [1, 2])
    assert found(pool, [1, 2, 0]) == [0]
    pool.release(second.table)
    assert pool.num_empty == 3  # the second copy cannot be found, so it is empty
    pool.check([first.table])


def test_the_index_keeps_no_view_of_lists_that_change_later():
    pool, tokens = BlockPool(4, 2), [1, 2]
    request = Request(0, tokens, 2, table=BlockTable(2), num_computed=2)
    pool.grow(request.table, 2)
    pool.index(request.table, request, 0)
    pool.release(request.table)
    tokens[:] = [7, 7]
    assert found(pool, [1, 2, 0]) == [0] and found(pool, [7, 7, 0]) == []


def test_without_a_prefix_cache_nothing_is_found_or_kept():
    pool = BlockPool(4, 2, prefix_cache=False)
    request = computed(pool, [1, 2, 3, 4])
    assert found(pool, [1, 2, 3, 4, 5]) == []
    pool.release(request.table)
    assert (pool.num_empty, pool.num_cached) == (4, 0)


def test_keys_of_a_long_text_die_without_deep_recursion():
    pool = BlockPool(20_000, 1)
    computed(pool, [i % 7 for i in range(20_000)])
    assert len(pool._interned) == 20_000
    pool.key_of, pool._index = [], {}
    gc.collect()
    assert len(pool._interned) == 0


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda pool, table: pool.ref_counts.__setitem__(0, 2), "block 0: 1 tables hold it, counted 2"),
        (lambda pool, table: pool._empty.append(0), "block 0: held by 1 tables, free: True"),
        (lambda pool, table: pool._empty.popleft(), "free: False"),
        (lambda pool, table: pool._empty.append(3), "twice"),
        (lambda pool, table: pool._index.clear(), "block 0 has a key"),
        (lambda pool, table: pool.key_of.__setitem__(0, None), "keys of no block"),
        (lambda pool, table: table.block_ids.append(3), "block 3"),
    ],
)
def test_check_names_what_is_broken(break_it, says):
    pool = BlockPool(4, 2)
    table = computed(pool, [1, 2]).table
    pool.check([table])
    break_it(pool, table)
    with pytest.raises(BlockError, match=says):
        pool.check([table])


def test_restore_undoes_everything_since_the_snapshot():
    pool = BlockPool(4, 2)
    pool.release(computed(pool, [1, 2]).table)
    state = pool.snapshot()
    table = BlockTable(2)
    pool.share(table, Request(1, [1, 2, 3], 3))
    pool.grow(table, 8)
    pool.restore(state)
    assert found(pool, [1, 2, 3]) == [0] and pool.num_cached == 1
    pool.check([])


class Pool(RuleBasedStateMachine):
    """Against a model that knows only texts: which block holds which text is the pool's business, but what is found
    must hold exactly these tokens, and be what was computed there last."""

    reached = Counter()

    def __init__(self):
        super().__init__()
        self.requests, self.content = [], {}

    @rule(blocks=st.integers(1, 9), size=st.sampled_from([1, 2, 3, 4]))
    @precondition(lambda self: not hasattr(self, "pool"))
    def make(self, blocks, size):
        self.pool = BlockPool(blocks, size)

    ready = precondition(lambda self: hasattr(self, "pool"))
    running = precondition(lambda self: self.requests)

    @ready
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def arrive(self, tokens):
        request = Request(len(self.requests), tokens, len(tokens), table=BlockTable(self.pool.block_size))
        request.num_computed = self.pool.share(request.table, request)
        hit, size = request.num_computed, self.pool.block_size
        self.reached["hits"] += hit > 0
        assert hit % size == 0 and hit < len(tokens)
        for i, block in enumerate(request.table.block_ids):
            assert self.content[block] == tokens[: (i + 1) * size], "a hit must hold this text"
        self.requests.append(request)

    @ready
    @running
    @rule(data=st.data(), length=st.integers(1, 6))
    def compute(self, data, length):
        request, pool = data.draw(st.sampled_from(self.requests)), self.pool
        start, end = request.num_computed, min(request.num_computed + length, request.num_tokens)
        before, free = list(request.table.block_ids), pool.num_free
        try:
            new = pool.grow(request.table, end)
        except OutOfBlocks:
            self.reached["out of blocks"] += 1
            assert num_blocks_needed(end, pool.block_size) - len(before) > free
            assert request.table.block_ids == before and pool.num_free == free
            return
        self.reached["evictions"] += sum(b in self.content for b in new)
        for i in range(len(before), len(request.table)):
            self.content.pop(request.table.block_ids[i], None)
        request.num_computed = end
        for i in range(start // pool.block_size, end // pool.block_size):
            self.content[request.table.block_ids[i]] = request.token_ids[: (i + 1) * pool.block_size]
        pool.index(request.table, request, start)

    @ready
    @running
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.pool.release(request.table)

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "pool"):
            pool = self.pool
            pool.check([r.table for r in self.requests])
            held = {b for r in self.requests for b in r.table.block_ids}
            assert pool.num_used == len(held)
            assert pool.num_empty + pool.num_cached == pool.num_free == pool.num_blocks - len(held)


def test_random_lives_of_a_pool():
    from hypothesis.stateful import run_state_machine_as_test

    Pool.reached.clear()
    run_state_machine_as_test(
        Pool, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
    )
    assert all(Pool.reached[what] for what in ("hits", "out of blocks", "evictions")), Pool.reached
