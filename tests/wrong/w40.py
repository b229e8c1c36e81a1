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


def one_token_left_for_a_decode(running, waiting, budget, chunk_size):
    decodes = [r for r in running if r.num_left == 1]
    plan = [(r, 1) for r in decodes]
    budget -= len(plan)
    for request in [r for r in running if r not in decodes] + waiting:
        if length := min(request.num_left, chunk_size, budget):
            plan.append((request, length))
            budget -= length
    return plan


def _plan(running, waiting, budget, chunk_size, left, first=None, zero=False, twice=False, most=10**9):
    decodes = [r for r in running if r.is_decode]
    plan = [(r, 1) for r in decodes]
    budget -= len(plan)
    prompts = [r for r in running if twice or not r.is_decode] + waiting
    for request in prompts[:first]:
        length = min(left(request), chunk_size, budget, most)
        if length > 0 or zero:
            plan.append((request, length))
            budget -= length
    return plan


def _num_left(request):
    return request.num_left


def prompt_minus_computed(*state):
    return _plan(*state, lambda r: r.num_prompt_tokens - r.num_computed)


def only_the_first_prompt(*state):
    return _plan(*state, _num_left, first=1)


def one_token_each(*state):
    return _plan(*state, _num_left, most=1)


def two_tokens_each(*state):
    return _plan(*state, _num_left, most=2)


def keeps_empty_chunks(*state):
    return _plan(*state, _num_left, zero=True)


def decodes_twice(*state):
    return _plan(*state, _num_left, twice=True)


def ids_for_requests(*state):
    return [(request.id, length) for request, length in _plan(*state, _num_left)]


def empties_waiting(running, waiting, budget, chunk_size):
    plan = _plan(running, waiting, budget, chunk_size, _num_left)
    while waiting:
        waiting.pop(0)
    return plan


def forgets_to_return(*state):
    _plan(*state, _num_left)


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


def stops_at_the_first_failure(sweep, slo_ms, decodes, prompt):
    best = None
    for tokens, _p50, p95 in sweep:
        if p95 > slo_ms:
            break
        if tokens > decodes:
            best = tokens, math.ceil(prompt / (tokens - decodes))
    return best


def rounds_down(sweep, slo_ms, decodes, prompt):
    budget = _largest(tokens for tokens, _p50, p95 in sweep if p95 <= slo_ms and tokens > decodes)
    return budget and (budget, prompt // (budget - decodes))


def no_room_beside_the_decodes(sweep, slo_ms, decodes, prompt):
    budget = _largest(tokens for tokens, _p50, p95 in sweep if p95 <= slo_ms)
    return budget and (budget, math.ceil(prompt / (budget - decodes)))


def largest_of_none(sweep, slo_ms, decodes, prompt):
    budget = max(tokens for tokens, _p50, p95 in sweep if p95 <= slo_ms and tokens > decodes)
    return budget, math.ceil(prompt / (budget - decodes))


WRONG = [
    ("40.1", "decode_missing", prompts_first),
    ("40.1", "over_budget", decodes_not_charged),
    ("40.1", "not_cut", stops_at_a_prompt_that_does_not_fit),
    ("40.1", "one_left", one_token_left_for_a_decode),
    ("40.1", "answer_left_out", prompt_minus_computed),
    ("40.1", "one_prompt", only_the_first_prompt),
    ("40.1", "one_token", one_token_each),
    ("40.1", "budget_left", two_tokens_each),
    ("40.1", "zero_length", keeps_empty_chunks),
    ("40.1", "decode_twice", decodes_twice),
    ("40.1", "not_the_request", ids_for_requests),
    ("40.1", "changed_lists", empties_waiting),
    ("40.1", "no_return", forgets_to_return),
    ("40.1", "over_chunk_size", no_chunk_size),
    ("40.1", "overtaken", shortest_first),
    ("40.2", "decodes_free", decodes_are_free),
    ("40.2", "median_slo", median_for_p95),
    ("40.2", "one_too_far", first_violating_size),
    ("40.2", "stopped_early", stops_at_the_first_failure),
    ("40.2", "rounded_down", rounds_down),
    ("40.2", "no_room", no_room_beside_the_decodes),
    ("40.2", "no_size", largest_of_none),
]
