"""Notebook 00: is this step mixed (00.1), and how long did the user wait (00.2)."""

from __future__ import annotations

from typing import Callable, NamedTuple

from minichunk.lab.checks import Exercise, Result, close


class Piece(NamedTuple):
    """One request's share of a step: `length` tokens from position `start`; its prompt ends at num_prompt_tokens."""

    id: str
    num_prompt_tokens: int
    start: int
    length: int


# --- 00.1 ---------------------------------------------------------------------------------------------------------
def is_mixed(chunks):
    decodes = [chunk.start >= chunk.num_prompt_tokens for chunk in chunks]
    return any(decodes) and not all(decodes)


# (chunks, mixed?, what it is, key when the answer is wrong here), the plainest first
STEPS = [
    ([Piece("A", 8, 0, 8)], False, "one prompt, no decode", "prompt_only"),
    ([Piece("A", 8, 9, 1), Piece("B", 5, 7, 1)], False, "two decodes, no prompt", "two_decodes"),
    ([Piece("A", 8, 10, 1), Piece("B", 20, 0, 12)], True, "a decode and a prompt chunk", "unknown"),
    ([Piece("B", 20, 19, 1), Piece("C", 3, 0, 3)], False, "two prompt chunks, one of a single token", "one_token_prompt_chunk"),
    ([Piece("A", 8, 11, 1), Piece("B", 20, 19, 1)], True, "a decode and a prompt's last token", "one_token_prompt_chunk"),
]  # fmt: skip


def check_mixed(fn: Callable) -> Result:
    for chunks, wanted, what, key in STEPS:
        got = fn(chunks)
        if bool(got) != wanted or got not in (True, False):
            case = "[" + ", ".join(f"({c.id!r}, prompt of {c.num_prompt_tokens}, start {c.start}, length {c.length})" for c in chunks) + "]"  # fmt: skip
            kinds = " and ".join(
                f"{c.id} is a {'decode' if c.start >= c.num_prompt_tokens else 'prompt chunk'} (start {c.start} "
                f"{'≥' if c.start >= c.num_prompt_tokens else '<'} {c.num_prompt_tokens})"
                for c in chunks
            )
            rule = f"A step is mixed when it holds a decode and a prompt chunk. This one holds {what}."
            return MIXED.wrong("unknown" if got is None else key, rule, case, got, wanted, kinds)
    return Result(True, "passed", MIXED.passed)


MIXED = Exercise(
    "00.1",
    is_mixed,
    check_mixed,
    causes={
        "prompt_only": "a prompt alone was enough for you. Both kinds must be there: one request past its prompt and one that is not.",
        "two_decodes": "several tokens or several requests do not make a prompt: each decode brings one token of its own.",
        "one_token_prompt_chunk": "you went by the length. A prompt's last chunk can be 1 token long; where it starts says what it is.",
    },
    passed="all five steps right, the prompt chunk of one token included.",
)  # fmt: skip


# --- 00.2 ---------------------------------------------------------------------------------------------------------
def ttft_and_tbt(arrival, scheduled, times):
    ttft = times[0] - arrival
    if len(times) == 1:
        return ttft, None
    return ttft, (times[-1] - times[0]) / (len(times) - 1)


# arrival, scheduled, times: values that are exact in binary
REQUESTS = [
    (1.0, 1.5, [2.0]),
    (2.0, 2.5, [3.0, 3.5]),
    (0.0, 0.25, [1.0, 1.25, 1.5, 2.5]),
    (4.0, 4.0, [4.5, 4.75, 5.0, 5.25, 8.5]),
]


def _key_of_wait(arrival, scheduled, times, ttft, tbt) -> str:
    n = len(times)
    if close(ttft, times[0] - scheduled) and not close(ttft, times[0] - arrival):
        return "queue_lost"
    if tbt is None:
        return "unknown"
    if close(tbt, (times[-1] - arrival) / n) or close(tbt, (times[-1] - scheduled) / n) or (n > 1 and close(tbt, (times[-1] - arrival) / (n - 1))):  # fmt: skip
        return "gap_has_ttft"
    return "n_minus_1" if close(tbt, (times[-1] - times[0]) / n) else "unknown"


def check_wait(fn: Callable) -> Result:
    # the one-token request comes last: it is the special case, and says least about a wrong formula
    for arrival, scheduled, times in REQUESTS[1:] + REQUESTS[:1]:
        got, wanted = fn(arrival, scheduled, times), ttft_and_tbt(arrival, scheduled, times)
        case = f"arrival {arrival}, scheduled {scheduled}, times {times}"
        if not isinstance(got, tuple | list) or len(got) != 2:
            return WAIT.wrong("unknown", "Return two values: (TTFT, mean TBT).", case, got, wanted, f"got {got!r}")
        key = _key_of_wait(arrival, scheduled, times, *got)
        if not close(got[0], wanted[0]):
            difference = f"TTFT: you wrote {got[0]}, expected {wanted[0]} = {times[0]} − {arrival}"
            return WAIT.wrong(
                key, "TTFT is the user's wait: from arrival to the first token.", case, got, wanted, difference
            )
        if wanted[1] is None and got[1] is not None:
            rule = "One token has no gap after it: there is no TBT, so return None, not a number."
            return WAIT.wrong(key, rule, case, got, wanted, f"TBT: you wrote {got[1]}, expected None")
        if wanted[1] is not None and not close(got[1], wanted[1]):
            gaps = " + ".join(str(b - a) for a, b in zip(times, times[1:]))
            difference = f"TBT: you wrote {got[1]}, expected {wanted[1]} = ({gaps}) / {len(times) - 1}"
            rule = "n tokens have n − 1 gaps between them; the mean TBT is the mean of those."
            return WAIT.wrong(key, rule, case, got, wanted, difference)
    return Result(True, "passed", WAIT.passed)


WAIT = Exercise(
    "00.2",
    ttft_and_tbt,
    check_wait,
    causes={
        "queue_lost": "you started the clock when the request was scheduled. The user has been waiting since it arrived.",
        "gap_has_ttft": "the wait for the first token is among your gaps. It is TTFT, and it would hide in the mean.",
        "n_minus_1": "you divided by the number of tokens. n tokens have n − 1 gaps.",
    },
    passed="waits and gaps right, the one-token request included.",
)

EXERCISES = [MIXED, WAIT]
