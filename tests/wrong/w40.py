"""Wrong answers to 40.1 and 40.2, as learners write them: (exercise, key, function)."""

import math


def prompts_first(running, waiting, budget, chunk_size):
    plan = []
    for request in [r for r in running if not r.is_decode] + list(waiting) + [r for r in running if r.is_decode]:
        length = min(request.num_left, chunk_size, budget)
        if length > 0:
            plan.append((request, length))
            budget -= length
    return plan


def decodes_not_charged(running, waiting, budget, chunk_size):
    plan = [(r, 1) for r in running if r.num_left == 1 and r.num_computed >= r.num_prompt_tokens]
    served = [r for r, _ in plan]
    for request in [*running, *waiting]:
        if request not in served and budget > 0:
            length = min(request.num_left, chunk_size, budget)
            plan.append((request, length))
            budget -= length
    return plan


def stops_at_a_prompt_that_does_not_fit(running, waiting, budget, chunk_size):
    plan = []
    for request in sorted(running, key=lambda r: not r.is_decode) + list(waiting):
        wanted = min(request.num_left, chunk_size)
        if wanted > budget:
            break
        plan.append((request, wanted))
        budget -= wanted
    return plan


def no_chunk_size(running, waiting, budget, chunk_size):
    plan = []
    for request in sorted(running, key=lambda r: not r.is_decode) + list(waiting):
        if length := min(request.num_left, budget):
            plan.append((request, length))
            budget -= length
    return plan


def shortest_first(running, waiting, budget, chunk_size):
    plan = []
    prompts = [r for r in running if not r.is_decode] + list(waiting)
    for request in [r for r in running if r.is_decode] + sorted(prompts, key=lambda r: r.num_left):
        if length := min(request.num_left, chunk_size, budget):
            plan.append((request, length))
            budget -= length
    return plan


def budget_never_falls(running, waiting, budget, chunk_size):
    plan, queue = [], [*running, *waiting]
    while budget > 0 and queue is not None:
        plan[:] = [(r, 1) for r in queue]
    return plan


def _largest(sizes):
    return max(sizes, default=None)


def decodes_are_free(sweep, slo_ms, decodes, prompt):
    budget = _largest(tokens for tokens, _p50, p95 in sweep if p95 <= slo_ms)
    return budget and (budget, math.ceil(prompt / budget))


def median_for_p95(sweep, slo_ms, decodes, prompt):
    budget = _largest(tokens for tokens, p50, _p95 in sweep if p50 <= slo_ms and tokens > decodes)
    return budget and (budget, math.ceil(prompt / (budget - decodes)))


def first_violating_size(sweep, slo_ms, decodes, prompt):
    for budget, _p50, p95 in sweep:
        if p95 > slo_ms:
            break
    return (budget, math.ceil(prompt / (budget - decodes))) if budget > decodes else None


WRONG = [
    ("40.1", "decode_missing", prompts_first),
    ("40.1", "over_budget", decodes_not_charged),
    ("40.1", "budget_left", stops_at_a_prompt_that_does_not_fit),
    ("40.1", "over_chunk_size", no_chunk_size),
    ("40.1", "overtaken", shortest_first),
    ("40.2", "decodes_free", decodes_are_free),
    ("40.2", "median_slo", median_for_p95),
    ("40.2", "one_too_far", first_violating_size),
]
