"""Notebook 95: a batch's tokens and "density" (95.1), slots without a token (95.2), slots written twice (95.3)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from minichunk.lab.checks import Exercise, Result, close, number
from minichunk.lab.checks.shared import plural
from minichunk.lab.watchdog import Raised


def _small_first(cases: list[tuple]) -> list[tuple]:
    return sorted(cases, key=lambda case: (len(case[0]), sum(case[0])))


# --- 95.1 ---------------------------------------------------------------------------------------------------------
def count_batch(chunks, cached):
    tokens = sum(chunks) + len(cached)
    prompts = sum(length**2 for length in chunks)
    decodes = sum(cached)
    if tokens == 0:
        return 0, None
    return tokens, (prompts + decodes) / max(prompts, decodes)


_rng = random.Random(95)
BATCHES = [
    ([512, 512], [1024] * 30),
    ([], []),
    ([8], []),
    ([], [5]),
    ([3], [2]),
    ([3], [9]),
    ([4, 2], [7]),
    *[([_rng.randint(4, 40) for _ in range(n)], [_rng.randint(1, 90) for _ in range(m)]) for n, m in ((2, 3), (1, 4), (3, 1))],
]  # fmt: skip


def check_count(fn: Callable) -> Result:
    rule = "tokens: all that the step computes. Ratio: (P + D) / max(P, D), and None for a batch of nothing."
    for chunks, cached in sorted(_small_first(BATCHES), key=lambda batch: batch == ([], [])):  # the empty one last
        wanted = count_batch(chunks, cached)
        case = f"chunks {_list(chunks)}, cached {_list(cached)}"
        p, d = sum(n * n for n in chunks), sum(cached)
        try:
            got = fn(chunks, cached)
        except Raised as raised:
            if not isinstance(raised.__cause__, ZeroDivisionError) or (chunks and cached):
                raise
            key = "over_the_smaller" if chunks or cached else "empty_batch"
            there = f"P is {p} and D is {d}: a division by 0"
            return COUNT.wrong(key, rule, case, f"ZeroDivisionError: {raised.__cause__}", wanted, there)
        nothing = "an empty batch has 0 tokens and no ratio"
        if not isinstance(got, tuple | list) or len(got) != 2:
            key = "empty_batch" if not chunks and not cached else "no_pair" if number(got) else "unknown"
            difference = nothing if key == "empty_batch" else "a pair is wanted: (tokens, ratio)"
            return COUNT.wrong(key, rule, case, got, wanted, difference)
        tokens, ratio = got
        if not chunks and not cached:
            if not close(tokens, 0) or ratio is not None:
                return COUNT.wrong("empty_batch", rule, case, got, wanted, nothing)
            continue
        if not close(tokens, wanted[0]):
            guesses = {
                "decodes_lost": [sum(chunks)],
                "chunks_counted": [len(chunks) + len(cached), len(chunks)],
                "one_chunk": [n + len(cached) for n in {max(chunks, default=0), chunks[0] if chunks else 0}],
                "history_counted": [sum(chunks) + d],
            }
            key = next((k for k, guess in guesses.items() if any(close(tokens, n) for n in guess)), "unknown")
            key = "swapped" if close(ratio, wanted[0]) and close(tokens, wanted[1]) else key
            parts = [*map(str, chunks), *[str(len(cached))] * bool(cached)]
            total = f"{' + '.join(parts)} = {wanted[0]}" if len(parts) > 1 else str(wanted[0])
            return COUNT.wrong(key, rule, case, got, wanted, f"tokens {tokens}, expected {total}")
        if not close(ratio, wanted[1]):
            pairs = {  # what was taken for P and D
                "tokens_for_pairs": (sum(chunks), len(cached)),
                "square_of_sum": (sum(chunks) ** 2, d),
                "cached_squared": (p, sum(n * n for n in cached)),
            }
            key = next((k for k, (x, y) in pairs.items() if close(ratio, (x + y) / max(x, y))), "unknown")
            key = "over_the_smaller" if min(p, d) and close(ratio, (p + d) / min(p, d)) else key
            key = "inverted" if close(ratio, max(p, d) / (p + d)) else key
            key = "none_too_often" if ratio is None else key
            difference = f"ratio {f'{ratio:.4g}' if number(ratio) else ratio}, expected ({p} + {d}) / {max(p, d)} = {wanted[1]:.4g}"
            return COUNT.wrong(key, rule, case, got, wanted, difference)
    return Result(True, "passed", COUNT.passed)


def _list(values: list, most: int = 6) -> str:
    same = len(set(values)) == 1 and len(values) > 3
    return f"[{values[0]}] × {len(values)}" if same else repr(values[:most])[:-1] + ", …" * (len(values) > most) + "]"


COUNT = Exercise(
    "95.1",
    count_batch,
    check_count,
    causes={
        "one_chunk": "you counted one chunk. Both are in the step: that is how 2 × 512 + 30 became 542.",
        "history_counted": "cached tokens are not computed again. A decode brings one token, however long its history.",
        "empty_batch": "nothing divided by nothing. Return (0, None) before you divide.",
        "tokens_for_pairs": "P and D are not token counts: P is the sum of the squared lengths, D that of the cached lengths.",
        "over_the_smaller": "divide by the larger of the two.",
        "inverted": "upside down: the sum stands above, the larger of the two below.",
        "square_of_sum": "square each chunk by itself, then add: a chunk's tokens do not look at another prompt's.",
        "cached_squared": "D is the sum of the cached lengths, not squared: one token looks at each of them.",
        "chunks_counted": "you counted the chunks. A chunk brings all of its tokens.",
        "decodes_lost": "each decode brings a token, too.",
        "swapped": "the other way round: (tokens, ratio).",
        "no_pair": "return both: (tokens, ratio).",
        "none_too_often": "one empty list is no empty batch: with the other one's sum the ratio is 1. None is for a batch of nothing.",
    },
    passed=f"{len(BATCHES)} batches, the empty one too.",
)


# --- 95.2 ---------------------------------------------------------------------------------------------------------
def fragmentation(lengths, block_size):
    held = sum(-(-length // block_size) * block_size for length in lengths)
    return 1 - sum(lengths) / held


LENGTHS = [([7], 2), ([4], 4), ([5], 4), ([16, 16], 16), ([17, 3], 16), ([1, 31], 16), ([8, 9, 10], 1), ([100, 250, 700], 256), ([40, 41, 42], 16)]  # fmt: skip


def check_fragmentation(fn: Callable) -> Result:
    rule = "Slots in the requests' blocks that hold no token, as a share of all slots in their blocks."
    for lengths, size in _small_first(LENGTHS):
        got, wanted = fn(lengths, size), fragmentation(lengths, size)
        if close(got, wanted):
            continue
        held = [-(-n // size) * size for n in lengths]
        unused = sum(held) - sum(lengths)
        extra, floored = sum((n // size + 1) * size for n in lengths), sum(n // size * size for n in lengths)
        guesses = {
            "full_share": sum(lengths) / sum(held),
            "blocks_not_slots": 1 - sum(lengths) / sum(h // size for h in held),
            "filled_part": sum(n % size for n in lengths) / sum(held),
            "shared_blocks": 1 - sum(lengths) / (-(-sum(lengths) // size) * size),
            "percent": 100 * wanted,
            "last_block_lost": 1 - sum(lengths) / floored if floored else None,
            "block_too_many": 1 - sum(lengths) / extra,
            "mean_of_shares": sum(1 - n / h for n, h in zip(lengths, held)) / len(lengths),
            "share_of_tokens": unused / sum(lengths),
            "slots_not_share": unused,
        }
        key = next((k for k, guess in guesses.items() if guess is not None and close(got, guess)), "unknown")
        blocks = " + ".join(str(h // size) for h in held) if len(held) > 1 else str(held[0] // size)
        one = blocks == "1"
        difference = f"{blocks} block{'s' * (not one)} hold{'s' * one} {plural(sum(held), 'slot')}, {sum(lengths)} with a token: {unused} / {sum(held)} = {wanted:.4f}"  # fmt: skip
        return FRAGMENTATION.wrong(key, rule, f"lengths {lengths}, block_size {size}", got, wanted, difference)
    return Result(True, "passed", FRAGMENTATION.passed)


FRAGMENTATION = Exercise(
    "95.2",
    fragmentation,
    check_fragmentation,
    causes={
        "last_block_lost": "you rounded down: a begun block is a whole block taken.",
        "block_too_many": "length // block_size + 1 takes a block too many where the length fits exactly.",
        "mean_of_shares": "you averaged the requests' shares. Add up slots first, then divide: long requests weigh more.",
        "share_of_tokens": "you divided by the tokens. Divide by the slots that are taken.",
        "slots_not_share": "that is a number of slots. Divide it by all slots that are taken.",
        "full_share": "that is the share with a token. 1 minus it is empty.",
        "blocks_not_slots": "those are blocks, not slots: times block_size.",
        "filled_part": "length % block_size counts the filled slots of the last block. The empty ones are -length % block_size.",
        "shared_blocks": "requests do not share a block: round each one's length up by itself.",
        "percent": "a share from 0 to 1 is wanted, not percent.",
    },
    passed="nine sets of lengths, full blocks among them.",
)


# --- 95.3 ---------------------------------------------------------------------------------------------------------
def written_twice(slots):
    return sorted(slot for slot, times in Counter(slots).items() if times > 1)


SLOTS = [
    [],
    [3],
    [3, 3],
    [3, 3, 3],
    [5, 1, 5],
    [9, 2, 9, 2],
    [35, 36, 37, 12, 13, 36],
    [4, 4, 7, 8, 4, 8],
    list(range(40)),
]


def check_written_twice(fn: Callable) -> Result:
    rule = "A sorted list of the slots that occur more than once, each named once."
    for (slots,) in _small_first([(s,) for s in SLOTS]):
        got, wanted = fn(slots), written_twice(slots)
        if isinstance(got, set | frozenset | dict) and wanted and set(got) == set(wanted):
            return TWICE.wrong(
                "no_list", rule, f"slots {slots}", got, wanted, f"a {type(got).__name__}, expected a list"
            )
        if _plain(got) == wanted:
            continue
        writings = [s for s in slots if slots.count(s) > 1]
        repeats = [i for i, s in enumerate(slots) if s in slots[:i]]
        neighbours = sorted({a for a, b in zip(slots, slots[1:]) if a == b})
        again = sorted(s for i, s in enumerate(slots) if s in slots[:i])
        guesses = {"neighbours_only": neighbours, "listed_again": again, "not_sorted": list(dict.fromkeys(writings)),
            "every_writing": sorted(writings), "places": repeats, "twice_only": [s for s in wanted if slots.count(s) == 2]}  # fmt: skip
        loose = {"every_writing": [writings], "places": [[i for i, s in enumerate(slots) if slots.count(s) > 1]]}
        if isinstance(got, bool | int):
            key = "yes_or_no"
        else:
            answers = [(k, guess) for k in guesses for guess in (guesses[k], *loose.get(k, []))]
            key = next((k for k, guess in answers if _plain(got) == guess), "unknown")
        missing = [s for s in wanted if s not in (_plain(got) or [])]
        difference = f"slot {missing[0]} is written {plural(slots.count(missing[0]), 'time')} and not in your answer" if missing else f"expected {wanted}"  # fmt: skip
        return TWICE.wrong(key, rule, f"slots {slots}", got, wanted, difference)
    return Result(True, "passed", TWICE.passed)


def _plain(value: Any) -> list | None:
    try:
        return list(value)
    except TypeError:
        return None


TWICE = Exercise(
    "95.3",
    written_twice,
    check_written_twice,
    causes={
        "neighbours_only": "you compared neighbours. Two requests' tokens lie far apart in the packed batch.",
        "listed_again": "a slot that is written three times is in your list twice. Name each slot once.",
        "yes_or_no": "which slots, please: a list.",
        "not_sorted": "the right slots, in the order of the batch. Sort them.",
        "no_list": "a set or a dict is no list: sorted(…) makes one of it.",
        "every_writing": "a slot stands in your list as often as it is written. Name each slot once.",
        "places": "those are places in the list. The slots that stand there are wanted.",
        "twice_only": "a slot that is written three times counts, too: more than once.",
    },
    passed="nine lists, a slot written three times among them.",
)

EXERCISES = [COUNT, FRAGMENTATION, TWICE]
