"""Wrong answers to 60.1, 60.2 and 60.3, as learners write them: (exercise, key, function)."""

import torch

from minichunk.blocks import OutOfBlocks


def logical_for_physical(block_ids, start, length, block_size):
    return [(p // block_size) * block_size + p % block_size for p in range(start, start + length)]


def forgets_start(block_ids, start, length, block_size):
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(length)]


def div_and_mod_swapped(block_ids, start, length, block_size):
    return [block_ids[p % block_size] * block_size + p // block_size for p in range(start, start + length)]


def block_not_scaled(block_ids, start, length, block_size):
    return [block_ids[p // block_size] + p % block_size for p in range(start, start + length)]


def forgets_the_place_in_the_block(block_ids, start, length, block_size):
    return [block_ids[p // block_size] * block_size for p in range(start, start + length)]


def adds_the_position(block_ids, start, length, block_size):
    return [block_ids[p // block_size] * block_size + p for p in range(start, start + length)]


def _right(block_ids, start, length, block_size):
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, start + length)]


def pops_the_blocks_before(block_ids, start, length, block_size):
    while start >= block_size:
        block_ids.pop(0)
        start -= block_size
    return _right(block_ids, start, length, block_size)


def empties_the_table(block_ids, start, length, block_size):
    found = _right(block_ids, start, length, block_size)
    block_ids.clear()
    return found


def yields_slots(block_ids, start, length, block_size):
    yield from _right(block_ids, start, length, block_size)


def slots_in_a_tensor(block_ids, start, length, block_size):
    return torch.tensor(_right(block_ids, start, length, block_size))


def makes_slots_and_returns_nothing(block_ids, start, length, block_size):
    _right(block_ids, start, length, block_size)


def appends_a_list(table, pool, n):
    wanted = -(-n // pool.block_size) - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks("none left")
    table.block_ids.append([pool.take() for _ in range(wanted)])


def replaces_the_table(table, pool, n):
    wanted = -(-n // pool.block_size) - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks("none left")
    table.block_ids = [pool.take() for _ in range(wanted)]


def first_token_of_a_block(table, pool, n):
    if n % pool.block_size == 1:
        table.block_ids.append(pool.take())


def one_block_at_most(table, pool, n):
    if n > len(table.block_ids) * pool.block_size:
        table.block_ids.append(pool.take())


def ignores_what_the_table_has(table, pool, n):
    wanted = -(-n // pool.block_size)
    if wanted > pool.num_free:
        raise OutOfBlocks("none left")
    for _ in range(wanted):
        table.block_ids.append(pool.take())


def reads_n_as_tokens_to_add(table, pool, n):
    wanted = -(-n // pool.block_size)
    if wanted > pool.num_free:
        raise OutOfBlocks("none left")
    table.block_ids += [pool.take() for _ in range(wanted)]


def ignores_the_free_tail(table, pool, n):
    wanted = n // pool.block_size + 1 - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks("none left")
    for _ in range(wanted):
        table.block_ids.append(pool.take())


def takes_until_it_fails(table, pool, n):
    while len(table.block_ids) * pool.block_size < n:
        table.block_ids.append(pool.take())


def stops_quietly(table, pool, n):
    while len(table.block_ids) * pool.block_size < n and pool.num_free:
        table.block_ids.append(pool.take())


def frees_shared_blocks(table, pool):
    for block in table.block_ids:
        pool.ref_counts[block] -= 1
        pool.give_back(block)
    table.block_ids.clear()


def does_not_count(table, pool):
    for block in table.block_ids:
        pool.give_back(block)
    table.block_ids.clear()


def keeps_the_count_of_the_last(table, pool):
    for block in table.block_ids:
        if pool.ref_counts[block] == 1:
            pool.give_back(block)
        else:
            pool.ref_counts[block] -= 1
    table.block_ids.clear()


def only_clears(table, pool):
    table.block_ids.clear()


def never_gives_back(table, pool):
    for block in table.block_ids:
        pool.ref_counts[block] -= 1
    table.block_ids.clear()


def keeps_the_table(table, pool):
    for block in table.block_ids:
        pool.ref_counts[block] -= 1
        if pool.ref_counts[block] == 0:
            pool.give_back(block)


WRONG = [
    ("60.1", "block_ids_skipped", logical_for_physical),
    ("60.1", "chunk_relative", forgets_start),
    ("60.1", "div_mod", div_and_mod_swapped),
    ("60.1", "block_not_scaled", block_not_scaled),
    ("60.1", "offset_lost", forgets_the_place_in_the_block),
    ("60.1", "offset_whole", adds_the_position),
    ("60.1", "changed_inputs", pops_the_blocks_before),
    ("60.1", "changed_inputs", empties_the_table),
    ("60.1", "generator", yields_slots),
    ("60.1", "no_list", slots_in_a_tensor),
    ("60.1", "no_return", makes_slots_and_returns_nothing),
    ("60.2", "nested", appends_a_list),
    ("60.2", "replaced", replaces_the_table),
    ("60.2", "over_allocated", reads_n_as_tokens_to_add),
    ("60.2", "multi_block_chunk", first_token_of_a_block),
    ("60.2", "multi_block_chunk", one_block_at_most),
    ("60.2", "over_allocated", ignores_what_the_table_has),
    ("60.2", "over_allocated", ignores_the_free_tail),
    ("60.2", "half_taken", takes_until_it_fails),
    ("60.2", "half_taken", stops_quietly),
    ("60.3", "refcount", frees_shared_blocks),
    ("60.3", "refcount", does_not_count),
    ("60.3", "refcount", keeps_the_count_of_the_last),
    ("60.3", "leak", only_clears),
    ("60.3", "leak", never_gives_back),
    ("60.3", "table_kept", keeps_the_table),
]
