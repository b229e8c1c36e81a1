"""Notebook 20: steps under continuous batching (20.1), and whose chunks made a gap long (20.2)."""

from __future__ import annotations

import math
from typing import Any, Callable

from minichunk.lab.checks import Exercise, Result, close, number
from minichunk.record import RequestRecord, Run, StepRecord


# --- 20.1 ---------------------------------------------------------------------------------------------------------
def continuous_steps(out_lens, slots):
    waiting, running, steps = list(out_lens), [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


def static_steps(out_lens: list[int], slots: int) -> int:
    """Static batching: a group of `slots` requests runs until its longest is done, then the next group starts."""
    return sum(max(out_lens[i : i + slots]) for i in range(0, len(out_lens), slots))


def _late(out_lens, slots):
    """A free slot is noticed a step late."""
    ends = [-1] * slots
    for length in out_lens:
        first = ends.index(min(ends))
        ends[first] += length + 1
    return max(ends)


def _dealt(out_lens, slots):
    """Request i sits in slot i % slots, whoever is free first."""
    return max(sum(out_lens[i::slots]) for i in range(slots))


def _means(out_lens, slots):
    """What a mean in the place of a maximum gives: the work shared out evenly, or the groups' mean lengths."""
    groups = [out_lens[i : i + slots] for i in range(0, len(out_lens), slots)]
    per_slot, of_groups = sum(out_lens) / slots, sum(sum(g) / len(g) for g in groups)
    return [f(x) for x in (per_slot, of_groups) for f in (float, math.ceil, math.floor, round)]


QUEUES = [
    ([3], 1),
    ([2, 2], 1),
    ([3], 2),
    ([5, 1, 1], 2),
    ([4, 1, 1, 1], 2),
    ([1, 4, 2, 3], 2),
    ([6, 2, 2, 2, 5], 3),
    ([1, 1, 1, 9, 1, 1, 1, 9], 4),
    ([30, 4, 7, 2, 19, 5, 5, 12, 3, 40], 4),
]


def check_steps(fn: Callable) -> Result:
    answers = []
    for lens, slots in QUEUES:
        answers.append((lens, slots, fn(lens, slots), continuous_steps(lens, slots)))
        if fn.changed:
            rule = "out_lens belongs to the caller, who needs it again."
            there = "out_lens is not the same list after the call"
            return STEPS.wrong("emptied", rule, _queue(lens, slots), answers[-1][2], answers[-1][3], there)
    for lens, slots, got, wanted in answers:
        if number(got) and got == wanted:
            continue
        agrees = {
            "no_return": got is None,
            "static": all(a == static_steps(n, s) for n, s, a, _ in answers),
            "idle_slot": all(a == _late(n, s) for n, s, a, _ in answers),
            "dealt": all(a == _dealt(n, s) for n, s, a, _ in answers),
            "extra_step": all(number(a) and a == w + 1 for _, _, a, w in answers),
            "mean": all(number(a) and any(close(a, m) for m in _means(n, s)) for n, s, a, _ in answers),
        }
        key = next((k for k, yes in agrees.items() if yes), "unknown")
        least, most = max(math.ceil(sum(lens) / slots), max(lens)), static_steps(lens, slots)
        rule = (
            f"{sum(lens)} tokens on {slots} slot{'s' * (slots > 1)}, {max(lens)} of them in one answer, need at least {least} steps; "
            f"static batching takes {most}. A slot that becomes free takes the next request in the very next step."
        )
        return STEPS.wrong(key, rule, _queue(lens, slots), got, wanted, _timetable(lens, slots))
    return Result(True, "passed", STEPS.passed)


def _queue(lens: list[int], slots: int) -> str:
    return f"out_lens {lens}, slots {slots}"


def _timetable(lens: list[int], slots: int) -> str:
    """Which request sits in which slot, step by step."""
    rows, ends = [""] * slots, [0] * slots
    for n, length in enumerate(lens):
        first = ends.index(min(ends))
        rows[first] += chr(65 + n) * length
        ends[first] += length
    return "the slots, step by step, should read  " + "  |  ".join(row or "(empty)" for row in rows)


STEPS = Exercise(
    "20.1",
    continuous_steps,
    check_steps,
    causes={
        "static": "you wait until the whole group is done. That is static batching: the short ones' slots stand empty.",
        "idle_slot": "a slot that became free stands empty for a step. Refill before you count the step, not after it.",
        "mean": "you took a mean. The last slot to finish decides (a maximum), and work cannot be shared out evenly.",
        "emptied": "you changed the caller's list. Work on a copy: waiting = list(out_lens).",
        "dealt": "you dealt the requests out beforehand; the next one goes to whichever slot is free first.",
        "extra_step": "you counted a step in which nobody ran.",
        "no_return": "your function gave None. Is there no return, or one that is not reached?",
    },
    passed="nine queues right, each between the two bounds.",
    slow="requests never leave: each step must take one token from every request that runs",
    show=_queue,
)


# --- 20.2 ---------------------------------------------------------------------------------------------------------
def blame(run, request, gap):
    previous, end = run.requests[request].token_times[gap : gap + 2]
    parts = {}
    for step in run.steps:
        if previous <= step.start < end:
            until = min(step.end, end)
            for id, _start, length, _is_last, _is_decode in step.chunks:
                parts[id] = parts.get(id, 0) + (until - previous) * length / step.num_tokens
            previous = until
    return max(parts, key=parts.get), parts


def hand_run(steps: list[tuple[float, list[tuple]]], prompts: dict[str, int], pause: float = 0.0, early: float = 0.0) -> Run:  # fmt: skip
    """A Run from (end in seconds, [(id, start, length)]) steps and {id: prompt length}; each step starts `pause`
    seconds after the one before ended, and its tokens come `early` seconds before its end. A chunk that reaches its prompt's end, or lies after it, samples a token."""
    requests = {id: RequestRecord(id, [0] * n, [], 0.0) for id, n in prompts.items()}
    records, clock = [], -pause
    for index, (end, pieces) in enumerate(steps):
        chunks = []
        for id, start, length in pieces:
            is_last = start + length >= prompts[id]
            chunks.append((id, start, length, is_last, start >= prompts[id]))
            if is_last:
                requests[id].output_ids.append(0)
                requests[id].token_times.append(end - early)
        records.append(StepRecord(index, clock + pause, end, 16, chunks))
        clock = end
    return Run({"source": "MADE BY HAND", "num_blocks": 0}, requests, records)


def _cases() -> list[tuple[Run, str, int, str]]:
    """(run, request, gap, what happens), the simplest first."""
    plain = hand_run([(0.25, [("A", 0, 3)]), (0.5, [("A", 3, 1)]), (0.75, [("A", 4, 1)])], {"A": 3})
    beside = hand_run(  # C's long prompt is over before the gap in question; B's chunk lies in it
        [
            (1.0, [("C", 0, 14), ("A", 0, 2)]),
            (1.25, [("A", 2, 1), ("C", 14, 1)]),
            (2.25, [("A", 3, 1), ("C", 15, 1), ("B", 0, 6)]),
            (2.5, [("A", 4, 1), ("C", 16, 1), ("B", 6, 1)]),
        ],
        {"A": 2, "B": 6, "C": 14},
    )
    frozen, paused, early = (  # two whole steps without A: prompts alone, as prefill_first has them
        hand_run(
            [
                (0.5, [("A", 0, 4)]),
                (0.75, [("A", 4, 1)]),
                (2.75, [("B", 0, 12)]),
                (3.25, [("C", 0, 3)]),
                (3.5, [("A", 5, 1), ("B", 12, 1), ("C", 3, 1)]),
                (3.75, [("A", 6, 1), ("B", 13, 1), ("C", 4, 1)]),
            ],
            {"A": 4, "B": 12, "C": 3},
            pause,
            before,
        )
        for pause, before in ((0, 0), (1 / 32, 0), (0, 1 / 32))
    )
    return [
        (plain, "A", 1, "A runs alone"),
        (beside, "A", 1, "B's chunk rides in the step of A's token"),
        (frozen, "A", 2, "nothing but decodes run"),
        (frozen, "A", 1, "two steps run without A"),
        (paused, "A", 1, "a little time passes between two steps; it counts to the later one"),
        (early, "A", 1, "a token comes a little before its step's end, as in the engine"),
    ]


def _in_gap(run: Run, request: Any, gap: int) -> list[StepRecord]:
    before, end = run.requests[request].token_times[gap : gap + 2]
    return [step for step in run.steps if before <= step.start < end]


def _on_time(run: Run) -> bool:
    return all(t in {step.end for step in run.steps} for r in run.requests.values() for t in r.token_times)


BLAME_MISTAKES = {
    "step_end": [{"whole_end": True}],
    "equal_split": [{"equal": True}, {"equal": True, "whole_end": True}],
    "wrong_gap": [{"shift": -1}, {"shift": -1, "whole_end": True}],
}


def _blame_as(run, request, gap, *, whole_end=False, equal=False, shift=0) -> dict[Any, float]:
    """The parts as a known mistake gives them."""
    previous, end = run.requests[request].token_times[gap + shift : gap + shift + 2]
    parts: dict[Any, float] = {}
    for step in run.steps:
        if previous <= step.start < end:
            until = step.end if whole_end else min(step.end, end)
            for id, _start, length, *_ in step.chunks:
                share = 1 / len(step.chunks) if equal else length / step.num_tokens
                parts[id] = parts.get(id, 0) + (until - previous) * share
            previous = until
    return parts


def _key_of_blame(wrong: list[tuple[Run, Any, int, Any]]) -> str:
    """The cause that explains every wrong answer, (run, request, gap, answer) each."""

    def is_variant(run, request, gap, got, **mistake):
        parts = _blame_as(run, request, gap, **mistake)
        same = set(got[1]) == set(parts) and all(close(got[1][i], parts[i]) for i in parts)
        return same and got[0] == max(parts, key=parts.get)

    for key, mistakes in BLAME_MISTAKES.items():
        if any(all(is_variant(*case, **mistake) for case in wrong) for mistake in mistakes):
            return key
    # the other causes are recognised by their shape, where a step's end is its tokens' time
    wrong = [case for case in wrong if _on_time(case[0])] or wrong

    def only_emitting(run, request, gap, got):
        """The tokens of the gap's last step alone, however the learner scaled them."""
        last = {id: length for id, _start, length, *_ in _in_gap(run, request, gap)[-1].chunks}
        total = sum(got[1].values())
        return set(got[1]) == set(last) and all(close(got[1][i] / total, last[i] / sum(last.values())) for i in last)

    def previous_too(run, request, gap, got):
        steps = _in_gap(run, request, gap)
        ids = {c[0] for step in [run.steps[steps[0].index - 1], *steps] for c in step.chunks}
        return set(got[1]) == ids and sum(got[1].values()) > sum(s.duration for s in steps) * (1 + 1e-9)

    def longest_prompt(run, request, gap, got):
        return got[0] == max(run.requests, key=lambda id: len(run.requests[id].prompt_ids))

    def durations_only(run, request, gap, got):
        steps = _in_gap(run, request, gap)
        return close(sum(got[1].values()), sum(s.duration for s in steps)) and got[0] == blame(run, request, gap)[0]

    if all(durations_only(*case) for case in wrong):
        return "between_steps"
    if all(previous_too(*case) for case in wrong):
        return "off_by_one"
    if all(only_emitting(*case) for case in wrong) and any(len(_in_gap(*case[:3])) > 1 for case in wrong):
        return "skipped_steps"
    return "outside_gap" if all(longest_prompt(*case) for case in wrong) else "unknown"


def check_blame(fn: Callable) -> Result:
    answers = []
    for run, request, gap, _ in CASES:
        got = fn(run, request, gap)
        if not (isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], dict) and all(map(number, got[1].values()))):  # fmt: skip
            rule = (
                "Return two values: the culprit's id, and {id: seconds} with every request that had a chunk in the gap."
            )
            wanted = blame(run, request, gap)
            return BLAME.wrong(
                "no_return" if got is None else "unknown",
                rule,
                _describe(run, request, gap),
                got,
                wanted,
                f"got {type(got).__name__}",
            )
        wanted = blame(run, request, gap)
        ok = (
            got[0] == wanted[0]
            and set(got[1]) == set(wanted[1])
            and all(close(got[1][i], wanted[1][i]) for i in wanted[1])
        )
        answers.append((run, request, gap, got, ok))
    for (run, request, gap, got, ok), (*_, what) in zip(answers, CASES):
        if ok:
            continue
        culprit, parts = blame(run, request, gap)
        total, length = sum(got[1].values()), run.requests[request].tbt[gap]
        differs = next((i for i in [*parts, *got[1]] if not close(got[1].get(i, 0), parts.get(i, 0))), None)
        if differs is None:
            difference = (
                f"the culprit: you named {got[0]!r}, but the largest part is {culprit}'s, {parts[culprit]:.4f} s"
            )
        else:
            difference = (
                f"{differs}'s part: you wrote {got[1].get(differs, 0):.4f} s, expected {parts.get(differs, 0):.4f} s"
            )
            difference += f" (your parts sum to {total:.4f} s, the gap is {length:.4f} s)"
        rule = f"The parts must sum to the gap, and the culprit has the largest. Here {what}."
        show = lambda answer: f"culprit {answer[0]!r}, " + ", ".join(f"{i} {s:.4f}" for i, s in answer[1].items())  # noqa: E731
        key = _key_of_blame([a[:4] for a in answers if not a[4]])
        return BLAME.wrong(key, rule, _describe(run, request, gap), show(got), show((culprit, parts)), difference)
    return Result(True, "passed", BLAME.passed)


def _describe(run: Run, request: Any, gap: int) -> str:
    before, end = run.requests[request].token_times[gap : gap + 2]
    lines = [f"request {request}, gap {gap}: from {before} s to {end} s. The steps of the run:"]
    for step in run.steps:
        mark = "in the gap" if before <= step.start < end else ""
        chunks = ", ".join(f"{id}[{start}:{start + length}]" for id, start, length, *_ in step.chunks)
        lines.append(f"    step {step.index}  {step.start:<8g} to {step.end:<5g} {chunks:<28} {mark}".rstrip())
    return "\n".join(lines)


BLAME = Exercise(
    "20.2",
    blame,
    check_blame,
    causes={
        "skipped_steps": "you looked only at the step that brought the token. Steps that ran without the request made it wait too. "
        "Or you overwrote: parts[id] = … forgets the earlier steps, parts[id] += … adds.",
        "between_steps": "you summed the steps' durations. From one step's end to the next one's start the user waits, too.",
        "outside_gap": "you named the longest prompt of the run, not the one that ran inside this gap.",
        "off_by_one": "you counted the step that brought the token before. The gap's steps are those that began after it.",
        "step_end": "the last step's share ends at the gap's end, not at the step's own .end.",
        "equal_split": "you shared a step's time equally. Share by length: length / step.num_tokens.",
        "wrong_gap": "gap 0 lies between token 0 and token 1: from token_times[gap] to token_times[gap + 1].",
        "no_step": "no step was selected. A step may begin exactly at the gap's start (<=) and end exactly at its end.",
        "tuple": "a chunk is a tuple here: for id, start, length, is_last, is_decode in step.chunks.",
        "no_return": "your function gave None. Is there no return, or one that is not reached?",
    },
    passed="six gaps taken apart; every time the parts sum to the gap.",
    show=_describe,
    errors=(
        ("no_step", ValueError, "max()"),
        ("no_step", ZeroDivisionError, ""),
        ("tuple", AttributeError, "'tuple' object"),
        ("wrong_gap", ValueError, "not enough values to unpack (expected 2, got 1)"),
        ("wrong_gap", IndexError, ""),
    ),
)  # fmt: skip

CASES = _cases()
EXERCISES = [STEPS, BLAME]
