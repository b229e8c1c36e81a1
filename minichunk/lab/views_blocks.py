"""Figures of notebooks 50 and 60: the packed batch with its mask, the error of each row, blocks and tables, waste.

Pure functions to plotly Figures, in the manner of views.py: a request keeps its colour, hatch and letter, and
`views.text(figure)` is the figure in words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minichunk.lab import colors
from minichunk.lab.views import _fill, _finish
from minichunk.packing import pack_tokens
from minichunk.record import Run
from minichunk.request import Chunk

ALIGNMENTS = ("bottom-right", "top-left")
HIDDEN, EMPTY = 1, 0  # codes of a cell: not seen, nothing; from 2 on a request


def packed_mask(chunks: Sequence[Chunk], packed: tuple | None = None, align: str = "bottom-right", theme: str = "both") -> go.Figure:  # fmt: skip
    """The packed batch, a line a row, and the keys that each row sees: a request's keys stand side by side.

    packed: what a pack_tokens gave for the chunks (default: the engine's); the picture is drawn from its integers.
    align: "bottom-right" (the last row sees the last key) or "top-left" (the first row sees the first key).
    """
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}, got {align!r}")
    _, positions, cu, lens, sampled = packed or pack_tokens(chunks)
    lefts = np.concatenate([[0], np.cumsum(lens)])
    z, marks = np.full((cu[-1], lefts[-1]), EMPTY), np.full((cu[-1], lefts[-1]), "", dtype=object)
    said, seen = [], 0
    for n, chunk in enumerate(chunks):
        rows, keys, left = cu[n + 1] - cu[n], lens[n], lefts[n]
        z[cu[n] : cu[n + 1], left : lefts[n + 1]] = HIDDEN
        for i in range(rows):
            count = min(max(i + 1 + (keys - rows) * (align == "bottom-right"), 0), keys)
            z[cu[n] + i, left : left + count] = n + 2
            new = np.arange(count) >= keys - rows
            marks[cu[n] + i, left : left + count] = np.where(new, str(chunk.id), str(chunk.id).lower())
            seen += count
            end = f"keys 0…{count - 1}" if count else "no key"
            said.append(f"row {cu[n] + i}: {chunk.id}, position {positions[cu[n] + i]}, sees {end} of {keys}")
    total = int(cu[-1]) * int(lefts[-1])
    said = [
        f"{cu[-1]} packed rows, {lefts[-1]} keys; {seen} of {total} pairs are computed",
        f"cu_seqlens_q {_list(cu)}; seq_lens_k {_list(lens)}; logits_rows {_list(sampled)}",
        "lower case: keys from the cache; capitals: keys of this step",
        *said,
    ]
    rows = [f"{row}  {chunks[n].id}{positions[row]}{' ▲' if row in sampled else ''}" for n in range(len(chunks)) for row in range(cu[n], cu[n + 1])]  # fmt: skip
    figure = go.Figure(_cells(z, marks, len(chunks), theme))
    for n in range(len(chunks)):
        figure.add_annotation(text=f"{chunks[n].id}: {lens[n]} keys", x=(lefts[n] + lefts[n + 1] - 1) / 2, y=-0.5, yshift=12, showarrow=False)  # fmt: skip
    _grid_axes(figure, z.shape)
    figure.update_yaxes(tickvals=list(range(cu[-1])), ticktext=rows, title="packed row, token (▲ sampled)")
    figure.update_xaxes(title="keys: lower case from the cache, capitals of this step", showticklabels=False)
    figure = _finish(figure, f"{cu[-1]} packed rows and what they see ({align})", [], said, theme, 190 + 21 * int(cu[-1]))  # fmt: skip
    return figure.update_layout(margin={"l": 110, "t": 84})


def row_error_bars(chunks: Sequence[Chunk], errors: Sequence[float], against: str = "transformers", theme: str = "both") -> go.Figure:  # fmt: skip
    """The error of each packed row, on a logarithmic scale, in the colour of its request. Below 1e-7 it is drawn as 1e-7."""
    figure, said, first = go.Figure(), [], 0
    for n, chunk in enumerate(chunks):
        rows = np.arange(first, first + chunk.length)
        part = np.maximum(np.asarray(errors)[rows], 1e-7)
        figure.add_bar(
            x=rows, y=part, name=str(chunk.id), marker=_fill(n, theme), width=0.9, customdata=part,
            text=[str(chunk.id)] * len(rows), textposition="outside",
            hovertemplate=f"{chunk.id}, row %{{x}}: error %{{customdata:.1e}}<extra></extra>",
        )  # fmt: skip
        said.append(f"{chunk.id}, rows {first}…{first + chunk.length - 1}: largest error {part.max():.1e}")
        first += chunk.length
    figure.update_xaxes(title="packed row", tickvals=list(range(first)))
    figure.update_yaxes(title="largest error", type="log", range=[-7, 2.5], exponentformat="power")
    return _finish(figure, f"Error of each row against {against}", [], said, theme, 380)


def block_map(run: Run, step: int, theme: str = "both") -> go.Figure:
    """Tables and memory while a step ran: on the left each request's blocks in order, on the right the pool's slots.

    Wasted slots (in a table, without a token) are crossed, blocks that are only cached are marked ~.
    """
    from minichunk.lab.scrubber import frame

    f, size, names = frame(run, step), run.meta["block_size"], colors.letters(run)
    order = {id: n for n, id in enumerate(run.requests)}
    tables = {id: t for id, t in f["tables"].items() if t}
    shape = (max(len(tables), 1), max((len(t) for t in tables.values()), default=1))
    logical, numbers = np.full(shape, EMPTY), np.full(shape, "", dtype=object)
    memory, marks = np.full((len(f["pool"]), size), EMPTY), np.full((len(f["pool"]), size), "", dtype=object)
    said = [f"{f['used']} blocks used, {f['cached']} cached, {f['empty']} empty; {f['wasted']} slots wasted"]
    for row, (id, table) in enumerate(tables.items()):
        filled = f["filled"][id]
        for k, block in enumerate(table):
            held = min(max(filled - k * size, 0), size)
            logical[row, k] = order[id] + 2 if held else HIDDEN
            wasted = "" if held == size else "×" if shape[1] > 6 else f" ({size - held} ×)"  # as wide as its cell
            numbers[row, k] = f"{block}{wasted}"
            memory[block, :held] = order[id] + 2
            owners = "&".join(names[owner] for owner in f["pool"][block])
            shown = held if size <= 8 else min(held, 1)  # in a long block the first token's name must do
            marks[block, :shown] = [f"{owners}{k * size + i}" for i in range(shown)]
            memory[block, held:][memory[block, held:] == EMPTY] = HIDDEN
            marks[block, held:][memory[block, held:] == HIDDEN] = "×"
        said.append(f"{names[id]}: {filled} tokens in blocks {_list(table)}, {len(table) * size - filled} slots wasted")
    cached = [block for block, state in enumerate(f["pool"]) if state == "cached"]
    memory[cached], marks[cached] = HIDDEN, "~"
    figure = make_subplots(1, 2, column_widths=[0.42, 0.58], horizontal_spacing=0.1, subplot_titles=[
        "in the tables: block numbers, in order", f"in memory: a row a block of {size} slots",
    ])  # fmt: skip
    figure.add_trace(_cells(logical, numbers, len(order), theme), row=1, col=1)
    figure.add_trace(_cells(memory, marks, len(order), theme), row=1, col=2)
    _grid_axes(figure, logical.shape, 1)
    _grid_axes(figure, memory.shape, 2)
    figure.update_yaxes(tickvals=list(range(len(tables))), ticktext=[names[id] for id in tables], row=1, col=1)
    figure.update_yaxes(title="block", tickvals=list(range(len(f["pool"]))), row=1, col=2)
    figure.update_xaxes(title="block of the table", dtick=1, row=1, col=1)
    figure.update_xaxes(title="slot in the block", dtick=1, row=1, col=2)
    said.append("× wasted, ~ cached")
    height = 190 + 21 * len(f["pool"])
    figure = _finish(figure, f"Blocks in step {step} (× wasted, ~ cached)", [run], said, theme, height)
    share = min(1.0, 30 * len(tables) / (height - 142))  # rows of the left side as high as a line of text
    return figure.update_layout(yaxis={"domain": [1 - share, 1]})


def waste_by_policy(waste: dict[str, Sequence[float]], trace: str, theme: str = "both") -> go.Figure:
    """A bar a way to reserve (scenes_blocks.waste): the median waste in percent, and P5 to P95 over the draws."""
    from minichunk.workloads import summaries

    low, mid, high = (np.array([np.percentile(v, q) for v in waste.values()]) for q in (5, 50, 95))
    figure, look = go.Figure(), colors.palette(theme)
    for n, start in enumerate(("contiguous", "blocks")):
        rows = [i for i, name in enumerate(waste) if name.startswith(start)]
        figure.add_bar(
            orientation="h", y=[list(waste)[i] for i in rows], x=mid[rows], name=start, marker=_fill(n + 3 * n, theme),
            error_x={"type": "data", "symmetric": False, "array": (high - mid)[rows], "arrayminus": (mid - low)[rows], "color": look["ink"]},
            hovertemplate="%{y}: %{x:.1f} % wasted<extra></extra>",
        )  # fmt: skip
    for i, name in enumerate(waste):
        figure.add_annotation(text=f"{mid[i]:.1f} %", y=name, x=high[i], xanchor="left", xshift=8, showarrow=False)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(waste))
    figure.update_xaxes(title="percent of the reserved slots without a token", range=[0, 104])
    said = [f"{name}: {b:.1f} % wasted (P5 {a:.1f}, P95 {c:.1f})" for name, a, b, c in zip(waste, low, mid, high)]
    drawn = len(next(iter(waste.values())))
    source = f"SIMULATED, {drawn} draws of lengths like {trace}'s ({summaries()[trace]['licence']})"
    figure = _finish(figure, "What each way to reserve wastes", [Run(meta={"source": source})], said, theme, 170 + 32 * len(waste))  # fmt: skip
    return figure.update_layout(margin={"l": 190}, showlegend=False)


# --- what the figures share --------------------------------------------------------------------------------------------
def _cells(z: np.ndarray, marks: np.ndarray, requests: int, theme: str) -> go.Heatmap:
    look = colors.palette(theme)
    shades = [look["paper"], look["hidden"], *(colors.color(n, theme) for n in range(requests))]
    scale = [(k / len(shades), c) for i, c in enumerate(shades) for k in (i, i + 1)]
    return go.Heatmap(
        z=z, text=marks, texttemplate="%{text}", textfont={"size": 12}, hoverinfo="text", xgap=1, ygap=1, showscale=False,
        zmin=-0.5, zmax=len(shades) - 0.5, colorscale=scale,
    )  # fmt: skip


def _grid_axes(figure: go.Figure, shape: tuple, col: int | None = None) -> None:
    where = {"row": 1, "col": col} if col else {}
    figure.update_yaxes(range=[shape[0] - 0.5, -0.5], showgrid=False, zeroline=False, **where)
    figure.update_xaxes(range=[-0.5, shape[1] - 0.5], showgrid=False, zeroline=False, **where)


def _list(values: Sequence[int]) -> str:
    return " ".join(str(int(v)) for v in values)
