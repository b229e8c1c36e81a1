"""The engine from outside: whatever happens, the right tokens come out and every block comes home."""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from token_memory import EOS, VOCAB, expected, memory_engine, newest_first, random_legal

from minichunk import BlockPool, Request, SamplingParams, pack_tokens, place
from minichunk.blocks import BlockError, OutOfBlocks
from minichunk.scheduler import NoProgress, PlanRefused

# The same traces on every run, so that what they reach is certain; MINICHUNK_TRACES=2000 explores.
TRACES = int(os.environ.get("MINICHUNK_TRACES", 0))
SLOW = dict(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=not TRACES, database=None,
    phases=[Phase.generate],  # shrinking takes longer than the trace takes to read
)  # fmt: skip
BASE = [1, 2, 3, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 5]  # what equal prefixes are cut from
NEVER_CUT = ("prefill_first", "whole_prompt")

prompts = st.builds(
    lambda shared, own: BASE[:shared] + own,
    st.sampled_from([0, 0, 4, 8, 9, 16, 20]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
)
operations = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 12), st.booleans()),
    st.tuples(st.just("add"), prompts, st.just(12), st.just(True)),
    st.tuples(st.just("add"), prompts, st.just(12), st.just(True)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("failing"), st.just("forward")),
    st.tuples(st.just("failing"), st.just("interrupt")),
    st.tuples(st.just("failing"), st.sampled_from([0, 1, 2])),
)
named = st.sampled_from(["mixed", "leftover", "share(0.01)", "share(0.7)", *NEVER_CUT])
policies = st.one_of(
    named,
    st.just(newest_first),
    st.builds(random_legal, st.integers(0, 99)),
)


@st.composite
def engines(draw, policies=policies):
    """Options of an engine that takes every request of `operations`: prompts to 32 tokens, 12 new ones."""
    policy, size = draw(policies), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]))
    cuts = policy not in NEVER_CUT
    budget = draw(st.integers(1, 40)) if cuts else draw(st.integers(44, 70))
    blocks = -(-43 // size) + draw(st.sampled_from([0, 0, 0, 1, 2, 4, 40]))
    return dict(
        policy=policy, block_size=size, max_batch_tokens=budget, prefix_cache=draw(st.booleans()),
        chunk_size=draw(st.one_of(st.none(), st.integers(1, 16))) if cuts else None,
        max_requests=draw(st.integers(1, min(6, budget))), num_blocks=blocks,
        pool=BlockPool(blocks, size) if draw(st.booleans()) else None,
    )  # fmt: skip


class Watch:
    """Looks at the engine in the middle of each step, plays the run back, and counts what was reached."""

    def __init__(self, engine, seen):
        self.engine, self.seen, self.keys = engine, seen, {}
        self.failing = None
        engine.runner.on_run = self.in_the_middle

    def live(self):
        scheduler, pool = self.engine.scheduler, self.engine.pool
        owners = [[r.id for r in scheduler.running if b in r.table.block_ids] for b in range(pool.num_blocks)]
        state = [ids or ("empty" if pool.key_of[b] is None else "cached") for b, ids in enumerate(owners)]
        queues = {"waiting": [r.id for r in scheduler.waiting], "running": [r.id for r in scheduler.running]}
        return {r.id: list(r.table.block_ids) for r in scheduler.running}, queues, state

    def in_the_middle(self, batch):
        pool = self.engine.pool
        self.middle = self.live()
        self.seen["evictions of cached blocks"] += sum(
            pool.key_of[b] is not key for b, key in self.keys.items() if pool.ref_counts[b]
        )
        if self.failing == "forward":
            raise ZeroDivisionError("the forward failed")
        if self.failing == "interrupt":
            raise KeyboardInterrupt
        if self.failing is not None:
            self.engine.runner.nan_rows = (self.failing,)

    def step(self):
        engine, pool, seen = self.engine, self.engine.pool, self.seen
        newest = engine.scheduler.running[-1].id if engine.scheduler.running else None
        self.keys = {b: key for b, key in enumerate(pool.key_of) if key is not None and not pool.ref_counts[b]}
        try:
            engine.step()
        except KeyboardInterrupt:
            seen["interrupted steps"] += 1
        self.failing = None
        step, index = engine.run.steps[-1], len(engine.run.steps) - 1
        assert (engine.run.tables_at(index), engine.run.queue_at(index)) == self.middle[:2]
        assert [sorted(s) if isinstance(s, list) else s for s in engine.run.pool_at(index)] == [
            sorted(s) if isinstance(s, list) else s for s in self.middle[2]
        ]
        assert (step.used, step.cached, step.empty) == (pool.num_used, pool.num_cached, pool.num_empty)
        assert step.wasted_slots == sum(
            len(r.table) * engine.block_size - r.num_computed for r in engine.scheduler.running
        )
        assert step.num_tokens <= step.budget
        assert not (step.preempted and step.admitted), "nobody is admitted after a preemption"
        left = step.budget - step.num_tokens
        seats = engine.scheduler.max_requests - len(self.middle[1]["running"])
        seen["preemptions"] += len(step.preempted)
        seen["prefix hits"] += len(step.hits)
        seen["mixed steps"] += step.is_mixed
        seen["the newest preempts itself"] += step.preempted == [newest] and not step.grown
        seen["admission refused for want of blocks"] += bool(
            engine.run.meta["policy"] in ("mixed", "leftover") and not step.preempted
            and self.middle[1]["waiting"] and seats > 0 and left > 0
        )  # fmt: skip
        seen["chunks that begin inside a block"] += any(c[1] % engine.block_size and not c[4] for c in step.chunks)


def run_trace(options, trace, seen):
    engine = memory_engine(**options)
    watch, asked, aborted = Watch(engine, seen), {}, set()

    def steps(most):
        while engine.has_work and most:
            watch.step()
            most -= 1

    for kind, *values in trace:
        if kind == "add":
            prompt, max_tokens, ignore_eos = values
            asked[engine.add(prompt, SamplingParams(max_tokens, ignore_eos=ignore_eos))] = values
        elif kind == "step":
            steps(values[0])
        elif kind == "failing":
            watch.failing = values[0]
        elif values[0] in asked:
            aborted |= {values[0]} if engine.result(values[0]) is None else set()
            engine.abort(values[0])
    steps(2000)
    assert not engine.has_work, "no end in sight"
    assert engine.pool.num_free == engine.num_blocks
    for id, (prompt, max_tokens, ignore_eos) in asked.items():
        done, want = engine.result(id), expected(prompt, max_tokens, ignore_eos)
        seen[done.finish_reason] += 1
        if done.finish_reason in ("abort", "error"):
            assert done.token_ids == want[: len(done.token_ids)]
            assert (done.finish_reason == "abort") == (id in aborted)
            assert done.finish_reason == "abort" or "ZeroDivision" in done.error or "finite" in done.error, done.error
        else:
            assert done.token_ids == want
            assert done.finish_reason == ("stop" if want[-1] == EOS and not ignore_eos else "length")


def run_ahead(options, trace, seen):
    """The same with overlap: the record is made one step later, so it is played back at the end."""
    engine = memory_engine(**options, overlap=True)
    asked, failing = {}, []

    def on_run(batch):
        what = failing.pop() if failing else None
        if what == "forward":
            raise ZeroDivisionError("the forward failed")
        if what == "interrupt":
            raise KeyboardInterrupt
        engine.runner.nan_rows = () if what is None else (what,)

    def steps(most):
        while engine.has_work and most:
            most -= 1
            try:
                engine.step()
            except KeyboardInterrupt:
                seen["interrupted steps"] += 1

    engine.runner.on_run = on_run
    for kind, *values in trace:
        if kind == "add":
            prompt, max_tokens, ignore_eos = values
            asked[engine.add(prompt, SamplingParams(max_tokens, ignore_eos=ignore_eos))] = values
        elif kind == "step":
            steps(values[0])
        elif kind == "failing":
            failing.append(values[0])
        elif values[0] in asked:
            engine.abort(values[0])
    steps(2000)
    assert not engine.has_work and engine.step() is None
    assert engine.pool.num_free == engine.num_blocks
    for id, (prompt, max_tokens, ignore_eos) in asked.items():
        done, want = engine.result(id), expected(prompt, max_tokens, ignore_eos)
        seen[done.finish_reason] += 1
        if done.finish_reason in ("abort", "error"):
            assert done.token_ids == want[: len(done.token_ids)]
            assert done.finish_reason == "abort" or "ZeroDivision" in done.error or "finite" in done.error, done.error
        else:
            assert done.token_ids == want
            assert done.finish_reason == ("stop" if want[-1] == EOS and not ignore_eos else "length")
        assert engine.run.requests[id].output_ids == done.token_ids
    gone = set()
    for step in engine.run.steps:
        ids = {c[0] for c in step.chunks}
        assert not gone & {*ids, *step.preempted, *step.grown}, "what was computed in vain is not on record"
        seen["preemptions"] += len(step.preempted)
        seen["prefix hits"] += len(step.hits)
        tables, queues = engine.run.tables_at(step.index), engine.run.queue_at(step.index)
        assert len(engine.run.pool_at(step.index)) == engine.num_blocks and set(tables) == set(queues["running"])
        for id, start, length, *_ in step.chunks:
            assert len(tables[id]) * engine.block_size >= start + length
        gone |= {*step.finished}


def test_a_step_ahead_the_tokens_are_right_too():
    seen = Counter()
    simple = engines(named).map(lambda o: {**o, "pool": None})

    @settings(max_examples=TRACES or 100, **SLOW)
    @given(simple, st.lists(operations, min_size=8, max_size=30))
    def traces(options, trace):
        run_ahead(options, trace, seen)

    traces()
    for what in ("preemptions", "prefix hits", "interrupted steps", "stop", "length", "abort", "error"):
        assert seen[what] > 0, f"never reached: {what}; {seen}"


def test_a_step_ahead_is_not_planned_for_one_that_ends_beside_one_that_has_no_block():
    """Four blocks of one token: the first request's last token is on its way while the second needs a fifth block."""
    engine = memory_engine(num_blocks=4, block_size=1, max_batch_tokens=8, overlap=True)
    params = [SamplingParams(n, ignore_eos=True) for n in (2, 4)]
    done = engine.generate([[1], [2]], params)
    assert [c.token_ids for c in done] == [expected([1], 2, True), expected([2], 4, True)]
    assert engine.pool.num_free == 4


def test_whatever_arrives_fails_or_leaves_the_tokens_are_right_and_the_record_plays_back():
    """Arrivals, aborts, failures and Ctrl-C over tiny pools, all block sizes, budgets, policies and equal prefixes."""
    seen = Counter()

    @settings(max_examples=TRACES or 150, **SLOW)
    @given(engines(), st.lists(operations, min_size=8, max_size=30))
    def traces(options, trace):
        run_trace(options, trace, seen)

    traces()
    print(seen)
    for what in (
        "preemptions", "prefix hits", "mixed steps", "the newest preempts itself", "evictions of cached blocks",
        "admission refused for want of blocks", "chunks that begin inside a block", "interrupted steps",
        "stop", "length", "abort", "error",
    ):  # fmt: skip
        assert seen[what] > 0, f"never reached: {what}; {seen}"


# --- asking ----------------------------------------------------------------------------------------------------------
def outcomes(completions):
    return [(c.token_ids, c.finish_reason) for c in completions]


def wanted(prompt, max_tokens, ignore_eos=False):
    tokens = expected(prompt, max_tokens, ignore_eos)
    return tokens, "stop" if tokens[-1] == EOS and not ignore_eos else "length"


TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [7], [8] * 11]


def test_generate_answers_in_the_order_of_the_prompts_with_each_ones_parameters():
    engine = memory_engine(num_blocks=40, block_size=4, max_batch_tokens=5, max_requests=3)
    params = [SamplingParams(n) for n in (9, 1, 4, 6)]
    assert outcomes(engine.generate(TEXTS, params)) == [wanted(p, q.max_tokens) for p, q in zip(TEXTS, params)]
    assert outcomes(engine.generate(TEXTS[0], SamplingParams(3))) == [wanted(TEXTS[0], 3)]  # one token list
    assert engine.generate([]) == []
    assert engine.generate([2])[0].token_ids == expected([2], 16)  # 16 tokens where nothing is said


def test_generate_returns_only_its_own_and_the_others_go_on():
    engine = memory_engine(num_blocks=40, block_size=4)
    first = engine.add(TEXTS[0], SamplingParams(20, ignore_eos=True))
    assert outcomes(engine.generate([TEXTS[1]], SamplingParams(4))) == [wanted(TEXTS[1], 4)]
    assert engine.result(first) is None and engine.has_work
    while engine.has_work:
        engine.step()
    assert engine.result(first).token_ids == expected(TEXTS[0], 20, True)
    assert engine.step() is None


def test_all_prompts_are_checked_before_any_is_added():
    engine = memory_engine(num_blocks=40, block_size=4)
    for wrong in ([[1], []], [[1], [99]], [[1], [2] * 60]):
        with pytest.raises(ValueError):
            engine.generate(wrong)
        with pytest.raises(ValueError):
            engine.replay([(0.0, p, None) for p in wrong])
    with pytest.raises(ValueError, match="2 prompts, but 1 SamplingParams"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert not engine.has_work and engine.run.requests == {}


@pytest.mark.parametrize(
    "prompt, params, says",
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "0..15, got 16..16"),
        ([3, -1], {}, "0..15, got -1..3"),
        ([1] * 60, dict(max_tokens=5), r"60 \+ max_tokens 5 = 65 is above max_model_len 64.* at most 4 tokens"),
        ([1] * 40, dict(max_tokens=2), r"needs 41 cache slots, the pool has 40 \(10 blocks of 4\).*num_blocks=11"),
        ("text", {}, "no tokenizer"),
        ([1], dict(stop="x"), "stop strings need a tokenizer"),
        (["1", "2"], {}, "token ids, got list"),
        ([1.5], {}, "token ids, got list"),
        (None, {}, "token ids, got NoneType"),
        (7, {}, "token ids, got int"),
    ],
    ids=str,
)
def test_what_can_never_run_is_refused_at_add_with_the_numbers(prompt, params, says):
    engine = memory_engine(num_blocks=10, block_size=4)
    with pytest.raises(ValueError, match=says):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


def test_what_just_fits_runs_to_its_end():
    engine = memory_engine(num_blocks=10, block_size=4)
    assert outcomes(engine.generate([[1] * 39], SamplingParams(2, ignore_eos=True)))[0][1] == "length"
    assert len(engine.generate([[1]], SamplingParams(40, ignore_eos=True))[0].token_ids) == 40
    import numpy as np
    import torch

    for prompt in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2)):
        assert engine.result(engine.add(prompt)) is None


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(max_batch_tokens=4, max_requests=5), "max_batch_tokens 4 is below max_requests 5"),
        (dict(policy="whole_prompt", chunk_size=4), "never cuts.*chunk_size=4"),
        (dict(policy="prefill_first", chunk_size=4), "never cuts.*chunk_size=4"),
        (dict(max_model_len=65), "65 is above the model's 64"),
        (dict(policy="fifo"), "unknown policy"),
        (dict(block_size=0), "block_size must be a whole number"),
        (dict(num_blocks=2.5), "num_blocks must be a whole number"),
        (dict(chunk_size=True), "chunk_size must be a whole number"),
        (dict(max_requests=-1), "max_requests must be a whole number"),
        (dict(attention="paged"), "attention must be"),
        (dict(dtype="int8"), "dtype must be"),
        (dict(compile="always"), "compile must be"),
        (dict(graphs=True), "graphs must be"),
        (dict(num_blocks=None, gpu_memory=1.5), "gpu_memory"),
        (dict(pool=BlockPool(9, 8)), "8 tokens, the engine's block_size is 4"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        memory_engine(**{"num_blocks": 9, "block_size": 4, **options})


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="max_num_seqs"):
        memory_engine(max_num_seqs=4)


def test_the_two_policies_that_never_cut_refuse_at_add_what_is_above_the_budget():
    for policy in NEVER_CUT:
        engine = memory_engine(policy=policy, max_batch_tokens=10, max_requests=2, num_blocks=9, block_size=4)
        with pytest.raises(
            ValueError, match=r"8 \+ max_tokens 3 = 11 is above max_batch_tokens 10.*max_batch_tokens=11"
        ):
            engine.add([1] * 8, SamplingParams(3))
        assert outcomes(engine.generate([[1] * 8], SamplingParams(2))) == [wanted([1] * 8, 2)]


def test_defaults():
    engine = memory_engine()
    assert engine.scheduler.max_batch_tokens == 512 and engine.scheduler.max_requests == 64
    assert engine.num_blocks == 64 * 4  # 64 requests of 64 tokens in blocks of 16
    assert memory_engine(policy="whole_prompt").scheduler.max_batch_tokens == 64
    assert memory_engine(max_batch_tokens=5).scheduler.max_requests == 5


def test_abort():
    engine = memory_engine(num_blocks=40, block_size=4)
    ids = [engine.add(p, SamplingParams(12, ignore_eos=True)) for p in TEXTS]
    engine.abort(ids[3])  # before its first step
    for _ in range(3):
        engine.step()
    engine.abort(ids[0])
    engine.abort(ids[0])  # finished: nothing happens
    done = engine.result(ids[0])
    assert (done.finish_reason, done.token_ids) == ("abort", expected(TEXTS[0], 3, True))
    assert engine.result(ids[3]).finish_reason == "abort" and engine.result(ids[3]).token_ids == []
    while engine.has_work:
        engine.step()
    for i in (1, 2):
        assert outcomes([engine.result(ids[i])]) == [wanted(TEXTS[i], 12, True)]
    engine.abort(ids[1])
    assert engine.result(ids[1]).finish_reason == "length"
    for call in (engine.abort, engine.result):
        with pytest.raises(KeyError):
            call(99)
    assert engine.pool.num_free == 40


def test_the_pool_shows_its_counts():
    engine = memory_engine(num_blocks=10, block_size=4)
    engine.add([1] * 9, SamplingParams(3, ignore_eos=True))
    engine.step()
    pool = engine.pool
    assert (pool.num_blocks, pool.num_free, pool.num_empty, pool.num_cached) == (10, 7, 7, 0)
    while engine.has_work:
        engine.step()
    assert pool.num_free == 10 and pool.num_cached >= 2 and pool.num_empty + pool.num_cached == 10


# --- streams, replay, life ---------------------------------------------------------------------------------------------
def test_a_stream_gives_each_token_as_it_comes_and_closing_it_aborts():
    engine = memory_engine(num_blocks=40, block_size=4)
    other = engine.add(TEXTS[3], SamplingParams(10, ignore_eos=True))
    assert [t for _, t in engine.stream(TEXTS[0], SamplingParams(5, ignore_eos=True))] == expected(TEXTS[0], 5, True)
    stream = engine.stream(TEXTS[1], SamplingParams(30, ignore_eos=True))
    assert [next(stream) for _ in range(3)] == [(None, t) for t in expected(TEXTS[1], 3, True)]
    stream.close()
    assert [c.finish_reason for c in engine._completions.values()] == ["length", "abort"]
    while engine.has_work:
        engine.step()
    assert engine.result(other).token_ids == expected(TEXTS[3], 10, True)
    assert engine.pool.num_free == 40


def test_two_streams_and_a_generate_take_turns():
    engine = memory_engine(num_blocks=40, block_size=4)
    a = engine.stream(TEXTS[0], SamplingParams(9, ignore_eos=True))
    b = engine.stream(TEXTS[1], SamplingParams(9, ignore_eos=True))
    got = [[], []]
    for _ in range(4):
        got[0].append(next(a)[1])
        got[1].append(next(b)[1])
    engine.generate([TEXTS[2]], SamplingParams(20))
    got[0] += [t for _, t in a]
    got[1] += [t for _, t in b]
    assert got == [expected(TEXTS[0], 9, True), expected(TEXTS[1], 9, True)]


def test_a_stream_refuses_at_once_and_not_when_it_is_first_read():
    engine = memory_engine(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="empty"):
        engine.stream([])


def test_a_consumer_that_fails_ends_its_stream_alone():
    engine = memory_engine(num_blocks=40, block_size=4)
    other = engine.add(TEXTS[3], SamplingParams(10, ignore_eos=True))
    with pytest.raises(ZeroDivisionError):
        for i, _ in enumerate(engine.stream(TEXTS[0], SamplingParams(30, ignore_eos=True))):
            1 // (3 - i)
    while engine.has_work:
        engine.step()
    assert engine.result(other).token_ids == expected(TEXTS[3], 10, True) and engine.pool.num_free == 40


class Clock:
    """An engine whose time passes only by sleeping, and a little with each step."""

    def __init__(self, engine):
        self.now, self.slept = 0.0, []
        engine._now, engine._sleep = self.read, self.sleep

    def read(self):
        self.now += 0.001
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_replay_honours_arrival_times_and_returns_in_the_order_given():
    engine = memory_engine(num_blocks=40, block_size=4)
    clock, records = Clock(engine), []
    todo = [(5.0, TEXTS[0], SamplingParams(4)), (0.0, TEXTS[1], None), {"arrival": 5.0, "prompt": TEXTS[2]}]
    done = engine.replay(todo, on_step=records.append)
    assert outcomes(done) == [wanted(TEXTS[0], 4), wanted(TEXTS[1], 16), wanted(TEXTS[2], 16)]
    assert len(clock.slept) == 1 and 4.5 < clock.slept[0] < 5
    assert [round(c.metrics.arrival - done[1].metrics.arrival, 6) for c in done] == [5.0, 0.0, 5.0]
    assert all(c.metrics.first_scheduled >= c.metrics.arrival for c in done)
    assert records == engine.run.steps


def test_interrupted_generate_stream_and_replay_abort_what_they_added_and_nothing_else():
    for what in ("generate", "stream", "replay"):
        engine = memory_engine(num_blocks=40, block_size=4, max_batch_tokens=6, max_requests=4)
        other = engine.add(TEXTS[3], SamplingParams(10, ignore_eos=True))
        calls = Counter()

        def interrupt(batch):
            calls["forward"] += 1
            if calls["forward"] == 4:
                raise KeyboardInterrupt

        engine.runner.on_run = interrupt
        params = SamplingParams(20, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            if what == "generate":
                engine.generate(TEXTS, params)
            elif what == "replay":
                engine.replay([(0.0, p, params) for p in TEXTS])
            else:
                list(engine.stream(TEXTS[0], params))
        assert list(engine._requests) == [other]
        assert {c.finish_reason for c in engine._completions.values()} == {"abort"}
        while engine.has_work:
            engine.step()
        assert engine.result(other).token_ids == expected(TEXTS[3], 10, True), what
        assert engine.pool.num_free == 40


def test_replay_aborts_what_it_added_when_the_callers_function_fails():
    engine = memory_engine(num_blocks=40, block_size=4)
    with pytest.raises(ZeroDivisionError):
        engine.replay([(0.0, TEXTS[0], None)], on_step=lambda record: 1 // 0)
    assert not engine.has_work and engine.pool.num_free == 40


def test_close_and_with():
    with memory_engine(num_blocks=40, block_size=4) as engine:
        done = engine.generate([TEXTS[0]], SamplingParams(4))[0]
        left = engine.add(TEXTS[1])
        engine.step()
    assert engine.result(left).finish_reason == "abort" and engine.result(done.id) is done
    assert len(engine.run.steps) >= 3 and "closed" in repr(engine) and not engine.has_work
    assert engine.model is None and engine.runner is None
    for call in (lambda: engine.add([1]), lambda: engine.generate([1]), lambda: engine.stream([1]), engine.step):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    engine.close()


def test_a_memory_error_has_the_numbers_and_names_the_engines_that_are_alive():
    with memory_engine(num_blocks=7, block_size=4) as alive:
        closed = memory_engine(num_blocks=5, block_size=4)
        closed.close()
        with pytest.raises(MemoryError) as caught:
            memory_engine(num_blocks=10**13, block_size=4)
        message = str(caught.value)
        assert "MB wanted" in message and "close()" in message and "num_blocks" in message
        assert repr(alive) in message and repr(closed) not in message


def test_learners_parts_of_two_engines_do_not_meet():
    calls = Counter()

    def pack(name):
        def counted(chunks):
            calls[name] += 1
            return pack_tokens(chunks)

        return counted

    a, b = (memory_engine(num_blocks=20, block_size=4, pack=pack(name)) for name in "ab")
    ids = [(e, e.add(TEXTS[0], SamplingParams(5, ignore_eos=True))) for e in (a, b)]
    for _ in range(5):
        a.step()
        b.step()
    assert calls == {"a": 5, "b": 5}
    assert all(e.result(i).token_ids == expected(TEXTS[0], 5, True) for e, i in ids)


# --- failures ----------------------------------------------------------------------------------------------------------
def test_a_failed_forward_ends_its_requests_and_nothing_of_it_can_be_found_again():
    engine = memory_engine(num_blocks=40, block_size=4, max_batch_tokens=12, max_requests=2)
    ids = [engine.add(p, SamplingParams(6, ignore_eos=True)) for p in TEXTS]
    engine.step()  # the first two run, the others wait

    def fail(batch):
        raise ZeroDivisionError("layer 1")

    engine.runner.on_run = fail
    before = set(engine.pool._index)
    record = engine.step()
    engine.runner.on_run = None
    assert record.finished == ids[:2] and set(engine.pool._index) <= before
    for i in ids[:2]:
        done = engine.result(i)
        assert (done.finish_reason, done.error) == ("error", "ZeroDivisionError: layer 1")
        assert done.token_ids == expected(done.prompt_ids, 1, True)
    while engine.has_work:
        engine.step()
    for i in ids[2:]:
        assert outcomes([engine.result(i)]) == [wanted(TEXTS[i], 6, True)]
    assert outcomes(engine.generate([TEXTS[0]], SamplingParams(6))) == [wanted(TEXTS[0], 6)]
    assert engine.pool.num_free == 40


def test_a_stream_whose_forward_fails_says_why():
    engine = memory_engine(num_blocks=40, block_size=4)
    stream = engine.stream(TEXTS[0])
    next(stream)

    def fail(batch):
        raise ZeroDivisionError("layer 1")

    engine.runner.on_run = fail
    with pytest.raises(RuntimeError, match="failed: ZeroDivisionError: layer 1"):
        next(stream)


def test_logits_of_one_request_that_are_not_finite_end_that_one_alone():
    engine = memory_engine(num_blocks=40, block_size=4)
    ids = [engine.add(p, SamplingParams(6, ignore_eos=True)) for p in TEXTS]
    engine.runner.nan_rows = (1,)
    engine.step()
    assert engine.result(ids[1]).finish_reason == "error" and "finite" in engine.result(ids[1]).error
    assert engine.pool.find(Request(9, [*TEXTS[1], 5], 5)) == []
    assert len(engine.pool.find(Request(9, TEXTS[0], 5))) == 1
    while engine.has_work:
        engine.step()
    for i in (0, 2, 3):
        assert outcomes([engine.result(ids[i])]) == [wanted(TEXTS[i], 6, True)]


class Failing:
    """Wraps a part of the engine so that its k-th call raises, once."""

    def __init__(self, inner, at, error):
        self.inner, self.at, self.error, self.calls = inner, at, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.inner(*args)


class PlainPool:
    """A learner's pool with nothing but the four names of the contract."""

    taken = Counter()  # not in the object: an undone step must not undo it

    def __init__(self, num_blocks, size, fail_in=None):
        self.free, self.size, self.fail_in = list(range(num_blocks)), size, fail_in
        self.taken.clear()

    @property
    def num_free(self):
        return len(self.free)

    def grow(self, table, num_tokens):
        wanted = -(-num_tokens // self.size) - len(table)
        if wanted > len(self.free):
            raise OutOfBlocks("none left")
        for _ in range(wanted):
            table.block_ids.append(self.free.pop())
            self.taken["blocks"] += 1
            if self.taken["blocks"] == self.fail_in:
                raise ZeroDivisionError("in grow, half done")

    def release(self, table):
        self.free += table.block_ids
        table.block_ids.clear()

    def share(self, table, request):
        return 0


def drain(engine):
    """Steps to the end; returns how often a step raised."""
    raised = 0
    for _ in range(500):
        if not engine.has_work:
            return raised
        try:
            engine.step()
        except (ZeroDivisionError, KeyboardInterrupt):
            raised += 1
    raise AssertionError("no end in sight")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a learner's mistake"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("part", ["policy", "pack", "place"])
def test_a_learners_part_that_fails_leaves_the_engine_as_before_the_step(part, at, error):
    inner = {"policy": newest_first, "pack": pack_tokens, "place": place}[part]
    failing = Failing(inner, at, error)
    engine = memory_engine(num_blocks=12, block_size=2, max_batch_tokens=8, max_requests=4, **{part: failing})
    ids = [engine.add(p, SamplingParams(9, ignore_eos=True)) for p in TEXTS]
    while failing.calls < at - 1:
        engine.step()
    if part == "policy":
        failing.at = failing.calls + 1
    state = lambda: (  # noqa: E731
        [(r.id, r.num_computed, list(r.table.block_ids)) for r in engine.scheduler.running],
        [r.id for r in engine.scheduler.waiting],
        engine.pool.num_empty, engine.pool.num_cached, dict(engine.pool._index), len(engine.run.steps),
    )  # fmt: skip
    before = state()
    with pytest.raises(type(error)):
        engine.step()
    assert state() == before
    engine.scheduler.check()
    assert drain(engine) == 0
    assert [engine.result(i).token_ids for i in ids] == [expected(p, 9, True) for p in TEXTS]
    assert engine.pool.num_free == 12
    assert sum(len(s.preempted) for s in engine.run.steps) > 0


@pytest.mark.parametrize("fail_in", [None, 1, 3, 6, 11, 14])
def test_a_learners_pool_with_four_names_serves_and_may_fail_half_way(fail_in):
    pool = PlainPool(12, 2, fail_in)
    engine = memory_engine(pool=pool, block_size=2, max_batch_tokens=8, max_requests=4)
    ids = [engine.add(p, SamplingParams(9, ignore_eos=True)) for p in TEXTS]
    assert drain(engine) == (fail_in is not None)
    assert [engine.result(i).token_ids for i in ids] == [expected(p, 9, True) for p in TEXTS]
    assert sorted(pool.free) == list(range(12)) and engine.num_blocks == 12
    assert engine.run.steps[-1].empty == 12


def test_a_pool_that_lies_about_its_room_is_an_error_and_no_endless_loop():
    class Liar(PlainPool):
        num_free = property(lambda self: 12)

    engine = memory_engine(pool=Liar(1, 2), block_size=2, num_blocks=12)
    engine.add([1] * 8)
    with pytest.raises((BlockError, NoProgress, OutOfBlocks)):
        for _ in range(50):
            engine.step()


def test_an_empty_plan_or_a_refused_one_is_raised_and_costs_nothing():
    plans = [[], [("nobody", 1)], None]

    def policy(running, waiting, budget, chunk_size):
        return plans.pop(0) if plans else newest_first(running, waiting, budget, chunk_size)

    engine = memory_engine(policy=policy, num_blocks=12, block_size=2)
    id = engine.add(TEXTS[0], SamplingParams(4))
    for error in (NoProgress, PlanRefused, PlanRefused):
        with pytest.raises(error):
            engine.step()
    drain(engine)
    assert engine.result(id).token_ids == expected(TEXTS[0], 4)


def test_a_packer_that_swaps_requests_is_seen():
    """The memory knows: a wrong packer gives an error or other tokens, never the right ones by luck."""
    engine = memory_engine(num_blocks=12, block_size=2, pack=lambda chunks: pack_tokens(chunks[::-1]))
    ids = [engine.add(p, SamplingParams(4)) for p in TEXTS[:2]]
    drain(engine)
    assert {engine.result(i).finish_reason for i in ids} == {"error"}


def test_a_token_outside_the_vocabulary_from_a_packer_is_refused_before_the_model_sees_it():
    def pack(chunks):
        token_ids, *rest = pack_tokens(chunks)
        return [VOCAB + 3 for _ in token_ids], *rest

    engine = memory_engine(num_blocks=12, block_size=2, pack=pack)
    engine.add(TEXTS[0])
    with pytest.raises(ValueError, match="token_ids must lie below 16, got 19"):
        engine.step()


class Words:
    """A tokenizer whose decode may fail."""

    chat_template = None

    def __init__(self):
        self.fail = None

    def __call__(self, text):
        return {"input_ids": [int(c, 16) for c in text]}

    def decode(self, ids, **options):
        if self.fail and self.fail[0] in ids:
            raise self.fail[1]
        return "".join(f"{i:x}" for i in ids)


@pytest.mark.parametrize("error", [ZeroDivisionError("bad token"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_tokenizer_that_fails_on_one_requests_token_ends_that_one_alone(error):
    words = Words()
    engine = memory_engine(num_blocks=40, block_size=4, tokenizer=words)
    texts = ["12345", "1239", "7"]
    ids = [engine.add(t, SamplingParams(8, ignore_eos=True)) for t in texts]
    outputs = [expected([int(c) for c in t], 8, True) for t in texts]
    engine.step()
    words.fail = outputs[1][1], error
    assert all(outputs[1][1] not in outputs[i][:2] for i in (0, 2)), "only one request brings this token"
    try:
        engine.step()
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    words.fail = None
    drain(engine)
    assert engine.result(ids[1]).finish_reason == "error" and type(error).__name__ in engine.result(ids[1]).error
    for i in (0, 2):
        assert engine.result(ids[i]).token_ids == outputs[i]
        assert engine.result(ids[i]).text == "".join(f"{t:x}" for t in outputs[i])
    assert engine.run.steps[1].finished == [ids[1]] and engine.pool.num_free == 40


def test_an_abort_works_even_when_the_tokenizer_does_not():
    words = Words()
    engine = memory_engine(num_blocks=40, block_size=4, tokenizer=words)
    id = engine.add("1234", SamplingParams(8, ignore_eos=True))
    engine.step()
    words.fail = expected([1, 2, 3, 4], 1)[0], ZeroDivisionError("bad token")
    engine.abort(id)
    assert engine.result(id).finish_reason in ("abort", "error")
    assert engine.pool.num_free == 40 and not engine.has_work


# --- text --------------------------------------------------------------------------------------------------------------
def test_text_and_stop_strings_through_the_engine():
    engine = memory_engine(num_blocks=40, block_size=4, tokenizer=Words())
    whole = engine.generate("12345", SamplingParams(12, ignore_eos=True))[0]
    text = "".join(f"{t:x}" for t in whole.token_ids)
    assert whole.text == text and whole.finish_reason == "length"
    for a, b in [(0, 1), (3, 5), (2, 6), (11, 12), (0, 12), (10, 12)]:
        stop = text[a:b]
        at = text.index(stop)
        for max_tokens in (12, at + len(stop)):  # the last allowed token may complete it
            done = engine.generate("12345", SamplingParams(max_tokens, ignore_eos=True, stop=stop))[0]
            assert (done.text, done.finish_reason) == (text[:at], "stop")
            assert done.token_ids == whole.token_ids[: at + len(stop)]  # tokens are kept, text is cut
            deltas = [d for d, _ in engine.stream("12345", SamplingParams(max_tokens, ignore_eos=True, stop=(stop,)))]
            assert "".join(deltas) == text[:at]
    assert engine.generate("12345", SamplingParams(12, ignore_eos=True, stop="12345"))[0].text == text  # prompt only


def test_eos_and_stop_tokens_end_the_output_and_are_kept():
    engine = memory_engine(num_blocks=40, block_size=4)
    prompt = next(p for p in ([i, j] for i in range(15) for j in range(15)) if EOS in expected(p, 12)[2:])
    to_eos, on = expected(prompt, 12), expected(prompt, 12, True)
    assert outcomes(engine.generate([prompt], SamplingParams(12))) == [(to_eos, "stop")]
    assert outcomes(engine.generate([prompt], SamplingParams(12, ignore_eos=True))) == [(on, "length")]
    stop = on[2]
    done = engine.generate([prompt], SamplingParams(12, stop_token_ids=(stop,), ignore_eos=True))[0]
    assert (done.token_ids, done.finish_reason) == (on[: on.index(stop) + 1], "stop")
    last = len(to_eos)
    assert outcomes(engine.generate([prompt], SamplingParams(last))) == [(to_eos, "stop")]  # eos as the last allowed


# --- seeds and penalties: what runs beside a request, and preemption, change nothing -------------------------------------
DRAWN = [
    dict(temperature=1.0, seed=5), dict(temperature=0.8, top_k=6, seed=6), dict(temperature=1.2, top_p=0.8, seed=7),
    dict(repetition_penalty=1.8), dict(temperature=1.0, repetition_penalty=1.5, seed=8), dict(logprobs=2),
]  # fmt: skip


def test_the_same_request_alone_in_company_and_preempted_gives_the_same_samples_and_logprobs():
    requests = [(p, SamplingParams(10, ignore_eos=True, **q)) for p in TEXTS for q in DRAWN]
    alone = []
    for prompt, params in requests:
        engine = memory_engine(num_blocks=40, block_size=4)
        alone.append(engine.generate([prompt], params)[0])
    preempted = 0
    for blocks, budget, chunk, size in [(400, 50, None, 1), (12, 7, 2, 2), (9, 40, None, 3), (21, 13, 5, 1)]:
        engine = memory_engine(
            num_blocks=blocks, block_size=size, max_batch_tokens=budget, chunk_size=chunk, max_requests=6
        )
        together = engine.generate([p for p, _ in requests], [q for _, q in requests])
        for a, b in zip(alone, together):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        preempted += sum(len(s.preempted) for s in engine.run.steps)
    assert preempted > 10
    assert len({tuple(c.token_ids) for c in alone[:6]}) >= 4, "the parameters must matter"


def test_without_a_seed_the_engines_seed_and_the_number_of_the_request_decide():
    def run(seed):
        engine = memory_engine(num_blocks=80, block_size=4, seed=seed)
        return [
            c.token_ids for c in engine.generate([TEXTS[0]] * 3, SamplingParams(12, temperature=1.0, ignore_eos=True))
        ]

    assert run(1) == run(1) != run(2)
    assert len({tuple(t) for t in run(1)}) == 3


def test_metrics_count_preemptions_and_cached_tokens():
    engine = memory_engine(num_blocks=9, block_size=2, max_batch_tokens=20, max_requests=3)
    done = engine.generate([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]], SamplingParams(8, ignore_eos=True))
    assert sum(c.metrics.preemptions for c in done) == sum(len(s.preempted) for s in engine.run.steps) > 0
    again = engine.generate([[1, 2, 3, 4, 9]], SamplingParams(1))[0]
    assert again.metrics.cached_tokens in (0, 2, 4)
    roomy = memory_engine(num_blocks=40, block_size=2)
    roomy.generate([[1, 2, 3, 4, 5]])
    assert roomy.generate([[1, 2, 3, 4, 5]])[0].metrics.cached_tokens == 4
    assert roomy.generate([[1, 2, 3, 4]])[0].metrics.cached_tokens == 2
