"""Figures of notebook 95: one for each of the twelve claims, in the manner of views.py. `figure(22)` draws claim 22's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle

import numpy as np
import plotly.graph_objects as go

from minichunk import claims
from minichunk.lab import colors
from minichunk.lab.views import RUN_MARKS, _fill, _finish, _run_color
from minichunk.lab.views_blocks import row_error_bars, waste_by_policy
from minichunk.record import Run

COUNTED, COMPUTED = "COUNTED", "COMPUTED with the cost model"
SIMULATED = "SIMULATED Mistral-7B on one A100; estimates on one seed"


def figure(claim: int, theme: str = "both") -> go.Figure:
    """The figure of a claim among the twelve. KeyError for another."""
    return _FIGURES[claim](theme)


def bars(
    rows: Mapping[str, Mapping[str, float]], headline: str, source: str, title: str, theme: str, at: tuple[float, str] | None = None, form: str = ".3g", log: bool = False,
) -> go.Figure:  # fmt: skip
    """Horizontal bars {group: {label: value}}; at: a line at a value, with words."""
    drawn, said = go.Figure(), []
    for n, (group, values) in enumerate(rows.items()):
        drawn.add_bar(
            orientation="h", y=list(values), x=list(values.values()), name=group, marker=_fill(n, theme), textposition="outside",
            text=[format(v, form) for v in values.values()], cliponaxis=False, hovertemplate="%{y}: %{x}<extra></extra>",
        )  # fmt: skip
        said += [
            f"{label if group in label else f'{group}, {label}'}: {value:{form}}" for label, value in values.items()
        ]
    if at:
        _mark(drawn, "x", at[0], at[1], theme, log)
        said.append(f"line at {at[0]:{form}}: {at[1]}")
    values = [value for group in rows.values() for value in group.values()]
    low, high = min(0, 1.6 * min(values)), 1.1 * max(values)
    drawn.update_xaxes(
        title=title, type="log" if log else "linear", range=None if log else [low, high], dtick=1 if log else None
    )
    labels = list(dict.fromkeys(label for values in rows.values() for label in values))
    drawn.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels, automargin=True)
    count = sum(len(values) for values in rows.values())
    drawn = _finish(drawn, headline, [Run(meta={"source": source})], said, theme, 190 + 30 * count)
    return drawn.update_layout(barmode="group" if len(labels) < count else "overlay", showlegend=len(rows) > 1)


def _tokens(theme: str) -> go.Figure:
    rows = {
        "in the step": {
            "chunk 1": 512,
            "chunk 2": 512,
            "30 decodes": 30,
            "all together": sum(n for _, n in claims.BATCH),
        }
    }
    return bars(rows, "What the step computes", COUNTED, "tokens", theme, (542, "the article's 542"), ",")


def _density(theme: str) -> go.Figure:
    """The article's ratio against the true balance, a mark a batch."""
    ratio, true = np.array(claims.random_batches()).T
    look, drawn = colors.palette(theme), go.Figure()
    drawn.add_scatter(x=ratio, y=true, mode="markers", name="500 random batches", marker={"size": 6, "color": look["soft"], "opacity": 0.6})  # fmt: skip
    named = {"2 × 512, no decode": [(0, 512)] * 2, "30 decodes, no prompt": [(1024, 1)] * 30, "the article's batch": claims.BATCH}  # fmt: skip
    said = [f"{len(ratio)} random batches: ratio {ratio.min():.2f} to {ratio.max():.2f}, balance {true.min():.3f} to {true.max():.2f}"]  # fmt: skip
    for n, ((name, batch), (symbol, _)) in enumerate(zip(named.items(), cycle(RUN_MARKS))):
        x, y = claims.density_ratio(*claims.pair_counts(batch)), claims.balance(batch)
        drawn.add_scatter(x=[x], y=[y], mode="markers", name=name, marker={"symbol": symbol, "size": 15, "color": colors.color(n, theme), "line": {"width": 2, "color": look["ink"]}})  # fmt: skip
        said.append(f"{name}: ratio {x:.4f}, balance {y:.2f}")
    _mark(drawn, "y", 1, "balanced", theme, log=True)
    drawn.update_xaxes(title="the article's density ratio", range=[0.95, 2.05])
    drawn.update_yaxes(title="compute time / memory time", type="log", dtick=1)
    return _finish(drawn, "A ratio near 1 says nothing about balance", [_source(f"{COMPUTED}: Llama-2-7B, A100 at its roof")], said, theme, 460)  # fmt: skip


def _qkvpacked(theme: str) -> go.Figure:
    chunks = claims.chunks_of((7, 1), (9, 12), (0, 3), names="ABC")
    return row_error_bars(chunks, [error for _, error, _, _ in claims.qkvpacked_rows()], "the whole sequences", theme)


def _waste(theme: str) -> go.Figure:
    from minichunk.lab.scenes_blocks import waste

    return waste_by_policy(waste("sharegpt-8k", 8192), "sharegpt-8k", theme)


def _pages(theme: str) -> go.Figure:
    names = ("llama-3-8b", "yi-34b", "llama-2-70b", "llama-2-7b", "gpt-3-175b")
    rows = {n: 16 * claims.SHAPES[n].kv_bytes_per_token / 2**20 for n in names}
    return bars({"16 tokens": rows}, "A block of 16 tokens, all layers", COMPUTED, "MiB", theme, (16, "16 MiB"))


def _slots(theme: str) -> go.Figure:
    batch, slots = claims.mixed_slots()
    drawn = go.Figure()
    drawn.add_scatter(
        x=list(range(batch.num_tokens)), y=slots.tolist(), mode="markers", name="tokens", marker={"size": 4, "color": colors.color(4, theme)},
        hovertemplate="packed row %{x} → slot %{y}<extra></extra>",
    )  # fmt: skip
    drawn.update_xaxes(title="packed row")
    drawn.update_yaxes(title="slot of the pool")
    said = [f"{batch.num_tokens} packed rows go to {len(set(slots.tolist()))} different slots of 65,536"]
    return _finish(drawn, "Where the tokens of a mixed step are written", [_source(COUNTED)], said, theme, 380)


def _links(theme: str) -> go.Figure:
    e = claims.find(34)["expect"]
    rows = {
        "PCIe 4.0 × 16, one way": e["pcie_gb_s"],
        "A100 40 GB, HBM": e["a100_40_gb_s"],
        "A100 80 GB, HBM": e["a100_80_gb_s"],
        "H200, HBM": e["h200_gb_s"],
    }
    return bars({"bandwidth": rows}, "What feeds a multiprocessor", "data sheets, PCI-SIG", "GB/s", theme, (64, "the article's 64"), ",.4g", log=True)  # fmt: skip


def _requests(theme: str) -> go.Figure:
    """Requests a second that the peak allows, by tokens a request."""
    peak = claims.find(61)["expect"]["tokens_s_at_peak"]
    tokens, look, drawn = np.geomspace(1, 4096, 80), colors.palette(theme), go.Figure()
    drawn.add_scatter(x=tokens, y=peak / tokens, mode="lines", name="at 100% of peak", line={"color": look["ink"], "width": 2.5})  # fmt: skip
    _mark(drawn, "y", 1200, "1,200 a second", theme, log=True)
    drawn.update_xaxes(title="tokens of a request, prompt and answer", type="log")
    drawn.update_yaxes(title="requests a second", type="log")
    said = [f"{n:,} tokens a request: at most {peak / n:,.1f} requests a second" for n in (6, 100, 500, 2000)]
    return _finish(drawn, "GPT-3 175B on eight A100: more cannot be", [_source(COMPUTED)], said, theme, 420)


def _both_sides(theme: str) -> go.Figure:
    chunk, *shares = np.array(claims.both_sides()).T
    drawn, said = go.Figure(), []
    names = ("compute, one after the other", "bandwidth, one after the other", "compute, perfect overlap", "bandwidth, perfect overlap")  # fmt: skip
    for n, (name, share) in enumerate(zip(names, shares)):
        dash = "solid" if n < 2 else "dash"
        drawn.add_scatter(x=chunk, y=share, mode="lines", name=name, line={"dash": dash, "width": 2.5, "color": _run_color(n % 2, theme)})  # fmt: skip
        said.append(f"{name}: " + ", ".join(f"{share[chunk == c][0]:.0%} at {c}" for c in (128, 256, 512, 2048)))
    for y in (0.85, 0.6):
        _mark(drawn, "y", y, f"{y:.0%}", theme)
    drawn.update_xaxes(title="prompt tokens beside 32 decodes", range=[0, 1536])
    drawn.update_yaxes(title="share of the peak", tickformat=".0%", range=[0, 1.05])
    source = f"{COMPUTED}: Llama-3-8B, A100, kernels at 100%"
    return _finish(drawn, "Compute and bandwidth that a step can use", [_source(source)], said, theme, 440)


def _gain_70b(theme: str) -> go.Figure:
    rows: dict[str, dict[str, float]] = {}
    for (gpu, tp), gain in claims.gain_70b().items():
        rows.setdefault(gpu, {})[f"{gpu}, {tp} GPU{'s' * (tp > 1)}"] = 100 * gain
    return bars(rows, "Linear layers of Llama-2-70B: 512 tokens a step over 256", "measured by Vidur, MLSys'24", "percent more tokens a second", theme, (22, "the article's 22"), "+.1f")  # fmt: skip


def _shares(theme: str) -> go.Figure:
    e = claims.find(49)["expect"]
    loads = {"256 in, 512 out": "short_prompts", "1,024 in, 256 out": "long_prompts", "code": "code"}
    kinds = {"decodes first, no share": "none", "70% for prompts": "70", "30% for prompts": "30"}
    rows = {kind: {load: e[f"{name}_{key}"] for load, name in loads.items()} for kind, key in kinds.items()}
    return bars(
        rows,
        "Requests a second with P99 TBT ≤ 100 ms",
        SIMULATED,
        "requests a second (TBT: time between tokens)",
        theme,
    )


def _gains(theme: str) -> go.Figure:
    e = claims.find(11)["expect"]
    rows = {
        "simulated": {
            "P99 TBT ≤ 100 ms": e["gain_100_ms"],
            "P99 TBT ≤ 500 ms": e["gain_500_ms"],
            "all at once, budget 512": e["offline_512"],
            "all at once, budget 2,048": e["offline_2048"],
        },
        "published": {
            "100 ms (fig. 12)": e["published_100_ms"],
            "strict, Mistral-7B": e["published_strict_mistral"],
            "relaxed, Yi-34B": e["published_relaxed_yi"],
        },
    }
    return bars(rows, "mixed over prompts first: a gain at a promise", f"{SIMULATED}; published: Sarathi-Serve, OSDI'24", "times as many requests or tokens a second (TBT: time between tokens)", theme, (1, "no gain"))  # fmt: skip


def _mark(drawn: go.Figure, axis: str, at: float, words: str, theme: str, log: bool = False) -> None:
    """A dashed line across the figure at a value of the x or y axis, with words."""
    line = {"color": colors.palette(theme)["alarm"], "dash": "dash", "width": 2}
    place = float(np.log10(at)) if log else at  # plotly wants the logarithm for annotations, but not for lines
    if axis == "x":
        drawn.add_vline(x=at, line=line)
        drawn.add_annotation(text=words, x=place, y=1, yref="paper", xanchor="left", yanchor="bottom", showarrow=False)
    else:
        drawn.add_hline(y=at, line=line)
        drawn.add_annotation(text=words, y=place, x=1, xref="paper", xanchor="right", yanchor="bottom", showarrow=False)


def _source(text: str) -> Run:
    return Run(meta={"source": text})


_FIGURES: dict[int, Callable[[str], go.Figure]] = {
    22: _tokens, 24: _density, 32: _qkvpacked, 48: _waste, 41: _pages, 47: _slots, 34: _links, 61: _requests, 52: _both_sides,
    55: _gain_70b, 49: _shares, 11: _gains,
}  # fmt: skip
