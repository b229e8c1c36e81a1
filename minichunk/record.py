"""What happened: a StepRecord per step, a Run for the whole, and the figures that are read from them.

A Run is delta-coded: `grown`, `admitted`, `preempted`, `finished`, `block_states` say what changed, and
`tables_at`, `queue_at` and `pool_at` play the changes back.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "minichunk-run"
VERSION = 1


@dataclass(slots=True)
class StepRecord:
    """One step. Times in seconds on the engine's clock; counts in tokens or blocks.

    chunks: (id, start, length, is_last, is_decode) in packed order.
    used + cached + empty == num_blocks, after the step. wasted_slots: slots in tables that hold no token.
    hits: {id: tokens found in the prefix index} for the requests admitted in this step.
    arrived, admitted, preempted, finished: ids, in the order in which it happened.
    grown: {id: block ids appended to its table}. block_states: {block: "cached" | "empty"} for blocks given up.
    times: seconds of each part of the step: plan, pack, forward, sample, commit.
    """

    index: int
    start: float
    end: float
    budget: int
    chunks: list[tuple[Any, int, int, bool, bool]]
    admitted: list = field(default_factory=list)
    preempted: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    used: int = 0
    cached: int = 0
    empty: int = 0
    wasted_slots: int = 0
    hits: dict = field(default_factory=dict)
    attention: str = ""
    arrived: list = field(default_factory=list)
    grown: dict = field(default_factory=dict)
    block_states: dict = field(default_factory=dict)
    times: dict = field(default_factory=dict)

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def num_tokens(self) -> int:
        return sum(c[2] for c in self.chunks)

    @property
    def aborted(self) -> list:
        """Those of `finished` that left before this step ran: they have no chunk in it."""
        ran = {c[0] for c in self.chunks}
        return [id for id in self.finished if id not in ran]

    @property
    def num_decodes(self) -> int:
        return sum(c[4] for c in self.chunks)

    @property
    def is_mixed(self) -> bool:
        """Holds a decode and a prompt chunk."""
        return 0 < self.num_decodes < len(self.chunks)

    @property
    def kind(self) -> str:
        return "mixed" if self.is_mixed else "decodes" if self.num_decodes else "prompts"

    def __str__(self):
        prompts = [f"{c[0]}[{c[1]}:{c[1] + c[2]}]" for c in self.chunks if not c[4]]
        decodes = [str(c[0]) for c in self.chunks if c[4]]
        parts = [f"chunks {' '.join(prompts)}"] * bool(prompts) + [f"decodes {' '.join(decodes)}"] * bool(decodes)
        return (
            f"step {self.index}: {self.kind}, {self.num_tokens} of {self.budget} tokens, "
            f"{self.duration * 1e3:.0f} ms; {'; '.join(parts)}; blocks used {self.used} cached {self.cached} empty {self.empty}"
        )

    def _repr_html_(self) -> str:
        head = "<tr><th>request</th><th></th><th>tokens</th><th>samples</th></tr>"
        rows = "".join(
            f"<tr><td>{html.escape(str(i))}</td><td>{'decode' if dec else 'prompt chunk'}</td>"
            f"<td>{start}…{start + n - 1}</td><td>{'yes' if last else ''}</td></tr>"
            for i, start, n, last, dec in self.chunks
        )
        return f"<p>{html.escape(str(self))}</p><table>{head}{rows}</table>"


@dataclass(slots=True)
class RequestRecord:
    """One request of a run: its tokens and its times (seconds)."""

    id: Any
    prompt_ids: list[int]
    output_ids: list[int]
    arrival: float
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]


class BadRunFile(ValueError):
    """The file is not a run that this version can read; the message says why."""


@dataclass
class Run:
    """All that was recorded. meta: model, policy, max_batch_tokens, chunk_size, block_size, num_blocks, device, dtype,
    attention, source ("LIVE cpu", "RECORDED h200 2026-11-29", "SIMULATED …"), threads, versions.
    vocab: {token id: its text} for the tokens that occur, empty without a tokenizer.
    """

    meta: dict = field(default_factory=dict)
    requests: dict[Any, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    vocab: dict[int, str] = field(default_factory=dict)

    # --- figures ---------------------------------------------------------------------------------------------------
    @property
    def ttfts(self) -> list[float]:
        return [r.ttft for r in self.requests.values() if r.ttft is not None]

    @property
    def tbts(self) -> list[float]:
        return [gap for r in self.requests.values() for gap in r.tbt]

    @property
    def duration(self) -> float:
        return self.steps[-1].end - self.steps[0].start if self.steps else 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(r.output_ids) for r in self.requests.values())

    def stalls(self, slo: float) -> int:
        """Gaps between two tokens of a request that are longer than `slo` seconds."""
        return sum(gap > slo for gap in self.tbts)

    def summary(self) -> dict:
        """The figures people quote: TTFT and TBT (P50, P99, max) in seconds, tokens/s, share of mixed steps, waste."""

        def spread(values):
            if not values:
                return {"p50": None, "p99": None, "max": None}
            p50, p99 = np.percentile(values, [50, 99])
            return {"p50": float(p50), "p99": float(p99), "max": float(max(values))}

        slots = sum(s.used for s in self.steps) * self.meta.get("block_size", 1)
        steps = len(self.steps)
        return {
            "requests": len(self.requests),
            "steps": steps,
            "seconds": self.duration,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens / self.duration if self.duration else None,
            "ttft": spread(self.ttfts),
            "tbt": spread(self.tbts),
            "mixed_share": sum(s.is_mixed for s in self.steps) / steps if steps else None,
            "budget_use": sum(s.num_tokens for s in self.steps) / sum(s.budget for s in self.steps) if steps else None,
            "waste": sum(s.wasted_slots for s in self.steps) / slots if slots else None,
            "preemptions": sum(len(s.preempted) for s in self.steps),
            "hit_tokens": sum(sum(s.hits.values()) for s in self.steps),
        }

    # --- the state after a step, played back -------------------------------------------------------------------------
    def tables_at(self, index: int) -> dict[Any, list[int]]:
        """{id: block ids} of every running request while step `index` ran (before its finished ones left)."""
        tables: dict[Any, list[int]] = {}
        for i, step in enumerate(self.steps[: index + 1]):
            for gone in (*step.aborted, *step.preempted):
                tables.pop(gone, None)
            for id, blocks in step.grown.items():
                tables.setdefault(id, []).extend(blocks)
            if i < index:
                for done in step.finished:
                    tables.pop(done, None)
        return tables

    def pool_at(self, index: int) -> list[str | list]:
        """State of each block while step `index` ran: "empty", "cached", or the list of ids whose tables hold it."""
        state: list = ["empty"] * self.meta["num_blocks"]
        for step in self.steps[: index + 1]:
            for block in (b for blocks in step.grown.values() for b in blocks):
                state[block] = "used"
            for block, what in step.block_states.items():
                state[block] = what
        # What step `index` gave up when requests finished is still theirs here; what it took from preempted or aborted
        # ones is not.
        owners: dict[int, list] = {}
        for id, blocks in self.tables_at(index).items():
            for block in blocks:
                owners.setdefault(block, []).append(id)
        return [owners.get(b, "cached" if s == "cached" else "empty") for b, s in enumerate(state)]

    def queue_at(self, index: int) -> dict[str, list]:
        """{"waiting": ids, "running": ids} as step `index` ran: after its admissions and preemptions."""
        waiting, running = [], []
        for i, step in enumerate(self.steps[: index + 1]):
            waiting += step.arrived
            gone = {*step.aborted, *(self.steps[i - 1].finished if i else ())}
            running = [r for r in running if r not in gone]
            waiting = [r for r in waiting if r not in gone]
            for id in step.preempted:
                running.remove(id)
                waiting.insert(0, id)
            for id in step.admitted:
                waiting.remove(id)
                running.append(id)
        return {"waiting": waiting, "running": running}

    # --- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> Path:
        """Writes gzip JSON (`.json.gz`); the file appears whole or not at all."""
        path = Path(path)
        body = {
            "format": FORMAT,
            "version": VERSION,
            "meta": self.meta,
            "requests": [asdict(r) for r in self.requests.values()],
            "steps": [_step_to_json(s) for s in self.steps],
            "vocab": [[k, v] for k, v in sorted(self.vocab.items())],
        }
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            text = json.dumps(body, separators=(",", ":"), allow_nan=False)
            part.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same run, the same bytes
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Reads what `save` wrote. Raises BadRunFile with the reason, FileNotFoundError when there is none."""
        try:
            body = json.loads(gzip.decompress(Path(path).read_bytes()))
        except (EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise BadRunFile(f"{path}: not a gzip JSON run file ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise BadRunFile(
                f"{path}: no {FORMAT} file (format is {body.get('format') if isinstance(body, dict) else type(body).__name__!r})"
            )
        if body.get("version") != VERSION:
            raise BadRunFile(f"{path}: version {body.get('version')!r}, this minichunk reads {VERSION}")
        try:
            requests = {r["id"]: RequestRecord(**r) for r in body["requests"]}
            meta = dict(body["meta"])
            steps = [_step_from_json(s, i, requests, meta.get("num_blocks")) for i, s in enumerate(body["steps"])]
            run = cls(meta, requests, steps, {k: v for k, v in body["vocab"]})
        except (KeyError, TypeError, ValueError) as error:
            raise BadRunFile(
                f"{path}: a part is missing or has the wrong form ({type(error).__name__}: {error})"
            ) from error
        return run


def _step_to_json(step: StepRecord) -> dict:
    """Fields at their default are left out; dicts become pairs, since JSON keys are strings."""
    out = {}
    for f in fields(step):
        value = getattr(step, f.name)
        if value in ([], {}, ""):
            continue
        out[f.name] = [[k, v] for k, v in value.items()] if isinstance(value, dict) else value
    return out


def _step_from_json(body: dict, index: int, requests: dict, num_blocks: int | None) -> StepRecord:
    """The step at this index; ValueError when it names a request or a block that there is not."""
    body = dict(body)
    for name in ("hits", "grown", "block_states", "times"):
        if name in body:
            body[name] = {k: v for k, v in body[name]}
    body["chunks"] = [tuple(c) for c in body.get("chunks", [])]
    step = StepRecord(**body)
    if step.index != index:
        raise ValueError(f"step {index} is numbered {step.index}")
    for id, _start, length, *_ in step.chunks:
        if id not in requests or length < 1:
            raise ValueError(f"step {index} has a chunk of {length} tokens of request {id!r}")
    named = {*step.arrived, *step.admitted, *step.preempted, *step.finished, *step.grown, *step.hits}
    if named - requests.keys():
        raise ValueError(
            f"step {index} names request {next(iter(named - requests.keys()))!r}, which is not in the file"
        )
    for block in (*step.block_states, *(b for blocks in step.grown.values() for b in blocks)):
        if not 0 <= block < (num_blocks or block + 1):
            raise ValueError(f"step {index} names block {block} of {num_blocks}")
    return step
