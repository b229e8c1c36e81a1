"""The engine from outside: whatever happens, the right tokens come out and every block comes home."""

import os
from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from token_memory import EOS, VOCAB, expected, memory_engine, newest_first, random_legal

from minichunk import BlockPool, SamplingParams

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
policies = st.one_of(
    st.sampled_from(["mixed", "leftover", "share(0.01)", "share(0.7)", *NEVER_CUT, newest_first]),
    st.builds(random_legal, st.integers(0, 99)),
)


@st.composite
def engines(draw):
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
