"""Notebook 90: the share of requests that got what was promised (90.1), the settings that nothing beats (90.2)."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

from minichunk.lab.checks import Exercise, Result, close, number
from minichunk.lab.watchdog import Raised


# --- 90.1 ---------------------------------------------------------------------------------------------------------
def kept_promises(requests, ttft_slo, tbt_slo):
    kept = sum(ttft <= ttft_slo and all(gap <= tbt_slo for gap in gaps) for ttft, gaps in requests)
    return kept / len(requests)


REQUESTS = [  # (TTFT, gaps) in seconds; promises 1 s and 0.1 s
    [(0.5, [0.05, 0.05])],
    [(1.0, [0.1])],
    [(2.0, [0.05])],
    [(0.5, [0.05, 0.2])],
    [(0.5, [0.2, 0.05])],
    [(0.5, [0.05, 0.2, 0.06])],
    [(0.5, [0.08, 0.09, 0.07])],
    [(0.5, [0.05, 0.05, 0.05, 0.12])],
    [(0.5, [0.05] * 150 + [0.12] + [0.05] * 149)],
    [(0.5, [])],
    [(2.0, [0.3]), (0.2, [0.04])],
    [(0.2, [0.04]), (2.0, [0.05]), (0.5, [0.3])],
    [(0.2, [0.04, 0.15]), (0.9, [0.09]), (3.0, [0.02]), (0.1, [])],
]


def _percentile(gaps: list[float], percent: int) -> float:
    """Linear between neighbours, as numpy's; 0 of nothing."""
    at, ordered = (len(gaps) - 1) * percent / 100, sorted(gaps)
    below = int(at)
    return ordered[below] + (at - below) * (ordered[min(below + 1, len(gaps) - 1)] - ordered[below]) if gaps else 0.0


def _by(good: Callable[[float, list], bool]) -> Callable[[list], float]:
    return lambda requests: sum(good(*r) for r in requests) / len(requests)


def _percent_kept(percent: int) -> Callable[[list], float]:
    return _by(lambda t, g: t <= 1 and _percentile(g, percent) <= 0.1)


MISTAKES: list[tuple[str, Callable[[list], float]]] = [  # (key, what it answers)
    ("either", _by(lambda t, g: t <= 1 or all(x <= 0.1 for x in g))),
    ("mean_gap", _by(lambda t, g: t <= 1 and sum(g) / max(len(g), 1) <= 0.1)),
    ("summed", _by(lambda t, g: t <= 1 and sum(g) <= 0.1)),
    *[("percentile", _percent_kept(percent)) for percent in (50, 90, 95, 99)],
    *[("one_gap", _by(lambda t, g, n=n: t <= 1 and (not g or g[n] <= 0.1))) for n in (0, -1)],
    ("one_gap", _by(lambda t, g: t <= 1 and min(g, default=0.0) <= 0.1)),
    ("one_gap", _by(lambda t, g: t <= 1 and any(x <= 0.1 for x in g))),
    ("ttft_forgotten", _by(lambda t, g: all(x <= 0.1 for x in g))),
    ("gaps_forgotten", _by(lambda t, g: t <= 1)),
    ("one_token", _by(lambda t, g: t <= 1 and bool(g) and all(x <= 0.1 for x in g))),
    ("strict", _by(lambda t, g: t < 1 and all(x < 0.1 for x in g))),
    ("number_not_share", lambda q: kept_promises(q, 1.0, 0.1) * len(q)),
    ("percent", lambda q: 100 * kept_promises(q, 1.0, 0.1)),
    *[("rounded", lambda q, n=n: round(kept_promises(q, 1.0, 0.1), n)) for n in (1, 2, 3)],
    ("first_request", lambda q: kept_promises(q[:1], 1.0, 0.1) / len(q)),
    ("first_request", lambda q: kept_promises(q[:1], 1.0, 0.1)),
]


def check_kept(fn: Callable) -> Result:
    rule = "Kept is a request whose TTFT and whose every gap stay within the promises; the answer is their share."
    cases: list[tuple[list, Any]] = []
    for requests in REQUESTS:
        try:
            cases.append((requests, fn(requests, 1.0, 0.1)))
        except Raised as raised:
            error = raised.__cause__
            empty = any(not gaps for _, gaps in requests)  # the maximum, the mean or the first of nothing
            if not (empty and isinstance(error, ValueError | IndexError | ZeroDivisionError)):
                raise
            cases.append((requests, f"{type(error).__name__}: {error}"))
    for requests, got in cases:
        wanted = kept_promises(requests, 1.0, 0.1)
        if close(got, wanted):
            continue
        explains = [
            (sum(close(g, guess(q)) for q, g in cases), key) for key, guess in MISTAKES if close(got, guess(requests))
        ]
        key = "one_token" if isinstance(got, str) else max(explains, key=lambda e: e[0], default=(0, "unknown"))[1]
        words = [f"({t:g} s, {_say(gaps)}): {'kept' if kept_promises([(t, gaps)], 1.0, 0.1) else 'broken'}" for t, gaps in requests]  # fmt: skip
        said = ", ".join(f"({t}, {_say(gaps)})" for t, gaps in requests)
        return KEPT.wrong(key, rule, f"promises 1 s and 0.1 s, requests [{said}]", got, wanted, "; ".join(words))
    return Result(True, "passed", KEPT.passed)


def _say(gaps: list[float]) -> str:
    """Gaps on a line: a run of equal ones as "[0.05] × 150"."""
    if len(gaps) <= 6:
        return repr(gaps)
    runs = [(gap, len(list(equal))) for gap, equal in groupby(gaps)]
    return " + ".join(f"[{gap}]" + f" × {n}" * (n > 1) for gap, n in runs)


KEPT = Exercise(
    "90.1",
    kept_promises,
    check_kept,
    causes={
        "either": "one of the two is not enough: a request must keep both.",
        "mean_gap": "you averaged the gaps. One long pause breaks the promise, however short the others are.",
        "summed": "you added the gaps up. Each one is compared with the promise.",
        "percentile": "a percentile lets the worst gaps through. Every gap counts.",
        "one_gap": "one short gap is not enough: every gap must keep the promise (all, not any; not the first or the last alone).",
        "ttft_forgotten": "a short TTFT is promised, too.",
        "gaps_forgotten": "you looked at the first token alone. The gaps after it are promised, too.",
        "one_token": "an answer of one token has no gaps, so none of them is too long.",
        "strict": "a promise is kept at its limit: ≤, not <.",
        "number_not_share": "that is how many kept it. Divide by the number of requests.",
        "percent": "a share from 0 to 1 is wanted, not percent.",
        "rounded": "you rounded. Return the share as it is.",
        "first_request": "you returned after the first request: is the `return` inside the loop?",
    },
    passed=f"{len(REQUESTS)} lists of requests, one-token answers among them.",
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
        if isinstance(answer, set | frozenset) and got and sorted(got) == wanted:
            there = "a set in the place of a list"
            return FRONT.wrong("no_list", rule, f"points {points}", answer, wanted, there)
        if got == wanted:
            continue
        others = [[q for j, q in enumerate(points) if j != i] for i in range(len(points))]
        guesses = {
            "beats_itself": []  # with one point, or equal ones, everything is beaten
            if len(set(points)) == 1
            else sorted(p for p, rest in zip(points, others) if not any(q[0] <= p[0] and q[1] <= p[1] for q in rest)),
            "one_is_enough": sorted(
                {p for p in points if not any(q != p and (q[0] <= p[0] or q[1] <= p[1]) for q in points)}
            ),
            "dominated_kept": sorted(set(points)),
            "corners_alone": sorted({min(points), min(points, key=lambda p: (p[1], p[0]))}),
            "larger_is_better": sorted(
                {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
            ),
            "repeated": sorted(p for p in points if p in wanted),
            "tie_kept": sorted(p for p in set(points) if not any(q[0] < p[0] and q[1] < p[1] for q in points)),
            "not_sorted": got if got and sorted(got) == wanted else None,
        }
        order = ("beats_itself", "one_is_enough", "repeated", "not_sorted", "tie_kept", "corners_alone", "larger_is_better", "dominated_kept")  # fmt: skip
        key = next((k for k in order if got is not None and got == guesses[k]), "unknown")
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
        "not_sorted": "the right points. Sort them by P99 TBT, the shortest first.",
        "beats_itself": "you let a point beat itself, or its equal. Better in at least one is needed.",
        "one_is_enough": "a point is beaten when the other one is at least as good in both: and, not or.",
        "no_list": "a set has no order: sorted(…) makes a list of it.",
    },
    passed="eleven sets of points, ties and equal points among them.",
)

EXERCISES = [KEPT, FRONT]
