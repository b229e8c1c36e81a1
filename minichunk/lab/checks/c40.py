"""Notebook 40: the learner's scheduler (40.1), the largest budget that keeps a promise (40.2), which bug? (40.3)."""

from __future__ import annotations

import math
import random
from typing import Any, Callable

from minichunk.blocks import BlockPool
from minichunk.lab.checks import Bug, Exercise, Result, number
from minichunk.lab.watchdog import Raised, TooSlow
from minichunk.request import Request, SamplingParams
from minichunk.scheduler import NoProgress, PlanRefused, RequestView, Scheduler


# --- 40.1 ---------------------------------------------------------------------------------------------------------
def plan_step(running, waiting, budget, chunk_size):
    decodes = [r for r in running if r.is_decode]
    unfinished = [r for r in running if not r.is_decode]
    plan = []
    for request in decodes + unfinished + list(waiting):
        length = min(request.num_left, chunk_size, budget)
        if length == 0:
            break
        plan.append((request, length))
        budget -= length
    return plan


def queues(rng: random.Random, size: int) -> tuple[list[RequestView], list[RequestView], int, int]:
    """running, waiting, budget, chunk_size: a state that the engine can be in, with at most `size` requests a queue."""
    running, waiting = [], []
    for n in range(rng.randint(0, size)):
        prompt = rng.randint(1, 3 * size)
        kind = rng.choice(["decode", "decode", "unfinished", "recompute"])
        if kind == "decode":
            tokens = prompt + rng.randint(1, size)
            computed = tokens - 1
        else:
            tokens = prompt if kind == "unfinished" else prompt + rng.randint(1, size)
            computed = rng.choice([prompt - 1, rng.randint(0, prompt - 1)])  # a prompt with 1 token left is a trap
        running.append(RequestView(chr(65 + n), tokens, computed, prompt, float(n)))
    for n in range(len(running), len(running) + rng.randint(0, size)):
        prompt = rng.randint(1, 3 * size)
        waiting.append(
            RequestView(chr(65 + n), prompt, rng.choice([0, 0, rng.randint(0, prompt - 1)]), prompt, float(n))
        )
    spare = rng.choice([rng.randint(0, size), rng.randint(0, 4 * size)])
    budget = max(len(running), 1) + spare  # the engine never has a budget below max_requests
    return running, waiting, budget, rng.randint(1, budget)


def problem(running, waiting, budget, chunk_size, plan) -> tuple[str, str, str] | None:
    """(key, the rule that failed, first difference) of a plan, or None when it keeps all the rules."""
    live = {r.id: r for r in [*running, *waiting]}
    given: dict[Any, int] = {}
    rule = "plan_step returns a list of (request, length) pairs."
    if not isinstance(plan, list | tuple):
        return "no_return" if plan is None else "unknown", rule, f"got {plan!r}"
    try:
        pairs = [(getattr(request, "id", request), length) for request, length in plan]
        hash(tuple(id for id, _ in pairs))
    except (TypeError, ValueError):
        return "unknown", rule, f"got {plan!r}"
    for n, (id, length) in enumerate(pairs):
        where = f"pair {n}, ({id}, {length!r})"
        if id in live and not hasattr(plan[n][0], "id"):
            return "not_the_request", rule, f"pair {n} is ({id!r}, {length!r})"
        if id not in live:
            return (
                "unknown",
                "A plan names requests from running and waiting only.",
                f"{where}: there is no request {id!r}",
            )
        if id in given:
            key = "decode_twice" if live[id].is_decode else "unknown"
            return key, "A request has at most one chunk in a step.", f"{where}: {id} is in the plan already"
        if length == 0 and number(length):
            return "zero_length", "1 ≤ length ≤ what the request has left.", f"{where}: a chunk of no tokens"
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= live[id].num_left:
            return "unknown", "1 ≤ length ≤ what the request has left.", f"{where}: {id} has {live[id].num_left} left"
        if length > chunk_size:
            return "over_chunk_size", "No chunk is longer than chunk_size.", f"{where}: chunk_size is {chunk_size}"
        given[id] = length
    total = sum(given.values())
    if total > budget:
        first = next(id for n, (id, _) in enumerate(pairs) if sum(x for _, x in pairs[: n + 1]) > budget)
        rule = "All lengths of a step together stay within the budget, the decodes included."
        return "over_budget", rule, f"with {first}'s chunk the plan holds more than {budget}; in all it holds {total}"
    for request in running:
        if request.is_decode and request.id not in given:
            rule = "Every decode gets its token in every step: that is what bounds everyone's TBT."
            return "decode_missing", rule, f"{request.id} has one generated token to compute and no chunk in your plan"
    prompts = [r for r in running if not r.is_decode] + list(waiting)
    short = None
    for request in prompts:
        room = min(request.num_left, chunk_size)
        got = given.get(request.id, 0)
        if short and got:
            rule = "Prompts are served in arrival order, the unfinished ones first: nobody overtakes."
            return "overtaken", rule, f"{request.id} gets {got}, while {short} before it got less than it could"
        if got < room and not short:
            short = request.id
            if total < budget:
                rule = "Nothing of the budget is left while a prompt could use it: a prompt that does not fit whole is cut."
                return "budget_left", rule, f"{request.id} gets {got} of {room} possible, and {budget - total} of the budget stays unused"  # fmt: skip
    return None


def draw(running, waiting, budget, chunk_size) -> str:
    """The state in words, a line a request."""
    lines = [f"budget {budget}, chunk_size {chunk_size}"]
    for name, queue in (("running", running), ("waiting", waiting)):
        for r in queue:
            what = "a decode" if r.is_decode else f"{r.num_left} left"
            what += " (thrown out, computed again)" * _thrown_out(r)
            lines.append(f"    {name}  {r.id}  {r.num_computed} of {r.num_tokens} tokens computed, prompt of {r.num_prompt_tokens}: {what}")  # fmt: skip
    return "\n".join(lines)


def _thrown_out(request: RequestView) -> bool:
    return request.num_tokens > request.num_prompt_tokens and not request.is_decode


def _say(plan) -> str:
    try:
        return ", ".join(f"{getattr(r, 'id', r)} {n}" for r, n in plan) or "an empty plan"
    except (TypeError, ValueError):
        return repr(plan)


def check_plan(fn: Callable) -> Result:
    rng, failures = random.Random(40), []
    for number_of_case in range(300):
        case = queues(rng, 1 + number_of_case // 60)
        try:
            plan = fn(*case)
        except (Raised, TooSlow):
            if failures:
                break
            raise
        found = problem(*case, plan)
        if not found and fn.changed:
            rule = "running and waiting belong to the engine: you may only look at them."
            found = "changed_lists", rule, "running or waiting is not the same list after the call"
        if found:
            failures.append((case, plan, found))
    if not failures:
        return drive(fn)
    case, plan, (key, rule, difference) = min(failures, key=_size)
    if key in ("budget_left", "overtaken"):
        key = _why([f for f in failures if f[2][0] in ("budget_left", "overtaken")], key)
    return PLAN.wrong(key, rule, draw(*case), _say(plan), _say(plan_step(*case)), difference)


def _size(failure: tuple) -> tuple:
    """What makes a case small: no request that was thrown out, then few requests, then few tokens."""
    running, waiting, budget, _ = failure[0]
    requests = [*running, *waiting]
    return any(map(_thrown_out, requests)), len(requests), budget, sum(r.num_tokens for r in requests)


def _why(failures: list[tuple], key: str) -> str:
    """The mistake that explains all plans in which a prompt got less than it could; `key` if none does."""

    def facts(running, waiting, budget, chunk_size, plan):
        """The first prompt that got too little, what it got, what was free, the first served behind it, prompt chunks."""
        given = {request.id: length for request, length in plan}
        prompts = [r for r in running if not r.is_decode] + list(waiting)
        n = next(i for i, r in enumerate(prompts) if given.get(r.id, 0) < min(r.num_left, chunk_size))
        behind = next((r for r in prompts[n + 1 :] if r.id in given), None)
        short = prompts[n]
        free = budget - sum(given.values())
        return short, given.get(short.id, 0), free, behind, [given[r.id] for r in prompts if r.id in given], chunk_size

    def one_left(short, got, free, behind, chunks, chunk_size):
        return behind.num_left == 1 if behind else short.num_left == 1 and got == 0

    def answer_left_out(short, got, free, behind, chunks, chunk_size):
        return _thrown_out(short) and got == min(short.num_prompt_tokens - short.num_computed, chunk_size)

    def one_token(short, got, free, behind, chunks, chunk_size):
        return got == 1 and set(chunks) == {1}

    def one_prompt(short, got, free, behind, chunks, chunk_size):
        return got == 0 and len(chunks) == 1 and not behind

    def not_cut(short, got, free, behind, chunks, chunk_size):
        return got == 0 and short.num_left > free > 0

    known = [facts(*case, plan) for case, plan, _ in failures]
    for explains in (one_left, answer_left_out, one_token, one_prompt, not_cut):
        if all(explains(*fact) for fact in known):
            return explains.__name__
    return key


def drive(fn: Callable, budget: int = 16, block_size: int = 4, num_blocks: int = 24) -> Result:
    """The engine's own Scheduler under the learner's plans, on a pool so small that it must preempt, with made-up
    tokens in the place of a model: every request must get all its tokens."""
    scheduler = Scheduler(BlockPool(num_blocks, block_size), fn, budget, budget, 8, block_size)
    for n, (prompt, out) in enumerate([(5, 12), (30, 8), (3, 15), (40, 4), (1, 9), (22, 6)]):
        scheduler.add(Request(n, list(range(prompt)), prompt, SamplingParams(max_tokens=out), arrival=float(n)))
    steps = 0
    while scheduler.has_work:
        try:
            plan = scheduler.plan()
        except (PlanRefused, NoProgress) as error:
            rule = "The engine's Scheduler drives your plan_step, and refused a plan."
            return PLAN.wrong("unknown", rule, f"step {steps} of a run of six requests", error, "a plan it can run", str(error))  # fmt: skip
        scheduler.commit(plan.chunks)
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.token_ids.append(7)
                if len(chunk.request.output_ids) == chunk.request.params.max_tokens:
                    scheduler.remove(chunk.request)
        steps += 1
    return Result(True, "passed", f"{PLAN.passed} It then drove the engine's Scheduler through {steps} steps.")


PLAN = Exercise(
    "40.1",
    plan_step,
    check_plan,
    causes={
        "decode_missing": "prompts were served before the decodes and used the budget up. Decodes first.",
        "over_budget": "a chunk was added without being charged. Decodes cost a token each: take it off the budget, too.",
        "not_cut": "you stopped at a prompt that does not fit whole. Cut it: that is what chunked prefill is.",
        "budget_left": "a prompt got less than min() of three: what it needs, chunk_size, what is left of the budget.",
        "one_left": "a request with 1 token left may still be a prompt: ask .is_decode, not the length.",
        "answer_left_out": "a request that was thrown out must be computed again, its answer tokens too: use .num_left.",
        "one_token": "a prompt may get more than 1 token.",
        "one_prompt": "you served one prompt; the rest of the budget belongs to the next ones.",
        "zero_length": "leave out a request that gets nothing.",
        "decode_twice": "skip the decodes in the second loop: they have their token already.",
        "not_the_request": "put the request itself in the pair, not its id.",
        "changed_lists": "you changed the caller's list. Work on a copy: prompts = list(waiting).",
        "no_return": "your function gave None. Is there no return, or one that is not reached?",
        "over_chunk_size": "min() of three: what the request needs, chunk_size, what is left of the budget.",
        "overtaken": "the order: unfinished prompts, then waiting ones, each as they arrived.",
    },
    passed="300 generated queues: within budget, every decode in, arrival order, nothing left unused.",
    slow="your loop does not end: the budget never fell",
    part="scheduler",
    show=draw,
)


# --- 40.2 ---------------------------------------------------------------------------------------------------------
def budget_for(sweep, slo_ms, decodes, prompt):
    feasible = [tokens for tokens, _p50, p95 in sweep if p95 <= slo_ms and tokens > decodes]
    if not feasible:
        return None
    budget = max(feasible)
    return budget, math.ceil(prompt / (budget - decodes))


SWEEP = [(16, 30, 36), (32, 36, 41), (64, 52, 60), (128, 90, 99), (256, 170, 210)]  # tokens, P50 ms, P95 ms
UNEVEN = [(16, 30, 36), (32, 36, 70), (64, 52, 60), (128, 90, 99)]  # the machine was busy while 32 tokens ran
PROMISES = [  # (sweep, slo_ms, decodes, prompt)
    (SWEEP, 99, 8, 600),
    (SWEEP, 100, 8, 600),
    (SWEEP, 55, 0, 64),
    (SWEEP, 95, 8, 560),
    (SWEEP, 95, 12, 520),
    (SWEEP, 205, 20, 1000),
    (SWEEP, 300, 6, 1000),
    (SWEEP, 41, 31, 5),
    (SWEEP, 41, 32, 5),
    (SWEEP, 20, 4, 100),
    (UNEVEN, 65, 4, 600),
]


def _budget_as(sweep, slo_ms, decodes, prompt, *, decodes_free=False, median=False, one_too_far=False, stops=False, down=False):  # fmt: skip
    """What a known mistake gives."""
    if stops:
        sweep = sweep[: next((i for i, row in enumerate(sweep) if row[2] > slo_ms), len(sweep))]
    good = [t for t, p50, p95 in sweep if (p50 if median else p95) <= slo_ms and (decodes_free or t > decodes)]
    budget = max(good, default=None)
    if one_too_far:
        sizes = [row[0] for row in sweep]
        budget = next((t for t, _p50, p95 in sweep if p95 > slo_ms), sizes[-1])
    if budget is None:
        return None
    room = budget if decodes_free else budget - decodes
    return (budget, prompt // room if down else math.ceil(prompt / room)) if room > 0 else None


def check_budget(fn: Callable) -> Result:
    answers = [(case, fn(*case), budget_for(*case)) for case in PROMISES]
    same = lambda got, wanted: (got is None) == (wanted is None) and (wanted is None or _pair(got) == wanted)  # noqa: E731
    for case, got, wanted in answers:
        if same(got, wanted):
            continue
        sweep, slo, decodes, prompt = case
        # the mistake that explains most of the answers, and this one
        mistakes = {"decodes_free": "decodes_free", "median_slo": "median", "one_too_far": "one_too_far"}
        mistakes |= {"stopped_early": "stops", "rounded_down": "down"}
        explains = {
            key: sum(same(g, _budget_as(*c, **{option: True})) for c, g, _ in answers)
            for key, option in mistakes.items()
            if same(got, _budget_as(*case, **{option: True}))
        }
        key = max(explains, key=explains.get, default="unknown")
        rule = "The largest measured size whose P95 keeps the promise; each step carries the decodes, the prompt gets the rest."
        text = _promise(*case)
        if wanted is None:
            difference = f"no size both keeps {slo} ms and has room beside {decodes} decodes: the answer is None"
        else:
            size, steps = wanted
            p95 = dict((t, p) for t, _, p in sweep)[size]
            difference = (
                f"budget {size} (P95 {p95} ms ≤ {slo}); {decodes} decodes leave {size - decodes} tokens for the prompt, "
                f"so {prompt} tokens take {steps} step{'s' * (steps > 1)}"
            )
        return BUDGET.wrong(key, rule, text, got, wanted, difference)
    return Result(True, "passed", BUDGET.passed)


def _promise(sweep, slo_ms, decodes, prompt) -> str:
    return f"slo_ms {slo_ms}, decodes {decodes}, prompt {prompt}\n    sweep (tokens, P50, P95) {sweep}"


def _pair(got: Any) -> tuple | None:
    return tuple(got) if isinstance(got, tuple | list) and all(map(number, got)) else None


BUDGET = Exercise(
    "40.2",
    budget_for,
    check_budget,
    causes={
        "decodes_free": "the decodes ride in the same budget: the prompt gets budget − decodes tokens a step.",
        "median_slo": "you compared the median with the promise. Half of the steps are slower than that: compare P95.",
        "one_too_far": "you took the first size that breaks the promise. Take the one before it.",
        "stopped_early": "you stopped at the first size that breaks the promise. Sweeps are uneven: look at all sizes.",
        "rounded_down": "the last, partly filled step counts: round up.",
        "no_room": "a budget that the decodes fill has no room for a prompt: skip a size that is not above decodes.",
        "no_size": "no size keeps this promise: return None.",
    },
    passed="eleven promises kept, each with the largest budget that keeps it.",
    show=_promise,
    errors=(("no_room", ZeroDivisionError, ""), ("no_size", ValueError, "max()")),
)


# --- 40.3 ---------------------------------------------------------------------------------------------------------
def charged_twice(running, waiting, budget, chunk_size):
    """The hidden bug of 40.3: every decode costs two tokens of the budget."""
    decodes = [r for r in running if r.is_decode]
    plan = [(r, 1) for r in decodes]
    left = max(budget - 2 * len(decodes), 0 if decodes else 1)
    for request in [r for r in running if not r.is_decode] + list(waiting):
        length = min(request.num_left, chunk_size, left)
        if length > 0:
            plan.append((request, length))
            left -= length
    return plan


WHICH = Bug(
    "40.3",
    charged_twice,
    "The check refuses this scheduler, though its picture looks almost right. What is wrong with it?",
    options={
        "prompts_first": (
            "It serves prompts before decodes.",
            "Look at the steps with a prompt chunk: every running request still gets its token. No decode is missing.",
        ),
        "twice": (
            "It charges every decode twice.",
            "Yes. In each step with a prompt chunk that was cut, as many tokens stay unused as there are decodes.",
        ),
        "whole_only": (
            "It does not cut a prompt that does not fit whole.",
            "Look for the long prompt: it runs in several chunks, so it was cut.",
        ),
        "one_prompt": (
            "It lets only one prompt into a step.",
            "Then a step with room to spare would hold one prompt. Here the unused part is small, and it grows with the decodes.",
        ),
    },
    right="twice",
)  # fmt: skip

EXERCISES = [PLAN, BUDGET, WHICH]
