"""Figures of a run: pure functions from Runs to plotly Figures.

A request has one colour, one hatch and one letter in all of them (colors.py). Every figure's title says where the
numbers come from, and `text(figure)` is the figure in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minichunk.lab import colors, gaps
from minichunk.lab.gaps import blame, culprit, explain
from minichunk.lab.titles import provenance
from minichunk.record import Run, StepRecord

__all__ = ["blame", "budget_latency", "culprit", "explain", "stalls", "step_strip", "text", "timeline", "ttft_tbt"]

TTFT, TBT = "TTFT, time to first token", "TBT, time between tokens"
BELOW = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
}  # a legend under the figure, which makes room
SYMBOLS = {"mixed": "diamond", "decodes": "circle-open", "prompts": "square"}
RUN_MARKS = [
    ("circle", "solid"),
    ("diamond", "dash"),
    ("square", "dot"),
    ("cross", "dashdot"),
    ("triangle-up", "longdash"),
]


def text(figure: go.Figure) -> str:
    """The figure in words: what a screen reader, a terminal or a test reads."""
    return figure.layout.meta["text"]


def step_strip(run: Run, theme: str = "both", first: int = 0, last: int | None = None) -> go.Figure:
    """Who ran in each step: a column a step, its chunks in packed order, under the line of the budget.

    first, last: the steps to show, last not included. The mark above a column says mixed, decodes or prompts. Where the
    largest step has less than half of the budget, the picture ends there, and the title says what the budget is.
    """
    steps, names = run.steps[first:last], colors.letters(run)
    figure, look = go.Figure(), colors.palette(theme)
    budget, largest = (max((n(s) for s in steps), default=1) for n in (lambda s: s.budget, lambda s: s.num_tokens))
    tops = budget if 2 * largest >= budget else largest
    least = max(1, round(tops / max(60, *(len(s.chunks) for s in steps))))
    bars: dict[Any, list[tuple]] = {}
    for step in steps:
        row = 0
        for (id, start, length, _, decode), height in zip(step.chunks, _heights(step, least)):
            what = f"{'decode' if decode else 'prompt chunk'} {start}…{start + length - 1}, step {step.index}: {length} token{'s' * (length > 1)}"
            bars.setdefault(id, []).append((step.index, height, row, what, decode))
            row += height
    for n, id in enumerate(run.requests):
        if id not in bars:
            continue
        x, y, base, what, decode = zip(*bars[id])
        figure.add_bar(
            x=x, y=y, base=base, width=0.94, name=names[id], marker=_fill(n, theme), customdata=what,
            text=["" if d else names[id] for d in decode], textposition="inside", insidetextanchor="middle", textangle=0,
            hovertemplate=names[id] + " %{customdata}<extra></extra>",
        )  # fmt: skip
    if tops == budget:
        figure.add_scatter(
            x=[x for s in steps for x in (s.index - 0.5, s.index + 0.5)], y=[b for s in steps for b in (s.budget, s.budget)],
            mode="lines", line={"color": look["ink"], "dash": "dash", "width": 1.5}, name="budget", hoverinfo="skip",
        )  # fmt: skip
    for kind, symbol in SYMBOLS.items():
        at = [s.index for s in steps if s.kind == kind and s.chunks]
        if at:
            figure.add_scatter(
                x=at, y=[tops * 1.08] * len(at), mode="markers", name=f"{kind} step", hovertemplate=f"step %{{x}}: {kind}<extra></extra>",
                marker={"symbol": symbol, "color": look["ink"], "size": 9, "line": {"color": look["ink"], "width": 1.5}},
            )  # fmt: skip
    kinds = [s.kind for s in steps]
    used, room = sum(s.num_tokens for s in steps), sum(s.budget for s in steps)
    said = [
        f"{len(steps)} steps: {kinds.count('mixed')} mixed, {kinds.count('decodes')} decodes only, {kinds.count('prompts')} prompts only; "
        f"{used} of {room} budgeted tokens used ({used / room:.0%})" if room else "no steps"
    ]  # fmt: skip
    said += [str(s) for s in steps[:40]] + [f"… {len(steps) - 40} more steps"] * (len(steps) > 40)
    figure.update_xaxes(title="step")
    figure.update_yaxes(
        title="packed tokens" + f" (a chunk at least {least} high)" * (least > 1), range=[0, tops * 1.14]
    )
    figure.update_layout(barmode="overlay", bargap=0)
    above = f" (budget {budget:,}, above the picture)" * (tops < budget)
    return _finish(figure, f"Who ran in each step{above}", [run], said, theme, max(420, 150 + 21 * len(figure.data)))


def _heights(step: StepRecord, least: int) -> list[float]:
    """How high a step's chunks are drawn: their tokens, yet each at least `least`, so that a decode beside a long prompt
    can be seen. What that adds is taken from the higher ones: the column is as high as its tokens, where it can be."""
    heights = [max(c[2], least) for c in step.chunks]
    added, spare = sum(heights) - step.num_tokens, sum(h - least for h in heights)
    return [h - (h - least) * min(1, added / spare) for h in heights] if spare else heights


def timeline(run: Run, theme: str = "both") -> go.Figure:
    """A row a request over time: waiting (grey), prompt chunks (thick), decodes (thin), tokens (ticks)."""
    names, rows = colors.letters(run), {id: n for n, id in enumerate(run.requests)}
    look, zero = colors.palette(theme), run.steps[0].start if run.steps else 0.0
    figure, said = go.Figure(), []
    queued = [
        (r, r.first_scheduled if r.first_scheduled is not None else run.steps[-1].end) for r in run.requests.values()
    ]
    figure.add_bar(
        orientation="h", y=[rows[r.id] for r, _ in queued], base=[r.arrival - zero for r, _ in queued],
        x=[until - r.arrival for r, until in queued], width=0.18, name="waiting", marker={"color": look["soft"], "opacity": 0.55},
        hovertemplate="waiting %{x:.3f} s<extra></extra>",
    )  # fmt: skip
    pieces: dict[Any, list[tuple]] = {}
    for step in run.steps:
        for id, start, length, _, decode in step.chunks:
            what = f"{'decode' if decode else 'prompt chunk'} {start}…{start + length - 1} in step {step.index}"
            pieces.setdefault(id, []).append((step.start - zero, step.duration, 0.22 if decode else 0.75, what))
    for id, n in rows.items():
        if id not in pieces:
            continue
        base, x, width, what = zip(*pieces[id])
        figure.add_bar(
            orientation="h", y=[n] * len(x), base=base, x=x, width=width, name=names[id], marker=_fill(n, theme), customdata=what,
            hovertemplate=names[id] + " %{customdata}, %{x:.3f} s<extra></extra>",
        )  # fmt: skip
    tokens = [
        (t - zero, rows[r.id], f"{names[r.id]}'s token {k}")
        for r in run.requests.values()
        for k, t in enumerate(r.token_times)
    ]
    if tokens:
        x, y, what = zip(*tokens)
        figure.add_scatter(
            x=x, y=y, mode="markers", name="token", customdata=what, hovertemplate="%{customdata} at %{x:.3f} s<extra></extra>",
            marker={"symbol": "line-ns-open", "color": look["ink"], "size": 14, "line": {"width": 2}},
        )  # fmt: skip
    for r in run.requests.values():
        worst = f", longest gap {_ms(max(r.tbt))}" if r.tbt else ""
        came = (
            f"first token after {_ms(r.ttft)} (of that {_ms(r.queue_time)} in the queue)"
            if r.ttft is not None
            else "no token"
        )
        said.append(
            f"{names[r.id]}: {len(r.prompt_ids)} prompt tokens, arrived at {r.arrival - zero:.3f} s, {came}, {len(r.token_times)} tokens{worst}"
        )
    figure.update_xaxes(title="seconds")
    figure.update_yaxes(
        tickvals=list(rows.values()),
        ticktext=[names[id] for id in rows],
        range=[len(rows) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
    )
    figure.update_layout(barmode="overlay")
    return _finish(figure, "Requests over time", [run], said, theme, 150 + 34 * len(rows))


def ttft_tbt(runs: Run | Sequence[Run], theme: str = "both") -> go.Figure:
    """TTFT and TBT of every request above, their distributions below; each run has its own mark and dash."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    ink = colors.palette(theme)["ink"]
    figure = make_subplots(2, 2, vertical_spacing=0.17, horizontal_spacing=0.11, subplot_titles=[
        f"{TTFT}, of each request", f"{TBT}: every gap", "share of requests with TTFT up to", "share of gaps up to",
    ])  # fmt: skip
    said, many = [f"{TTFT}; {TBT}"], len(runs) > 1
    for k, (run, name, (symbol, dash)) in enumerate(zip(runs, _labels(runs), cycle(RUN_MARKS))):
        names, shift = colors.letters(run), (k - (len(runs) - 1) / 2) * 0.22
        points = [[(n, r.ttft) for n, r in enumerate(run.requests.values()) if r.ttft is not None]]
        points.append([(n, gap) for n, r in enumerate(run.requests.values()) for gap in r.tbt])
        for column, pairs in enumerate(points, 1):
            x, y = [n for n, _ in pairs], [v * 1e3 for _, v in pairs]
            marker = {"symbol": symbol, "size": 10 if column == 1 else 7, "color": [colors.color(n, theme) for n in x]}
            figure.add_scatter(
                x=[n + shift for n in x], y=y, mode="markers", row=1, col=column, name=name, legendgroup=name,
                showlegend=False, marker={**marker, "line": {"color": ink, "width": 1}},
                customdata=[names[id] for id in (list(run.requests)[n] for n in x)],
                hovertemplate="%{customdata}: %{y:.0f} ms<extra>" + name + "</extra>",
            )  # fmt: skip
            y = sorted(y)
            figure.add_scatter(
                x=y, y=[(i + 1) / len(y) for i in range(len(y))], mode="lines", line={"shape": "hv", "dash": dash, "color": _run_color(k, theme), "width": 2.5},
                row=2, col=column, name=f"{name}", legendgroup=name, showlegend=many and column == 1,
            )  # fmt: skip
        for column in (1, 2):
            figure.update_xaxes(tickvals=list(range(len(names))), ticktext=list(names.values()), row=1, col=column)
        s = run.summary()
        said.append(f"{name + ': ' if many else ''}TTFT {_spread(s['ttft'])}; TBT {_spread(s['tbt'])}")
        if not many:
            said += [
                f"{names[r.id]}: TTFT {_ms(r.ttft)}" + (f", TBT median {_ms(np.median(r.tbt))}, longest {_ms(max(r.tbt))}" if r.tbt else "")
                for r in run.requests.values() if r.ttft is not None
            ]  # fmt: skip
    figure.update_yaxes(title="ms", rangemode="tozero", row=1)
    figure.update_xaxes(title="ms", rangemode="tozero", row=2)
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%", row=2)
    figure.update_layout(legend=BELOW)
    return _finish(figure, "First tokens and the gaps after them", runs, said, theme, 600)


def stalls(run: Run, slo: float | None = None, theme: str = "both", most: int = 20) -> go.Figure:
    """Every gap above `slo` seconds (default: three times the median gap), longest first, cut into its causes by `blame`."""
    names, limit, look = colors.letters(run), gaps.slo_of(run, slo), colors.palette(theme)
    every = gaps.long_gaps(run, slo, most=10**9)
    found, facts = every[:most], gaps.Facts.of(run)
    figure = go.Figure()
    label = lambda id, k: f"{names[id]}, before token {k + 1}"  # noqa: E731
    parts = [blame(run, id, k, facts) for id, k, _ in found]
    fills = {f"prompt {names[id]}": _fill(n, theme) for n, id in enumerate(run.requests)}
    fills |= {
        gaps.DECODES: {"color": look["soft"]}, gaps.LEFT_OUT: _plain(look["soft"], "/"),
        gaps.RECOMPUTE: _plain(look["alarm"], "x"), gaps.BETWEEN: _plain(look["line"], "."),
    }  # fmt: skip
    for cause, marker in fills.items():
        rows = [(label(id, k), p[cause] * 1e3) for (id, k, _), p in zip(found, parts) if p.get(cause, 0) > 0]
        if rows:
            figure.add_bar(
                orientation="h", y=[y for y, _ in rows], x=[x for _, x in rows], name=cause, marker=marker,
                hovertemplate=f"{cause}: %{{x:.0f}} ms<extra></extra>",
            )  # fmt: skip
    if found:
        figure.add_vline(
            x=limit * 1e3,
            line={"color": look["alarm"], "dash": "dash", "width": 2},
            annotation_text=_ms(limit),
            annotation_position="top",
        )
        said = [f"{len(every)} of {len(run.tbts)} gaps are longer than {_ms(limit)}"]
        said += [explain(run, id, k, facts) for id, k, _ in found]
    else:
        said = [
            f"none of {len(run.tbts)} gaps is longer than {_ms(limit)}"
            if run.tbts
            else "no gaps: no request has two tokens"
        ]
        figure.add_annotation(text=said[0], showarrow=False, x=0, y=0.5, xref="paper", yref="paper", xanchor="left")
    figure.update_xaxes(title="ms", rangemode="tozero", visible=bool(found))
    order = [label(id, k) for id, k, _ in found]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order, visible=bool(found))
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    shown = f" (the {len(found)} longest of {len(every)})" if len(every) > len(found) else ""
    return _finish(
        figure, f"What the long gaps waited for{shown}", [run], said, theme, 190 + 26 * len(found) if found else 140
    )


def budget_latency(runs: Sequence[Run], theme: str = "both") -> go.Figure:
    """TTFT and TBT (P50, P99) against the budget, one point a run: what a larger budget gives and takes."""
    runs = sorted(runs, key=lambda r: r.meta["max_batch_tokens"])
    budgets, sums = [r.meta["max_batch_tokens"] for r in runs], [r.summary() for r in runs]
    figure = make_subplots(1, 2, subplot_titles=[TTFT, TBT], horizontal_spacing=0.11)
    for column, what in enumerate(("ttft", "tbt"), 1):
        for k, (point, (symbol, dash)) in enumerate(zip(("p50", "p99"), RUN_MARKS)):
            figure.add_scatter(
                x=budgets, y=[None if s[what][point] is None else s[what][point] * 1e3 for s in sums], mode="lines+markers", row=1, col=column,
                name=point.upper(), legendgroup=point, showlegend=column == 1, marker={"symbol": symbol, "size": 10},
                line={"dash": dash, "color": _run_color(k, theme), "width": 2.5},
                hovertemplate="budget %{x}: %{y:.0f} ms<extra>" + f"{what.upper()} {point.upper()}</extra>",
            )  # fmt: skip
    figure.update_xaxes(
        title="budget: tokens a step at most", type="log", tickvals=budgets, ticktext=[str(b) for b in budgets]
    )
    figure.update_yaxes(title="ms", rangemode="tozero")
    said = [f"{TTFT}; {TBT}"]
    said += [f"budget {b}: TTFT {_spread(s['ttft'])}; TBT {_spread(s['tbt'])}" for b, s in zip(budgets, sums)]
    return _finish(figure, "What the budget buys, and what it costs", runs, said, theme, 420)


# --- what the figures share --------------------------------------------------------------------------------------------
def _fill(n: int, theme: str) -> dict:
    """plotly's marker of the n-th request."""
    return _plain(colors.color(n, theme), colors.hatch(n), colors.palette(theme)["hatch"])


def _plain(color: str, shape: str, hatch: str | None = None) -> dict:
    return {
        "color": color, "line": {"width": 0},
        "pattern": {"shape": shape, "fillmode": "overlay", "size": 7, "solidity": 0.25, "fgopacity": 0.45, "fgcolor": hatch or color},
    }  # fmt: skip


def _run_color(k: int, theme: str) -> str:
    """Of a whole run or a statistic: blue first, yellow last, which is faint in a line on white."""
    return colors.color((4, 6, 5, 2, 0, 1, 3)[k % 7], theme)


def _labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, no two alike: what tells them apart."""
    keys = [
        k
        for k in ("policy", "code", "max_batch_tokens", "chunk_size", "model", "source")
        if len({str(r.meta.get(k)) for r in runs}) > 1
    ]
    names = [", ".join(_parts(r.meta, keys)) or str(r.meta.get("policy") or "run") for r in runs]
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def _parts(meta: dict, keys: list[str]) -> list[str]:
    """What these keys of a run's meta say, in words, without what another one says already."""
    parts = {k: str(meta[k]) for k in keys if meta.get(k)}
    if parts.get("code") in ("YOUR", "REFERENCE"):
        parts["code"] += " scheduler"
        parts.pop("policy", None)  # the learner's function, by its name
    if "max_batch_tokens" in parts:
        parts["max_batch_tokens"] = f"budget {meta['max_batch_tokens']}"
    if "chunk_size" in parts:
        parts["chunk_size"] = f"chunks of {meta['chunk_size']}"
        if meta["chunk_size"] == meta.get("max_batch_tokens"):  # cut by the budget alone
            del parts["chunk_size"]
    return list(parts.values())


def _spread(s: dict) -> str:
    if s["p50"] is None:
        return "none"
    return f"P50 {_ms(s['p50'])}, P99 {_ms(s['p99'])}, longest {_ms(s['max'])}"


_ms = gaps.milliseconds


def _finish(
    figure: go.Figure, headline: str, runs: Sequence[Run], said: list[str], theme: str, height: int
) -> go.Figure:
    look = colors.palette(theme)
    sources = list(dict.fromkeys(provenance(r) for r in runs))
    if len(sources) > 3:
        sources = [*sources[:2], f"and {len(sources) - 2} more"]
    title = f"{headline}<br><span style='font-size:14px;color:{look['soft']}'>{'<br>'.join(sources)}</span>"
    height += 20 * len(sources)
    figure.update_layout(
        template="plotly_dark" if theme == "dark" else "plotly_white", height=height,
        title={"text": title, "x": 0, "xref": "paper", "yref": "container", "y": 1 - 26 / height, "yanchor": "top", "font": {"size": 18}},
        font={"size": 14, "color": look["ink"]}, paper_bgcolor=look["paper"], plot_bgcolor=look["paper"],
        margin={"l": 60, "r": 20, "t": 66 + 20 * len(sources), "b": 56}, hoverlabel={"font": {"size": 14}},
        modebar={"color": look["soft"], "activecolor": look["ink"], "bgcolor": look["paper"]},
        meta={"text": "\n".join([headline, *sources, *said])},
    )  # fmt: skip
    figure.update_annotations(font={"size": 14, "color": look["ink"]})
    figure.update_xaxes(gridcolor=look["line"], zerolinecolor=look["line"])
    figure.update_yaxes(gridcolor=look["line"], zerolinecolor=look["line"], ticklabelstandoff=4)
    return figure
