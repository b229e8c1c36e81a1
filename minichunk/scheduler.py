"""Which tokens run in the next step.

    running   A ▪            B ▪            K ▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪   what each has left to compute
    waiting   F ▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪
    budget    A B K▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪ F▪▪▪                          decodes, then unfinished prompts, then new ones

A policy proposes (request, length) pairs from read-only views. The Scheduler checks the proposal, grants blocks in
its order, admits from the head of the queue, preempts the newest when blocks run out. No policy can break a rule.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minichunk.blocks import BlockError, BlockPool, BlockTable, OutOfBlocks, num_blocks_needed
from minichunk.request import Chunk, Request


class RequestView(NamedTuple):
    """What a policy sees of a request. A waiting one's num_computed counts the prefix hits it would have now."""

    id: Any
    num_tokens: int
    num_computed: int
    num_prompt_tokens: int
    arrival: float

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decode(self) -> bool:
        """Its next chunk is a decode: one token left, and that one was generated."""
        return self.num_left == 1 and self.num_computed >= self.num_prompt_tokens


PlanStep = Callable[[Sequence[RequestView], Sequence[RequestView], int, int | None], list]


class PlanRefused(ValueError):
    """A policy proposed what cannot run; the message says which pair and why. Nothing was changed."""


class NoProgress(RuntimeError):
    """A policy proposed nothing although there is work."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduling policy as data: the order of the three phases, and three limits.

    prompt_share: prompt tokens take at most this share of a step's budget. may_cut: a prompt may be split into
    chunks. prompts_alone: a step holds prompts or decodes, never both.

    Raises ValueError when the order leaves a phase out, or prompt_share does not lie between 0 and 1.
    """

    name: str
    order: tuple[str, str, str] = ("decodes", "unfinished", "waiting")
    prompt_share: float | None = None
    may_cut: bool = True
    prompts_alone: bool = False

    def __post_init__(self):
        if sorted(self.order) != ["decodes", "unfinished", "waiting"]:
            raise ValueError(f"order must name decodes, unfinished and waiting once each, got {self.order!r}")
        if self.prompt_share is not None and not 0 < self.prompt_share < 1:
            raise ValueError(f"prompt_share must lie between 0 and 1, got {self.prompt_share}")

    def plan_step(
        self, running: Sequence[RequestView], waiting: Sequence[RequestView], budget: int, chunk_size: int | None
    ) -> list[tuple[RequestView, int]]:
        """Each chunk gets min(what it needs, chunk_size, budget left), phase by phase, in arrival order."""
        phases = {"decodes": [r for r in running if r.is_decode], "waiting": waiting}
        phases["unfinished"] = (
            [r for r in running if r.num_left and not r.is_decode] if len(phases["decodes"]) < len(running) else []
        )
        left = budget
        prompt_left = budget if self.prompt_share is None else max(1, int(self.prompt_share * budget))
        plan, num_decodes = [], 0
        for phase in self.order:
            if self.prompts_alone and plan and (phase == "decodes") != (len(plan) == num_decodes):
                continue
            if phase == "decodes":  # a token each
                num_decodes = min(left, len(phases[phase]))
                plan += [(request, 1) for request in phases[phase][:left]]
                left -= num_decodes
                continue
            for request in phases[phase]:
                wanted = request.num_left
                length = min(wanted, chunk_size or wanted, left, prompt_left)
                if length == 0 or (length < wanted and not self.may_cut):
                    break  # the first that does not fit ends the phase: nobody overtakes
                plan.append((request, length))
                left, prompt_left = left - length, prompt_left - length
        return plan


POLICIES = {
    "mixed": Policy("mixed"),
    "prefill_first": Policy("prefill_first", ("unfinished", "waiting", "decodes"), may_cut=False, prompts_alone=True),
    "whole_prompt": Policy("whole_prompt", may_cut=False),
    "leftover": Policy("leftover", ("unfinished", "waiting", "decodes")),
}


def make_policy(policy: str | Policy | PlanStep) -> Policy | PlanStep:
    """A name from POLICIES, "share(x)" with 0 < x < 1, a Policy, or a plan_step function. Raises ValueError."""
    if not isinstance(policy, str):
        if isinstance(policy, Policy) or callable(policy):
            return policy
        raise ValueError(f"policy must be a name, a Policy or a plan_step function, got {policy!r}")
    if policy in POLICIES:
        return POLICIES[policy]
    if policy.startswith("share(") and policy.endswith(")"):
        try:
            share = float(policy[6:-1])
        except ValueError:
            share = -1.0
        if 0 < share < 1:
            return Policy(policy, prompt_share=share)
        raise ValueError(f"share(x) needs 0 < x < 1, got {policy!r}")
    raise ValueError(f"unknown policy {policy!r}: use {', '.join(POLICIES)}, share(x), a Policy, or a function")


@dataclass(slots=True)
class StepPlan:
    """What runs in the step, and what changed to make it so."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list = field(default_factory=list)
    preempted: list = field(default_factory=list)
    hits: dict = field(default_factory=dict)
    grown: dict = field(default_factory=dict)
    admitting: bool = True  # ends at the first waiting request that does not fit, and at a preemption


class Scheduler:
    """Queues, admission, preemption. `waiting` and `running` hold Requests in arrival order.

    pool: a BlockPool, or a learner's object with grow, release, share and num_free.
    """

    def __init__(
        self, pool: BlockPool, policy: Policy | PlanStep, max_batch_tokens: int, chunk_size: int | None, max_requests: int, block_size: int,
    ):  # fmt: skip
        self.pool, self.policy, self.block_size = pool, policy, block_size
        self.max_batch_tokens, self.chunk_size, self.max_requests = max_batch_tokens, chunk_size, max_requests
        self.may_cut = getattr(policy, "may_cut", True)
        self._plan_step: PlanStep = getattr(policy, "plan_step", policy)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    # --- one step ----------------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan:
        """Decides the next step and takes its blocks. Raises PlanRefused, NoProgress or what the policy raises, with
        nothing changed."""
        candidates = self._candidates()
        proposal = self._propose(candidates)
        plan = StepPlan()
        while True:
            for request, length in proposal:
                if request.table is not None:
                    self._grow(request, length, plan)
                elif request in candidates and plan.admitting:
                    plan.admitting = self._admit(request, length, plan) and plan.admitting
            if plan.chunks:
                return plan
            if not self.running:
                raise BlockError(
                    f"request {self.waiting[0].id} does not fit into an empty pool of {self.pool.num_free} free blocks"
                )
            # The policy listed only waiting requests, and none fits yet; or only one that ran out of blocks and was
            # preempted itself. Ask again about those that run: every step computes at least one token.
            proposal = self._propose([])

    def _candidates(self) -> list[Request]:
        """The waiting requests that could enter in this step: as many as there are seats and budget for."""
        found, tokens = [], 0
        for request in self.waiting:
            if len(found) >= self.max_requests - len(self.running) or tokens >= self.max_batch_tokens:
                break
            found.append(request)
            left = request.num_tokens - self._num_hit(request)
            tokens += min(left, self.chunk_size or left)
        return found

    def _propose(self, candidates: list[Request]) -> list[tuple[Request, int]]:
        """Asks the policy, and checks every pair."""
        views = [RequestView(r.id, r.num_tokens, r.num_computed, r.num_prompt_tokens, r.arrival) for r in self.running]
        queue = [RequestView(r.id, r.num_tokens, self._num_hit(r), r.num_prompt_tokens, r.arrival) for r in candidates]
        pairs = self._plan_step(list(views), list(queue), self.max_batch_tokens, self.chunk_size)
        if isinstance(self.policy, Policy):
            live = {r.id: r for r in self.running} | {r.id: r for r in candidates}
            pairs = [(live[view.id], length) for view, length in pairs]
        else:
            pairs = self._checked(pairs, views, queue, candidates)
        if not pairs and (self.running or candidates):
            raise NoProgress(
                f"the policy proposed nothing, with {len(self.running)} running and {len(candidates)} waiting requests"
            )
        return pairs

    def _checked(self, pairs, views, queue, candidates) -> list[tuple[Request, int]]:
        live = {r.id: r for r in self.running} | {r.id: r for r in candidates}
        left = {v.id: v.num_left for v in [*views, *queue]}
        order = [v.id for v in queue]
        total, seen, entered, checked = 0, set(), 0, []
        try:
            pairs = [(getattr(request, "id", request), length) for request, length in pairs]
            hash(tuple(id for id, _ in pairs))
        except (TypeError, ValueError) as error:
            raise PlanRefused(f"plan_step must return a list of (request, length) pairs, got {pairs!r}") from error
        for id, length in pairs:
            if id not in live:
                raise PlanRefused(f"request {id!r} is neither running nor among the waiting ones")
            if id in seen:
                raise PlanRefused(f"request {id!r} is in the plan twice")
            if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= left[id]:
                raise PlanRefused(
                    f"request {id!r} has {left[id]} tokens left, the plan gives it {length!r}: a whole number from 1 to {left[id]}"
                )
            if self.chunk_size and length > self.chunk_size:
                raise PlanRefused(f"request {id!r} gets {length} tokens, chunk_size is {self.chunk_size}")
            if id in order:
                if id != order[entered]:
                    raise PlanRefused(
                        f"request {id!r} would overtake {order[entered]!r}: waiting requests enter in arrival order"
                    )
                entered += 1
            total += length
            seen.add(id)
            checked.append((live[id], length))
        if total > self.max_batch_tokens:
            raise PlanRefused(f"the plan holds {total} tokens, the budget is {self.max_batch_tokens}")
        return checked

    # --- blocks ------------------------------------------------------------------------------------------------------
    def _find(self, request: Request) -> list[int]:
        find = getattr(self.pool, "find", None)
        return find(request) if find else []

    def _num_hit(self, request: Request) -> int:
        return len(self._find(request)) * self.block_size

    def _admit(self, request: Request, length: int, plan: StepPlan) -> bool:
        """Lets the head of the queue in when its whole present length fits beside what the running ones still lack."""
        hits = self._find(request)
        held = sum(self.pool.ref_counts[b] > 0 for b in hits)  # hits in another table cost no free block
        owed = sum(num_blocks_needed(r.num_tokens, self.block_size) - len(r.table) for r in self.running)
        if num_blocks_needed(request.num_tokens, self.block_size) - held + owed > self.pool.num_free:
            return False
        left = request.num_tokens - len(hits) * self.block_size
        if length < left and not self.may_cut:
            return False  # blocks taken earlier in this step evicted some of its hits: whole, or in the next step
        self.waiting.popleft()
        request.table = BlockTable(self.block_size)
        request.num_computed = self.pool.share(request.table, request)
        self.running.append(request)
        plan.admitted.append(request.id)
        plan.hits |= {request.id: request.num_computed} if request.num_computed else {}
        plan.grown[request.id] = list(request.table.block_ids)
        self._grow(request, min(length, request.num_left), plan)
        return True

    def _grow(self, request: Request, length: int, plan: StepPlan) -> None:
        """Takes the chunk's blocks, preempting the newest running requests until they are there."""
        before, end = len(request.table), request.num_computed + length
        short = num_blocks_needed(end, self.block_size) > before
        while short:
            try:
                self.pool.grow(request.table, end)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is request:
                    return
        if short:
            plan.grown.setdefault(request.id, []).extend(request.table.block_ids[before:])
        plan.chunks.append(Chunk.of(request, length))

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """The victim gives up its blocks and its chunk in this step, and waits at the head of the queue. It keeps its
        output, seed and max_tokens: its tokens will be computed again."""
        plan.admitting = False
        self.pool.release(victim.table)
        victim.table, victim.num_computed = None, 0
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        plan.chunks = [c for c in plan.chunks if c.request is not victim]
        plan.grown.pop(victim.id, None)
        if victim.id in plan.admitted:  # entered in this very step: as if it had not
            plan.admitted.remove(victim.id)
            plan.hits.pop(victim.id, None)
        else:
            plan.preempted.append(victim.id)
            victim.metrics.preemptions += 1

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """The chunks were computed: counts them, and makes their whole blocks findable."""
        index, size = getattr(self.pool, "index", None), self.block_size
        for request, start, length, _, _ in chunks:
            end = request.num_computed = start + length
            if index and end // size > start // size:  # a block became whole
                index(request.table, request, start)

    def remove(self, request: Request) -> None:
        """The request leaves, wherever it is; its blocks come home."""
        if request.table is not None:
            self.pool.release(request.table)
            request.table = None
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    # --- undo and check ----------------------------------------------------------------------------------------------
    def snapshot(self) -> Callable[[], None]:
        """Returns a function that puts queues, tables and pool back as they are now (a learner's packer may fail)."""
        live = [*self.running, *self.waiting]
        state = [
            (
                r,
                r.num_computed,
                r.table,
                list(r.table.block_ids) if r.table is not None else None,
                r.metrics.preemptions,
            )
            for r in live
        ]
        queues = deque(self.waiting), list(self.running)
        pool_state = self.pool.snapshot() if hasattr(self.pool, "snapshot") else copy.deepcopy(vars(self.pool))

        def restore() -> None:
            self.pool.restore(pool_state) if hasattr(self.pool, "restore") else vars(self.pool).update(pool_state)
            self.waiting, self.running = queues
            for request, num_computed, table, block_ids, preemptions in state:
                request.num_computed, request.table = num_computed, table
                request.metrics.preemptions = preemptions
                if table is not None:
                    table.block_ids = block_ids

        return restore

    def check(self) -> None:
        """Asserts the invariants between steps; raises BlockError."""
        tables = [r.table for r in self.running]
        if hasattr(self.pool, "check"):
            self.pool.check(tables)
        ids = [r.id for r in [*self.running, *self.waiting]]
        if len(ids) != len(set(ids)):
            raise BlockError(f"a request is in two queues: {ids}")
        for request in self.running:
            if request.table is None or not 0 <= request.num_computed <= request.num_tokens:
                raise BlockError(
                    f"running request {request.id}: table {request.table}, computed {request.num_computed} of {request.num_tokens}"
                )
            if len(request.table) * self.block_size < request.num_computed:
                raise BlockError(
                    f"request {request.id}: {request.num_computed} tokens computed, {len(request.table)} blocks"
                )
        for request in self.waiting:
            if request.table is not None or request.num_computed:
                raise BlockError(f"waiting request {request.id} holds blocks or computed tokens")
