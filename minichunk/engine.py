"""The engine: requests in, tokens out, a mixed batch a step.

Request → Scheduler → [Chunk…] → pack, place → PackedBatch → ModelRunner → logits → sample → commit → StepRecord
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from tqdm import tqdm

from minichunk import __version__
from minichunk import overlap as ahead
from minichunk.attention import AttentionBackend, make_backend
from minichunk.blocks import BlockError, BlockPool, num_blocks_needed
from minichunk.graphs import make_buckets
from minichunk.models import load
from minichunk.options import (
    Limits,
    alive,
    check_counts,
    fitting_blocks,
    make_runner,
    resolve_device,
    resolve_dtype,
    verify,
)
from minichunk.packing import PackedBatch, pack_tokens, place
from minichunk.record import RequestRecord, Run, StepRecord
from minichunk.request import Chunk, Completion, Request, SamplingParams
from minichunk.sampling import request_seed, sample
from minichunk.scheduler import Policy, Scheduler, StepPlan, make_policy
from minichunk.text import Detokenizer

Prompt = str | Sequence[int]


class Engine:
    """Runs a model over mixed batches of prompts and decodes.

    model: "smollm2", "tiny", "random:llama-3-8b", a hub id, a folder, or a transformers model object, which is left
        untouched: the engine runs a twin with the same weights.
    attention: auto, torch, triton, flash_attn, flashinfer, or a backend object (attention.explain() says what runs and why). device: auto, cpu, cuda. dtype: auto, float32, bfloat16, float16.
    policy: mixed, prefill_first, whole_prompt, leftover, share(x), a Policy, or a function
        plan_step(running, waiting, budget, chunk_size) → [(request, length), …].
    max_batch_tokens: the budget of a step in tokens. chunk_size: most tokens of one request a step.
    max_requests: most running at once. max_model_len: most tokens of a request, prompt and output.
    block_size in tokens; num_blocks: default as many as max_requests × max_model_len needs, within 1 GiB on a CPU and
        `gpu_memory` of a card's free memory.
    prefix_cache: find computed blocks again. seed: of requests that bring none, and of random weights.
    overlap: plan and launch a step while the one before it still runs on the GPU (overlap.py).
    check: assert every invariant after every step. pack, place, pool: a learner's own parts.

    Raises ValueError with the numbers when options do not go together.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        tokenizer: Any = None,
        attention: str | AttentionBackend = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        policy: str | Policy | Callable = "mixed",
        max_batch_tokens: int | None = None,
        chunk_size: int | None = None,
        max_requests: int | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        gpu_memory: float = 0.5,
        prefix_cache: bool = True,
        seed: int = 0,
        compile: str = "auto",
        graphs: str = "auto",
        overlap: bool = False,
        check: bool = False,
        pack: Callable = pack_tokens,
        place: Callable = place,
        pool: Any = None,
    ):
        check_counts(max_batch_tokens=max_batch_tokens, chunk_size=chunk_size, max_requests=max_requests,
                     max_model_len=max_model_len, block_size=block_size, num_blocks=num_blocks)  # fmt: skip
        if getattr(pool, "block_size", block_size) != block_size:
            raise ValueError(
                f"the pool's blocks hold {pool.block_size} tokens, the engine's block_size is {block_size}"
            )
        policy = make_policy(policy)
        device = resolve_device(device)
        dtype = resolve_dtype(dtype, device, model)
        self._prepare_undo(policy, pack, place, pool, overlap)
        Limits.of(policy, None, max_batch_tokens, chunk_size, max_requests, max_model_len)  # before a model is loaded
        loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype, seed=seed)
        limits = Limits.of(policy, loaded.max_model_len, max_batch_tokens, chunk_size, max_requests, max_model_len)
        self.model, self.tokenizer, self.vocab_size = loaded.model, loaded.tokenizer, loaded.vocab_size
        self.eos_token_ids, self.max_model_len = frozenset(loaded.eos_token_ids), limits.max_model_len
        self.attention = make_backend(attention, device, graphs != "off") if isinstance(attention, str) else attention
        if num_blocks is None:
            num_blocks = (
                fitting_blocks(loaded.layers, block_size, dtype, device, gpu_memory, limits)
                if pool is None
                else pool.num_free
            )
        self.runner = make_runner(
            loaded, self.attention, num_blocks, block_size, dtype, device, compile, graphs, isinstance(model, (str, os.PathLike)), overlap,
            make_buckets(limits.max_requests, limits.max_batch_tokens, num_blocks_needed(limits.max_model_len, block_size)),
        )  # fmt: skip
        verify(loaded, self.attention if isinstance(attention, str) else make_backend("torch", device), block_size)
        self.pool = pool if pool is not None else BlockPool(num_blocks, block_size, prefix_cache)
        self.scheduler = Scheduler(
            self.pool, policy, limits.max_batch_tokens, chunk_size, limits.max_requests, block_size
        )
        self.num_blocks, self.block_size, self.seed, self._check = num_blocks, block_size, seed, check
        self._requests: dict[int, Request] = {}  # live ones
        self._completions: dict[int, Completion] = {}
        self._streams: dict[int, list] = {}
        self._arrived: list[int] = []
        self._aborted: list[int] = []
        self._last_batch: PackedBatch | None = None
        self._flight: ahead.Flight | None = None  # the step that runs ahead
        self._count = 0
        self._epoch = time.perf_counter()
        self._run = Run(meta=self._meta(loaded.name, policy, device, dtype))
        alive.add(self)

    def _prepare_undo(self, policy: Any, pack: Callable, place: Callable, pool: Any, overlap: bool) -> None:
        """A learner's part may fail in the middle of a step: then the step is undone."""
        self._pack, self._place, self._overlap = pack, place, overlap
        own = pack is pack_tokens and place is _place and pool is None and isinstance(policy, Policy)
        self._undoable = not own
        if overlap and self._undoable:
            raise ValueError(
                "overlap=True plans a step before the last one's tokens are known: it needs minichunk's own policy, "
                "pack, place and pool"
            )

    def _meta(self, name: str, policy: Any, device: torch.device, dtype: torch.dtype) -> dict:
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {
            "model": name, "policy": getattr(policy, "name", getattr(policy, "__name__", type(policy).__name__)),
            "max_batch_tokens": self.scheduler.max_batch_tokens, "chunk_size": self.scheduler.chunk_size,
            "max_requests": self.scheduler.max_requests, "max_model_len": self.max_model_len,
            "block_size": self.block_size, "num_blocks": self.num_blocks, "prefix_cache": getattr(self.pool, "prefix_cache", False),
            "device": str(device), "dtype": str(dtype).removeprefix("torch."), "attention": self.attention.name,
            "source": f"LIVE {card}", "threads": torch.get_num_threads(), "seed": self.seed,
            "mode": self.runner.mode, "overlap": self._overlap, "versions": {"minichunk": __version__, "torch": torch.__version__},
            "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip

    # --- asking ------------------------------------------------------------------------------------------------------
    def add(self, prompt: Prompt, params: SamplingParams | None = None, arrival: float | None = None) -> int:
        """Queues a prompt (text or token ids); returns its id. arrival: seconds on the engine's clock, default now.

        Raises ValueError with the numbers when it could never run.
        """
        self._require_open()
        params = params or SamplingParams()
        ids = self._encode(prompt)
        self._refuse(ids, params)
        return self._add(ids, params, self._now() if arrival is None else arrival)

    def _add(self, ids: list[int], params: SamplingParams, arrival: float) -> int:
        number, self._count = self._count, self._count + 1
        seed = params.seed if params.seed is not None else request_seed(self.seed, number)
        request = Request(number, list(ids), len(ids), params, arrival, seed)
        if self.tokenizer is not None:
            request.detokenizer = Detokenizer(self.tokenizer, params.stop)
        self._requests[number] = request
        self.scheduler.add(request)
        self._arrived.append(number)
        self._run.requests[number] = RequestRecord(
            number, list(ids), [], arrival, token_times=request.metrics.token_times
        )
        return number

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give token ids, or Engine(…, tokenizer=…)")
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(
                f"a prompt is text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
            ) from error

    def _refuse(self, ids: list[int], params: SamplingParams) -> None:
        """What can never run is refused here, before it disturbs anybody."""
        total, slots = len(ids) + params.max_tokens, len(ids) + params.max_tokens - 1
        if not ids:
            raise ValueError("the prompt is empty: there is no token to start from")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.vocab_size - 1}, got {min(ids)}..{max(ids)}")
        if total > self.max_model_len:
            raise ValueError(
                f"prompt {len(ids)} + max_tokens {params.max_tokens} = {total} is above max_model_len {self.max_model_len}: "
                f"shorten the prompt, or ask for at most {max(0, self.max_model_len - len(ids))} tokens"
            )
        budget = self.scheduler.max_batch_tokens
        if not self.scheduler.may_cut and total > budget:
            raise ValueError(
                f"prompt {len(ids)} + max_tokens {params.max_tokens} = {total} is above max_batch_tokens {budget}, and this "
                f"policy never cuts a prompt: give the engine max_batch_tokens={total}, or use policy='mixed'"
            )
        room = self.num_blocks * self.block_size
        if num_blocks_needed(slots, self.block_size) > self.num_blocks:
            raise ValueError(
                f"prompt {len(ids)} + max_tokens {params.max_tokens} needs {slots} cache slots, the pool has {room} "
                f"({self.num_blocks} blocks of {self.block_size}): give the engine num_blocks={num_blocks_needed(slots, self.block_size)}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids, or Engine(…, tokenizer=…)")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def run(self) -> Run:
        """Everything recorded so far."""
        if self.tokenizer is not None:
            seen = {t for r in self._run.requests.values() for t in (*r.prompt_ids, *r.output_ids)}
            for token in seen - self._run.vocab.keys():
                self._run.vocab[token] = self.tokenizer.decode([token])
        return self._run

    def result(self, id: int) -> Completion | None:
        """The completion of a request, None while it is not finished. KeyError for an unknown id."""
        if id not in self._completions and id not in self._requests:
            raise KeyError(id)
        return self._completions.get(id)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, progress: bool = False
    ) -> list[Completion]:  # fmt: skip
        """Completions in the order of the prompts: text, a token list, or a list of those. All are checked before any
        is added. Other requests of this engine go on beside them."""
        self._require_open()
        if isinstance(prompts, str) or (len(prompts) and all(isinstance(p, int) for p in prompts)):
            prompts = [prompts]
        each = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} SamplingParams")
        encoded = [self._encode(p) for p in prompts]
        for ids, one in zip(encoded, each):
            self._refuse(ids, one)
        now = self._now()
        ids = [self._add(tokens, one, now) for tokens, one in zip(encoded, each)]
        return self._finish_all(ids, progress)

    def _finish_all(self, ids: list[int], progress: bool) -> list[Completion]:
        """Steps until these are done; an interruption aborts them."""
        open_ids = set(ids)
        try:
            with tqdm(total=len(ids), disable=not progress, unit="request") as bar:
                while open_ids:
                    self.step()
                    done = {i for i in open_ids if i in self._completions}
                    open_ids -= done
                    bar.update(len(done))
        except BaseException:
            for id in open_ids:
                self.abort(id)
            raise
        return [self._completions[i] for i in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[tuple[str | None, int]]:
        """Yields (text_delta, token_id) for each token; the deltas make up the completion's text, half a character and
        a possible stop string held back. text_delta is None without a tokenizer. Closing it aborts the request.
        A request that fails raises RuntimeError with the cause."""
        self._require_open()
        params = params or SamplingParams()
        ids = self._encode(prompt)
        self._refuse(ids, params)
        return self._stream(ids, params)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[tuple[str | None, int]]:
        id = self._add(ids, params, self._now())
        pieces = self._streams[id] = []
        try:
            while True:
                while pieces:
                    yield pieces.pop(0)
                done = self._completions.get(id)
                if done is not None and not pieces:
                    if done.finish_reason == "error":
                        raise RuntimeError(f"request {id} failed: {done.error}")
                    return
                self.step()
        finally:
            self._streams.pop(id, None)
            self.abort(id)

    def chat(self, messages: str | list[dict], params: SamplingParams | None = None, stream: bool = False):
        """Answers a conversation through the model's chat template: [{"role": …, "content": …}, …] or one user's text.
        Returns a Completion, or with stream=True what `stream` yields."""
        ids = self.chat_ids(messages)
        return self.stream(ids, params) if stream else self.generate(ids, params)[0]

    def chat_ids(self, messages: str | list[dict]) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("chat needs a tokenizer with a chat template; use generate for plain prompts")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return list(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def replay(
        self, requests: Iterable[tuple[float, Prompt, SamplingParams | None]], on_step: Callable[[StepRecord], None] | None = None
    ) -> list[Completion]:  # fmt: skip
        """Replays (arrival in seconds from now, prompt, params) in real time; completions in the order given.

        A mapping with those three keys will do too. All are checked before the first is added. on_step(record) is
        called after each step.
        """
        self._require_open()
        given = [(r["arrival"], r["prompt"], r.get("params")) if isinstance(r, Mapping) else tuple(r) for r in requests]
        todo = [(float(arrival), self._encode(prompt), params or SamplingParams()) for arrival, prompt, params in given]
        for _, ids, params in todo:
            self._refuse(ids, params)
        order = sorted(range(len(todo)), key=lambda i: todo[i][0])
        added: dict[int, int] = {}
        start = self._now()
        try:
            while len(added) < len(todo) or any(i not in self._completions for i in added.values()):
                while len(added) < len(todo) and start + todo[order[len(added)]][0] <= self._now():
                    at, ids, params = todo[order[len(added)]]
                    added[order[len(added)]] = self._add(ids, params, start + at)
                record = self.step()
                if record is None:
                    self._sleep(max(0.0, start + todo[order[len(added)]][0] - self._now()))
                elif on_step:
                    on_step(record)
        except BaseException:
            for id in added.values():
                self.abort(id)
            raise
        return [self._completions[added[i]] for i in range(len(todo))]

    def abort(self, id: int) -> None:
        """Ends a request; its completion says "abort" and keeps what came. Unknown id: KeyError. Finished: nothing."""
        if id in self._completions:
            return
        request = self._requests[id]
        self._finish(request, "abort", self._now())
        self._aborted.append(id)

    # --- one step ----------------------------------------------------------------------------------------------------
    def step(self) -> StepRecord | None:
        """Plans, packs, computes, samples, commits. None when there is no work."""
        self._require_open()
        if self._overlap:
            return ahead.step(self)
        return self._step_now() if self.scheduler.has_work else None

    def _step_now(self) -> StepRecord:
        start = self._now()
        plan, batch = self._plan(start)
        packed = self._now()
        finished = list(self._aborted)
        computed: list[Chunk] = []
        try:
            self._compute(plan.chunks, batch, computed, finished)
        finally:  # an interrupted step computed nothing, but its admissions and blocks are on record
            end = self._now()
            record = self._record(plan, computed, start, packed, end, finished)
        if self._check:
            self._check_step(plan, batch)
        return record

    def _plan(self, start: float) -> tuple[StepPlan, PackedBatch]:
        undo = self.scheduler.snapshot() if self._undoable else None
        try:
            plan = self.scheduler.plan()
            self._planned = self._now()
            tables = [c.request.table for c in plan.chunks]
            batch = PackedBatch.build(plan.chunks, tables, self.block_size, self._pack, self._place, self._last_batch)
            if self._undoable:
                self.runner.check_ranges(batch)
        except BaseException:
            if undo:
                undo()
            raise
        self._last_batch = batch
        for id in plan.admitted:
            metrics = self._requests[id].metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = self._run.requests[id].first_scheduled = start
            metrics.cached_tokens += plan.hits.get(id, 0)
        return plan, batch

    def _compute(self, chunks: list[Chunk], batch: PackedBatch, computed: list[Chunk], finished: list[int]) -> None:
        """Forward, sampling, commit. Fills `computed`, and `finished` with the ids that ended."""
        sampled = [c.request for c in chunks if c.is_last]
        try:
            logits = self.runner.run(batch)
            forwarded = self._now()
            tokens, logprobs = sample(logits, sampled) if sampled else ([], [])
        except Exception as error:  # the forward failed: its requests end, none of its blocks is findable
            computed += chunks
            for chunk in chunks:
                self._finish(chunk.request, "error", self._now(), _cause(error))
                finished.append(chunk.id)
            self._forwarded = self._sampled = self._now()
            return
        self._forwarded, self._sampled = forwarded, self._now()
        computed += chunks
        failed = {r.id for r, token in zip(sampled, tokens) if token is None}
        self.scheduler.commit([c for c in chunks if c.id not in failed])  # keys that gave NaN must not be found again
        self._accept_all(sampled, tokens, logprobs, finished)

    def _accept_all(self, requests: list[Request], tokens: list, logprobs: list, finished: list[int]) -> None:
        """Gives each request its token. Where that fails (its tokenizer, or Ctrl-C just then), that request alone ends:
        the others must not lose theirs."""
        now, interrupt = self._now(), None
        for request, token, logprob in zip(requests, tokens, logprobs):
            try:
                self._accept(request, token, logprob, now)
            except BaseException as error:
                if request.id in self._requests:
                    self._finish(request, "error", now, _cause(error))
                interrupt = interrupt if isinstance(error, Exception) else error
            if request.id not in self._requests:
                finished.append(request.id)
        if interrupt is not None:
            raise interrupt

    def _accept(self, request: Request, token: int | None, logprob, now: float) -> None:
        """Gives a request its new token, and ends it where that was the last."""
        if token is None:
            self._finish(request, "error", now, "the logits of this request are not finite: no token can be chosen")
            return
        request.token_ids.append(token)
        request.metrics.token_times.append(now)
        self._run.requests[request.id].output_ids.append(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        params, text = request.params, request.detokenizer
        delta = text.push(token) if text else None
        stopped = (token in self.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        reason = None
        if stopped or (text and text.stopped):
            reason = "stop"
        elif request.num_tokens - request.num_prompt_tokens >= params.max_tokens:
            reason = "length"
        if reason and text:
            delta += text.flush()
            reason = "stop" if text.stopped else reason
        if request.id in self._streams:
            self._streams[request.id].append((delta, token))
        if reason:
            self._finish(request, reason, now)

    def _finish(self, request: Request, reason: str, now: float, error: str | None = None) -> None:
        """The request leaves with what it has; its blocks come home."""
        self.scheduler.remove(request)
        del self._requests[request.id]
        text = request.detokenizer
        try:
            if text and not error:
                text.flush()
        except Exception as failure:  # of the tokenizer: the request leaves all the same
            reason, error = "error", _cause(failure)
        request.finish_reason, request.error, request.metrics.finished = reason, error, now
        logprobs = request.logprobs if request.params.logprobs is not None else None
        self._completions[request.id] = Completion(
            request.id,
            request.prompt_ids,
            text.text if text else None,
            request.output_ids,
            reason,
            logprobs,
            request.metrics,
            error,
        )
        record = self._run.requests[request.id]
        record.finish_reason, record.finished = reason, now

    def _record(
        self, plan: StepPlan, computed: list[Chunk], start: float, packed: float, end: float, finished: list[int], attention: str | None = None,
    ) -> StepRecord:  # fmt: skip
        pool, size = self.pool, self.block_size
        cached = getattr(pool, "num_cached", 0)
        wasted = sum(len(r.table) * size - r.num_computed for r in self.scheduler.running)
        marks = [start, self._planned, packed]
        if computed:
            marks += [self._forwarded, self._sampled, end]
        record = StepRecord(
            index=len(self._run.steps), start=start, end=end, budget=self.scheduler.max_batch_tokens,
            chunks=[(c.id, c.start, c.length, c.is_last, c.is_decode) for c in computed],
            admitted=plan.admitted, preempted=plan.preempted, finished=finished,
            used=self.num_blocks - pool.num_free, cached=cached, empty=pool.num_free - cached, wasted_slots=wasted,
            hits=plan.hits, attention=attention or self.runner.explain_step(), arrived=self._arrived, grown=plan.grown,
            block_states=dict(getattr(pool, "given_up", {})),
            times=dict(zip(("plan", "pack", "forward", "sample", "commit"), (b - a for a, b in zip(marks, marks[1:])))),
        )  # fmt: skip
        self._run.steps.append(record)
        self._arrived, self._aborted = [], []
        getattr(pool, "given_up", {}).clear()
        return record

    def _check_step(self, plan: StepPlan, batch: PackedBatch) -> None:
        tokens = sum(c.length for c in plan.chunks)
        if not 1 <= tokens <= self.scheduler.max_batch_tokens:
            raise BlockError(f"a step of {tokens} tokens, the budget is {self.scheduler.max_batch_tokens}")
        if len(set(batch.slot_mapping.tolist())) != tokens:
            raise BlockError(f"two of {tokens} tokens were written to one slot: {batch.slot_mapping.tolist()}")
        self.scheduler.check()

    # --- life --------------------------------------------------------------------------------------------------------
    def warmup(self, progress: bool = False) -> None:
        """Captures every CUDA graph now; without it each is captured when it is first needed. Elsewhere: nothing to do."""
        self._require_open()
        self.runner.warmup(lambda buckets: tqdm(buckets, unit="graph", disable=not progress))

    def explain(self) -> str:
        """How steps run here, in words: attention kernels, compiled layers, graphs."""
        return f"{self.runner.explain()}; attention: {self.attention.explain()}"

    def close(self) -> None:
        """Aborts what is live and gives the memory back. The results and the run stay readable."""
        for id in list(self._requests):
            self.abort(id)
        self.model = self.runner = self._flight = None
        alive.discard(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        meta = self._run.meta
        state = (
            "closed"
            if self.runner is None
            else f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"
        )
        return f"Engine({meta['model']}, {meta['policy']}, budget {meta['max_batch_tokens']}, {meta['num_blocks']} blocks of {meta['block_size']}, {meta['device']}; {state})"

    def _require_open(self) -> None:
        if self.runner is None:
            raise RuntimeError("this engine is closed: make a new one")

    def _now(self) -> float:
        """Seconds since the engine was made."""
        return time.perf_counter() - self._epoch

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


_place = place  # the module's own, under a name that __init__'s argument does not hide


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
