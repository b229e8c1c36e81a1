"""Who delayed my token? The gap between two tokens of a request, taken apart by cause.

What is measured is the time of each step; how a step's time is shared among its chunks is a rule, this one:
an ordinary step of decodes (the run's median step without a prompt chunk; without any, its shortest step) would have
taken its time anyway, and what a step took beyond that belongs to its prompt chunks, by tokens. In a step that the
request was left out of, all of it belongs to them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from minichunk.lab.colors import letters
from minichunk.record import Run, StepRecord

DECODES = "decodes"  # an ordinary step of decodes
LEFT_OUT = "left out"  # steps with no prompt chunk in which the request did not run
RECOMPUTE = "recompute"  # its own prompt chunks, after a preemption
BETWEEN = "between steps"


def gap_of(run: Run, request_id: Any, gap_index: int) -> tuple[float, float]:
    """(time of token gap_index, time of the next one) in seconds. Raises KeyError and IndexError with what there is."""
    if request_id not in run.requests:
        raise KeyError(f"no request {request_id!r} in this run; it has {list(run.requests)}")
    times = run.requests[request_id].token_times
    if not 0 <= gap_index < len(times) - 1:
        raise IndexError(f"request {request_id!r} has {len(times)} tokens, so gaps 0…{len(times) - 2}; got {gap_index}")
    return times[gap_index], times[gap_index + 1]


def ordinary(run: Run) -> float:
    """Seconds of an ordinary step of decodes in this run (see above); 0 without steps."""
    decodes = [s.duration for s in run.steps if s.kind == "decodes"]
    return median(decodes) if decodes else min((s.duration for s in run.steps), default=0.0)


def steps_of_gap(run: Run, request_id: Any, gap_index: int) -> list[StepRecord]:
    """The steps that began after the first token of the gap was there and before the second one was."""
    a, b = gap_of(run, request_id, gap_index)
    first = bisect_left(run.steps, a, key=lambda s: s.start)
    return run.steps[first : bisect_left(run.steps, b, key=lambda s: s.start)]


@dataclass(frozen=True, slots=True)
class Facts:
    """What every gap of a run needs."""

    ordinary: float
    letters: dict[Any, str]

    @classmethod
    def of(cls, run: Run) -> Facts:
        return cls(ordinary(run), letters(run))


def _shares(
    run: Run, request_id: Any, gap_index: int, facts: Facts | None = None
) -> list[tuple[str, tuple | None, int, float]]:
    """(cause, prompt chunk or None, step, seconds) for every part of the gap that lies in a step."""
    _, end = gap_of(run, request_id, gap_index)
    facts, out = facts or Facts.of(run), []
    for step in steps_of_gap(run, request_id, gap_index):
        seconds = min(step.end, end) - step.start
        prompts = [c for c in step.chunks if not c[4]]
        present = any(c[0] == request_id for c in step.chunks)
        if not prompts:
            out.append((DECODES if present else LEFT_OUT, None, step.index, seconds))
            continue
        anyway = min(seconds, facts.ordinary) if present else 0.0
        if anyway:
            out.append((DECODES, None, step.index, anyway))
        tokens = sum(c[2] for c in prompts)
        for chunk in prompts:
            cause = RECOMPUTE if chunk[0] == request_id else f"prompt {facts.letters[chunk[0]]}"
            out.append((cause, chunk, step.index, (seconds - anyway) * chunk[2] / tokens))
    return out


def blame(run: Run, request_id: Any, gap_index: int, facts: Facts | None = None) -> dict[str, float]:
    """Seconds of the gap after the request's token `gap_index`, by cause; they sum to the gap.

    facts: Facts.of(run), where the caller asks about many gaps.

    Causes: "decodes", "prompt K" (chunks of the request with letter K), "left out", "recompute", "between steps".
    """
    a, b = gap_of(run, request_id, gap_index)
    parts: Counter = Counter()
    for cause, _, _, seconds in _shares(run, request_id, gap_index, facts):
        parts[cause] += seconds
    parts[BETWEEN] = (b - a) - sum(parts.values())  # last, so that the sum is the gap and not nearly the gap
    return dict(parts)


def culprit(run: Run, request_id: Any, gap_index: int, facts: Facts | None = None) -> dict | None:
    """The prompt chunk that the largest part of the gap belongs to: request, step, start, length, seconds; or None."""
    shares = [s for s in _shares(run, request_id, gap_index, facts) if s[1]]
    if not shares:
        return None
    _, chunk, step, seconds = max(shares, key=lambda s: s[3])
    return {"request": chunk[0], "step": step, "start": chunk[1], "length": chunk[2], "seconds": seconds}


def slo_of(run: Run, slo: float | None = None) -> float:
    """What counts as a long gap: `slo` seconds, or else three times the run's median gap."""
    return slo if slo is not None else 3 * median(run.tbts) if run.tbts else float("inf")


def long_gaps(run: Run, slo: float | None = None, most: int = 500) -> list[tuple[Any, int, float]]:
    """(request id, gap index, seconds) of the gaps above slo_of(run, slo), longest first, `most` of them."""
    limit = slo_of(run, slo)
    found = [(r.id, k, gap) for r in run.requests.values() for k, gap in enumerate(r.tbt) if gap > limit]
    return sorted(found, key=lambda g: -g[2])[:most]


def explain(run: Run, request_id: Any, gap_index: int, facts: Facts | None = None) -> str:
    """One sentence: how long, who, and when."""
    facts = facts or Facts.of(run)
    names = facts.letters
    a, b = gap_of(run, request_id, gap_index)
    steps = steps_of_gap(run, request_id, gap_index)
    text = f"{names[request_id]} waited {milliseconds(b - a)} for its token {gap_index + 1}"
    if steps:
        text += f" (steps {steps[0].index}…{steps[-1].index})" if len(steps) > 1 else f" (step {steps[0].index})"
    who = culprit(run, request_id, gap_index, facts)
    if who:
        chunk = f"chunk {who['start']}…{who['start'] + who['length'] - 1} in step {who['step']}"
        owner = "its own recomputed" if who["request"] == request_id else f"{names[who['request']]}'s"
        text += f": {owner} {chunk}, {milliseconds(who['seconds'])}"
    parts = sorted(blame(run, request_id, gap_index, facts).items(), key=lambda p: -p[1])
    shown = [f"{cause} {milliseconds(s)}" for cause, s in parts[:4] if s >= 5e-5]
    if (rest := sum(s for _, s in parts[4:])) >= 5e-5:
        shown.append(f"others {milliseconds(rest)}")
    return f"{text}; in all {', '.join(shown)}"


def milliseconds(seconds: float) -> str:
    """83 ms, 4.2 ms."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
