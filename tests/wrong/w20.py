"""Wrong answers to 20.1 and 20.2, as learners write them: (exercise, key, function)."""

import os
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


def empties_the_list(out_lens, slots):
    running, steps = [], 0
    while out_lens or running:
        while out_lens and len(running) < slots:
            running.append(out_lens.pop(0))
        running = [n - 1 for n in running if n > 1]
        steps += 1
    return steps


def dealt_beforehand(out_lens, slots):
    work = [0] * slots
    for i, n in enumerate(out_lens):
        work[i % slots] += n
    return max(work)


def one_step_too_many(out_lens, slots):
    waiting, running, steps = list(out_lens), [], 0
    while True:
        running = [n - 1 for n in running if n > 1]
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        steps += 1
        if not running:
            return steps


def prints_instead(*args):
    print(*args, file=open(os.devnull, "w"))


def _blame(run, request, gap, whole_end=False, equal=False, shift=0):
    times = run.requests[request].token_times
    previous, end, parts = times[gap + shift], times[gap + shift + 1], {}
    for step in run.steps:
        if previous <= step.start < end:
            until = step.end if whole_end else min(step.end, end)
            for id, _start, length, *_ in step.chunks:
                share = 1 / len(step.chunks) if equal else length / step.num_tokens
                parts[id] = parts.get(id, 0) + share * (until - previous)
            previous = until
    return max(parts, key=parts.get), parts


def ends_with_the_step(run, request, gap):
    return _blame(run, request, gap, whole_end=True)


def shares_equally(run, request, gap):
    return _blame(run, request, gap, equal=True)


def shares_equally_to_the_steps_end(run, request, gap):
    return _blame(run, request, gap, whole_end=True, equal=True)


def gap_before(run, request, gap):
    return _blame(run, request, gap, shift=-1)


def gap_after(run, request, gap):
    return _blame(run, request, gap, shift=1)


def gap_after_unpacked(run, request, gap):
    before, end = run.requests[request].token_times[gap + 1 : gap + 3]
    return only_the_emitting_step(run, request, gap)


def overwrites(run, request, gap):
    previous, end = run.requests[request].token_times[gap : gap + 2]
    parts = {}
    for step in run.steps:
        if previous <= step.start < end:
            for id, _start, length, *_ in step.chunks:
                parts[id] = (min(step.end, end) - previous) * length / step.num_tokens
            previous = step.end
    return max(parts, key=parts.get), parts


def strictly_inside(run, request, gap):
    before, end = run.requests[request].token_times[gap : gap + 2]
    parts = _share([s for s in run.steps if before < s.start and s.end < end])
    return max(parts, key=parts.get), parts


def chunks_as_objects(run, request, gap):
    return max((chunk.length, chunk.id) for step in run.steps for chunk in step.chunks)


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
    ("20.1", "emptied", empties_the_list),
    ("20.1", "dealt", dealt_beforehand),
    ("20.1", "extra_step", one_step_too_many),
    ("20.1", "no_return", prints_instead),
    ("20.2", "step_end", ends_with_the_step),
    ("20.2", "equal_split", shares_equally),
    ("20.2", "equal_split", shares_equally_to_the_steps_end),
    ("20.2", "wrong_gap", gap_before),
    ("20.2", "wrong_gap", gap_after),
    ("20.2", "wrong_gap", gap_after_unpacked),
    ("20.2", "skipped_steps", overwrites),
    ("20.2", "no_step", strictly_inside),
    ("20.2", "tuple", chunks_as_objects),
    ("20.2", "no_return", prints_instead),
]
