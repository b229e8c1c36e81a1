"""What notebooks 10 and 30 run: a plain model that counts its tokens, this machine's roof, the free-lunch curve with its
knee, a prompt in pieces, and the tokens that flip in bfloat16."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from minichunk import costmodel
from minichunk.costmodel import GPU, ModelShape
from minichunk.engine import Engine
from minichunk.families import twin
from minichunk.lab.checks import c10
from minichunk.lab.checks.c10 import Counted
from minichunk.lab.scenes import _loaded, document, engine
from minichunk.models import load
from minichunk.paths import data_path
from minichunk.request import SamplingParams


# --- a plain model -------------------------------------------------------------------------------------------------
@functools.cache
def _plain(name: str) -> Any:
    """The lab's weights under transformers' own attention."""
    model = twin(_loaded(name, "cpu")[0], "sdpa")
    model.generation_config.eos_token_id = None  # answers of a given length
    return model


def plain_model(name: str = "smollm2") -> tuple[Counted, Any]:
    """(a transformers model that counts the tokens it is fed, its tokenizer)."""
    return Counted(_plain(name)), _loaded(name, "cpu")[1]


def chat_ids(text: str, name: str = "smollm2") -> list[int]:
    """The tokens of a chat that begins with this message."""
    messages = [{"role": "user", "content": text}]
    return _loaded(name, "cpu")[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def transformers_answer(ids: list[int], n: int, name: str = "smollm2") -> list[int]:
    """n new tokens, greedy, from transformers' own generate."""
    return c10.transformers_answer(_plain(name), ids, n)


def model_shape(name: str = "smollm2", dtype_bytes: int = 4) -> ModelShape:
    """The shape of a lab model, for the cost model: float32 has 4 bytes a value."""
    return replace(ModelShape.of(_plain(name).config, dtype_bytes), name=name)  # its own name may be a folder's


# --- this machine's roof -------------------------------------------------------------------------------------------
def roof(seconds: float = 2.0) -> GPU:
    """This CPU as the cost model sees a GPU: FLOP/s of a product of two 1024² matrices in float32, bytes/s of reading a
    matrix of 256 MiB once (a product with a vector). Half of the time each; the fastest repeat counts, since a roof is
    what the machine can do."""
    square, tall = torch.rand(1024, 1024), torch.rand(16384, 4096)
    peak = 2 * 1024**3 / _fastest(lambda: square @ square, seconds / 2)
    bandwidth = 4 * tall.numel() / _fastest(lambda vector=torch.rand(4096): tall @ vector, seconds / 2)
    threads = torch.get_num_threads()
    return GPU(f"this CPU, {threads} thread{'s' * (threads != 1)}", peak, bandwidth, math.inf, threads, math.inf)


def _fastest(action: Callable[[], Any], seconds: float) -> float:
    action()  # the first one allocates
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


# --- the free-lunch curve --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lunch:
    """How long a step takes by the size of the prompt chunk in it, beside `decodes` decodes.

    times: for each size the milliseconds of every repeat. roof: milliseconds below which no step can be. meta: where the
    numbers come from, as Run.meta has it.
    """

    label: str
    sizes: list[int]
    times: list[list[float]]
    roof: list[float]
    decodes: int = 0
    meta: dict = field(default_factory=dict)

    def percentile(self, q: float) -> np.ndarray:
        return np.array([np.percentile(t, q) for t in self.times])

    def at(self, tokens: int) -> float | None:
        """Median milliseconds with so many tokens, between two measured sizes on the line through them; None outside."""
        if not self.sizes[0] <= tokens <= self.sizes[-1]:
            return None
        return float(np.interp(tokens, self.sizes, self.percentile(50)))


SIZES = (1, 2, 4, 8, 16, 32, 50, 128)


def measure_lunch(machine: GPU, sizes: Sequence[int] = SIZES, repeats: int = 5, model: str = "smollm2") -> Lunch:
    """The curve of this machine, now: a prompt chunk of each size alone in a step of the engine. The sizes take turns,
    so that a slow second hits all of them."""
    times: list[list[float]] = [[] for _ in sizes]
    with engine(model, max_batch_tokens=max(sizes)) as made:
        for turn in range(repeats + 1):
            for size, found in zip(sizes, times):
                made.generate([10] * size, SamplingParams(max_tokens=1))
                if turn:  # the first turn warms up
                    found.append(made.run.steps[-1].duration * 1e3)
        shape, meta = model_shape(model), made.run.meta
    roofs = [costmodel.serial_roof(shape, [(0, size)], machine) * 1e3 for size in sizes]
    return Lunch("live", list(sizes), times, roofs, 0, {key: meta[key] for key in ("source", "mode", "threads")})


def recorded_lunch(card: str = "h200") -> list[Lunch]:
    """The curves that `minichunk bench steps --free-lunch` recorded on this card: with a CUDA graph for each number of
    decodes, and eager without decodes. Raises FileNotFoundError where none is recorded."""
    recorded = json.loads(data_path(f"recorded/{card}/free_lunch.json").read_text(encoding="utf-8"))
    source = f"RECORDED {card} {recorded['date']} · {recorded['model']}"
    counts = sorted({point["decodes"] for point in recorded["points"]})
    curves = []
    for mode, decodes in [("eager", counts[0]), *(("graph", n) for n in counts)]:
        points = [p for p in recorded["points"] if p["decodes"] == decodes and p["chunk"]]
        curves.append(Lunch(
            mode, [p["chunk"] for p in points], [p[mode]["repeats"] for p in points], [p["roof_ms"] for p in points],
            decodes, {"source": source, "mode": mode},
        ))  # fmt: skip
    return curves


@dataclass(frozen=True)
class Knee:
    """Where a curve leaves its floor: the tokens of the chunk at which the part that grows with the tokens takes as long
    as the floor. From low to high lie 90% of the fits to resampled measurements.

    floor: milliseconds before it. sharp: the exponent of costmodel.Efficiency.knee. found: False where no such place lies
    within the measured sizes.
    """

    tokens: float
    low: float
    high: float
    floor: float
    sharp: float
    found: bool

    def __str__(self) -> str:
        if not self.found:
            return "no knee within the measured sizes"
        return f"knee at {self.tokens:.0f} tokens ({self.low:.0f} to {self.high:.0f})"


SHARPNESS = np.array([1, 1.5, 2, 3, 5, 10])  # 1: floor and growth add up; 10: almost the larger of the two


def knee(curve: Lunch, draws: int = 300, seed: int = 0) -> Knee:
    """Fits floor · (1 + (tokens in the step / knee)^sharp)^(1/sharp), least squares of the logarithms of all medians, over
    a grid of knees and SHARPNESS. The interval (P5 to P95) comes from fits to sizes and repeats drawn anew."""
    rng, steps = np.random.default_rng(seed), np.array(curve.sizes, dtype=float) + curve.decodes
    grid = np.geomspace(steps[0], steps[-1], 160)
    bend, floor, sharp = _fit(steps, curve.percentile(50), grid)
    drawn = []
    for _ in range(draws):
        rows = rng.integers(len(steps), size=len(steps))
        medians = [np.median(rng.choice(curve.times[r], len(curve.times[r]))) for r in rows]
        drawn.append(_fit(steps[rows], np.array(medians), grid)[0])
    low, high = np.percentile(drawn, [5, 95])
    found = bool(grid[0] < bend < grid[-1])
    return Knee(bend - curve.decodes, float(low) - curve.decodes, float(high) - curve.decodes, floor, sharp, found)


def _fit(steps: np.ndarray, times: np.ndarray, grid: np.ndarray) -> tuple[float, float, float]:
    """(knee, floor, sharp) with the smallest squared error of the logarithms."""
    p = SHARPNESS[:, None]
    grown = np.log1p((steps / grid[:, None, None]) ** p) / p  # [knees, sharpness, steps]
    floors = (np.log(times) - grown).mean(-1)
    errors = ((np.log(times) - grown - floors[..., None]) ** 2).sum(-1)
    i, j = np.unravel_index(errors.argmin(), errors.shape)
    return float(grid[i]), float(np.exp(floors[i, j])), float(SHARPNESS[j])


# --- a prompt in pieces ----------------------------------------------------------------------------------------------
def answer_in_chunks(mask: Callable, text: str, chunk: int, n: int = 16, model: str = "smollm2") -> list[int]:
    """n new tokens of the plain model, its prompt fed in chunks under mask(start, length): [length, start + length],
    True where a row sees a key. The tokens after the prompt come one by one and see everything."""
    ids, counted, cache = chat_ids(text, model), plain_model(model)[0], None
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        seen = torch.as_tensor(np.asarray(mask(start, len(part))), dtype=torch.bool)
        cache = counted(torch.tensor([part]), cache=cache, attention_mask=seen[None, None]).cache
    output = counted.calls[-1].best[-1:]
    while len(output) < n:
        cache = counted(torch.tensor([output[-1:]]), cache=cache).cache
        output += counted.calls[-1].best
    return output


def decode(ids: Sequence[int], model: str = "smollm2") -> str:
    """Tokens as text."""
    return _loaded(model, "cpu")[1].decode(ids)


def split_times(
    chunks: Sequence[int], prompt: int = 512, repeats: int = 3, model: str = "smollm2"
) -> dict[int, list[list[float]]]:
    """{chunk size: for each repeat the milliseconds of every step} of a prompt of so many tokens, alone in the engine.
    The sizes take turns, so that a slow second hits all of them; each engine has warmed up on 16 tokens and keeps no prefix."""
    tokens = chat_ids(document(), model)
    tokens = (tokens * (prompt // len(tokens) + 1))[:prompt]
    times: dict[int, list[list[float]]] = {chunk: [] for chunk in chunks}
    params = SamplingParams(max_tokens=1)
    with ExitStack() as opened:
        engines = {n: opened.enter_context(engine(model, max_batch_tokens=n)) for n in chunks}
        for made in engines.values():
            made.generate(tokens[:16], params)
        for _ in range(repeats):
            for chunk, made in engines.items():
                before = len(made.run.steps)
                made.generate(tokens, params)
                times[chunk].append([step.duration * 1e3 for step in made.run.steps[before:]])
    return times


# --- flips -----------------------------------------------------------------------------------------------------------
@functools.cache
def _weights(dtype: str) -> Any:
    return _loaded("smollm2", "cpu")[0] if dtype == "float32" else load("smollm2", dtype=getattr(torch, dtype)).model


@dataclass(frozen=True)
class Flips:
    """Greedy answers under two budgets. first: for each answer the index of the first token that differs, None if none."""

    dtype: str
    budgets: tuple[int, int]
    tokens: int
    first: list[int | None]

    @property
    def differ(self) -> int:
        return sum(i is not None for i in self.first)

    def __str__(self) -> str:
        said = f"{self.dtype:>8}, budgets {self.budgets[0]} and {self.budgets[1]}: {self.differ} of {len(self.first)} answers differ"
        where = ", ".join(f"from token {i} on" for i in self.first if i is not None)
        return f"{said}: {where}" if where else f"{said} in {self.tokens} tokens each"


def flips(dtype: str, budgets: tuple[int, int] = (16, 512), answers: int = 6, tokens: int = 20) -> Flips:
    """The same short questions, the same SmolLM2 in this dtype on the CPU, two budgets: where do the answers part?

    The questions are the first of data/prompts.jsonl that are shorter than 100 characters.
    """
    lines = map(json.loads, data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines())
    prompts = [chat_ids(p["prompt"]) for p in lines if len(p["prompt"]) < 100][:answers]
    found = []
    for budget in budgets:
        with Engine(
            _weights(dtype), tokenizer=_loaded("smollm2", "cpu")[1], device="cpu", max_batch_tokens=budget, max_requests=min(16, budget),
            max_model_len=512, num_blocks=160, prefix_cache=False,
        ) as made:  # fmt: skip
            done = made.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        found.append([completion.token_ids for completion in done])
    first = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), None) for pair in zip(*found)]
    return Flips(dtype, budgets, tokens, first)


# --- chunks as the cost model counts them ------------------------------------------------------------------------------
def split_cost(prompt: int, chunk: int, shape: str | ModelShape = "smollm2-135m") -> dict[str, Any]:
    """What a prompt of so many tokens costs in chunks of this size, against the whole; exact integers.

    starts, lengths: of the chunks. pairs: (query, key) pairs of each. keys: tokens whose keys each reads, history and
    own. linear, attention: FLOPs of each (the logits of the last token are counted among linear). totals: {what: (in
    pieces, whole)} of pairs, FLOPs, keys read, bytes of weights read.
    """
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (prompt, chunk)):
        raise ValueError(f"prompt and chunk must be whole numbers of at least 1, got {prompt!r} and {chunk!r}")
    parts = costmodel.split(prompt, chunk)
    work = [costmodel.work([part]) for part in parts]
    flops = [costmodel.flops(shape, [part]) for part in parts]
    whole, whole_flops = costmodel.work([(0, prompt)]), costmodel.flops(shape, [(0, prompt)])
    weights = costmodel.traffic(shape, [(0, 1)])["weights"]
    attention = [f["attention"] for f in flops]
    linear = [f["linear"] + f["logits"] for f in flops]
    return {
        "starts": [start for start, *_ in parts],
        "lengths": [length for _, length, _ in parts],
        "pairs": [w.pairs for w in work],
        "keys": [w.keys for w in work],
        "linear": linear,
        "attention": attention,
        "totals": {
            "pairs": (sum(w.pairs for w in work), whole.pairs),
            "FLOPs": (sum(chain(linear, attention)), whole_flops["total"]),
            "keys read": (sum(w.keys for w in work), whole.keys),
            "weights read": (len(parts) * weights, weights),
        },
    }
