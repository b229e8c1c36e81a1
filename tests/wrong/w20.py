"""Wrong answers to 20.1 and 20.2, as learners write them: (exercise, key, function)."""

import statistics


def waits_for_the_group(out_lens, slots):
    lens, steps = list(out_lens), 0
    while lens:
        group, lens = lens[:slots], lens[slots:]
        while max(group) > 0:
            group = [n - 1 for n in group]
            steps += 1
    return steps


def refills_a_step_late(out_lens, slots):
    waiting, seats, steps = list(out_lens), [None] * slots, 0
    for i in range(slots):
        seats[i] = waiting.pop(0) if waiting else None
    while waiting or any(s is not None for s in seats):
        steps += 1
        for i, left in enumerate(seats):
            if left is None:  # found empty: filled now, works from the next step on
                seats[i] = waiting.pop(0) if waiting else None
            else:
                seats[i] = left - 1 if left > 1 else None
    return steps


def mean_of_the_slots(out_lens, slots):
    ends = [0] * slots
    for n in out_lens:
        ends[ends.index(min(ends))] += n
    return round(statistics.mean(ends))


def mean_of_the_groups(out_lens, slots):
    groups = [out_lens[i : i + slots] for i in range(0, len(out_lens), slots)]
    return sum(statistics.mean(g) for g in groups)


def _share(steps):
    parts = {}
    for step in steps:
        for id, _start, length, _last, _decode in step.chunks:
            parts[id] = parts.get(id, 0) + step.duration * length / step.num_tokens
    return parts


def only_the_emitting_step(run, request, gap):
    end = run.requests[request].token_times[gap + 1]
    parts = _share([s for s in run.steps if s.start < end <= s.end])
    return max(parts, key=parts.get), parts


def emitting_step_scaled(run, request, gap):
    length = run.requests[request].tbt[gap]
    culprit, parts = only_the_emitting_step(run, request, gap)
    return culprit, {id: part * length / sum(parts.values()) for id, part in parts.items()}


def sums_durations(run, request, gap):
    before, end = run.requests[request].token_times[gap : gap + 2]
    parts = _share([s for s in run.steps if before <= s.start < end])
    return max(parts, key=parts.get), parts


def longest_prompt_of_the_run(run, request, gap):
    previous, end = run.requests[request].token_times[gap : gap + 2]
    parts = {}
    for step in run.steps:
        if previous <= step.start < end:
            for id, _start, length, *_ in step.chunks:
                parts[id] = parts.get(id, 0) + (step.end - previous) * length / step.num_tokens
            previous = step.end
    return max(run.requests.values(), key=lambda r: len(r.prompt_ids)).id, parts


def previous_step_too(run, request, gap):
    before, end = run.requests[request].token_times[gap : gap + 2]
    parts = _share([s for s in run.steps if before <= s.end <= end])
    return max(parts, key=parts.get), parts


WRONG = [
    ("20.1", "static", waits_for_the_group),
    ("20.1", "idle_slot", refills_a_step_late),
    ("20.1", "mean", mean_of_the_slots),
    ("20.1", "mean", mean_of_the_groups),
    ("20.2", "skipped_steps", only_the_emitting_step),
    ("20.2", "skipped_steps", emitting_step_scaled),
    ("20.2", "between_steps", sums_durations),
    ("20.2", "outside_gap", longest_prompt_of_the_run),
    ("20.2", "off_by_one", previous_step_too),
]
