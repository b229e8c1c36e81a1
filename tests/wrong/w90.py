"""Wrong answers to 90.1 and 90.2, as learners write them: (exercise, key, function)."""


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
    ("90.2", "not_sorted", as_given),
]
