"""Figures of notebook 95: one for each of the twelve claims, in the manner of views.py. `figure(22)` draws claim 22's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle

import numpy as np
import plotly.graph_objects as go

from minichunk import claims
from minichunk.lab import colors
from minichunk.lab.views import RUN_MARKS, _fill, _finish
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


def _append(theme: str) -> go.Figure:
    e = claims.find(46)["expect"]
    rows = {
        "tokens in the step": e["tokens"],
        "found at their slots": e["found_at_their_slots"],
        "slots written": e["slots_written"],
    }
    return bars({"a step": rows}, "What the append wrote, and where it lies", COUNTED, "tokens", theme, form=",")


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


def _decode_bytes(theme: str) -> go.Figure:
    """What a step of n decodes reads, by n and by the length of their histories."""
    rows: dict[str, dict[str, float]] = {"weights": {}, "keys and values": {}}
    for n, cached in ((1, 1024), (30, 128), (30, 1024), (128, 1024)):
        parts, label = claims.traffic(claims.SEVEN, [(cached, 1)] * n), f"{n} decode{'s' * (n > 1)} at {cached:,}"
        rows["weights"][label], rows["keys and values"][label] = parts["weights"] / 1e9, parts["kv_read"] / 1e9
    return bars(rows, "What a step of decodes reads", f"{COMPUTED}: Llama-2-7B", "GB", theme, form=".1f")


def _eighths(theme: str) -> go.Figure:
    rows = {}
    for part, name in (("total", "all of the step"), ("attention", "attention alone")):
        each = [claims.flops(claims.SEVEN, [chunk])[part] for chunk in claims.split(4096, 512)]
        rows[name] = {f"chunk {n}": 100 * x / sum(each) for n, x in enumerate(each, 1)}
    return bars(rows, "FLOPs of eight chunks of 512", f"{COMPUTED}: Llama-2-7B", "percent of the prompt's", theme, (12.5, "an eighth"), ".1f")  # fmt: skip


def _starving(theme: str) -> go.Figure:
    e = claims.find(16)["expect"]
    rows = {
        "prompts first": {
            "simulated": e["tbt_p99_prefill_first_s"],
            "published, Yi-34B": e["published_hybrid_tbt_p99"],
        },
        "mixed": {"simulated": e["tbt_p99_mixed_s"], "published, Yi-34B": e["published_tbt_p99"]},
    }
    return bars(rows, "How long readers stand still", f"{SIMULATED}; published: Sarathi-Serve, OSDI'24", "P99 of TBT (time between tokens), s", theme)  # fmt: skip


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
    22: _tokens, 24: _density, 32: _qkvpacked, 48: _waste, 46: _append, 47: _slots, 34: _links, 61: _requests, 5: _decode_bytes,
    15: _eighths, 16: _starving, 11: _gains,
}  # fmt: skip
