"""What the notebooks run: small engines, and the same little rush hour again and again."""

from __future__ import annotations

import functools
import json
from typing import Any

from minichunk.engine import Engine
from minichunk.lab.checks.c00 import Piece
from minichunk.lab.exercises import WrongAnswer, code_of
from minichunk.models import load
from minichunk.paths import data_path
from minichunk.record import Run, StepRecord
from minichunk.request import SamplingParams
from minichunk.scheduler import NoProgress, PlanRefused


@functools.cache
def _loaded(model: str, device: str) -> tuple:
    """One copy of the weights a kernel; every engine runs a twin of it."""
    found = load(model, device=device)
    return found.model, found.tokenizer


def engine(
    model: str = "smollm2", *, policy: Any = "mixed", max_batch_tokens: int | None = None, chunk_size: int | None = None,
    max_requests: int = 16, max_model_len: int = 2048, block_size: int = 16, num_blocks: int = 160, device: str = "cpu",
    prefix_cache: bool = False, **options: Any,
) -> Engine:  # fmt: skip
    """An Engine of classroom size: 160 blocks of 16 tokens (113 MiB for smollm2 in float32), on the CPU unless asked.

    The prefix cache is off, so that a picture shows every prompt token. A plan_step function always gets a number as
    chunk_size: the budget, if none is given. Other options are the Engine's own.
    """
    if callable(policy) and max_batch_tokens is None:
        raise ValueError("an engine with a plan_step of your own needs max_batch_tokens, the budget of a step")
    if callable(policy) and chunk_size is None:
        chunk_size = max_batch_tokens
    weights, tokenizer = _loaded(model, device)
    made = Engine(
        weights, tokenizer=tokenizer, policy=policy, max_batch_tokens=max_batch_tokens, chunk_size=chunk_size,
        max_requests=min(max_requests, max_batch_tokens or max_requests), max_model_len=max_model_len,
        block_size=block_size, num_blocks=num_blocks, device=device, prefix_cache=prefix_cache, **options,
    )  # fmt: skip
    made.run.meta["model"] = model
    code = code_of(policy) if callable(policy) else None
    if code:
        made.run.meta["code"] = code
    return made


# --- the rush hour -------------------------------------------------------------------------------------------------
QUESTIONS = [
    "What is the capital of France?",
    "Why does ice float on water?",
    "How long should black tea steep?",
    "Why can owls turn their heads so far?",
    "Name the prime numbers between 10 and 20.",
    "What can I plant in a shady corner of a garden?",
]


@functools.cache
def document(paragraphs: int = 4) -> str:
    """The first paragraphs of a text about the tides, and a question about it: 571 tokens in a chat with SmolLM2."""
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = next(p["prompt"] for p in map(json.loads, lines) if p["id"] == "tides")
    return "\n\n".join(text.split("\n\n")[: paragraphs + 1]) + "\n\nSay in one sentence what causes the tides."


def rush_hour(engine: Engine, steps_before: int = 8, max_tokens: int = 20, documents: int = 1) -> Run:
    """Six people ask short questions; after a few steps, while they read their answers, a long document comes in.

    Every answer has max_tokens tokens (ignore_eos), so that two runs differ in the schedule alone. Steps the engine
    until all is done, closes it, and returns its run.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with engine:
        for question in QUESTIONS:
            engine.add(engine.chat_ids(question), params)
        for _ in range(steps_before):
            _step(engine)
        for _ in range(documents):
            engine.add(engine.chat_ids(document()), params)
        return finish(engine, max_tokens * (len(QUESTIONS) + documents))


def finish(engine: Engine, tokens: int) -> Run:
    """Steps the engine until all is done, closes it, and returns its run. tokens: how many come, for the progress bar."""
    from tqdm.auto import tqdm

    with engine, tqdm(total=tokens, desc="the engine runs", unit="token", leave=False) as bar:
        while engine.has_work:
            _step(engine)
            bar.update(engine.run.output_tokens - bar.n)
        return engine.run


def _step(engine: Engine) -> None:
    """One step. A plan that the engine refuses ends the cell with the refusal alone, without the engine's traceback."""
    try:
        engine.step()
    except (PlanRefused, NoProgress) as error:
        raise WrongAnswer(f"{type(error).__name__}: {error}") from error


def scrub_at(request: Any, *runs: Run):
    """The scrubber, opened where this request has its first chunk in one of the runs. ValueError if it never has one."""
    from minichunk.lab import scrubber

    first = [next((n for n, s in enumerate(r.steps) if request in [c[0] for c in s.chunks]), None) for r in runs]
    shown = scrubber.scrub(*runs)
    for position, steps in enumerate(scrubber.positions(runs, shown.state["sync"])):
        if any(n is not None and step >= n for step, n in zip(steps, first)):
            shown.state = {"step": position}
            return shown
    raise ValueError(f"request {request!r} has no chunk in these runs")


def same_answers(runs: list[Run]) -> str:
    """Whether the runs gave every request the same tokens, counted: "answers identical: yes, 14 token lists compared"."""
    first, *others = [{id: r.output_ids for id, r in run.requests.items()} for run in runs]
    compared = sum(len(answers) for answers in others)
    differ = [f"request {id}" for answers in others for id in first if answers.get(id) != first[id]]
    if differ:
        return f"answers identical: no, {len(differ)} of {compared} token lists differ: {', '.join(differ)}"
    return f"answers identical: yes, {compared} token lists compared with the first run's"


# --- measuring -----------------------------------------------------------------------------------------------------
def step_sweep(sizes: tuple[int, ...] = (16, 32, 64, 96, 160), repeats: int = 4) -> list[tuple[int, float, float]]:
    """This machine's step time by tokens in the step: (tokens, P50 ms, P95 ms). One prompt chunk a step, no history;
    the sizes take turns, so that a slow second hits all of them. A first step of the largest size is not counted."""
    import numpy as np
    from tqdm.auto import tqdm

    times: dict[int, list[float]] = {size: [] for size in sizes}
    with engine(max_batch_tokens=max(sizes)) as made:
        for size in tqdm([max(sizes), *sizes * repeats], desc="measuring steps", leave=False):
            made.generate([10] * size, SamplingParams(max_tokens=1))
            times[size].append(made.run.steps[-1].duration * 1e3)
    times[max(sizes)].pop(0)  # it warmed up
    return [(size, *(float(v) for v in np.percentile(t, [50, 95]))) for size, t in times.items()]


def pieces(run: Run, step: StepRecord) -> list[Piece]:
    """A step's chunks as notebook 00 has them: .id, .num_prompt_tokens, .start, .length."""
    return [Piece(id, len(run.requests[id].prompt_ids), start, length) for id, start, length, *_ in step.chunks]
