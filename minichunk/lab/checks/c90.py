"""Notebook 90: the share of requests that got what was promised (90.1), the settings that nothing beats (90.2)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from minichunk.lab.checks import Exercise, Result, close, number


# --- 90.1 ---------------------------------------------------------------------------------------------------------
def kept_promises(requests, ttft_slo, tbt_slo):
    kept = sum(ttft <= ttft_slo and all(gap <= tbt_slo for gap in gaps) for ttft, gaps in requests)
    return kept / len(requests)


REQUESTS = [  # (TTFT, gaps) in seconds; promises 1 s and 0.1 s
    [(0.5, [0.05, 0.05])],
    [(1.0, [0.1])],
    [(0.5, [])],
    [(2.0, [0.05])],
    [(0.5, [0.05, 0.2])],
    [(0.5, [0.05, 0.05, 0.05, 0.12])],
    [(2.0, [0.3]), (0.2, [0.04])],
    [(0.2, [0.04, 0.15]), (0.9, [0.09]), (3.0, [0.02]), (0.1, [])],
]


def check_kept(fn: Callable) -> Result:
    rule = "Kept is a request whose TTFT and whose every gap stay within the promises; the answer is their share."
    cases = [(requests, fn(requests, 1.0, 0.1)) for requests in REQUESTS]
    for requests, got in cases:
        wanted = kept_promises(requests, 1.0, 0.1)
        if close(got, wanted):
            continue
        mean = lambda gaps: sum(gaps) / len(gaps) if gaps else 0.0  # noqa: E731
        mistakes: dict[str, Callable[[float, list], bool]] = {
            "either": lambda t, g: t <= 1 or all(x <= 0.1 for x in g),
            "mean_gap": lambda t, g: t <= 1 and mean(g) <= 0.1,
            "ttft_forgotten": lambda t, g: all(x <= 0.1 for x in g),
            "gaps_forgotten": lambda t, g: t <= 1,
            "one_token": lambda t, g: t <= 1 and bool(g) and all(x <= 0.1 for x in g),
            "strict": lambda t, g: t < 1 and all(x < 0.1 for x in g),
        }
        explains = {
            key: sum(close(g, sum(good(*r) for r in q) / len(q)) for q, g in cases)
            for key, good in mistakes.items()
            if close(got, sum(good(*r) for r in requests) / len(requests))
        }
        key = max(explains, key=explains.get, default="unknown")
        if close(got, wanted * len(requests)) and len(requests) > 1:
            key = "number_not_share"
        words = [f"({t:g} s, {gaps}): {'kept' if kept_promises([(t, gaps)], 1.0, 0.1) else 'broken'}" for t, gaps in requests]  # fmt: skip
        return KEPT.wrong(key, rule, f"promises 1 s and 0.1 s, requests {requests}", got, wanted, "; ".join(words))
    return Result(True, "passed", KEPT.passed)


KEPT = Exercise(
    "90.1",
    kept_promises,
    check_kept,
    causes={
        "either": "one of the two is not enough: a request must keep both.",
        "mean_gap": "you averaged the gaps. One long pause breaks the promise, however short the others are.",
        "ttft_forgotten": "a short TTFT is promised, too.",
        "gaps_forgotten": "you looked at the first token alone. The gaps after it are promised, too.",
        "one_token": "an answer of one token has no gaps, so none of them is too long.",
        "strict": "a promise is kept at its limit: ≤, not <.",
        "number_not_share": "that is how many kept it. Divide by the number of requests.",
    },
    passed="eight lists of requests, one-token answers among them.",
)


# --- 90.2 ---------------------------------------------------------------------------------------------------------
def front(points):
    found = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


_rng = random.Random(90)
POINTS = [
    [(1, 1)],
    [(1, 2), (2, 1)],
    [(1, 1), (2, 2)],
    [(1, 2), (2, 2)],
    [(1, 1), (1, 1)],
    [(1, 3), (2, 2), (3, 1)],
    [(4, 1), (1, 4), (2, 2), (3, 3)],
    *[[(_rng.randint(1, 9), _rng.randint(1, 9)) for _ in range(n)] for n in (4, 6, 9, 9)],
]


def check_front(fn: Callable) -> Result:
    rule = "Kept are the points that no other is at least as good as in both and better in one; sorted, each once."
    for points in POINTS:
        answer, wanted = fn(points), front(points)
        got = _points(answer)
        if got == wanted:
            continue
        guesses = {
            "dominated_kept": sorted(set(points)),
            "corners_alone": sorted({min(points), min(points, key=lambda p: (p[1], p[0]))}),
            "larger_is_better": sorted(
                {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
            ),
            "repeated": sorted(p for p in points if p in wanted),
            "tie_kept": sorted(p for p in set(points) if not any(q[0] < p[0] and q[1] < p[1] for q in points)),
            "not_sorted": [p for p in dict.fromkeys(points) if p in wanted],
        }
        order = ("repeated", "not_sorted", "tie_kept", "corners_alone", "larger_is_better", "dominated_kept")
        key = next((k for k in order if got == guesses[k]), "unknown")
        extra = [p for p in got or [] if p not in wanted]
        missing = [p for p in wanted if p not in (got or [])]
        if extra:
            better = next((p for p in wanted if p[0] <= extra[0][0] and p[1] <= extra[0][1]), None)
            difference = f"{extra[0]} is beaten by {better}"
        else:
            difference = f"{missing[0]} is beaten by none and missing" if missing else f"the order, or a point twice: expected {wanted}"  # fmt: skip
        return FRONT.wrong(key, rule, f"points {points}", answer, wanted, difference)
    return Result(True, "passed", FRONT.passed)


def _points(value: Any) -> list | None:
    """The answer as a list of pairs of numbers, None where it is something else."""
    try:
        points = [tuple(p) for p in value]
    except TypeError:
        return None
    return points if all(len(p) == 2 and all(map(number, p)) for p in points) else None


FRONT = Exercise(
    "90.2",
    front,
    check_front,
    causes={
        "dominated_kept": "you kept points that another one beats in both.",
        "corners_alone": "the best in each wait is not all: what lies between them and is beaten by none counts, too.",
        "larger_is_better": "both are waits: smaller is better.",
        "repeated": "equal points stand once.",
        "tie_kept": "a point that is equal in one wait and worse in the other is beaten.",
        "not_sorted": "the right points. Sort them.",
    },
    passed="eleven sets of points, ties and equal points among them.",
)

EXERCISES = [KEPT, FRONT]
