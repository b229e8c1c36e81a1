"""Notebook 60: slots (60.1), growing and releasing a table (60.2, 60.3), which bug? (60.4)."""

from __future__ import annotations

import random
from typing import Any, Callable

from minichunk.blocks import BlockError, BlockTable, OutOfBlocks
from minichunk.lab.checks import Bug, Exercise, Result
from minichunk.lab.checks.shared import is_array, kind, plural
from minichunk.lab.watchdog import Raised
from minichunk.request import Request, SamplingParams


# --- 60.1 ---------------------------------------------------------------------------------------------------------
def slots(block_ids, start, length, block_size):
    positions = range(start, start + length)
    return [block_ids[p // block_size] * block_size + p % block_size for p in positions]


PLACES = [  # (block_ids, start, length, block_size); a table is never shorter than its blocks are long, see _slots_as
    ([1, 0], 0, 1, 2),
    ([1, 0], 1, 1, 2),
    ([1, 0], 0, 3, 2),
    ([2, 0, 1], 2, 1, 2),
    ([2, 3, 0, 1], 2, 3, 2),
    ([5, 2, 8, 1], 7, 1, 4),
    ([7, 0, 3, 9, 1, 4], 9, 12, 4),
    ([6, 5, 2, 8], 0, 3, 4),
    ([31, 7, 90, 4], 37, 5, 16),
]


def _slots_as(block_ids, start, length, block_size, mistake):
    """What a known mistake gives, None where it runs out of the table."""
    out = []
    for i in range(length):
        p = start + i
        where, offset = p // block_size, p % block_size
        if mistake == "chunk_relative":
            where, offset = i // block_size, i % block_size
        if mistake == "div_mod":
            where, offset = p % block_size, p // block_size
        if where >= len(block_ids):
            return None
        block = where if mistake == "block_ids_skipped" else block_ids[where]
        offset = {"offset_lost": 0, "offset_whole": p}.get(mistake, offset)
        out.append(block + offset if mistake == "block_not_scaled" else block * block_size + offset)
    return out


def check_slots(fn: Callable) -> Result:
    rng = random.Random(60)
    cases = list(PLACES)
    for _ in range(150):
        size = rng.choice([1, 2, 4, 16])
        count = rng.randint(max(1, size if size < 16 else 4), 20)
        start = rng.randrange(count * size)
        cases.append((rng.sample(range(64), count), start, rng.randint(1, count * size - start), size))
    for case in cases:
        block_ids, start, length, size = case
        got, wanted = fn(*case), slots(*case)
        odd = None if isinstance(got, list) else got
        if isinstance(got, list):
            odd = next((slot for slot in got if isinstance(slot, bool) or not isinstance(slot, int)), None)
        if odd is not None or got is None:
            key = "no_list" if is_array(odd) else "unknown"
            there = f"got {kind(got)}" + f" that holds {kind(odd)}" * isinstance(got, list)
            return SLOTS.wrong(key, "slots returns a list of whole numbers.", _say(case), got, wanted, there)
        if got == wanted:
            continue
        explains = {key: sum(_answer(fn, c) == _slots_as(*c, key) for c in PLACES) for key in SLOTS.causes if _slots_as(*case, key) == got}  # fmt: skip
        key = max(explains, key=explains.get, default="unknown")
        rule = "Position p lies in block block_ids[p // block_size], p % block_size slots from its beginning."
        if len(got) != len(wanted):
            there = f"{len(got)} slots, expected {len(wanted)}, one for each token of the chunk"
        else:
            at = next(i for i, (a, b) in enumerate(zip(got, wanted)) if a != b)
            p = start + at
            there = f"token {at} of the chunk, position {p}: you wrote slot {got[at]}, expected {wanted[at]} = block {block_ids[p // size]} · {size} + {p % size}"  # fmt: skip
        return SLOTS.wrong(key, rule, _say(case), got, wanted, there)
    return Result(True, "passed", SLOTS.passed)


def _answer(fn: Callable, case: tuple) -> Any:
    try:
        return list(fn(*case))
    except Exception:  # it only helps to tell two mistakes apart
        return None


def _say(case: tuple) -> str:
    block_ids, start, length, size = case
    return f"block_ids {block_ids}, start {start}, length {length}, block_size {size}"


SLOTS = Exercise(
    "60.1",
    slots,
    check_slots,
    causes={
        "block_ids_skipped": "you took the logical block number for the physical one. Look it up: block_ids[p // block_size].",
        "chunk_relative": "you counted from the chunk's first token. Positions begin at start: the chunk may begin in "
        "the middle of a block.",
        "div_mod": "// and % changed places: p // block_size is the block, p % block_size the place in it.",
        "offset_lost": "you forgot p % block_size, the token's place in its block.",
        "offset_whole": "you added p. The token's place in its block is p % block_size.",
        "no_list": "a plain list of whole numbers, please (.tolist() makes one of a tensor or an array).",
        "block_not_scaled": "a block has block_size slots, so block b begins at slot b · block_size.",
    },
    passed="159 chunks, some of them beginning inside a block.",
    part="blocks",
)


# --- 60.2 ---------------------------------------------------------------------------------------------------------
def grow(table, pool, n):
    wanted = -(-n // pool.block_size) - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks(f"{wanted} blocks wanted, {pool.num_free} free")
    for _ in range(wanted):
        table.block_ids.append(pool.take())


def release(table, pool):
    for block in reversed(table.block_ids):
        pool.ref_counts[block] -= 1
        if pool.ref_counts[block] == 0:
            pool.give_back(block)
    table.block_ids.clear()


def _pool(num_blocks: int, block_size: int, **options: Any):
    from minichunk.lab.scenes_blocks import YourPool

    return YourPool(grow, release, num_blocks, block_size, **options)


def _raising(fn: Callable) -> Callable:
    """fn under the watchdog, but its OutOfBlocks comes through as what it is: the scheduler waits for it."""

    def call(table: BlockTable, pool: Any, n: int) -> None:
        try:
            fn(table, pool, n)
        except Raised as error:
            if isinstance(error.__cause__, OutOfBlocks):
                raise error.__cause__ from None
            raise

    return call


def check_grow(fn: Callable) -> Result:
    fn = _raising(fn)
    cases = [  # (block size, tokens in the table, tokens wanted, free blocks)
        (size, before, n, free)
        for size in (2, 4, 3, 1)
        for n in range(1, 4 * size + 2)
        for before in range(n)
        for free in (6, 1)
    ]
    for size, before, n, free in cases:
        pool, table = _pool(16, size), BlockTable(size)
        pool.grow(table, before)
        pool.grow(BlockTable(size), (pool.num_free - free) * size)  # somebody else's
        held, wanted = list(table.block_ids), -(-n // size) - len(table)
        case = f"blocks of {size}; the table {held} holds {before} token{'s' * (before != 1)}; grow to n = {n}; {free} block{'s' * (free != 1)} free"
        try:
            fn(table, pool, n)
            refused = False
        except OutOfBlocks:
            refused = True
        got = list(table.block_ids)
        taken, says = len(got) - len(held), "OutOfBlocks" if refused else f"block_ids {got}"
        odd = next((block for block in got if isinstance(block, bool) or not isinstance(block, int)), None)
        if odd is not None:
            rule = "table.block_ids is a flat list of block numbers."
            key = "nested" if isinstance(odd, list | tuple) else "unknown"
            return GROW.wrong(key, rule, case, says, f"{held} and {plural(wanted, 'block')} of pool.take()", f"block_ids[{got.index(odd)}] is {kind(odd)}")  # fmt: skip
        if got[: len(held)] != held:
            rule = "What is in the table stays there, in its order."
            return GROW.wrong("replaced", rule, case, says, f"{held} and what is missing", f"block_ids was {held} and is {got}")  # fmt: skip
        if wanted > free:
            if not refused or got != held or pool.num_free != free:
                rule = "All or nothing: when the blocks do not suffice, raise OutOfBlocks and change nothing."
                there = f"{wanted} more blocks needed, {free} free: " + (f"block_ids is {got}, it was {held}" if refused else "no OutOfBlocks was raised")  # fmt: skip
                return GROW.wrong("half_taken", rule, case, says, f"OutOfBlocks, and block_ids still {held}", there)
            continue
        rule = "Afterwards the table has as many blocks as n tokens need, and not one more."
        need = f"n = {n} needs {-(-n // size)} block{'s' * (n > size)} of {size}"
        if refused or taken != wanted:
            there = (
                f"{need}; the table has {len(held)} and you took {'none, but raised OutOfBlocks' if refused else taken}"
            )
            key = "unknown" if refused else "over_allocated" if taken > wanted else "multi_block_chunk"
            return GROW.wrong(key, rule, case, says, f"{wanted} more block{'s' * (wanted != 1)}", there)
        fresh = got[len(held) :]
        if len(set(got)) != len(got) or pool.num_free != free - wanted or any(pool.ref_counts[b] != 1 for b in fresh):  # fmt: skip
            rule = "New blocks come from pool.take(), one call a block, and go to the end of table.block_ids."
            there = f"block_ids was {held} and is {got}; the pool had {free} free blocks and has {pool.num_free}"
            return GROW.wrong(
                "unknown", rule, case, says, f"{held} and {plural(wanted, 'block')} of pool.take()", there
            )
    return _drive(GROW, fn, release)


GROW = Exercise(
    "60.2",
    grow,
    check_grow,
    causes={
        "multi_block_chunk": "you took too few. 'A new block at the first token of a block' holds when one token comes; "
        "a chunk may need several blocks, and may begin and end anywhere.",
        "over_allocated": "you took too many. n is the total: what the table has counts, and the last block has room until it is full.",
        "nested": "block_ids holds a list: append adds one item; use extend or +=.",
        "replaced": "you replaced the table: append to what is there.",
        "half_taken": "compare what you need with pool.num_free before the first pool.take(), and raise OutOfBlocks.",
    },
    passed="each table with just the blocks that it needs.",
    slow="your loop does not end: the table never got long enough",
    part="blocks",
)


# --- 60.3 ---------------------------------------------------------------------------------------------------------
def _scene(rng: random.Random, size: int) -> tuple:
    """A pool, and tables that share their first blocks: (pool, {letter: table})."""
    pool = _pool(3 + 3 * size, 2)
    tables = {"A": BlockTable(2)}
    pool.grow(tables["A"], rng.randint(1, 2 * size))
    for k in range(1, 1 + rng.randint(0, size)):
        table = tables[chr(65 + k)] = BlockTable(2)
        head = tables["A"].block_ids[: rng.randint(0, len(tables["A"]))]
        for block in head:
            pool.ref_counts[block] += 1
        table.block_ids.extend(head)
        if pool.num_free:
            pool.grow(table, 2 * len(head) + rng.randint(0, 2))
    return pool, tables


def check_release(fn: Callable) -> Result:
    rng = random.Random(60)
    for number in range(200):
        pool, tables = _scene(rng, 1 + number // 50)
        gone = []
        for name in rng.sample(list(tables), len(tables)):
            held = list(tables[name].block_ids)
            case = f"{_holders({n: t for n, t in tables.items() if n not in gone})}; free {pool.free}; release {name}"
            fn(tables[name], pool)
            gone.append(name)
            found = _wrong_release(pool, tables, gone, held, name)
            if found:
                key, rule, wanted, there = found
                got = f"free {pool.free}, {name}'s block_ids {tables[name].block_ids}"
                return RELEASE.wrong(key, rule, case, got, wanted, there)
    return _drive(RELEASE, grow, fn)


def _holders(tables: dict) -> str:
    return "; ".join(f"{name} holds {t.block_ids}" for name, t in tables.items())


def _wrong_release(pool, tables: dict, gone: list[str], held: list[int], name: str) -> tuple | None:
    """(key, rule, expected, first difference) of a state after a release, None where it is right."""
    holders = {b: [n for n, t in tables.items() if n not in gone and b in t.block_ids] for b in range(pool.num_blocks)}
    free = [b for b, who in holders.items() if not who]
    wanted = f"free {free}, {name}'s block_ids []"
    for b in held:
        if holders[b] and b in pool.free:
            rule = "A block goes back when nobody holds it any more."
            there = f"block {b} is on the free list, but {' and '.join(holders[b])} still holds it: the next request would write over it"
            return "refcount", rule, wanted, there
    for b in held:
        if pool.ref_counts[b] != len(holders[b]):
            rule = "pool.ref_counts says in how many tables a block is."
            there = f"block {b}: ref_counts says {pool.ref_counts[b]}, and {len(holders[b])} tables hold it"
            return "refcount" if b in pool.free or holders[b] else "leak", rule, wanted, there
        if not holders[b] and b not in pool.free:
            return "leak", "A block that nobody holds goes back to the pool.", wanted, f"block {b}: nobody holds it, and it is not on the free list"  # fmt: skip
    if tables[name].block_ids:
        rule = "A released table is empty."
        there = f"{name}'s block_ids is still {tables[name].block_ids}: released once more, each block would be counted down twice"
        return "table_kept", rule, wanted, there
    if pool.free != free:
        return (
            "unknown",
            "Free are the blocks that nobody holds, each once.",
            wanted,
            f"free is {pool.free}, expected {free}",
        )
    return None


RELEASE = Exercise(
    "60.3",
    release,
    check_release,
    causes={
        "refcount": "a block may be in several tables. Count its holders down by one, and give it back only at 0.",
        "leak": "some blocks never come home. Walk through the whole table; at 0 call pool.give_back(block).",
        "table_kept": "clear table.block_ids at the end.",
    },
    passed="200 pools with shared blocks, and every block came home.",
    part="blocks",
)


def _drive(exercise: Exercise, grow: Callable, release: Callable) -> Result:
    """The engine's Scheduler on a tiny pool over these functions, made-up tokens in the place of a model: with shared
    prefixes and preemption, the invariants hold after each step and every block comes home."""
    from minichunk.lab.scenes_blocks import YourPool
    from minichunk.scheduler import POLICIES, Scheduler

    pool = YourPool(grow, release, num_blocks=20, block_size=4, prefix_cache=True)
    scheduler = Scheduler(pool, POLICIES["mixed"], 16, None, 8, 4)
    head = list(range(13))  # three whole blocks that three of them share
    hits = preempted = 0
    for n, (prompt, out) in enumerate([(head, 12), ([50] * 30, 8), (head + [60], 15), ([70, 71], 20), (head + [80] * 9, 9)]):  # fmt: skip
        scheduler.add(Request(n, list(prompt), len(prompt), SamplingParams(max_tokens=out), arrival=float(n)))
    for step in range(400):
        if not scheduler.has_work:
            break
        try:
            plan = scheduler.plan()
            scheduler.commit(plan.chunks)
            scheduler.check()
        except BlockError as error:
            rule = "The engine's Scheduler runs on your function, and its invariants hold after every step."
            return exercise.wrong("unknown", rule, f"step {step} of five requests on 20 blocks of 4", error, "no error", str(error))  # fmt: skip
        hits, preempted = hits + sum(plan.hits.values()), preempted + len(plan.preempted)
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.token_ids.append(90 + chunk.id)
                if len(chunk.request.output_ids) == chunk.request.params.max_tokens:
                    scheduler.remove(chunk.request)
    if pool.num_free != pool.num_blocks:
        rule = "When all requests are done, every block is free."
        there = f"{pool.num_free} of {pool.num_blocks} blocks are free"
        return exercise.wrong("unknown", rule, "five requests on 20 blocks of 4", there, "20 of 20", there)
    said = f"It then carried five requests on 20 blocks: {preempted} preemptions, {hits} tokens shared."
    return Result(True, "passed", f"{exercise.passed} {said}")


# --- 60.4 ---------------------------------------------------------------------------------------------------------
def one_block_ahead(table, pool, n):
    """The hidden bug of 60.4: where n tokens fill the blocks exactly, it takes one more."""
    wanted = n // pool.block_size + 1 - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks(f"{wanted} blocks wanted, {pool.num_free} free")
    for _ in range(wanted):
        table.block_ids.append(pool.take())


WHICH = Bug(
    "60.4",
    one_block_ahead,
    "A classmate's grow: all answers are right, and still memory is lost now and then. What is wrong with it?",
    options={
        "new_block": (
            "Every chunk begins in a new block.",
            "Then each decode would take a block for its one token. Most decodes go into the block that is there.",
        ),
        "exact": (
            "It takes one block too many when the tokens fill the blocks exactly.",
            "Yes: n // block_size + 1. A chunk of 8 ends with a full block, and the table has an empty one behind it. "
            "(A decode that fills a block asks for none: its block is there.)",
        ),
        "leak": (
            "The blocks of finished requests do not come home.",
            "When all is done, no block is in use.",
        ),
        "reserve": (
            "It reserves the whole answer when a request comes in.",
            "Then the first step alone would take blocks. Go on: the tables grow, with each chunk and with the answer.",
        ),
    },
    right="exact",
)

EXERCISES = [SLOTS, GROW, RELEASE, WHICH]
