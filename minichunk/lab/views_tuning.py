"""The map of notebook 90: what readers wait against what newcomers wait, a mark a setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle

import plotly.graph_objects as go

from minichunk.lab import colors
from minichunk.lab.checks.c90 import front
from minichunk.lab.scenes_tuning import waits
from minichunk.lab.views import RUN_MARKS, _finish, _run_color
from minichunk.record import Run


def tuning_map(runs: Sequence[Run], slo: float | None = None, theme: str = "both") -> go.Figure:
    """P99 TBT against median TTFT, a mark a run, and a line through those that no other beats in both.
    The budget stands beside each, where there is room for it; hovering tells it everywhere. A learner's scheduler is a ring,
    so that a built-in policy's mark shows through.

    slo: the promise in seconds, drawn as a line.
    """
    look, drawn, said = colors.palette(theme), go.Figure(), []
    points = {id(run): waits(run) for run in runs}
    best = front(list(points.values()))
    ms = [(1e3 * x, 1e3 * y) for x, y in best]
    drawn.add_scatter(x=[x for x, _ in ms], y=[y for _, y in ms], mode="lines", name="the front", line={"color": look["ink"], "width": 2, "dash": "dot"})  # fmt: skip
    policies = dict.fromkeys(_name(run) for run in runs)
    # Neighbours' labels lie apart, and the last one away from what is beaten, to its right.
    sides = {point: ("bottom left", "top right")[n % 2] for n, point in enumerate(reversed(best))}
    for k, (policy, (symbol, _)) in enumerate(zip(policies, cycle(RUN_MARKS))):
        ring = policy.endswith("scheduler")
        mine = [run for run in runs if _name(run) == policy]
        x, y = zip(*((1e3 * a, 1e3 * b) for a, b in (points[id(run)] for run in mine)))
        budgets = [f"{run.meta['max_batch_tokens']:,}" for run in mine]
        side = [sides.get(points[id(run)]) for run in mine]
        marker = {"symbol": "circle-open", "size": 22, "color": look["ink"], "line": {"width": 2}} if ring else {"symbol": symbol, "size": 12, "color": _run_color(k + 1, theme), "line": {"width": 1, "color": look["ink"]}}  # fmt: skip
        drawn.add_scatter(
            x=x, y=y, mode="markers" if ring else "markers+text", name=policy, customdata=budgets, text=[budget if on or _alone(points[id(run)], points.values()) else "" for run, budget, on in zip(mine, budgets, side)], textposition=[on or "top right" for on in side], textfont={"size": [14 if on else 11 for on in side]}, marker=marker,
            hovertemplate=policy + ", budget %{customdata}: P99 TBT %{x:.0f} ms, median TTFT %{y:.0f} ms<extra></extra>",
        )  # fmt: skip
        for run, budget, a, b in zip(mine, budgets, x, y):
            on = " (on the front)" if points[id(run)] in best else ""
            said.append(f"{policy}, budget {budget}: P99 TBT {a:.0f} ms, median TTFT {b:.0f} ms{on}")
    if slo:
        drawn.add_vline(x=1e3 * slo, line={"color": look["alarm"], "dash": "dash", "width": 2})
        said.append(f"promise: P99 TBT at most {1e3 * slo:.0f} ms")
    drawn.update_xaxes(title="readers: P99 of TBT (time between tokens), ms", type="log", dtick="D2")
    drawn.update_yaxes(title="newcomers: median TTFT (time to first token), ms", type="log", dtick=1)
    return _finish(drawn, "Shorter for one, longer for the other", [Run(meta={"source": runs[0].meta["source"]})], said, theme, 480)  # fmt: skip


def _alone(point: tuple[float, float], points: Iterable[tuple[float, float]]) -> bool:
    """Whether no other point lies within 15% in both waits: then there is room for a label."""
    return not any(p != point and all(abs(math.log(a / b)) < 0.15 for a, b in zip(p, point)) for p in points)


def _name(run: Run) -> str:
    code = run.meta.get("code")
    return f"{code} scheduler" if code else run.meta["policy"]
