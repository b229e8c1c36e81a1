"""Figures of notebooks 10 and 30: tokens fed, the roofline, a prompt in chunks, total time by chunk size, the free lunch.

Pure functions to plotly Figures, in the manner of views.py: `views.text(figure)` is the figure in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minichunk import costmodel
from minichunk.costmodel import GPU, ModelShape
from minichunk.lab import colors
from minichunk.lab.scenes_prompt import Knee, Lunch, split_cost
from minichunk.lab.views import BELOW, RUN_MARKS, _finish, _plain, _run_color
from minichunk.record import Run


def tokens_fed(prompt: int, n: int, theme: str = "both") -> go.Figure:
    """How many tokens the model computes for each of n new tokens, with a cache and without."""
    without, cached = [prompt + i for i in range(n)], [prompt] + [1] * (n - 1)
    figure = go.Figure()
    for name, fed, k, shape in (("without a cache", without, 3, "/"), ("with a cache", cached, 4, "")):
        figure.add_bar(
            x=list(range(n)), y=fed, name=name, marker=_plain(colors.color(k, theme), shape, colors.palette(theme)["hatch"]),
            hovertemplate=f"token %{{x}}, {name}: %{{y}} computed<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="token of the answer")
    figure.update_yaxes(title="tokens computed for it")
    said = [
        f"without a cache: {prompt} for the first token, then one more each time, {sum(without)} in all",
        f"with a cache: {prompt} for the first token, then 1 each, {sum(cached)} in all",
    ]
    return _finish(figure, "Tokens computed for each new token", [_source("COUNTED")], said, theme, 360)


def roofline(shape: str | ModelShape, gpu: GPU, batches: Mapping[str, Iterable], measured: Mapping[str, float] | None = None, theme: str = "both") -> go.Figure:  # fmt: skip
    """Batches {label: chunks} under the roof of a machine: FLOP per byte against FLOP/s, both logarithmic.

    A filled mark lies on the roof, where no step can be faster; measured {label: milliseconds} puts an open mark where
    the step really was. FLOPs and bytes are those of costmodel.
    """
    look, figure, said, measured = colors.palette(theme), go.Figure(), [], measured or {}
    rows = {label: (costmodel.flops(shape, c)["total"], costmodel.traffic(shape, c)["total"]) for label, c in batches.items()}  # fmt: skip
    intensities = [flops / nbytes for flops, nbytes in rows.values()]
    x = np.geomspace(min(*intensities, gpu.ridge) / 2, max(*intensities, gpu.ridge) * 4, 60)
    x = np.sort(np.append(x, gpu.ridge))
    figure.add_scatter(
        x=x, y=np.minimum(gpu.peak, gpu.bandwidth * x), mode="lines", line={"color": look["ink"], "width": 2.5}, name="roof",
        hovertemplate="%{x:.3g} FLOP per byte: at most %{y:.3g} FLOP/s<extra></extra>",
    )  # fmt: skip
    said.append(f"{gpu.name}: at most {gpu.peak / 1e9:.4g} GFLOP/s and {gpu.bandwidth / 1e9:.3g} GB/s; they meet at {gpu.ridge:.3g} FLOP per byte")  # fmt: skip
    for n, ((label, (flops, nbytes)), (symbol, _)) in enumerate(zip(rows.items(), cycle(RUN_MARKS))):
        at, top = flops / nbytes, min(gpu.peak, gpu.bandwidth * flops / nbytes)
        side = "memory" if at < gpu.ridge else "compute"
        ys = [top, flops / (measured[label] / 1e3)] if label in measured else [top]
        figure.add_scatter(
            x=[at] * len(ys), y=ys, mode="lines+markers", name=label, line={"color": colors.color(n, theme), "dash": "dot"},
            marker={"symbol": [symbol, f"{symbol}-open"][: len(ys)], "size": 14, "color": colors.color(n, theme), "line": {"width": 2, "color": look["ink"]}},
            hovertemplate=f"{label}: %{{x:.3g}} FLOP per byte, %{{y:.3g}} FLOP/s<extra></extra>",
        )  # fmt: skip
        words = f"{label}: {flops / 1e9:.3g} GFLOP, {nbytes / 1e6:.4g} MB, {at:.3g} FLOP per byte, bound by {side}; at the roof {1e3 * flops / top:.3g} ms"  # fmt: skip
        said.append(words + (f", measured {measured[label]:.3g} ms" if len(ys) > 1 else ""))
    figure.add_vline(x=gpu.ridge, line={"color": look["soft"], "dash": "dash", "width": 1})
    figure.add_annotation(text=f"ridge, {gpu.ridge:.3g}", x=np.log10(gpu.ridge), y=0, yref="paper", xanchor="left", yanchor="bottom", xshift=4, yshift=6, showarrow=False)  # fmt: skip
    figure.update_xaxes(title="FLOP per byte", type="log", dtick=1)
    figure.update_yaxes(title="FLOP/s", type="log", dtick=1, exponentformat="power")
    marks = "filled: the roof's bound" + (", open: measured" if measured else "")
    return _finish(figure, f"Where the batch lies under the roof ({marks})", [_source(gpu.name)], said, theme, 440)


def chunk_plan(prompt: int, chunk: int, shape: str | ModelShape = "smollm2-135m", theme: str = "both") -> go.Figure:
    """A prompt cut into chunks: the keys that each reads (history and own), the FLOPs of each, and all of them against
    the whole prompt at once."""
    look, cost = colors.palette(theme), split_cost(prompt, chunk, shape)
    model = costmodel.shape_named(shape)
    count, x = len(cost["starts"]), list(range(len(cost["starts"])))
    history, own = cost["starts"], cost["lengths"]
    ratios = {what: pieces / whole for what, (pieces, whole) in cost["totals"].items()}
    figure = make_subplots(
        1, 3, column_widths=[0.36, 0.36, 0.28], horizontal_spacing=0.11,
        subplot_titles=["keys that chunk k reads", "GFLOP of chunk k", "all chunks, times the whole"],
    )  # fmt: skip
    spans = [f"tokens {a} to {a + n - 1}" for a, n in zip(history, own)]
    gflop = {part: [f / 1e9 for f in cost[part]] for part in ("linear", "attention")}
    bars = [
        (1, "history, read again", history, _plain(look["soft"], "/", look["hatch"]), "%{y} keys of the history"),
        (1, "its own", own, _plain(colors.color(1, theme), ""), "%{y} keys of its own"),
        (2, "linear layers", gflop["linear"], _plain(colors.color(4, theme), ""), "%{y:.3g} GFLOP in the linear layers"),
        (2, "attention", gflop["attention"], _plain(colors.color(0, theme), "x", look["hatch"]), "%{y:.3g} GFLOP in attention"),
    ]  # fmt: skip
    for column, label, y, marker, hover in bars:
        figure.add_bar(
            x=x, y=y, name=label, marker=marker, customdata=spans, row=1, col=column,
            hovertemplate=f"chunk %{{x}}, %{{customdata}}: {hover}<extra></extra>",
        )  # fmt: skip
    figure.add_bar(
        orientation="h", y=[what.replace(" ", "<br>") for what in ratios], x=list(ratios.values()), text=[f"{r:.3g} ×" for r in ratios.values()], textposition="outside",
        marker=_plain(colors.color(2, theme), ""), showlegend=False, cliponaxis=False, row=1, col=3,
        hovertemplate="%{y}: %{x:.4g} times the whole prompt at once<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="chunk k", row=1, col=1)
    figure.update_xaxes(title="chunk k", row=1, col=2)
    figure.update_xaxes(range=[0, 1.25 * max(ratios.values())], row=1, col=3)
    figure.update_yaxes(autorange="reversed", row=1, col=3)
    figure.update_layout(barmode="stack", legend=BELOW)
    first, last = cost["pairs"][0], cost["pairs"][-1]
    flops = [a + b for a, b in zip(cost["linear"], cost["attention"])]
    total, whole = cost["totals"]["pairs"], cost["totals"]["keys read"]
    said = [
        f"{prompt} tokens in {count} chunk{'s' * (count > 1)} of at most {chunk}",
        f"pairs: {total[0]} in pieces, {total[1]} at once; chunk 0 has {first}, the last {last}, {last / first:.3g} times as many",
        f"FLOPs: {sum(flops) / 1e9:.4g} GFLOP in pieces and at once; the last chunk has {flops[-1] / flops[0]:.3g} times those of chunk 0",
        f"keys read: {whole[0]} in pieces, {whole[1]} at once, {ratios['keys read']:.3g} times",
        f"weights read: {count} time{'s' * (count > 1)}, {cost['totals']['weights read'][0] / 1e6:.4g} MB",
    ]
    figure = _finish(figure, f"{prompt} tokens in {count} chunk{'s' * (count > 1)} of at most {chunk}", [_source(f"COUNTED · {model.name}, {model.dtype_bytes} bytes a value")], said, theme, 420)  # fmt: skip
    return figure.update_layout(margin={"t": 110, "b": 90})


def chunk_time(times: Mapping[int, Sequence[Sequence[float]]], prompt: int, shape: str | ModelShape, gpu: GPU, meta: dict | None = None, theme: str = "both") -> go.Figure:  # fmt: skip
    """Total time of a prompt against the chunk size, with its launches (steps) and what rereading the weights takes.

    times: {chunk: for each repeat the milliseconds of every step}; gpu: the machine's roof; meta: as Run.meta has it.
    """
    look, figure, sizes = colors.palette(theme), go.Figure(), sorted(times)
    totals = [[sum(repeat) for repeat in times[size]] for size in sizes]
    low, mid, high = (np.array([np.percentile(t, q) for t in totals]) for q in (5, 50, 95))
    launches = [len(times[size][0]) for size in sizes]
    weights = costmodel.traffic(shape, [(0, 1)])["weights"] / gpu.bandwidth * 1e3
    reread = [n * weights for n in launches]
    work = costmodel.flops(shape, [(0, prompt)])["total"] / gpu.peak * 1e3
    figure.add_scatter(
        x=sizes, y=mid, mode="lines+markers+text", name="measured, total", line={"color": look["ink"], "width": 2.5}, marker={"size": 10},
        text=[f"{n} launch{'es' * (n > 1)}" for n in launches], textposition="top center", customdata=launches,
        error_y={"type": "data", "symmetric": False, "array": high - mid, "arrayminus": mid - low, "color": look["ink"]},
        hovertemplate="chunks of %{x}: %{y:.0f} ms in %{customdata} launches<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=sizes, y=reread, mode="lines+markers", name="reading the weights once a launch", marker={"symbol": "diamond", "size": 9},
        line={"color": colors.color(4, theme), "dash": "dash", "width": 2.5}, customdata=launches,
        hovertemplate="chunks of %{x}: the weights %{customdata} times, %{y:.0f} ms at the roof<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=sizes, y=[work] * len(sizes), mode="lines", name="the arithmetic, at the roof", line={"color": colors.color(5, theme), "dash": "dot", "width": 2.5},
        hovertemplate="the same arithmetic for every size: %{y:.0f} ms at the roof<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="chunk size, tokens", type="log", tickvals=sizes, ticktext=[str(s) for s in sizes])
    figure.update_yaxes(title="ms", range=[0, 1.15 * max(float(high.max()), reread[0], work)])
    figure.update_layout(legend=BELOW)
    said = [
        f"chunks of {size}: {n} launch{'es' * (n > 1)}, {m:.0f} ms in all (P5 {a:.0f}, P95 {b:.0f}); reading the weights {f'{n} times' if n > 1 else 'once'} takes at least {r:.0f} ms"
        for size, n, a, m, b, r in zip(sizes, launches, low, mid, high, reread)
    ]
    said.append(f"the arithmetic is the same for every size: at least {work:.0f} ms")
    figure = _finish(figure, f"{prompt} tokens: total time against chunk size", [Run(meta=meta or {"source": gpu.name})], said, theme, 440)  # fmt: skip
    return figure.update_layout(margin={"b": 90})


REASONS = {
    "graph": "CUDA graph",
    "eager": "eager, launch-bound: flat for another reason",
    "live": "this machine, now",
}


def lunch(curves: Sequence[Lunch], knees: Sequence[Knee], at: int | None = None, theme: str = "both") -> go.Figure:
    """Step time against the tokens of the prompt chunk, logarithmic, a panel a machine: median with P5 to P95, the roof,
    and the fitted knee with its interval as a band. at: tokens that a vertical line marks.

    Curves of one panel share meta["source"]; an eager curve gets no band, since it bends for another reason.
    """
    look, sources = colors.palette(theme), list(dict.fromkeys(c.meta["source"] for c in curves))
    figure = make_subplots(1, len(sources), horizontal_spacing=0.1, subplot_titles=sources)
    said, order = [], {source: 0 for source in sources}
    for curve, bend in zip(curves, knees):
        source = curve.meta["source"]
        column, k = sources.index(source) + 1, order[source]
        order[source] += 1
        symbol, dash = RUN_MARKS[k % len(RUN_MARKS)]
        low, mid, high = (curve.percentile(q) for q in (5, 50, 95))
        beside = f", beside {curve.decodes} decodes" if curve.decodes else ""
        name = REASONS[curve.label] + beside
        color = look["soft"] if curve.label == "eager" else _run_color(k, theme)
        figure.add_scatter(
            x=curve.sizes, y=mid, mode="lines+markers", name=name, row=1, col=column, marker={"symbol": symbol, "size": 8},
            line={"color": color, "dash": "longdashdot" if curve.label == "eager" else dash, "width": 2.5},
            error_y={"type": "data", "symmetric": False, "array": high - mid, "arrayminus": mid - low},
            hovertemplate=f"%{{x}} tokens{beside}: %{{y:.3g}} ms<extra>{curve.label}</extra>",
        )  # fmt: skip
        if curve.label != "eager":
            figure.add_scatter(
                x=curve.sizes, y=curve.roof, mode="lines", name=f"roof{beside}", row=1, col=column, showlegend=not curve.decodes,
                line={"color": color, "width": 1.5, "dash": "dot"}, hovertemplate=f"roof, %{{x}} tokens{beside}: %{{y:.3g}} ms<extra></extra>",
            )  # fmt: skip
            if bend.found:
                figure.add_vrect(x0=bend.low, x1=bend.high, fillcolor=color, opacity=0.13, line_width=0, row=1, col=column)  # fmt: skip
        said.append(f"{source}, {name}: {mid[0]:.3g} ms with {curve.sizes[0]} token{'s' * (curve.sizes[0] > 1)}, {mid[-1]:.3g} ms with {curve.sizes[-1]}" + f"; {bend}" * (curve.label != "eager"))  # fmt: skip
    for column, source in enumerate(sources, 1):
        most = max(c.sizes[-1] for c in curves if c.meta["source"] == source)
        ticks = [4**k for k in range(8) if 4**k <= most]
        figure.update_xaxes(tickvals=ticks, ticktext=[f"{t:,}" for t in ticks], range=[-0.1, np.log10(most) + 0.1], row=1, col=column)  # fmt: skip
    figure.update_xaxes(title="tokens in the chunk", type="log")
    figure.update_yaxes(title="ms a step", row=1, col=1)
    ticks = [digit * 10**k for k in range(5) for digit in (1, 2, 5)]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    figure.update_layout(legend=BELOW)
    figure = _finish(figure, "The free lunch, and where it ends (band: the fitted knee)", [Run(meta={**c.meta, "mode": ""}) for c in curves], said, theme, 440 + 20 * len(curves))  # fmt: skip
    figure.update_layout(margin={"t": figure.layout.margin.t + 30, "b": 80 + 20 * len(curves)})
    if at:
        for shape in marks(len(sources), at, theme):
            figure.add_shape(shape)
    return figure


def marks(panels: int, at: int, theme: str = "both") -> list[dict]:
    """The vertical line of `lunch` at so many tokens, in each panel."""
    line = {"color": colors.palette(theme)["alarm"], "width": 2}
    axes = ["" if n == 0 else str(n + 1) for n in range(panels)]
    return [{"type": "line", "x0": at, "x1": at, "xref": f"x{n}", "y0": 0, "y1": 1, "yref": f"y{n} domain", "line": line, "name": "at"} for n in axes]  # fmt: skip


def _source(text: str) -> Run:
    return Run(meta={"source": text})
