"""One step ahead: while the GPU computes a step, the host plans and launches the next one.

    GPU     | step 1      | step 2      | step 3      |
    host    plan 2, launch 2 · tokens of 1 · record 1 | plan 3, launch 3 · tokens of 2 · record 2 | …

Step 2 is planned before the tokens of step 1 are known. Only their number matters to the plan; the tokens themselves
stay on the GPU, where step 2 picks them up (`feed`). A request that turns out to be finished (a stop token) is then
computed once in vain: its row in step 2 is ignored, and its blocks may be given to others at once, since the GPU runs
the steps in order. One that ends by its number of tokens is known beforehand and not planned.

Between two calls of Engine.step the state is the usual one, but for the blocks of the step that already runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minichunk.blocks import num_blocks_needed
from minichunk.packing import PackedBatch
from minichunk.record import StepRecord
from minichunk.request import Request
from minichunk.sampling import is_plain
from minichunk.scheduler import StepPlan

if TYPE_CHECKING:
    from minichunk.engine import Engine

UNKNOWN = 0  # stands in a request's tokens for the one that the GPU is about to choose


@dataclass(slots=True)
class Flight:
    """A launched step. wait(): its tokens, None for a row that has none. interrupt: what broke its launch off (Ctrl-C)."""

    plan: StepPlan
    batch: PackedBatch
    sampled: list[Request]
    wait: Callable[[], list[int | None]]
    start: float
    assumed: set = field(default_factory=set)  # requests that were given UNKNOWN, to plan the next step
    interrupt: BaseException | None = None
    arrived: list = field(default_factory=list)  # ids that the plan was the first to see
    attention: str = ""  # what ran it
    recorded: bool = False


def step(engine: Engine) -> StepRecord | None:
    """What Engine.step does with overlap=True: returns the record of the oldest step in flight."""
    flight, engine._flight = engine._flight, None
    if flight is None or not any(_alive(engine, c.request) for c in flight.plan.chunks):
        if flight is not None and flight.plan.preempted:  # computed in vain, but whom it preempted still waits
            _drop(engine, flight)
        elif flight is not None:
            engine._arrived[:0] = flight.arrived
        if not engine.scheduler.has_work:
            return None
        if not _all_plain(engine):
            return engine._step_now()
        flight = _launch(engine, None)
    ahead = None
    try:
        if flight.interrupt is not None:
            raise flight.interrupt
        if _all_plain(engine):
            ahead = _launch_ahead(engine, flight)
        record = _complete(engine, flight, ahead)
        if ahead is not None and ahead.interrupt is not None:
            raise ahead.interrupt
    except BaseException:
        for broken in (flight, ahead):
            if broken is not None:
                _drop(engine, broken)
        raise
    engine._flight = ahead
    return record


def _alive(engine: Engine, request: Request) -> bool:
    return request.id in engine._requests


def _all_plain(engine: Engine) -> bool:
    """Rows that need their logits or their history on the host cannot be chosen on the GPU alone."""
    return all(is_plain(r.params) for r in engine._requests.values())


def _launch(engine: Engine, before: Flight | None) -> Flight:
    """Plans a step and starts it; `before` is the step whose tokens it takes up."""
    start = engine._now()
    plan, batch = engine._plan(start)
    feed = np.full(batch.num_tokens, -1, np.int64)
    if before is not None:
        row_of = {r.id: row for row, r in enumerate(before.sampled) if r.id in before.assumed}
        for chunk, end in zip(plan.chunks, batch.cu_seqlens_q[1:].tolist()):
            if chunk.is_last and chunk.request.id in row_of:
                feed[end - 1] = row_of[chunk.request.id]
    flight = Flight(plan, batch, [c.request for c in plan.chunks if c.is_last], list, start)
    flight.arrived, engine._arrived = engine._arrived, []
    try:
        flight.wait = engine.runner.launch(batch, feed, flight.sampled)
        flight.attention = engine.runner.explain_step()
    except Exception as error:  # reported when its turn comes, as a failure on the GPU would be
        flight.wait = _raising(error)
    except BaseException as error:  # the step before it is completed first
        flight.interrupt = error
    return flight


def _raising(error: Exception) -> Callable:
    def wait():
        raise error

    return wait


def _launch_ahead(engine: Engine, flight: Flight) -> Flight | None:
    """Counts the flight's chunks as computed and its tokens as there, and launches what follows; None if nothing does."""
    for chunk in flight.plan.chunks:
        if _alive(engine, chunk.request):
            chunk.request.num_computed = chunk.end
    for request in flight.sampled:
        if _alive(engine, request) and request.num_tokens + 1 - request.num_prompt_tokens < request.params.max_tokens:
            request.token_ids.append(UNKNOWN)
            flight.assumed.add(request.id)
    running, size = engine.scheduler.running, engine.block_size
    owed = sum(num_blocks_needed(r.num_tokens, size) - len(r.table) for r in running)
    # Short of blocks it waits: whoever ends in this flight gives some back, and nobody is preempted for a guess.
    if any(r.num_left for r in running) and owed <= engine.pool.num_free:
        return _launch(engine, flight)
    return None


def _complete(engine: Engine, flight: Flight, ahead: Flight | None) -> StepRecord:
    """Waits for the flight's tokens and gives them to their requests."""
    finished, gone = list(engine._aborted), []  # gone: they end with this step, but took no part in it
    here = {*engine._requests, *(c.id for c in flight.plan.chunks if c.id in engine._aborted)}
    chunks = [c for c in flight.plan.chunks if c.id in here]  # the others were computed in vain
    ran = {c.id for c in chunks}
    begin = max(flight.start, engine._run.steps[-1].end if engine._run.steps else 0.0)
    waited = engine._now()
    try:
        tokens = flight.wait()
        _forget(engine, flight)
    except Exception as error:
        _forget(engine, flight)
        for chunk in [*chunks, *(ahead.plan.chunks if ahead else ())]:
            if _alive(engine, chunk.request):
                engine._finish(chunk.request, "error", engine._now(), f"{type(error).__name__}: {error}")
                (finished if chunk.id in ran else gone).append(chunk.id)
        tokens = []
    came = engine._now()
    failed = {r.id for r, token in zip(flight.sampled, tokens) if token is None}
    for chunk in chunks:  # as Scheduler.commit, with what is now known to be good
        if _alive(engine, chunk.request):
            request = chunk.request
            if ahead is None:
                request.num_computed = chunk.end
            if request.table is not None and request.id not in failed and hasattr(engine.pool, "index"):
                engine.pool.index(request.table, request, chunk.start)
    live = [(r, token) for r, token in zip(flight.sampled, tokens) if _alive(engine, r)]
    try:
        engine._accept_all([r for r, _ in live], [token for _, token in live], [None] * len(live), finished)
    finally:
        end = engine._now()
        engine._planned, engine._forwarded, engine._sampled = begin, waited, came
        later = engine._arrived
        for waiting in (later, ahead.arrived if ahead else []):  # who has left already is shown to have come
            flight.arrived += [id for id in waiting if id in finished]
            waiting[:] = [id for id in waiting if id not in finished]
        engine._arrived = flight.arrived
        record = engine._record(_kept(flight.plan, here), chunks, begin, begin, end, finished, flight.attention)
        engine._arrived = later
        flight.recorded = True
        engine._aborted += gone
    if engine._check:
        engine.scheduler.check()
    return record


def _forget(engine: Engine, flight: Flight) -> None:
    """Takes UNKNOWN back from the requests that were given it."""
    for request in flight.sampled:
        if request.id in flight.assumed:
            request.token_ids.pop()
    flight.assumed.clear()


def _drop(engine: Engine, flight: Flight) -> None:
    """The step was interrupted: its requests are as before it. It computed nothing, but its admissions and blocks are on
    record."""
    if flight.recorded:
        return
    _forget(engine, flight)
    for chunk in flight.plan.chunks:
        request = chunk.request
        if _alive(engine, request) and request.table is not None:
            request.num_computed = min(request.num_computed, chunk.start)
    engine._planned = now = engine._now()
    engine._arrived[:0] = flight.arrived
    engine._record(_kept(flight.plan, engine._requests.keys()), [], flight.start, now, now, list(engine._aborted))


def _kept(plan: StepPlan, here: Collection) -> StepPlan:
    """The plan for the record: a request that had ended before the step's turn came took no part in it."""
    return StepPlan(
        admitted=[id for id in plan.admitted if id in here], preempted=[id for id in plan.preempted if id in here],
        hits={id: n for id, n in plan.hits.items() if id in here}, grown={id: b for id, b in plan.grown.items() if id in here},
    )  # fmt: skip
