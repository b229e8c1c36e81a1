"""Which tokens run in the next step: DESIGN.md's "Scheduling, exactly", sentence by sentence."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_memory import newest_first, random_legal

from minichunk import BlockPool, Policy, Request, SamplingParams
from minichunk.blocks import BlockError, BlockTable, num_blocks_needed
from minichunk.scheduler import NoProgress, PlanRefused, Scheduler, make_policy


def scheduler(policy="mixed", budget=100, chunk_size=None, max_requests=8, blocks=64, size=4, **pool):
    pool = pool.get("pool") or BlockPool(blocks, size, pool.get("prefix_cache", True))
    return Scheduler(pool, make_policy(policy), budget, chunk_size, max_requests, size)


def ask(s, id, prompt, tokens=None):
    request = Request(
        id, list(tokens or [100 * ord(str(id)[0]) + i for i in range(prompt)]), prompt, SamplingParams(50)
    )
    s.add(request)
    return request


def step(s, skip=()):
    """One step: the plan, committed; each last chunk samples token 7."""
    plan = s.plan()
    s.commit(plan.chunks)
    for chunk in plan.chunks:
        if chunk.is_last:
            chunk.request.token_ids.append(7)
    s.check()
    return plan


def lengths(plan):
    return [(c.id, c.length) for c in plan.chunks]


def mixed_scene(policy, budget, chunk_size=None):
    """A and B decode, K has 18 prompt tokens left, F (22) and G (3) wait."""
    s = scheduler("mixed", budget=40)
    for id, prompt in (("A", 3), ("B", 5)):
        ask(s, id, prompt)
    step(s)
    ask(s, "K", 56)
    step(s)  # two decodes and 38 tokens of K
    ask(s, "F", 22)
    ask(s, "G", 3)
    policy = make_policy(policy)
    s.policy, s._plan_step, s.may_cut = policy, policy.plan_step, policy.may_cut
    s.max_batch_tokens, s.chunk_size = budget, chunk_size
    return s


@pytest.mark.parametrize(
    "policy, budget, chunk_size, want",
    [
        ("mixed", 100, None, "A1 B1 K18 F22 G3"),
        ("mixed", 24, None, "A1 B1 K18 F4"),
        ("mixed", 20, None, "A1 B1 K18"),
        ("mixed", 12, None, "A1 B1 K10"),
        ("mixed", 2, None, "A1 B1"),
        ("mixed", 1, None, "A1"),
        ("mixed", 100, 5, "A1 B1 K5 F5 G3"),
        ("mixed", 9, 5, "A1 B1 K5 F2"),
        ("leftover", 100, None, "K18 F22 G3 A1 B1"),
        ("leftover", 44, None, "K18 F22 G3 A1"),
        ("leftover", 20, None, "K18 F2"),
        ("leftover", 11, 4, "K4 F4 G3"),
        ("share(0.5)", 40, None, "A1 B1 K18 F2"),
        ("share(0.25)", 41, None, "A1 B1 K10"),
        ("share(0.99)", 10, None, "A1 B1 K8"),
        ("share(0.01)", 40, None, "A1 B1 K1"),
        ("share(0.01)", 2, None, "A1 B1"),
        ("share(0.5)", 40, 7, "A1 B1 K7 F7 G3"),
    ],
)
def test_each_chunk_gets_what_it_needs_within_chunk_size_budget_and_share(policy, budget, chunk_size, want):
    plan = mixed_scene(policy, budget, chunk_size).plan()
    assert " ".join(f"{id}{n}" for id, n in lengths(plan)) == want
    assert [c.is_decode for c in plan.chunks] == [c.id in "AB" for c in plan.chunks]


def drive(policy, budget, prompts, outputs=4):
    """Runs prompts that arrive one a step to their end; the steps as strings, decodes in small letters."""
    s, steps, todo = scheduler(policy, budget), [], list(prompts.items())
    while s.has_work or todo:
        if todo:
            ask(s, *todo.pop(0))
        plan = step(s)
        steps.append(" ".join(c.id.lower() if c.is_decode else f"{c.id}{c.length}" for c in plan.chunks))
        for request in list(s.running):
            if request.num_tokens - request.num_prompt_tokens >= outputs:
                s.remove(request)
    return steps


def test_prefill_first_never_mixes_and_stalls_the_decodes():
    steps = drive("prefill_first", 12, {"A": 4, "B": 10, "C": 10})
    assert steps == ["A4", "B10", "C10", "a b c", "a b c", "a b c"]


def test_whole_prompt_mixes_but_never_cuts_and_nobody_overtakes():
    # C (3) would fit beside a decode from step 2 on, but B (12) is before it and needs the whole budget.
    assert drive("whole_prompt", 12, {"A": 4, "B": 12, "C": 3}, outputs=3) == [
        "A4",
        "a",
        "a",
        "B12",
        "b C3",
        "b c",
        "c",
    ]


def test_leftover_lets_decodes_wait_and_mixed_does_not():
    prompts = {"A": 2, "B": 20}
    assert drive("leftover", 6, prompts, outputs=3) == ["A2", "B6", "B6", "B6", "B2 a", "a b", "b"]
    assert drive("mixed", 6, prompts, outputs=3) == ["A2", "a B5", "a B5", "B6", "B4", "b", "b"]


def test_a_policy_of_ones_own_that_wants_prompts_alone_never_mixes_whatever_its_order():
    for order in (("decodes", "unfinished", "waiting"), ("waiting", "decodes", "unfinished")):
        s = scheduler(Policy("alone", order, prompts_alone=True), budget=6)
        ask(s, "A", 3)
        ask(s, "B", 14)
        for _ in range(8):
            kinds = {c.is_decode for c in step(s).chunks}
            assert len(kinds) == 1


@pytest.mark.parametrize(
    "wrong", ["fifo", "share(0)", "share(1)", "share(-0.5)", "share(x)", "share(nan)", "share()", 7]
)
def test_an_unknown_policy_is_refused(wrong):
    with pytest.raises(ValueError, match="share|policy"):
        make_policy(wrong)


@pytest.mark.parametrize(
    "wrong", [dict(order=("decodes",)), dict(order=("decodes", "decodes", "waiting")), dict(prompt_share=0.0)]
)
def test_a_policy_that_could_leave_work_undone_is_refused_when_it_is_made(wrong):
    with pytest.raises(ValueError, match="order|prompt_share"):
        Policy("odd", **wrong)


# --- blocks, admission, preemption -----------------------------------------------------------------------------------
def test_blocks_are_taken_chunk_by_chunk():
    s = scheduler(budget=6, size=4)
    request = ask(s, "A", 20)
    for want in (2, 3, 5, 5):  # 6, 12, 18, 20 tokens
        step(s)
        assert len(request.table) == want
    step(s)
    assert (request.num_computed, len(request.table)) == (21, 6)


def test_at_most_max_requests_run():
    s = scheduler(max_requests=2)
    for id in "ABC":
        ask(s, id, 2)
    assert step(s).admitted == ["A", "B"]
    s.remove(s.running[0])
    assert step(s).admitted == ["C"]


def test_the_head_of_the_queue_enters_only_when_its_whole_present_length_fits_and_nobody_overtakes():
    s = scheduler(blocks=4, size=4)
    ask(s, "A", 4)
    step(s)  # holds 1 of 4 blocks, and owes the one of its next token
    ask(s, "B", 12)
    ask(s, "C", 2)
    plan = step(s)
    assert lengths(plan) == [("A", 1)] and [r.id for r in s.waiting] == ["B", "C"]
    s.remove(s.running[0])
    assert step(s).admitted == ["B", "C"]


def test_admission_counts_what_the_running_ones_still_lack():
    s = scheduler(budget=8, chunk_size=4, blocks=6, size=4)
    a = ask(s, "A", 16)
    step(s)  # one block held, three owed
    b = ask(s, "B", 9)
    for _ in range(
        4
    ):  # five blocks are free at first, and B needs three: but A lacks three, then as many as it holds less
        plan = step(s)
        assert [c.id for c in plan.chunks] == ["A"] and list(s.waiting) == [b]
    s.remove(a)
    assert step(s).admitted == ["B"]


def test_a_hit_in_a_living_table_costs_no_block():
    s = scheduler(blocks=4, size=4)
    ask(s, "A", 9, range(9))
    step(s)  # three of four blocks
    ask(s, "B", 12, [*range(8), 90, 91, 92, 93])
    plan = step(s)  # 3 - 2 ≤ 1
    assert (plan.admitted, plan.hits, s.pool.num_free) == (["B"], {"B": 8}, 0)


def test_a_hit_on_the_free_list_costs_a_block():
    s = scheduler(blocks=4, size=4, chunk_size=4)
    a = ask(s, "A", 9, range(9))
    for _ in range(3):
        step(s)
    s.remove(a)
    x = ask(s, "X", 2)
    step(s)
    ask(s, "B", 13, [*range(8), 90, 91, 92, 93, 94])
    assert s.pool.num_free == 3 and len(s.pool.find(s.waiting[0])) == 2
    assert step(s).admitted == []  # 4 > 3, although its first chunk would find room
    s.remove(x)
    assert step(s).admitted == ["B"]


def test_a_waiting_request_shows_its_policy_the_hits_it_would_have():
    seen = []

    def plan_step(running, waiting, budget, chunk_size):
        seen.extend((w.id, w.num_computed, w.num_left) for w in waiting)
        return [(r, r.num_left) for r in (*running, *waiting)]

    s = scheduler(plan_step)
    ask(s, "A", 9, range(9))
    step(s)
    ask(s, "B", 10, [*range(8), 50, 51])
    assert lengths(step(s)) == [("A", 1), ("B", 2)]
    assert seen == [("A", 0, 9), ("B", 8, 2)]


def crowd(policy="mixed", blocks=6, **options):
    """A and B decode at 8 tokens, C at 7: 6 blocks of 4 are all taken, A and B need one more now."""
    s = scheduler(policy, blocks=blocks, size=4, **options)
    for id, prompt in (("A", 7), ("B", 7), ("C", 6)):
        ask(s, id, prompt)
    step(s)
    step(s)
    assert [r.num_tokens for r in s.running] == [9, 9, 8] and s.pool.num_free == blocks - 6
    return s


def test_out_of_blocks_the_newest_gives_up_everything_and_waits_at_the_head_of_the_queue():
    s = crowd()
    newest, seed = s.running[-1], s.running[-1].seed
    ask(s, "D", 1)
    output = newest.output_ids
    plan = step(s)
    assert (plan.preempted, plan.admitted, lengths(plan)) == (["C"], [], [("A", 1), ("B", 1)])
    assert [r.id for r in s.waiting] == ["C", "D"]
    assert (newest.num_computed, newest.table, newest.output_ids, newest.seed) == (0, None, output, seed)
    assert newest.params.max_tokens == 50 and newest.metrics.preemptions == 1


def test_the_newest_gives_up_the_chunk_it_already_held_in_this_step():
    s = crowd("leftover", prefix_cache=False)
    s.remove(s.running[-1])  # C, 2 blocks
    c = ask(s, "C", 8)
    step(s)
    assert [r.id for r in s.running] == ["A", "B"] and list(s.waiting) == [c]  # A and B took what C left
    order = lambda running, *_: [(r, 1) for r in (*running[::-1],)]  # noqa: E731
    s = crowd(order_with_waiting)
    s.policy, s._plan_step = order, order
    plan = step(s)  # C decodes in its own block, B and then A need C's
    assert (plan.preempted, lengths(plan)) == (["C"], [("B", 1), ("A", 1)])
    assert s.pool.num_free == 0


def order_with_waiting(running, waiting, budget, chunk_size):
    return [(r, r.num_left) for r in (*running, *waiting)]


def test_the_newest_preempts_itself_when_it_is_the_one_that_needs_a_block():
    s = scheduler(blocks=3, size=4)
    a, b = ask(s, "A", 6), ask(s, "B", 3)
    step(s)
    step(s)  # A 8 computed in 2 blocks, B 4 in 1; both need one now
    s.remove(a)
    a = ask(s, "A2", 5)
    step(s)
    assert [r.id for r in s.running] == ["B"]
    s = scheduler(blocks=3, size=4)
    a, b = ask(s, "A", 5), ask(s, "B", 4)
    step(s)
    plan = step(s)
    assert (plan.preempted, lengths(plan)) == (["B"], [("A", 1)])
    assert list(s.waiting) == [b] and s.running == [a]


def test_when_only_the_preempted_one_was_planned_the_others_are_asked_again():
    calls = []

    def newest_only(running, waiting, budget, chunk_size):
        calls.append([r.id for r in running])
        return [(r, 1) for r in running[-1:]] or [(waiting[0], waiting[0].num_left)]

    s = crowd(order_with_waiting)
    s.policy, s._plan_step = newest_only, newest_only
    step(s)  # C fills its block
    plan = step(s)
    assert plan.preempted[:1] == ["C"] and sum(c.length for c in plan.chunks) >= 1
    assert calls[-1] == [r.id for r in s.running]


def test_after_a_preemption_nobody_is_admitted_in_that_step_even_when_there_is_room():
    s = crowd(blocks=7)
    # 7 blocks: A takes the free one, B preempts C (2 blocks) and takes one; one is left, and D needs one.
    ask(s, "D", 1)
    plan = step(s)
    assert (plan.preempted, plan.admitted, s.pool.num_free) == (["C"], [], 1)


def test_several_preempted_come_back_in_the_order_in_which_they_arrived():
    s = scheduler(blocks=8, size=1, prefix_cache=False)
    for id in "ABCD":
        ask(s, id, 1)
    step(s)
    step(s)  # all eight blocks are taken
    preempted = []
    while len(s.running) > 1:
        preempted += step(s).preempted
    assert preempted == ["D", "C", "B"] and [r.id for r in s.waiting] == ["B", "C", "D"]
    s.remove(s.running[0])
    assert step(s).admitted[0] == "B"


# --- a learner's policy ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "pairs, says",
    [
        (lambda a, b, w: [(a, 1), (a, 1)], "twice"),
        (lambda a, b, w: [(a, 2)], "1 tokens left"),
        (lambda a, b, w: [(a, 0)], "gives it 0"),
        (lambda a, b, w: [(a, -1)], "gives it -1"),
        (lambda a, b, w: [(a, 1.0)], "gives it 1.0"),
        (lambda a, b, w: [(a, True)], "gives it True"),
        (lambda a, b, w: [(w[0], 15), (w[1], 5), (b, 1)], "21 tokens, the budget is 20"),
        (lambda a, b, w: [(w[0], 13)], "chunk_size is 12"),
        (lambda a, b, w: [(w[1], 1)], "overtake"),
        (lambda a, b, w: [("nobody", 1)], "neither running nor"),
        (lambda a, b, w: None, "must return a list"),
        (lambda a, b, w: [a], "must return a list|pairs"),
        (lambda a, b, w: [(a, 1, 2)], "pairs"),
        (lambda a, b, w: [([], 1)], "neither running nor|pairs"),
    ],
)
def test_what_a_plan_may_not_say_is_refused_in_words_and_nothing_changes(pairs, says):
    s = scheduler(budget=20)
    a, b = ask(s, "A", 3), ask(s, "B", 3)
    step(s)
    ask(s, "C", 15)
    ask(s, "D", 9)
    s._plan_step = lambda running, waiting, *_: pairs(running[0], running[1], waiting)
    s.policy = s._plan_step
    s.chunk_size = 12 if "chunk_size" in says else None
    before = (list(s.running), list(s.waiting), s.pool.num_free, a.table.block_ids, b.num_computed)
    with pytest.raises(PlanRefused, match=says):
        s.plan()
    assert (list(s.running), list(s.waiting), s.pool.num_free, a.table.block_ids, b.num_computed) == before
    s.check()


def test_an_empty_plan_while_there_is_work_is_an_error():
    s = scheduler(lambda *_: [])
    ask(s, "A", 3)
    with pytest.raises(NoProgress, match="0 running and 1 waiting"):
        s.plan()


def test_a_plan_may_name_requests_by_id():
    s = scheduler(lambda running, waiting, *_: [(r.id, 1) for r in (*running, *waiting)])
    ask(s, "A", 3)
    assert lengths(step(s)) == [("A", 1)]


def test_a_policy_cannot_reach_the_requests_themselves():
    def greedy(running, waiting, budget, chunk_size):
        view = waiting[0]
        with pytest.raises(AttributeError):
            view.num_computed = 3
        waiting.clear()
        return [(view, 1)]

    s = scheduler(greedy)
    ask(s, "A", 3)
    assert lengths(step(s)) == [("A", 1)]


def test_restore_puts_queues_tables_and_pool_back():
    s = crowd()
    ask(s, "D", 1)
    before = [(r.id, r.num_computed, list(r.table.block_ids)) for r in s.running]
    undo = s.snapshot()
    assert s.plan().preempted == ["C"]
    undo()
    assert [(r.id, r.num_computed, list(r.table.block_ids)) for r in s.running] == before
    assert [r.id for r in s.waiting] == ["D"] and s.running[-1].metrics.preemptions == 0
    s.check()
    assert s.plan().preempted == ["C"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda s: s.waiting.append(s.running[0]),
        lambda s: setattr(s.running[0], "num_computed", 99),
        lambda s: setattr(s.running[0], "table", None),
        lambda s: setattr(s.waiting[0], "num_computed", 1),
        lambda s: setattr(s.waiting[0], "table", BlockTable(4)),
        lambda s: s.running[0].table.block_ids.pop(),
        lambda s: s.running.pop(),
    ],
)
def test_check_sees_a_broken_invariant(break_it):
    s = crowd()
    ask(s, "D", 1)
    s.check()
    break_it(s)
    with pytest.raises((BlockError, AttributeError)):
        s.check()


# --- the rules as a whole --------------------------------------------------------------------------------------------
arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 8), st.sampled_from([0, 0, 4, 8])),
    min_size=2,
    max_size=8,
)


def test_random_arrivals_keep_every_rule():
    """Each rule computed again from the state before the step, for all policies."""
    reached = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        arrivals,
        st.sampled_from(["mixed", "leftover", "share(0.01)", "share(0.5)", "whole_prompt", "prefill_first", "newest"])
        | st.integers(0, 50),
        st.integers(1, 24), st.sampled_from([None, 1, 3, 8]), st.integers(1, 5), st.integers(0, 4),
    )  # fmt: skip
    def traces(arrivals, policy, budget, chunk_size, size, spare):
        never_cut = policy in ("whole_prompt", "prefill_first")
        plan_step = newest_first if policy == "newest" else random_legal(policy) if isinstance(policy, int) else policy
        s = scheduler(
            plan_step, 28 if never_cut else budget, None if never_cut else chunk_size, min(4, budget),
            num_blocks_needed(27, size) + spare, size,
        )  # fmt: skip
        todo, wanted, number = list(arrivals), {}, 0
        for _ in range(3000):
            while todo and todo[0][0] <= number:
                _, prompt, outputs, shared = todo.pop(0)
                id = len(wanted)
                text = [*range(min(shared, prompt)), *(100 * id + i for i in range(prompt - min(shared, prompt)))]
                ask(s, id, prompt, text)
                wanted[id] = prompt + outputs
            number += 1
            if not s.has_work:
                if not todo:
                    return
                continue
            one_step(s, wanted, policy, reached)
        raise AssertionError("no end in sight")

    traces()
    for what in ("preempted", "hits", "admitted", "refused", "mixed"):
        assert reached[what] > 0, f"never reached: {what}; {reached}"


def one_step(s, wanted, policy, reached):
    size, pool = s.block_size, s.pool
    queue, running = [r.id for r in s.waiting], [r.id for r in s.running]
    fits = None
    if s.waiting:
        head = s.waiting[0]
        held = sum(pool.ref_counts[b] > 0 for b in pool.find(head))
        owed = sum(num_blocks_needed(r.num_tokens, size) - len(r.table) for r in s.running)
        fits = num_blocks_needed(head.num_tokens, size) - held + owed <= pool.num_free
    decodes = [r.id for r in s.running if r.num_left == 1 and r.num_tokens > r.num_prompt_tokens]
    plan = s.plan()
    chunks = plan.chunks
    assert 1 <= sum(c.length for c in chunks) <= s.max_batch_tokens
    assert len({c.id for c in chunks}) == len(chunks)
    assert all(not s.chunk_size or c.length <= s.chunk_size for c in chunks)
    assert plan.admitted == queue[: len(plan.admitted)]  # nobody overtakes
    assert plan.preempted == running[len(running) - len(plan.preempted) :][::-1]  # the newest first
    assert not (plan.admitted and plan.preempted)
    assert [r.id for r in s.running] == [*running[: len(running) - len(plan.preempted)], *plan.admitted]
    assert [r.id for r in s.waiting] == [*plan.preempted[::-1], *queue[len(plan.admitted) :]]
    for request in s.running:
        got = sum(c.length for c in chunks if c.request is request)
        assert len(request.table) == max(
            num_blocks_needed(request.num_computed + got, size), len(request.table) if not got else 0
        )
    if policy == "mixed" and not plan.preempted:
        assert [c.id for c in chunks if c.is_decode and c.id in running] == decodes[: s.max_batch_tokens]
        used = sum(c.length for c in chunks if c.id in running)
        if queue and used < s.max_batch_tokens and len(running) < s.max_requests:
            assert (queue[0] in plan.admitted) == fits
            reached["refused"] += not fits
    if policy == "prefill_first":  # one that comes back and finds all but its last token is a decode that waited
        assert len({c.is_decode for c in chunks if c.id not in plan.admitted or c.start == 0}) <= 1
        assert plan.admitted == [] or {c.id for c in chunks} <= {*plan.admitted}
    if policy in ("whole_prompt", "prefill_first"):
        assert all(c.is_last for c in chunks)
    if isinstance(policy, str) and policy.startswith("share"):
        share = max(1, int(float(policy[6:-1]) * s.max_batch_tokens))
        assert sum(c.length for c in chunks if not c.is_decode) <= share
    for request in s.waiting:
        assert request.table is None and request.num_computed == 0
    reached["preempted"] += len(plan.preempted)
    reached["hits"] += len(plan.hits)
    reached["admitted"] += len(plan.admitted)
    reached["mixed"] += len({c.is_decode for c in chunks}) == 2
    s.commit(chunks)
    for chunk in chunks:
        if chunk.is_last:
            chunk.request.token_ids.append(1000 + chunk.id)
            if chunk.request.num_tokens == wanted[chunk.id]:
                s.remove(chunk.request)
    s.check()
