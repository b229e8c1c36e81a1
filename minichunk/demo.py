"""`minichunk demo`: documents and short questions arrive, and one live table shows what rode with what."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from minichunk.paths import data_path
from minichunk.record import Run, StepRecord
from minichunk.request import Completion, SamplingParams

SHOWN_STEPS = 14


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file. arrival: seconds after the start. prompt: the user's text, before the template."""

    id: str
    arrival: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What a demo brought: {prompt id: completion} in the file's order, and the run whose requests carry those ids."""

    answers: dict[str, Completion]
    run: Run


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads a .jsonl of {"id", "arrival", "prompt", "max_tokens"}. Raises ValueError that names the line at fault."""
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = Prompt(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}; each line is {_EXAMPLE}") from None
        if prompt.id in prompts:
            raise ValueError(f"{path}, line {number}: the id {prompt.id!r} is there already")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path}: no prompts; each line is {_EXAMPLE}")
    return list(prompts.values())


_EXAMPLE = '{"id": "moon", "arrival": 0.5, "prompt": "How far away is the moon?", "max_tokens": 32}'


def replay(engine, prompts: list[Prompt], on_step: Callable[[StepRecord, dict[Any, str]], None]) -> Outcome:
    """Replays the prompts through the engine's chat template in real time.

    on_step(record, names) after each step; names: {request id: prompt id} of those that have arrived.
    """
    coming = deque(sorted(prompts, key=lambda p: p.arrival))  # the order in which replay adds them
    names: dict[Any, str] = {}

    def named(record: StepRecord) -> None:
        names.update((id, coming.popleft().id) for id in record.arrived)
        on_step(record, names)

    requests = [(p.arrival, engine.chat_ids(p.prompt), SamplingParams(max_tokens=p.max_tokens)) for p in prompts]
    completions = engine.replay(requests, on_step=named)
    engine.run.meta["names"] = [[id, name] for id, name in names.items()]
    return Outcome({p.id: c for p, c in zip(prompts, completions)}, engine.run)


class StepTable:
    """The last steps of a running engine, for rich's Live; at the end those around the step that mixed most."""

    def __init__(self, title: str):
        self.title = title
        self.rows: list[tuple[StepRecord, dict]] = []
        self.end: int | None = None  # the row after the last one shown

    def add(self, record: StepRecord, names: dict[Any, str]) -> None:
        self.rows.append((record, names))

    def rest(self) -> None:
        """Settles on the mixed step with most decodes, the first of them, if there is one."""
        steps = [record for record, _ in self.rows]
        best = max(range(len(steps)), key=lambda i: (steps[i].is_mixed, steps[i].num_decodes), default=0)
        self.end = min(len(steps), max(best + SHOWN_STEPS // 2, SHOWN_STEPS))

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", expand=True)
        for name, options in {
            "step": {"justify": "right"}, "kind": {}, "ms": {"justify": "right"}, "tokens": {"justify": "right"},
            "prompt chunks": {"ratio": 3, "no_wrap": True}, "decodes": {"ratio": 3, "no_wrap": True},
            "blocks": {"justify": "right"}, "done": {"ratio": 1, "no_wrap": True},
        }.items():  # fmt: skip
            table.add_column(name, **options)
        end = len(self.rows) if self.end is None else self.end
        for record, names in self.rows[max(0, end - SHOWN_STEPS) : end]:
            chunks = " ".join(
                f"{names[id]} {start}…{start + length - 1}"
                for id, start, length, _, decode in record.chunks
                if not decode
            )
            decodes = [names[id] for id, *_, decode in record.chunks if decode]
            table.add_row(
                str(record.index), record.kind, f"{record.duration * 1e3:.0f}", f"{record.num_tokens}/{record.budget}",
                chunks, f"{len(decodes)}: {' '.join(decodes)}" if decodes else "", str(record.used),
                " ".join(names[id] for id in record.finished), style="bold" if record.is_mixed else None,
            )  # fmt: skip
        return table


def figures(run: Run) -> Table:
    """TTFT, TBT, tokens/s, mixed steps and waste of a run."""
    s = run.summary()
    table = Table(title="What it came to", title_justify="left", show_header=False)
    rows = {
        "TTFT, arrival to first token": f"P50 {_seconds(s['ttft']['p50'])}   P99 {_seconds(s['ttft']['p99'])}",
        "TBT, gap between two tokens": f"P50 {_seconds(s['tbt']['p50'])}   P99 {_seconds(s['tbt']['p99'])}",
        "output": f"{s['output_tokens']} tokens in {s['seconds']:.1f} s: {s['output_tokens_per_s']:.1f} tokens/s",
        "steps": f"{s['steps']}, of them {s['mixed_share']:.0%} mixed; budget used {s['budget_use']:.0%}",
        "cache": f"waste {s['waste'] or 0:.1%} of the slots held; {s['hit_tokens']} prompt tokens found in the prefix index; "
        f"{s['preemptions']} preemptions",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def as_json(outcome: Outcome, saved: Path) -> str:
    """Figures, meta and answers as one JSON object."""
    answers = [
        {"id": id, "text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason, "error": c.error,
         "ttft": c.metrics.ttft, "tbt": c.metrics.tbt}
        for id, c in outcome.answers.items()
    ]  # fmt: skip
    body = {"summary": outcome.run.summary(), "meta": outcome.run.meta, "answers": answers, "saved": str(saved)}
    return json.dumps(body, ensure_ascii=False)


def main(
    model: str, policy: str, budget: int, block_size: int, prompts: Path | None, save: Path, as_json_only: bool
) -> None:
    """Runs the demo and prints it. A wrong option ends with one message; an answer that failed makes the exit code 1."""
    console = Console(stderr=as_json_only)
    try:
        asked = load_prompts(prompts or data_path("prompts.jsonl"))
        engine, note = _engine(model, policy, budget, block_size, asked)
    except (ValueError, MemoryError, FileNotFoundError) as error:  # the user's: a bad option, file or model
        raise typer.BadParameter(str(error)) from error
    if note:
        console.print(note, markup=False, highlight=False)
    with engine:
        meta = engine.run.meta
        title = (
            f"{meta['model']} · {policy} · budget {meta['max_batch_tokens']} · {meta['source']} · mixed steps in bold"
        )
        table = StepTable(title)
        with Live(table, console=console, auto_refresh=False) as live:

            def on_step(record, names):
                table.add(record, names)
                live.refresh()

            try:
                outcome = replay(engine, asked, on_step)
            except ValueError as error:
                if engine.run.steps:
                    raise
                raise typer.BadParameter(str(error)) from error  # a prompt that can never run: nothing was started
            table.rest()
            live.refresh()
    save.parent.mkdir(parents=True, exist_ok=True)
    saved = outcome.run.save(save)
    for id, completion in outcome.answers.items():
        console.print(f"\n[bold]{id}[/]", highlight=False)
        text = completion.text if completion.error is None else f"failed: {completion.error}"
        console.print((text or str(completion.token_ids)).strip(), markup=False, highlight=False)
    console.print()
    if model == "smollm2":
        console.print(
            "(135 million parameters answer like that. What counts here: who shared a step with whom.)", style="dim"
        )
    console.print(figures(outcome.run))
    console.print(f"The run is saved in {saved}", markup=False, highlight=False)
    if as_json_only:
        print(as_json(outcome, saved))
    if any(c.finish_reason == "error" for c in outcome.answers.values()):
        raise typer.Exit(1)


def _engine(model: str, policy: str, budget: int, block_size: int, prompts: list[Prompt]) -> tuple[Any, str]:
    """An engine that takes all prompts, and a line that says so when its budget is not the one asked for.

    A policy that never cuts a prompt needs a budget that holds the longest request.
    """
    import torch

    from minichunk.engine import Engine
    from minichunk.scheduler import make_policy
    from minichunk.threads import num_threads

    torch.set_num_threads(num_threads())
    note = ""
    if not make_policy(policy).may_cut:
        with Engine(model, policy=policy, num_blocks=1) as ruler:
            longest = max(len(ruler.chat_ids(p.prompt)) + p.max_tokens for p in prompts)
        if longest > budget:
            note = (
                f"{policy} never cuts a prompt: the budget is {longest}, what the longest request needs, not {budget}."
            )
            budget = longest
    return Engine(model, policy=policy, max_batch_tokens=budget, block_size=block_size), note
