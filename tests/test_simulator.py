"""The simulator against the engine step by step, against arithmetic done by hand, and against itself."""

import copy
import gzip
import math
from dataclasses import replace

import numpy as np
import pytest

from minichunk import simulator as sim
from minichunk import workloads
from minichunk.costmodel import CostModel, ModelShape
from minichunk.engine import Engine
from minichunk.record import Run
from minichunk.request import SamplingParams
from minichunk.scheduler import Policy
from minichunk.simulator import capacity, probe, replay, resimulate, simulate
from minichunk.workloads import ClosedLoop, TraceRequest, poisson

SHAPE = ModelShape("small", 2, 64, 4, 2, 16, 128, 256)
COST = CostModel("llama-3-8b", "h200")


def one_second_a_step(chunks):
    return 1.0


class VirtualEngine(Engine):
    """The real engine, its model and all, on a clock that moves only in the forward, by what the cost model says."""

    clock = 0.0

    def _now(self):
        return self.clock

    def _sleep(self, seconds):
        self.clock += seconds

    def run_on(self, cost):
        forward = self.runner.run

        def timed(batch):
            self.clock += cost.seconds(batch.chunks)
            return forward(batch)

        self.runner.run = timed
        return self


def prompts(n, seed, longest=60):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 200, 24).tolist()  # a prefix that half of them share
    return [
        (base if rng.random() < 0.5 else []) + rng.integers(0, 200, int(rng.integers(1, longest))).tolist() for _ in range(n)
    ]  # fmt: skip


OPTIONS = [
    dict(policy="mixed", max_batch_tokens=16, max_requests=6, num_blocks=200),
    dict(policy="mixed", max_batch_tokens=20, chunk_size=7, max_requests=8, num_blocks=22),  # preempts
    dict(policy="leftover", max_batch_tokens=16, max_requests=4, num_blocks=60, prefix_cache=False),
    dict(policy="share(0.5)", max_batch_tokens=24, max_requests=8, num_blocks=40),
    dict(policy="whole_prompt", max_batch_tokens=128, max_requests=5, num_blocks=60),
    dict(policy="prefill_first", max_batch_tokens=128, max_requests=5, num_blocks=60),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["policy"])
def test_engine_and_simulator_run_the_same_batches_at_the_same_times(options):
    """Engine.replay with a model and resimulate without one, both on the cost model's clock: every record is equal."""
    cost = CostModel(SHAPE, replace(COST.gpu, peak=1e9, bandwidth=1e9))
    arrivals = np.cumsum(np.random.default_rng(1).exponential(0.02, 9)).tolist()
    todo = [
        (at, ids, SamplingParams(max_tokens=1 + 11 * i % 23, ignore_eos=True))
        for i, (at, ids) in enumerate(zip(arrivals, prompts(9, seed=2, longest=40)))
    ]
    with VirtualEngine("tiny", block_size=4, check=True, **options).run_on(cost) as engine:
        engine.replay(todo)
        real = engine.run
    virtual = resimulate(real, cost)
    assert [s.chunks for s in virtual.steps] == [s.chunks for s in real.steps]
    for a, b in zip(real.steps, virtual.steps):
        same = "index start end budget chunks admitted preempted finished used cached empty wasted_slots hits arrived grown block_states"
        for name in same.split():
            assert getattr(b, name) == getattr(a, name), f"{name} in step {a.index}"
    for id, record in real.requests.items():
        assert virtual.requests[id] == record
    assert virtual.summary() == real.summary()
    assert replay(real) is None and replay(virtual) is None
    if options["num_blocks"] == 22:
        assert sum(len(s.preempted) for s in real.steps) > 0


def recorded_run(**options) -> Run:
    """A run on the machine's own clock; requests come while others run, one is aborted."""
    with Engine("tiny", block_size=4, max_batch_tokens=16, max_requests=6, num_blocks=60, **options) as engine:
        for i, ids in enumerate(prompts(9, seed=5)):
            engine.add(ids, SamplingParams(max_tokens=3 + i, ignore_eos=True))
            engine.step()
            if i == 4:
                engine.abort(3)
        while engine.has_work:
            engine.step()
        return engine.run


def test_measured_step_times_give_the_engines_batches():
    with Engine("tiny", block_size=4, max_batch_tokens=16, max_requests=6, num_blocks=60) as engine:
        for ids in prompts(8, seed=7):
            engine.add(ids, SamplingParams(max_tokens=9, ignore_eos=True))
            engine.step()
        while engine.has_work:
            engine.step()
        real = engine.run
    virtual = resimulate(real)
    assert [s.chunks for s in virtual.steps] == [s.chunks for s in real.steps]
    assert virtual.steps[-1].end == pytest.approx(real.steps[-1].end)
    with pytest.raises(ValueError, match=r"has \d+ steps, this one needs more"):
        resimulate(real, max_batch_tokens=6)


def test_replay_holds_a_recording_to_todays_scheduler(tmp_path):
    run = Run.load(recorded_run().save(tmp_path / "run.json.gz"))
    assert replay(run) is None
    moved = copy.deepcopy(run)
    step = next(s for s in moved.steps if s.is_mixed)
    id, start, length, last, decode = step.chunks[-1]
    step.chunks[-1] = (id, start, length + 1, last, decode)
    assert replay(moved).startswith(
        f"step {step.index}: chunk {len(step.chunks) - 1} was ({id}, {start}, {length + 1},"
    )
    moved = copy.deepcopy(run)
    moved.steps[2].used += 1
    assert replay(moved).startswith("step 2: blocks used, cached, empty were")
    moved = copy.deepcopy(run)
    moved.meta["max_batch_tokens"] = 8
    assert "step 0" in replay(moved)


def test_replay_of_a_learners_policy_needs_the_policy():
    def mine(running, waiting, budget, chunk_size):
        (request, *_) = [*running, *waiting]
        return [(request, min(request.num_left, budget))]

    run = recorded_run(policy=mine)
    assert replay(run, policy=mine) is None
    assert replay(run, policy="mixed") is not None
    with pytest.raises(ValueError, match="unknown policy 'mine'.*pass policy="):
        replay(run)


def test_an_engine_error_is_replayed():
    with Engine("tiny", block_size=4, max_batch_tokens=16, max_requests=6, num_blocks=60) as engine:
        forward, calls = engine.runner.run, []

        def broken(batch):
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("boom")
            return forward(batch)

        engine.runner.run = broken
        done = engine.generate(prompts(6, seed=3), SamplingParams(max_tokens=5, ignore_eos=True))
        assert {c.finish_reason for c in done} == {"error", "length"}
        assert replay(engine.run) is None


# --- by hand -----------------------------------------------------------------------------------------------------------------


def test_chunked_prompt_beside_a_decode_by_hand():
    """Budget 8, one second a step. A: 3 tokens at 0, answers 4. B: 12 tokens at 0.5, answers 2."""
    trace = [TraceRequest(0.0, 3, 4), TraceRequest(0.5, 12, 2)]
    run = simulate(trace, one_second_a_step, max_batch_tokens=8, max_requests=4, num_blocks=10)
    assert [s.chunks for s in run.steps] == [
        [(0, 0, 3, True, False)],
        [(0, 3, 1, True, True), (1, 0, 7, False, False)],
        [(0, 4, 1, True, True), (1, 7, 5, True, False)],
        [(0, 5, 1, True, True), (1, 12, 1, True, True)],
    ]
    a, b = run.requests.values()
    assert a.token_times == [1, 2, 3, 4] and b.token_times == [3, 4]
    assert (b.queue_time, b.ttft, a.finished) == (0.5, 2.5, 4.0)
    assert run.meta["source"] == "SIMULATED virtual" and a.finish_reason == "length"


def test_clock_jumps_over_idle_time_and_steps_cost_what_the_model_says():
    trace = [TraceRequest(0.0, 100, 1), TraceRequest(50.0, 100, 2)]
    run = simulate(trace, COST)
    assert [s.start for s in run.steps] == pytest.approx([0.0, 50.0, 50.0 + run.steps[1].duration])
    assert [s.duration for s in run.steps] == pytest.approx([COST.seconds(s.chunks) for s in run.steps])


def test_closed_loop_keeps_its_users_busy():
    requests = [TraceRequest(0.0, 4, 3)] * 7
    run = simulate(ClosedLoop(requests, users=2), one_second_a_step, max_requests=4, num_blocks=10)
    assert len(run.requests) == 7
    for step in run.steps[:-3]:
        assert len(step.chunks) == 2
    starts = sorted(r.arrival for r in run.requests.values())
    assert starts == [0, 0, 3, 3, 6, 6, 9]


def test_prefix_hits_from_block_hashes():
    trace = [TraceRequest(0.0, 1100, 2, (1, 2, 3)), TraceRequest(100.0, 1100, 2, (1, 2, 4))]
    run = simulate(trace, COST)
    assert [s.hits for s in run.steps if s.hits] == [{1: 1024}]
    assert not any(s.hits for s in simulate(trace, COST, prefix_cache=False).steps)


def test_same_input_same_run(tmp_path):
    trace = workloads.load("azure-conv", 60)
    runs = [simulate(trace, COST, max_batch_tokens=512) for _ in range(2)]
    paths = [run.save(tmp_path / f"{i}.json.gz") for i, run in enumerate(runs)]
    assert gzip.decompress(paths[0].read_bytes()) == gzip.decompress(paths[1].read_bytes())
    assert Run.load(paths[0]).summary() == runs[0].summary()
    assert replay(Run.load(paths[0])) is None


def test_chunking_bounds_the_stall_of_a_running_stream():
    """What chunked prefill is for: beside a long prompt, the longest gap is near the budget's step, not the prompt's."""
    trace = [TraceRequest(0.0, 100, 200), TraceRequest(0.5, 30_000, 10)]
    worst = {
        policy: max(simulate(trace, COST, policy=policy, **options).requests[0].tbt)
        for policy, options in [("mixed", {"max_batch_tokens": 512}), ("whole_prompt", {}), ("prefill_first", {})]
    }
    assert worst["mixed"] < 0.05 * worst["whole_prompt"]
    assert worst["prefill_first"] > COST.seconds([(0, 30_000, True)])


# --- capacity ------------------------------------------------------------------------------------------------------------------


def test_capacity_against_a_queue_worked_out_by_hand():
    """One request at a time, one step of 0.5 s each (prompt of 1, answer of 1): 2 a second is all there is. Below it the
    queue stays short, above it the queue of 3,000 grows past 2 s."""
    requests = [TraceRequest(0.0, 1, 1)] * 3000

    def half(chunks):
        return 0.5

    options = dict(max_batch_tokens=1, max_requests=1, num_blocks=4)
    found = capacity(requests, half, slo=1.0, workers=1, **options)
    assert 1.7 < found.rate < 2.1
    assert all(p.passed == (p.rate <= found.rate) for p in found.probes)
    above = min(p.rate for p in found.probes if not p.passed)
    assert above / found.rate <= 1.02


def test_capacity_ends_at_zero_when_the_slo_is_below_one_step():
    requests = [TraceRequest(0.0, 10, 5)] * 20
    assert capacity(requests, one_second_a_step, slo=0.5, num_blocks=100).rate == 0


def test_stopping_early_does_not_change_the_verdict():
    requests = workloads.sample("azure-conv", 80, seed=4)
    slow = CostModel("llama-3-8b", "a100-80-sxm")
    for rate in (2.0, 8.0, 24.0, 64.0):
        full = simulate(poisson(requests, rate), slow, policy="prefill_first")
        queue = np.median([r.queue_time for r in full.requests.values()])
        expected = np.percentile(full.tbts, 99) <= 0.05 and queue <= 2
        assert probe(requests, slow, 0.05, rate, policy="prefill_first").passed == expected


def test_too_few_requests_to_find_a_limit():
    with pytest.raises(ValueError, match="even 3 requests at once keep the objective"):
        capacity([TraceRequest(0.0, 10, 5)] * 3, COST, slo=1.0, workers=1)


@pytest.mark.parametrize("workers", [2, 3])
def test_capacity_is_the_same_with_processes(workers):
    requests = workloads.sample("azure-conv", 12)
    options = dict(tolerance=0.3, low=1.0, max_batch_tokens=256)
    alone = capacity(requests, COST, 0.004, workers=1, **options)
    assert capacity(requests, COST, 0.004, workers=workers, **options).rate == alone.rate > 0


# --- refusals --------------------------------------------------------------------------------------------------------------------


def test_refusals_say_the_numbers():
    with pytest.raises(ValueError, match="138 GB for its weights; 1 × A100-80-SXM have 80 GB: raise tp"):
        simulate([], CostModel("llama-2-70b", "a100-80-sxm"))
    with pytest.raises(ValueError, match="give num_blocks"):
        simulate([], one_second_a_step)
    with pytest.raises(ValueError, match="needs 102 cache slots, the pool has 64"):
        simulate([TraceRequest(0.0, 100, 3)], one_second_a_step, num_blocks=4)
    with pytest.raises(ValueError, match="leave out chunk_size=8"):
        simulate([], COST, policy="whole_prompt", chunk_size=8)
    with pytest.raises(ValueError, match="never cuts a prompt: give max_batch_tokens=603"):
        simulate([TraceRequest(0.0, 600, 3)], COST, policy="whole_prompt", max_batch_tokens=512)
    with pytest.raises(ValueError, match="below max_requests"):
        simulate([], COST, max_batch_tokens=8, max_requests=16)
    with pytest.raises(ValueError, match="give a max_batch_tokens"):
        sim.Simulator(COST, policy="whole_prompt")
    assert math.isclose(
        simulate([TraceRequest(0.0, 600, 3)], COST, policy=Policy("mine", may_cut=False)).duration, 0, abs_tol=1
    )
