"""The scrubber: one step of a run in four panes, on a live run, a recorded one, or a saved page without a kernel.

`frame(run, i)` is everything the panes show, as plain data; static/scrubber.mjs computes the same from what `encode`
ships (once, delta-coded, gzip), so that stepping never asks the kernel. A test holds the two together.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Hashable
from typing import Any

import traitlets

from minichunk.lab import colors, gaps, kit
from minichunk.lab.titles import provenance
from minichunk.record import Run, StepRecord

SYNCS = ("time", "step")


# --- one step as plain data ------------------------------------------------------------------------------------------
def frame(run: Run, i: int) -> dict:
    """What the four panes show of step i, while it ran. Ids are the run's; times are seconds since the first step began.

    waiting, running: (id, tokens, computed before the step). chunks: (id, start, length, is_last, is_decode).
    tables: {id: block ids}. pool: per block "empty", "cached" or the ids that hold it. slots: one per packed token.
    filled: {id: tokens that have a slot when the step ends}. sampled: the token ids that the rows logits_rows gave.
    aborted: those of finished that had left before the step ran, so without a chunk or a table.
    used, cached, empty, wasted count that picture; a StepRecord's counts are those after the finished ones have left.
    Raises IndexError when there is no such step.
    """
    step = _step(run, i)
    size, tables = run.meta["block_size"], run.tables_at(i)
    computed, outputs = _progress(run, i)
    tokens = {id: r.prompt_ids + r.output_ids for id, r in run.requests.items()}
    queue = run.queue_at(i)
    out: dict[str, Any] = {
        "step": i, "kind": step.kind if step.chunks else "empty", "budget": step.budget, "tokens": step.num_tokens,
        "start": step.start - run.steps[0].start, "end": step.end - run.steps[0].start, "times": _times(run, step),
        "arrived": list(step.arrived), "admitted": list(step.admitted), "preempted": list(step.preempted),
        "aborted": list(step.aborted), "finished": list(step.finished), "hits": dict(step.hits), "chunks": [tuple(c) for c in step.chunks],
        "cu_seqlens_q": [0], "seq_lens_k": [], "positions": [], "token_ids": [], "slots": [], "logits_rows": [],
        "sampled": [], "tables": tables, "pool": run.pool_at(i),
    }  # fmt: skip
    for name, ids in queue.items():
        out[name] = [(r, len(run.requests[r].prompt_ids) + outputs[r], computed[r]) for r in ids]
    filled = {r: computed[r] for r in tables}
    for id, start, length, is_last, _ in step.chunks:
        end, table = start + length, tables.get(id, [])
        filled[id] = end
        out["cu_seqlens_q"].append(out["cu_seqlens_q"][-1] + length)
        out["seq_lens_k"].append(end)
        out["positions"] += range(start, end)
        out["token_ids"] += tokens[id][start:end]
        out["slots"] += [
            table[p // size] * size + p % size if p // size < len(table) else -1 for p in range(start, end)
        ]
        if is_last:
            out["logits_rows"].append(out["cu_seqlens_q"][-1] - 1)
            out["sampled"].append(tokens[id][end] if end < len(tokens[id]) else None)
    out["filled"] = filled
    out["used"] = sum(isinstance(b, list) for b in out["pool"])
    out["cached"] = out["pool"].count("cached")
    out["empty"] = out["pool"].count("empty")
    out["wasted"] = sum(len(table) * size - filled[r] for r, table in tables.items())
    return out


def _step(run: Run, i: int):
    if not 0 <= i < len(run.steps):
        raise IndexError(f"the run has {len(run.steps)} steps, so 0…{len(run.steps) - 1}; got step {i}")
    return run.steps[i]


def _progress(run: Run, i: int) -> tuple[dict, dict]:
    """({id: tokens computed}, {id: tokens sampled}) as step i begins to compute: after its admissions and preemptions."""
    computed, outputs = dict.fromkeys(run.requests, 0), dict.fromkeys(run.requests, 0)
    for step in run.steps[: i + 1]:
        for id in (*step.preempted, *step.aborted):
            computed[id] = 0
        for id in step.admitted:
            computed[id] = step.hits.get(id, 0)
        if step is run.steps[i]:
            break
        for id, start, length, is_last, _ in step.chunks:
            computed[id] = start + length
            outputs[id] += is_last
    return computed, outputs


# --- what the browser gets -------------------------------------------------------------------------------------------
def _gone(run: Run) -> str:
    """What it is called when a request leaves without a chunk: aborted, unless the run says otherwise."""
    return run.meta.get("gone", "aborted")


def _integers(run: Run) -> str:
    """What the columns of integers are, where they are not what the model ran on: `frame` computes them from the plan."""
    return f"columns: {run.meta['integers']}" if run.meta.get("integers") else ""


def _times(run: Run, step: StepRecord) -> dict[str, float]:
    """Seconds of each part of the step. On a GPU the host waits for the step's kernels where it asks for the tokens."""
    waits = str(run.meta.get("device", "cpu")) != "cpu"
    return {"wait + sample" if waits and name == "sample" else name: seconds for name, seconds in step.times.items()}


def encode(run: Run, slo: float | None = None) -> dict:
    """The run as small JSON: requests by index, times as differences in microseconds, per step only what changed.

    A chunk that is a decode at the expected position is its request's index; any other is -1 - index, start, length,
    flags (1 is_last, 2 is_decode). Raises ValueError when the run has no steps or not the meta it takes.
    """
    missing = [k for k in ("block_size", "num_blocks") if k not in run.meta]
    if missing or not run.steps:
        raise ValueError(f"cannot show this run: {f'meta lacks {missing}' if missing else 'it has no steps'}")
    index = {id: n for n, id in enumerate(run.requests)}
    zero = run.steps[0].start
    us = lambda seconds: round((seconds - zero) * 1e6)  # noqa: E731
    expected = dict.fromkeys(run.requests, 0)
    steps, before = [], 0
    for step in run.steps:
        chunks = []
        for id, start, length, is_last, is_decode in step.chunks:
            if is_decode and is_last and length == 1 and start == expected[id]:
                chunks.append(index[id])
            else:
                chunks += [-1 - index[id], start, length, is_last + 2 * is_decode]
            expected[id] = start + length
        changes = {
            "a": [index[r] for r in step.arrived], "i": [index[r] for r in step.admitted],
            "p": [index[r] for r in step.preempted], "x": [index[r] for r in step.aborted], "f": [index[r] for r in step.finished],
            "h": [[index[r], n] for r, n in step.hits.items()], "g": [[index[r], *b] for r, b in step.grown.items()],
            "s": [[b, int(what == "cached")] for b, what in step.block_states.items()],
            "t": [[name, round(seconds * 1e6)] for name, seconds in _times(run, step).items()],
        }  # fmt: skip
        start, end = us(step.start), us(step.end)
        steps.append([start - before, end - start, step.budget, chunks, {k: v for k, v in changes.items() if v}])
        before = end
    facts = gaps.Facts.of(run)
    long = []
    for id, k, _ in gaps.long_gaps(run, slo):
        who = gaps.culprit(run, id, k, facts)
        long.append(
            [index[id], k, [index[who["request"]], who["step"], who["start"], who["length"]] if who else None,
             gaps.explain(run, id, k, facts)]
        )  # fmt: skip
    limit = gaps.slo_of(run, slo)
    return {
        "title": provenance(run),
        "policy": str(run.meta.get("policy", "")),
        "gone": _gone(run),
        "integers": _integers(run),
        "block_size": run.meta["block_size"],
        "num_blocks": run.meta["num_blocks"],
        "ids": list(run.requests),
        "letters": list(facts.letters.values()),
        "prompts": [len(r.prompt_ids) for r in run.requests.values()],
        "arrivals": [us(r.arrival) for r in run.requests.values()],
        "tokens": [r.prompt_ids + r.output_ids for r in run.requests.values()],
        "token_times": [_differences([us(t) for t in r.token_times]) for r in run.requests.values()],
        "vocab": [[k, v] for k, v in run.vocab.items()],
        "steps": steps,
        "slo": limit if limit != float("inf") else None,
        "gaps": long,
    }


def _differences(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values)]


def pack(runs: tuple[Run, ...], slo: float | None = None) -> bytes:
    """Runs and palette as gzip JSON: the widget's first state, and the saved page's data.

    What counts as a long gap is one and the same for two runs: without an slo, gaps.slo_of the gaps of both.
    """
    both = Run(requests={(n, id): r for n, run in enumerate(runs) for id, r in run.requests.items()})
    limit = gaps.slo_of(both, slo)
    body = {
        "runs": [encode(run, limit) for run in runs],
        "hatches": colors.HATCHES,
        "themes": colors.THEMES,
    }
    return gzip.compress(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(), 6, mtime=0)


# --- the text twin ---------------------------------------------------------------------------------------------------
def text(run: Run, i: int, selection: dict | None = None) -> str:
    """Step i in seven lines of text, and one more for a selection."""
    f, names = frame(run, i), colors.letters(run)
    prompts = [c for c in f["chunks"] if not c[4]]
    decodes = len(f["chunks"]) - len(prompts)
    who = [f"{len(prompts)} prompt chunk{'s' * (len(prompts) != 1)}"] * bool(prompts)
    who += [f"{decodes} decode{'s' * (decodes != 1)}"] * bool(decodes)
    run_of = lambda c: names[c[0]] if c[4] else f"{names[c[0]]}[{c[1]}…{c[1] + c[2] - 1}]"  # noqa: E731
    state = lambda r, total, done: f"{names[r]} {done}/{total}" if total - done != 1 else names[r]  # noqa: E731
    bar = round(24 * f["tokens"] / f["budget"]) if f["budget"] else 0
    left = {_gone(run): f["aborted"], "finished": [r for r in f["finished"] if r not in f["aborted"]]}
    events = [
        f"{e} {' '.join(names[r] for r in who)}"
        for e, who in ({e: f[e] for e in ("arrived", "admitted", "preempted")} | left).items()
        if who
    ]
    rows = ["." if b == "empty" else "~" if b == "cached" else names[b[0]] if len(b) == 1 else "&" for b in f["pool"]]
    lines = [
        f"step {i} of 0…{len(run.steps) - 1} · {f['kind']} · {' + '.join(who) or 'no chunks'} · {f['tokens']} of {f['budget']} "
        f"tokens · {(f['end'] - f['start']) * 1e3:.0f} ms · {provenance(run)}",
        f"waiting  {' '.join(f'{names[r]}({total})' for r, total, _ in f['waiting']) or 'nobody'} · running  "
        f"{', '.join(state(*entry) for entry in f['running']) or 'nobody'}"
        + (f" · {' · '.join(events)}" if events else ""),
        f"budget   {'█' * bar}{'░' * (24 - bar)} {f['tokens']} of {f['budget']}",
        f"packed   {_short([run_of(c) for c in f['chunks']], 12)} · cu_seqlens_q {_short(f['cu_seqlens_q'], 12)} · "
        f"seq_lens_k {_short(f['seq_lens_k'], 12)} · logits_rows {_short(f['logits_rows'], 12)}"
        + (f" ({_integers(run)})" if _integers(run) else ""),
        f"blocks   {_short(rows, 96, '')}  used {f['used']} cached {f['cached']} empty {f['empty']} · "
        f"{f['wasted']} slots wasted  (. empty, ~ cached, & shared)",
        "tables   " + _short([f"{names[r]}: {_short(t, 8)}" for r, t in f["tables"].items()], 6, " · "),
        f"time     {f['start']:.3f}…{f['end']:.3f} s"
        + "".join(f" · {name} {s * 1e3:.0f} ms" for name, s in f["times"].items() if s >= 5e-4),
    ]
    if selection:
        lines.append(f"selected {_selection_text(run, f, selection)}")
    return "\n".join(lines)


def _short(values: list, most: int, joint: str = " ") -> str:
    values = [str(v) for v in values]
    if len(values) > most:
        values = [*values[: most - 2], "…", values[-1]]
    return joint.join(values) or "none"


def _selection_text(run: Run, f: dict, selection: dict) -> str:
    if "gap" in selection:
        return gaps.explain(run, *selection["gap"])
    id, p = selection["request"], selection["position"]
    name, size = colors.letters(run)[id], run.meta["block_size"]
    request = run.requests[id]
    token = (request.prompt_ids + request.output_ids)[p]
    out = f"{name}'s token {p}" + (f" {run.vocab[token]!r}" if token in run.vocab else "") + f" (id {token})"
    for n, (r, start, length, _, _) in enumerate(f["chunks"]):
        if r == id and start <= p < start + length:
            out += f" · packed row {f['cu_seqlens_q'][n] + p - start} · sees keys 0…{p} of {f['seq_lens_k'][n]}"
    table = f["tables"].get(id, [])
    if p < f["filled"].get(id, 0) and p // size < len(table):
        block = table[p // size]
        out += f" · slot {block * size + p % size} = block {block} · {size} + {p % size}"
    return out


# --- the widget ------------------------------------------------------------------------------------------------------
def positions(runs: tuple[Run, ...], sync: str) -> list[tuple[int, ...]]:
    """The step of each run at every position of the slider.

    One run: its steps. Two in step: the same number in both. Two by time: every moment at which a step of either ends,
    each run at its step in progress (its last one when it is done), both clocks starting with their first step.
    """
    counts = [len(r.steps) for r in runs]
    if len(runs) == 1 or sync == "step":
        return [tuple(min(p, n - 1) for n in counts) for p in range(max(counts))]
    ends = [[round((s.end - r.steps[0].start) * 1e6) for s in r.steps] for r in runs]
    out, at = [], [0] * len(runs)
    for moment in sorted({t for e in ends for t in e}):
        for n, e in enumerate(ends):
            while at[n] < len(e) - 1 and e[at[n]] < moment:
                at[n] += 1
        out.append(tuple(at))
    return out


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Scrubber(kit.Widget):
    """`state`: {"step", "selection", "sync"}; set it from Python or with the mouse, the same.

    step: position of the slider (of one run: its step). selection: None, {"request": id, "position": p} for a token or
    {"gap": [id, k]} for the gap after the id's token k ("run": 1 beside it for the second run's). sync: "time" or "step", how two runs go together.
    `status`: one line in the widget; an error in your own observer appears there.
    """

    _esm = kit.module("scrubber")
    _css = kit.style("scrubber")
    called = "scrubber"
    data = traitlets.Bytes().tag(sync=True)

    def __init__(self, *runs: Run, slo: float | None = None):
        if len(runs) not in (1, 2):
            raise ValueError(f"scrub takes one run or two, got {len(runs)}")
        self.runs = runs
        super().__init__(data=pack(runs, slo), state={})

    def _checked(self, given: dict) -> dict:
        state = {"step": 0, "selection": None, "sync": "time", **given}
        if unknown := set(state) - {"step", "selection", "sync"}:
            raise ValueError(f"state has step, selection and sync, not {', '.join(sorted(map(str, unknown)))}")
        if state["sync"] not in SYNCS:
            raise ValueError(f"sync must be one of {', '.join(SYNCS)}, got {state['sync']!r}")
        last = len(positions(self.runs, state["sync"])) - 1
        if not _whole(state["step"]) or not 0 <= state["step"] <= last:
            raise ValueError(f"step must be a whole number in 0…{last}, got {state['step']!r}")
        if state["selection"] is not None:
            state["selection"] = self._checked_selection(state["selection"])
        return state

    def _checked_selection(self, selection: dict) -> dict:
        """A token needs to be there in one of the runs, a gap in the run that it names."""
        keys = set(selection) if isinstance(selection, dict) else None
        if keys in ({"gap"}, {"gap", "run"}):
            gap, n = selection["gap"], selection.get("run", 0)
            if (
                not isinstance(gap, (list, tuple))
                or len(gap) != 2
                or not isinstance(gap[0], Hashable)
                or not _whole(gap[1])
            ):
                raise ValueError(f"gap must be [request, index of the token before it], got {gap!r}")
            if not _whole(n) or n not in range(len(self.runs)):
                raise ValueError(f"run must lie in 0…{len(self.runs) - 1}, got {n!r}")
            gaps.gap_of(self.runs[n], *gap)
            return {"gap": list(gap), **({"run": n} if n else {})}
        if keys != {"request", "position"}:
            raise ValueError(f'selection must be None, {{"request", "position"}} or {{"gap"}}, got {selection!r}')
        id, p = selection["request"], selection["position"]
        owners = [r.requests[id] for r in self.runs if isinstance(id, Hashable) and id in r.requests]
        if not owners:
            raise ValueError(f"no request {id!r} in this run; it has {list(self.runs[0].requests)}")
        tokens = max(len(r.prompt_ids) + len(r.output_ids) for r in owners)
        if not _whole(p) or not 0 <= p < tokens:
            raise ValueError(f"request {id!r} has {tokens} tokens, so positions 0…{tokens - 1}; got {p!r}")
        return dict(selection)

    def run(self) -> dict | list[dict]:
        """The frame that is shown: `frame(run, step)`; of two runs, both."""
        at = positions(self.runs, self.state["sync"])[self.state["step"]]
        frames = [frame(run, i) for run, i in zip(self.runs, at)]
        return frames[0] if len(frames) == 1 else frames

    def reset(self) -> None:
        """Back to the first step, nothing selected."""
        self.state = {}

    def _selection_in(self, n: int) -> dict | None:
        """The selection, if it lies in the n-th run."""
        chosen, requests = self.state["selection"], self.runs[n].requests
        if chosen is None or "gap" in chosen:
            return chosen if chosen and chosen.get("run", 0) == n else None
        r = requests.get(chosen["request"])
        return chosen if r and chosen["position"] < len(r.prompt_ids) + len(r.output_ids) else None

    def __str__(self) -> str:
        at = positions(self.runs, self.state["sync"])[self.state["step"]]
        return "\n\n".join(text(run, i, self._selection_in(n)) for n, (run, i) in enumerate(zip(self.runs, at)))


def scrub(*runs: Run, slo: float | None = None) -> Scrubber:
    """The scrubber over one run, or over two side by side. slo: seconds above which a gap is long (gaps.slo_of)."""
    return Scrubber(*runs, slo=slo)


def encoded(runs: tuple[Run, ...], slo: float | None = None) -> str:
    """`pack` in base64, for a page."""
    return base64.b64encode(pack(runs, slo)).decode()
