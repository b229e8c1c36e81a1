"""The real Scheduler, pool and policies on a virtual clock, with a cost model where the engine has a GPU.

    arrivals → Scheduler.plan → [Chunk…] → cost model: seconds → Scheduler.commit → StepRecord

No token is computed: a step costs what the cost model says, and a request ends after the output tokens its trace names.
What comes out is a `Run` like the engine's, so every figure and view works on it. The same input gives the same Run.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from minichunk import __version__
from minichunk.blocks import BlockPool, num_blocks_needed
from minichunk.costmodel import CostModel, kv_tokens_that_fit
from minichunk.record import RequestRecord, Run, StepRecord
from minichunk.request import Chunk, Request, SamplingParams
from minichunk.scheduler import Policy, Scheduler, StepPlan, make_policy
from minichunk.workloads import ClosedLoop, TraceRequest, poisson, prompt_ids

Cost = CostModel | Callable[[Sequence[Chunk]], float]


class Simulator:
    """One simulated server.

    cost: a CostModel, or a function chunks → seconds. The other options mean what they mean to `Engine`; num_blocks
    defaults to what fits beside the weights in 90% of the GPUs' memory, max_batch_tokens to 512 where the policy may cut
    prompts (else it must be given), max_requests to 128.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        policy: str | Policy | Callable = "mixed",
        max_batch_tokens: int | None = None,
        chunk_size: int | None = None,
        max_requests: int = 128,
        block_size: int = 16,
        num_blocks: int | None = None,
        prefix_cache: bool = True,
    ):
        policy = make_policy(policy)
        may_cut = getattr(policy, "may_cut", True)
        if not may_cut and chunk_size is not None:
            raise ValueError(f"policy {policy.name} never cuts a prompt: leave out chunk_size={chunk_size}")
        if max_batch_tokens is None:
            if not may_cut:
                raise ValueError(
                    f"policy {policy.name} never cuts a prompt: give a max_batch_tokens that holds the longest"
                )
            max_batch_tokens = max(512, max_requests)
        if max_batch_tokens < max_requests:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} is below max_requests {max_requests}: a step must hold a decode of each"
            )
        if num_blocks is None:
            if not isinstance(cost, CostModel):
                raise ValueError("give num_blocks: a function as cost does not say how much memory there is")
            num_blocks = kv_tokens_that_fit(cost.shape, cost.gpu, cost.tp) // block_size
            if num_blocks < 1:
                raise ValueError(
                    f"{cost.shape.name} needs {cost.shape.params * cost.shape.dtype_bytes / 1e9:.0f} GB for its weights; "
                    f"{cost.tp} × {cost.gpu.name} have {cost.tp * cost.gpu.memory / 1e9:.0f} GB: raise tp"
                )
        self.cost, self._seconds = cost, cost.seconds if isinstance(cost, CostModel) else cost
        self.pool = BlockPool(num_blocks, block_size, prefix_cache)
        self.scheduler = Scheduler(self.pool, policy, max_batch_tokens, chunk_size, max_requests, block_size)
        self.now = 0.0
        self.run = Run(meta=self._meta(policy, num_blocks, block_size, max_requests, prefix_cache))
        self._outputs: dict[Any, list[int]] = {}
        self._arrived: list = []

    def _meta(self, policy, num_blocks, block_size, max_requests, prefix_cache) -> dict:
        model = self.cost if isinstance(self.cost, CostModel) else None
        device = "virtual" if model is None else model.gpu.name if model.tp == 1 else f"{model.tp} x {model.gpu.name}"
        return {
            "model": "unknown" if model is None else model.shape.name,
            "policy": getattr(policy, "name", getattr(policy, "__name__", type(policy).__name__)),
            "max_batch_tokens": self.scheduler.max_batch_tokens, "chunk_size": self.scheduler.chunk_size,
            "max_requests": max_requests, "block_size": block_size, "num_blocks": num_blocks, "prefix_cache": prefix_cache,
            "device": device, "dtype": "virtual", "attention": "cost model", "source": f"SIMULATED {device}",
            "mode": "simulated", "versions": {"minichunk": __version__},
        }  # fmt: skip

    def add(
        self, id: Any, prompt: list[int], output_tokens: int, arrival: float, outputs: list[int] | None = None
    ) -> None:
        """Queues a request. outputs: its answer's token ids (they matter to the prefix cache only), default zeros.
        Raises ValueError when it could never run, as the engine does."""
        self._refuse(id, len(prompt), output_tokens)
        request = Request(id, list(prompt), len(prompt), SamplingParams(max_tokens=output_tokens), arrival)
        self._outputs[id] = outputs if outputs is not None else [0] * output_tokens
        self.run.requests[id] = RequestRecord(id, prompt, [], arrival, token_times=request.metrics.token_times)
        self.scheduler.add(request)
        self._arrived.append(id)

    def _refuse(self, id: Any, prompt: int, output: int) -> None:
        slots, size, budget = prompt + output - 1, self.pool.block_size, self.scheduler.max_batch_tokens
        if num_blocks_needed(slots, size) > self.pool.num_blocks:
            raise ValueError(
                f"request {id}: prompt {prompt} + output {output} needs {slots} cache slots, the pool has "
                f"{self.pool.num_blocks * size}: give it more memory (tp, gpu, num_blocks) or drop the request"
            )
        if not self.scheduler.may_cut and prompt + output > budget:
            raise ValueError(
                f"request {id}: prompt {prompt} + output {output} is above max_batch_tokens {budget}, and policy "
                f"{self.scheduler.policy.name} never cuts a prompt: give max_batch_tokens={prompt + output}"
            )

    def step(self) -> StepRecord | None:
        """Plans a step, lets the cost model say how long it takes, and moves the clock. None when there is no work."""
        if not self.scheduler.has_work:
            return None
        plan = self.scheduler.plan()
        start = self.now
        for id in plan.admitted:
            if self.run.requests[id].first_scheduled is None:
                self.run.requests[id].first_scheduled = start
        end = self.now = start + self._seconds(plan.chunks)
        self.scheduler.commit(plan.chunks)
        finished = [c.id for c in plan.chunks if c.is_last and self._accept(c.request, end)]
        record = _step_record(self.scheduler, plan, start, end, finished, self._arrived, len(self.run.steps))
        self.run.steps.append(record)
        self._arrived = []
        return record

    def _accept(self, request: Request, now: float) -> bool:
        """Gives a request its next token; True when it was the last."""
        record = self.run.requests[request.id]
        token = self._outputs[request.id][len(record.output_ids)]
        request.token_ids.append(token)
        record.output_ids.append(token)
        record.token_times.append(now)
        if len(record.output_ids) < request.params.max_tokens:
            return False
        self.scheduler.remove(request)
        record.finish_reason, record.finished = "length", now
        del self._outputs[request.id]
        return True


def _step_record(scheduler: Scheduler, plan: StepPlan, start, end, finished, arrived, index: int) -> StepRecord:
    pool, size = scheduler.pool, scheduler.block_size
    record = StepRecord(
        index=index, start=start, end=end, budget=scheduler.max_batch_tokens,
        chunks=[(c.id, c.start, c.length, c.is_last, c.is_decode) for c in plan.chunks],
        admitted=plan.admitted, preempted=plan.preempted, finished=finished,
        used=pool.num_used, cached=pool.num_cached, empty=pool.num_empty,
        wasted_slots=sum(len(r.table) * size - r.num_computed for r in scheduler.running),
        hits=plan.hits, attention="cost model", arrived=arrived, grown=plan.grown,
        block_states=dict(pool.given_up), times={"forward": end - start},
    )  # fmt: skip
    pool.given_up.clear()
    return record


def simulate(
    requests: Iterable[TraceRequest] | ClosedLoop,
    cost: Cost,
    *,
    on_step: Callable[[Simulator, StepRecord], bool | None] | None = None,
    **options: Any,
) -> Run:
    """Runs a trace through a simulated server until every answer is out, and returns the Run.

    requests: TraceRequests (ids are their places in the list), or a ClosedLoop. options: those of `Simulator`; a policy
    that never cuts prompts gets, unless told otherwise, a budget that holds the longest request.
    on_step(simulator, record) is called after each step; returning True ends the simulation there.
    """
    loop = requests if isinstance(requests, ClosedLoop) else None
    given = loop.start() if loop else list(requests)
    if options.get("max_batch_tokens") is None and not getattr(
        make_policy(options.get("policy", "mixed")), "may_cut", True
    ):
        everyone = loop.requests if loop else given
        longest = max((r.prompt_tokens + r.output_tokens for r in everyone), default=0)
        options["max_batch_tokens"] = max(longest, options.get("max_requests", 128))
    simulator = Simulator(cost, **options)
    pending = [(r.arrival, number, r) for number, r in enumerate(given)]
    heapq.heapify(pending)
    count = len(pending)
    while pending or simulator.scheduler.has_work:
        if not simulator.scheduler.has_work:
            simulator.now = max(simulator.now, pending[0][0])
        while pending and pending[0][0] <= simulator.now:
            arrival, number, r = heapq.heappop(pending)
            simulator.add(number, prompt_ids(r, number), r.output_tokens, arrival)
        record = simulator.step()
        if on_step and on_step(simulator, record):
            break
        for _ in record.finished if loop else ():
            again = loop.finished(simulator.now)
            if again is not None:
                heapq.heappush(pending, (again.arrival, count, again))
                count += 1
    return simulator.run


# --- recorded runs ------------------------------------------------------------------------------------------------------


def options_of(run: Run) -> dict:
    """The Scheduler's options that a run was made with, from its meta."""
    names = ("policy", "max_batch_tokens", "chunk_size", "max_requests", "block_size", "num_blocks", "prefix_cache")
    return {name: run.meta[name] for name in names if name in run.meta}


def resimulate(run: Run, cost: Cost | None = None, **options: Any) -> Run:
    """The requests of a recorded run, with their tokens and arrivals, on a virtual clock: under another policy or budget
    (options), or on another GPU (cost). Without a cost a step takes as long as the recorded step of the same number."""
    options = options_of(run) | options
    simulator = Simulator(cost or _recorded_times(run), **options)
    pending = deque(sorted((r for r in run.requests.values() if r.output_ids), key=lambda r: r.arrival))
    if run.steps:
        simulator.now = run.steps[0].start
    while pending or simulator.scheduler.has_work:
        if not simulator.scheduler.has_work:
            simulator.now = max(simulator.now, pending[0].arrival)
        while pending and pending[0].arrival <= simulator.now:
            r = pending.popleft()
            simulator.add(r.id, r.prompt_ids, len(r.output_ids), r.arrival, r.output_ids)
        simulator.step()
    return simulator.run


def _recorded_times(run: Run) -> Callable[[Sequence[Chunk]], float]:
    """Seconds from a step's start to the next one's, or to its own end before a pause with nobody waiting."""
    durations, live = [], 0
    for step, after in zip(run.steps, [*run.steps[1:], None]):
        live += len(step.arrived) - len(step.finished)
        durations.append((after.start if after and live else step.end) - step.start)
    times = iter(durations)

    def seconds(chunks: Sequence[Chunk]) -> float:
        try:
            return next(times)
        except StopIteration:
            raise ValueError(
                f"the recorded run has {len(durations)} steps, this one needs more: give a cost model"
            ) from None

    return seconds


def replay(run: Run, policy: str | Policy | Callable | None = None) -> str | None:
    """Puts a recorded run's arrivals and tokens through today's Scheduler, step by step, and compares the batches.

    Returns None when every step is the same, else the first difference in words: the recording is stale, or the
    Scheduler changed. policy: the function, where the run was made with a learner's own. Raises ValueError for a run
    made with overlap=True: its steps were planned before what the record of the step before says had happened.
    """
    if run.meta.get("overlap"):
        raise ValueError("this run was made with overlap=True, which plans ahead: only runs without it can be replayed")
    options = options_of(run) | ({} if policy is None else {"policy": policy})
    try:
        scheduler = Simulator(lambda chunks: 0.0, **options).scheduler
    except ValueError as error:
        raise ValueError(
            f"cannot replay this run ({error}); if its policy is a function of your own, pass policy="
        ) from error
    requests: dict[Any, Request] = {}
    for step in run.steps:
        for id in step.arrived:
            r = run.requests[id]
            requests[id] = Request(id, list(r.prompt_ids), len(r.prompt_ids), arrival=r.arrival)
            scheduler.add(requests[id])
        for id in step.finished:
            if run.requests[id].finish_reason == "abort":
                scheduler.remove(requests[id])
        plan = scheduler.plan()
        difference = _first_difference(step, plan)
        if difference:
            return f"step {step.index}: {difference}"
        _commit_as_recorded(scheduler, plan, step, run)
        difference = _pool_difference(step, scheduler.pool)
        if difference:
            return f"step {step.index}: {difference}"
    return None


def _first_difference(step: StepRecord, plan: StepPlan) -> str | None:
    now = [(c.id, c.start, c.length, c.is_last, c.is_decode) for c in plan.chunks]
    recorded = [tuple(c) for c in step.chunks]
    if recorded:  # an interrupted step has none
        for i, (a, b) in enumerate(zip(recorded, now)):
            if a != b:
                return f"chunk {i} was {a}, now it is {b} (id, start, length, is_last, is_decode)"
        if len(recorded) != len(now):
            return f"{len(recorded)} chunks were recorded, now there are {len(now)}"
    for name in ("admitted", "preempted", "hits", "grown"):
        was, is_now = getattr(step, name), getattr(plan, name)
        if was != is_now:
            return f"{name} was {was}, now it is {is_now}"
    return None


def _commit_as_recorded(scheduler: Scheduler, plan: StepPlan, step: StepRecord, run: Run) -> None:
    """Gives each sampled request the token it got then; what failed or stopped then leaves now."""
    reasons = {id: run.requests[id].finish_reason for id in step.finished}
    ids = [c.id for c in plan.chunks]
    if step.chunks and not all(reasons.get(id) == "error" for id in ids):
        scheduler.commit(plan.chunks)
        for chunk in plan.chunks:
            request, record = chunk.request, run.requests[chunk.id]
            given = request.num_tokens - request.num_prompt_tokens
            if chunk.is_last and given < len(record.output_ids):
                request.token_ids.append(record.output_ids[given])
    for chunk in plan.chunks:
        if chunk.id in reasons and reasons[chunk.id] != "abort":
            scheduler.remove(chunk.request)


def _pool_difference(step: StepRecord, pool: BlockPool) -> str | None:
    was, now = (step.used, step.cached, step.empty), (pool.num_used, pool.num_cached, pool.num_empty)
    return None if was == now else f"blocks used, cached, empty were {was}, now they are {now}"


# --- capacity -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """One rate tried: P99 of TBT and median queueing in seconds (of what ran before it was clear), and the verdict."""

    rate: float
    passed: bool
    tbt_p99: float | None
    queue_p50: float | None


@dataclass(frozen=True)
class Capacity:
    """Highest arrival rate (requests a second) that keeps the objective; 0 when the lowest tried does not."""

    rate: float
    slo: float
    probes: list[Probe] = field(default_factory=list)


QUEUE_LIMIT = 2.0  # seconds of median queueing, as Sarathi-Serve's capacity (OSDI'24, section 5)


def probe(
    requests: Sequence[TraceRequest], cost: Cost, slo: float, rate: float, seed: int = 0, **options: Any
) -> Probe:
    """Runs the requests with Poisson arrivals at `rate` and says whether P99 TBT ≤ slo and median queueing ≤ 2 s.

    Stops as soon as the verdict cannot change any more: too many gaps above the SLO, or too many late starts.
    """
    gaps_allowed = 0.01 * sum(r.output_tokens - 1 for r in requests) + 1
    late_allowed = len(requests) / 2 + 1
    arrivals = poisson(requests, rate, seed)
    long_gaps = late_starts = 0
    hopeless = False

    def watch(simulator: Simulator, step: StepRecord) -> bool:
        nonlocal long_gaps, late_starts, hopeless
        records = simulator.run.requests
        for id, _, _, is_last, _ in step.chunks:
            times = records[id].token_times
            if is_last and len(times) > 1 and times[-1] - times[-2] > slo:
                long_gaps += 1
        for id in step.admitted:
            first = records[id].first_scheduled
            late_starts += first == step.start and first - records[id].arrival > QUEUE_LIMIT
        hopeless = long_gaps > gaps_allowed or late_starts > late_allowed
        return hopeless

    run = simulate(arrivals, cost, on_step=watch, **options)
    queues = [r.queue_time for r in run.requests.values() if r.queue_time is not None]
    tbt = float(np.percentile(run.tbts, 99)) if run.tbts else None
    queue = float(np.median(queues)) if queues else None
    return Probe(rate, not hopeless and (tbt or 0.0) <= slo and (queue or 0.0) <= QUEUE_LIMIT, tbt, queue)


def capacity(
    requests: Sequence[TraceRequest],
    cost: Cost,
    slo: float,
    *,
    tolerance: float = 0.02,
    low: float = 0.0625,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Capacity:
    """Highest Poisson rate with P99 TBT ≤ `slo` seconds and median queueing ≤ 2 s, to within `tolerance` (relative).

    Doubles the rate from `low` until one fails, then halves the interval; ValueError when none does. workers: processes (default: all cores, 1 runs
    here); with three or more, the two possible next middles are tried beside each middle. The result does not depend
    on how many there are. A policy or cost of your own runs in this process: another one may not find its code. A script
    that asks for more than one needs `if __name__ == "__main__":` around the call.
    """
    own_code = not isinstance(cost, CostModel) or not isinstance(make_policy(options.get("policy", "mixed")), Policy)
    workers = 1 if own_code else workers or os.cpu_count() or 1
    tried: dict[float, Probe] = {}
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with _pool_of(workers) as pool, Progress(*columns, disable=not progress, transient=True) as bar:
        task = bar.add_task(f"capacity at {slo * 1e3:.0f} ms", total=None)

        def verdicts(rates: Sequence[float]) -> None:
            rates = [r for r in rates if r not in tried]
            call = [(requests, cost, slo, rate, seed, options) for rate in rates]
            for found in pool.map(_probe, call) if pool else map(_probe, call):
                tried[found.rate] = found
                bar.update(task, advance=1, description=f"capacity at {slo * 1e3:.0f} ms: {found.rate:.2f} a second {'passes' if found.passed else 'fails'}")  # fmt: skip

        good, bad = 0.0, low
        while True:
            ladder = [bad * 2**k for k in range(min(workers, 4))]
            verdicts(ladder)
            failed = next((r for r in ladder if not tried[r].passed), None)
            passed = [r for r in ladder if failed is None or r < failed]
            good = passed[-1] if passed else good
            if failed is not None:
                bad = failed
                break
            bad = ladder[-1] * 2
            if len(requests) / bad < 1e-3:
                raise ValueError(
                    f"even {len(requests)} requests at once keep the objective: give more requests, or a tighter SLO"
                )
        while good and bad / good > 1 + tolerance:
            middle = (good * bad) ** 0.5
            verdicts([middle] if workers < 3 else [middle, (good * middle) ** 0.5, (middle * bad) ** 0.5])
            good, bad = (middle, bad) if tried[middle].passed else (good, middle)
    return Capacity(good, slo, sorted(tried.values(), key=lambda p: p.rate))


def _probe(call: tuple) -> Probe:
    requests, cost, slo, rate, seed, options = call
    return probe(requests, cost, slo, rate, seed, **options)


class _Here:
    """Stands where a process pool would, for one worker: there is none."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_) -> None:
        return None


def _pool_of(workers: int):
    # spawn: a fork of a process that has torch's threads may hang
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else _Here()
