"""Wrong answers to 90.1 and 90.2, as learners write them: (exercise, key, function)."""

import numpy as np


def either(requests, ttft_slo, tbt_slo):
    return sum(t <= ttft_slo or all(g <= tbt_slo for g in gaps) for t, gaps in requests) / len(requests)


def average_gap(requests, ttft_slo, tbt_slo):
    kept = [t <= ttft_slo and sum(gaps) / max(len(gaps), 1) <= tbt_slo for t, gaps in requests]
    return sum(kept) / len(kept)


def gaps_only(requests, ttft_slo, tbt_slo):
    return sum(all(g <= tbt_slo for g in gaps) for _, gaps in requests) / len(requests)


def first_token_only(requests, ttft_slo, tbt_slo):
    return sum(t <= ttft_slo for t, _ in requests) / len(requests)


def no_gaps_is_broken(requests, ttft_slo, tbt_slo):
    kept = [t <= ttft_slo and max(gaps, default=tbt_slo + 1) <= tbt_slo for t, gaps in requests]
    return sum(kept) / len(kept)


def below_the_limit(requests, ttft_slo, tbt_slo):
    return sum(t < ttft_slo and all(g < tbt_slo for g in gaps) for t, gaps in requests) / len(requests)


def how_many(requests, ttft_slo, tbt_slo):
    return sum(t <= ttft_slo and all(g <= tbt_slo for g in gaps) for t, gaps in requests)


def _share(requests, good):
    return sum(good(t, gaps) for t, gaps in requests) / len(requests)


def sum_of_gaps(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and sum(gaps) <= tbt_slo)


def last_gap(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and (not gaps or gaps[-1] <= tbt_slo))


def first_gap(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and (not gaps or gaps[0] <= tbt_slo))


def any_gap(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and any(x <= tbt_slo for x in gaps))


def p99(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and (not gaps or np.percentile(gaps, 99) <= tbt_slo))


def median(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and (not gaps or np.median(gaps) <= tbt_slo))


def sorts_the_callers(requests, ttft_slo, tbt_slo):
    kept = 0
    for ttft, gaps in requests:
        gaps.sort()
        kept += ttft <= ttft_slo and (not gaps or gaps[-1] <= tbt_slo)
    return kept / len(requests)


def two_digits(requests, ttft_slo, tbt_slo):
    return round(how_many(requests, ttft_slo, tbt_slo) / len(requests), 2)


def in_percent(requests, ttft_slo, tbt_slo):
    return 100 * how_many(requests, ttft_slo, tbt_slo) / len(requests)


def return_inside(requests, ttft_slo, tbt_slo):
    kept = 0
    for ttft, gaps in requests:
        if ttft <= ttft_slo and all(gap <= tbt_slo for gap in gaps):
            kept += 1
        return kept / len(requests)


def yes_or_no(requests, ttft_slo, tbt_slo):
    for ttft, gaps in requests:
        return float(ttft <= ttft_slo and all(gap <= tbt_slo for gap in gaps))


def longest_of_nothing(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and max(gaps) <= tbt_slo)


def p99_of_nothing(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and np.percentile(gaps, 100) <= tbt_slo)


def mean_of_nothing(requests, ttft_slo, tbt_slo):
    return _share(requests, lambda t, gaps: t <= ttft_slo and sum(g > tbt_slo for g in gaps) / len(gaps) == 0)


def everything(points):
    return sorted(set(points))


def best_of_each(points):
    return sorted({min(points), min(points, key=lambda p: (p[1], p[0]))})


def larger(points):
    return sorted({p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)})


def not_beaten(p, points):
    return not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)


def with_repeats(points):
    return sorted(p for p in points if not_beaten(p, points))


def beaten_in_both_only(points):
    return sorted({p for p in points if not any(q[0] < p[0] and q[1] < p[1] for q in points)})


def by_ttft(points):
    return sorted({p for p in points if not_beaten(p, points)}, key=lambda p: p[1])


def reversed_(points):
    return sorted({p for p in points if not_beaten(p, points)}, reverse=True)


def beats_itself(points):
    return sorted({p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] for q in points)})


def beats_its_equal(points):
    rest = [points[:i] + points[i + 1 :] for i in range(len(points))]
    return sorted(p for p, qs in zip(points, rest) if not any(q[0] <= p[0] and q[1] <= p[1] for q in qs))


def or_for_and(points):
    return sorted({p for p in points if not any(q != p and (q[0] <= p[0] or q[1] <= p[1]) for q in points)})


def or_for_and_strict(points):
    return sorted({p for p in points if not any(q[0] < p[0] or q[1] < p[1] for q in points)})


def as_set(points):
    return {p for p in points if not_beaten(p, points)}


def sorts_points(points):
    points.sort()
    return sorted({p for p in points if not_beaten(p, points)})


def as_given(points):
    return [p for p in dict.fromkeys(points) if not_beaten(p, points)]


WRONG = [
    ("90.1", "either", either),
    ("90.1", "mean_gap", average_gap),
    ("90.1", "ttft_forgotten", gaps_only),
    ("90.1", "gaps_forgotten", first_token_only),
    ("90.1", "one_token", no_gaps_is_broken),
    ("90.1", "strict", below_the_limit),
    ("90.1", "number_not_share", how_many),
    ("90.2", "dominated_kept", everything),
    ("90.2", "corners_alone", best_of_each),
    ("90.2", "larger_is_better", larger),
    ("90.2", "repeated", with_repeats),
    ("90.2", "tie_kept", beaten_in_both_only),
    ("90.1", "summed", sum_of_gaps),
    ("90.1", "one_gap", last_gap),
    ("90.1", "one_gap", first_gap),
    ("90.1", "one_gap", any_gap),
    ("90.1", "percentile", p99),
    ("90.1", "percentile", median),
    ("90.1", "changed_inputs", sorts_the_callers),
    ("90.1", "rounded", two_digits),
    ("90.1", "percent", in_percent),
    ("90.1", "first_request", return_inside),
    ("90.1", "first_request", yes_or_no),
    ("90.1", "one_token", longest_of_nothing),
    ("90.1", "one_token", p99_of_nothing),
    ("90.1", "one_token", mean_of_nothing),
    ("90.2", "not_sorted", as_given),
    ("90.2", "not_sorted", by_ttft),
    ("90.2", "not_sorted", reversed_),
    ("90.2", "beats_itself", beats_itself),
    ("90.2", "beats_itself", beats_its_equal),
    ("90.2", "one_is_enough", or_for_and),
    ("90.2", "one_is_enough", or_for_and_strict),
    ("90.2", "no_list", as_set),
    ("90.2", "changed_inputs", sorts_points),
]
