"""What notebooks 50 and 60 run: the running example, a learner's packer and block functions in the real engine, a list
of block operations as a run for the scrubber, and the waste of four ways to reserve memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minichunk import workloads
from minichunk.blocks import BlockPool, BlockTable, OutOfBlocks, num_blocks_needed
from minichunk.engine import Engine
from minichunk.families import twin
from minichunk.lab.exercises import code_of
from minichunk.lab.scenes import QUESTIONS, _loaded, engine
from minichunk.packing import PackedBatch
from minichunk.record import RequestRecord, Run, StepRecord
from minichunk.request import Chunk, Request, SamplingParams

# --- the running example ---------------------------------------------------------------------------------------------
TEXTS = {  # each begins with at least as many tokens as the example takes of it
    "A": ("The capital of France is Paris, and it lies on the river Seine.", 6, 8, 7),  # text, prompt, tokens, computed
    "B": ("Tides are caused by the pull of the Moon and of the Sun on the water of the oceans, and twice a day", 21, 21, 9),
    "C": ("Ice floats on water", 3, 3, 0),
}  # fmt: skip
BLOCKS = {"A": [5, 2], "B": [7, 0, 3, 9, 1, 4], "C": [6]}  # of 4 slots, anywhere in memory


def running_example(budget: int = 16, model: str = "smollm2") -> list[Chunk]:
    """One step's chunks: A decodes at length 8, B brings 12 tokens after 9, C is a new prompt of 3 and gets what the
    budget leaves it."""
    tokenizer = _loaded(model, "cpu")[1]
    chunks = []
    for id, (text, prompt, total, computed) in TEXTS.items():
        request = Request(id, tokenizer(text)["input_ids"][:total], prompt, num_computed=computed)
        length = min(request.num_left, budget - sum(c.length for c in chunks))
        if length > 0:
            chunks.append(Chunk.of(request, length))
    return chunks


def row_errors(pack: Callable, chunks: Sequence[Chunk], model: str = "smollm2") -> np.ndarray:
    """How far the log-probabilities of each packed row [T] lie from those of transformers' own dense forward (largest
    absolute difference over the vocabulary). The histories are in the cache already, computed by the engine's packer."""
    import torch

    with engine(model, block_size=4, num_blocks=16, max_model_len=64) as made, torch.inference_mode():
        tables = [BLOCKS[c.id] for c in chunks]
        before = [Chunk(c.request, 0, c.start, False, False) for c in chunks if c.start]
        made.runner.run(PackedBatch.build(before, [BLOCKS[c.id] for c in before], 4))
        batch = PackedBatch.build(chunks, tables, 4, pack=pack)
        batch.logits_rows = np.arange(batch.num_tokens)  # all rows, not the sampled ones alone
        got = made.runner.run(batch).log_softmax(-1)
        dense = twin(_loaded(model, "cpu")[0], "eager")  # the same weights under transformers' own attention
        wanted = [dense(torch.tensor([c.request.token_ids[: c.end]])).logits[0, c.start :].float() for c in chunks]
        return (got - torch.cat(wanted).log_softmax(-1)).abs().amax(-1).numpy()


def engine_packing(pack: Callable, model: str = "smollm2", **options: Any) -> Engine:
    """lab.engine with this function as its packer; figures say whose it is. The scrubber computes its columns of integers
    from the plan: of a packer that passed no check it says that they are not what the packer sent (meta "integers")."""
    made = engine(model, pack=pack, **options)
    if code_of(pack):
        made.run.meta["code"] = f"{code_of(pack)} packer"
    else:
        made.run.meta["integers"] = "the plan's, not what this packer sent"
    return made


def ask(engine: Engine, questions: int = 3, max_tokens: int = 24) -> Run:
    """The first of rush_hour's questions, all asked at once; steps the engine until all is done and closes it."""
    with engine:
        prompts = [engine.chat_ids(question) for question in QUESTIONS[:questions]]
        engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        return engine.run


def compare_answers(run: Run, reference: Run, tokens: int = 14) -> str:
    """Each answer's first tokens as text, and whether it is the reference's; where it is not, the reference's below it."""
    from minichunk.lab.colors import letters

    lines = []
    for id, name in letters(run).items():
        got, wanted = run.requests[id].output_ids, reference.requests[id].output_ids
        lines.append(f"{name}  {'same ' if got == wanted else 'OTHER'}  {_words(run, got[:tokens])}")
        if got != wanted:
            lines.append(f"   right  {_words(reference, wanted[:tokens])}")
    return "\n".join(lines)


def _words(run: Run, ids: Sequence[int]) -> str:
    text = "".join(run.vocab.get(t, f"#{t} ") for t in ids).split("<|im_end|>")[0]
    return f"{text.strip().replace(chr(10), '⏎')} …"


def compare_waste(run: Run, reference: Run, steps: int = 12) -> str:
    """The slots wasted in the first steps of both runs, and the blocks that are in use when all is done."""
    rows = {"step": range(steps)}
    rows |= {name: [s.wasted_slots for s in r.steps[:steps]] for name, r in (("right", reference), ("theirs", run))}
    lines = [f"{name:<8}" + "".join(f"{n:>4}" for n in row) for name, row in rows.items()]
    used = f"right {reference.steps[-1].used}, theirs {run.steps[-1].used}"
    return "\n".join(["slots wasted, step by step:", *lines, f"blocks in use when all is done: {used}"])


def thrown_out(run: Run) -> str:
    """Who was preempted: "step 12: C was thrown out with 48 tokens computed, 37 of its prompt and 11 of its answer"."""
    from minichunk.lab.colors import letters

    computed, lines = dict.fromkeys(run.requests, 0), []
    for step in run.steps:
        for id in step.preempted:
            prompt = min(computed[id], len(run.requests[id].prompt_ids))
            what = f"{prompt} of its prompt and {computed[id] - prompt} of its answer"
            who = f"step {step.index}: {letters(run)[id]} was thrown out with"
            lines.append(f"{who} {computed[id]} tokens computed, {what}")
        computed |= {id: start + length for id, start, length, *_ in step.chunks}
    return "\n".join(lines) or "nobody was thrown out"


# --- a learner's blocks ----------------------------------------------------------------------------------------------
class YourPool(BlockPool):
    """A BlockPool whose `grow` and `release` are a learner's functions grow(table, pool, n) and release(table, pool).

    For them it has `take()` → a block id, and `give_back(block)`; the counting is theirs.
    shuffle: a seed that puts the empty blocks into a random order.
    """

    def __init__(self, grow: Callable, release: Callable, num_blocks: int, block_size: int, shuffle: int | None = None, prefix_cache: bool = False):  # fmt: skip
        super().__init__(num_blocks, block_size, prefix_cache)
        self._your_grow, self._your_release = grow, release
        if shuffle is not None:
            self._empty = deque(np.random.default_rng(shuffle).permutation(num_blocks).tolist())

    def take(self) -> int:
        """A free block, held once from now on. Raises OutOfBlocks when there is none."""
        if not self.num_free:
            raise OutOfBlocks(f"none of {self.num_blocks} blocks is free")
        return self._take()

    def give_back(self, block: int) -> None:
        """Puts a block that nobody holds on the free list; its content can still be found."""
        if self.key_of[block] is None:
            self._empty.append(block)
            self.given_up[block] = "empty"
        else:
            self._cached[block] = None
            self.given_up[block] = "cached"

    def grow(self, table: BlockTable, num_tokens: int) -> list[int]:
        before = len(table)
        self._your_grow(table, self, num_tokens)
        return table.block_ids[before:]

    def release(self, table: BlockTable) -> None:
        self._your_release(table, self)

    def __repr__(self) -> str:
        return f"YourPool({self.num_blocks} blocks of {self.block_size}, {self.num_free} free)"

    @property
    def free(self) -> list[int]:
        """The blocks on the free list, sorted."""
        return sorted([*self._empty, *self._cached])


def your_pool(grow: Callable, release: Callable, num_blocks: int, block_size: int = 16, **options: Any) -> YourPool:
    """A pool that runs on these two functions, for lab.engine_on. options: shuffle, prefix_cache."""
    return YourPool(grow, release, num_blocks, block_size, **options)


def engine_on(pool: BlockPool, slots: Callable | None = None, model: str = "smollm2", **options: Any) -> Engine:
    """lab.engine over this pool; with slots(block_ids, start, length, block_size) placing every token."""
    if slots:
        options["place"] = placing(slots)
    made = engine(model, pool=pool, num_blocks=pool.num_blocks, block_size=pool.block_size, **options)
    functions = [f for f in (slots, getattr(pool, "_your_grow", None), getattr(pool, "_your_release", None)) if f]
    codes = {code_of(f) for f in functions}
    if codes and None not in codes:
        made.run.meta["code"] = f"{' and '.join(sorted(codes, reverse=True))} blocks"
    return made


def placing(slots: Callable) -> Callable:
    """The engine's `place` made from a slots function."""

    def place(chunks: Sequence[Chunk], tables: Sequence[BlockTable], block_size: int) -> tuple:
        ids = [table.block_ids[: num_blocks_needed(c.end, block_size)] for c, table in zip(chunks, tables)]
        return ids, [s for c, i in zip(chunks, ids) for s in slots(i, c.start, c.length, block_size)]

    return place


# --- the page-table explorer -----------------------------------------------------------------------------------------
def explore_blocks(operations: Sequence[tuple], num_blocks: int = 12, block_size: int = 4):
    """The scrubber over a list of block operations, one a step, on a real BlockPool:

    ("grow", "A", 5)     A gets 5 more tokens; a new name is a new request
    ("share", "A", "B")  B comes in with a prompt that begins with all of A's tokens, and has one more
    ("free", "A")        A is done

    Raises ValueError naming the operation that cannot be done, and why.
    """
    from minichunk.lab.scrubber import scrub

    return scrub(replay_blocks(operations, num_blocks, block_size))


def replay_blocks(operations: Sequence[tuple], num_blocks: int = 12, block_size: int = 4) -> Run:
    """The run that explore_blocks shows. A step takes a made-up millisecond; nothing is sampled. A freed request has no chunk
    in its step, so its blocks are gone in that step's picture (StepRecord.aborted)."""
    source = f"your list of {len(operations)} operations on a BlockPool; no model, made-up times"
    run = Run(meta={"block_size": block_size, "num_blocks": num_blocks, "source": source, "gone": "freed"})
    replay = _Replay(BlockPool(num_blocks, block_size), run)
    for n, operation in enumerate(operations):
        try:
            replay.step(n, *operation)
        except (ValueError, TypeError, OutOfBlocks) as error:
            raise ValueError(f"operation {n}, {operation!r}: {error}") from error
    budget = max((s.num_tokens for s in run.steps), default=1)
    for step in run.steps:
        step.budget = max(budget, 1)
    for request in replay.requests.values():
        run.requests[request.id].prompt_ids = list(request.token_ids)
    return run


class _Replay:
    """Operations on a pool, recorded as a Run's steps."""

    def __init__(self, pool: BlockPool, run: Run):
        self.pool, self.run = pool, run
        self.requests: dict[str, Request] = {}

    def step(self, n: int, what: str, *args: Any) -> None:
        kinds = {"grow": (self.grow, 2), "share": (self.share, 2), "free": (self.free, 1)}
        if what not in kinds or len(args) != kinds[what][1]:
            raise ValueError('use ("grow", "A", 5), ("share", "A", "B") or ("free", "A")')
        record = StepRecord(n, n * 1e-3, (n + 1) * 1e-3, 1, [])
        self.pool.given_up.clear()
        kinds[what][0](record, *args)
        pool, tables = self.pool, [r for r in self.requests.values() if r.table is not None]
        pool.check([r.table for r in tables])
        record.block_states = dict(pool.given_up)
        record.used, record.cached, record.empty = pool.num_used, pool.num_cached, pool.num_empty
        record.wasted_slots = sum(len(r.table) * pool.block_size - r.num_computed for r in tables)
        self.run.steps.append(record)

    def grow(self, record: StepRecord, id: str, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"the number of new tokens must be a whole number of at least 1, got {length!r}")
        request = self._live(id) if id in self.requests else self._enter(record, id, [])
        request.token_ids += self._new_tokens(request, length)
        self._compute(record, request)

    def share(self, record: StepRecord, owner: str, id: str) -> None:
        if id in self.requests:
            raise ValueError(f"{id} is there already: a request finds shared blocks only when it comes in")
        request = self._enter(record, id, self._live(owner).token_ids)
        request.token_ids += self._new_tokens(request, 1)
        request.num_computed = self.pool.share(request.table, request)
        if request.num_computed:
            record.hits[id] = request.num_computed
            record.grown[id] = list(request.table.block_ids)
        self._compute(record, request)

    def free(self, record: StepRecord, id: str) -> None:
        request = self._live(id)
        self.pool.release(request.table)
        request.table = None
        record.finished.append(id)

    def _live(self, id: str) -> Request:
        request = self.requests.get(id)
        if request is None or request.table is None:
            live = ", ".join(i for i, r in self.requests.items() if r.table is not None) or "nobody"
            raise ValueError(f"{id!r} holds no blocks; {live} does" if request is None else f"{id} was freed already")
        return request

    def _enter(self, record: StepRecord, id: str, tokens: list[int]) -> Request:
        if not isinstance(id, str) or not 1 <= len(id) <= 2:
            raise ValueError(f"a request's name is one letter or two, got {id!r}")
        request = self.requests[id] = Request(id, list(tokens), 1, table=BlockTable(self.pool.block_size))
        self.run.requests[id] = RequestRecord(id, [], [], record.start, record.start)
        record.arrived.append(id)
        record.admitted.append(id)
        return request

    def _new_tokens(self, request: Request, length: int) -> list[int]:
        """Token ids that nobody else has; hovering them shows "A5"."""
        first = len(self.run.vocab)
        for k in range(length):
            self.run.vocab[first + k] = f" {request.id}{request.num_tokens + k}"
        return list(range(first, first + length))

    def _compute(self, record: StepRecord, request: Request) -> None:
        start = request.num_computed
        taken = self.pool.grow(request.table, request.num_tokens)
        record.grown.setdefault(request.id, []).extend(taken)
        record.chunks.append((request.id, start, request.num_tokens - start, False, False))
        request.num_computed = request.num_tokens
        self.pool.index(request.table, request, start)


# --- waste -----------------------------------------------------------------------------------------------------------
BLOCK_SIZES = (1, 4, 16, 64, 256)


def waste(trace: str, longest: int, n: int = 50, seeds: int = 40) -> dict[str, list[float]]:
    """{way to reserve: for each seed the percent of reserved slots that hold no token}.

    At one moment n requests live, with lengths like the trace's (workloads.sample, at most `longest` tokens), each
    evenly likely anywhere between the first and the last token of its answer. Contiguous ways reserve a request's whole
    place when it comes in: `longest`, the power of two that holds its final length, or just that length, as if it were
    known. Blocks are taken as tokens come.
    """
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        requests = workloads.sample(trace, n, seed, max_total=longest)
        prompt, out = (np.array([getattr(r, f"{side}_tokens") for r in requests]) for side in ("prompt", "output"))
        live = prompt + np.ceil(np.random.default_rng(seed).random(n) * out).astype(int)
        total = prompt + out
        reserved = {
            f"contiguous: longest ({longest:,})": np.full(n, longest),
            "contiguous: a power of two": 2 ** np.ceil(np.log2(total)).astype(int),
            "contiguous: exact length": total,
            **{f"blocks of {size}": -(-live // size) * size for size in BLOCK_SIZES[::-1]},
        }
        for way, slots in reserved.items():
            found.setdefault(way, []).append(100 * float(1 - live.sum() / slots.sum()))
    return found
