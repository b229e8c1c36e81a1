"""The two simple widgets: the chunk splitter and the free-lunch meter. A slider and one plotly figure each, made once and
changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from minichunk.costmodel import ModelShape
from minichunk.lab import views_cost
from minichunk.lab.scenes_prompt import Lunch, knee, split_cost
from minichunk.lab.views import text
from minichunk.lab.widgets import Panel


class Slider(Panel):
    """One slider over `choices` and one figure. value: where it stands.

    A subclass gives `figure()` for the value, `said()` in words, `code()`, the line that makes the widget as it stands,
    `_change(figure)`, which brings a figure that is shown to the value, and `_checked(value)`, which refuses one.
    """

    label = ""

    def __init__(self, choices: Sequence[int], value: int):
        self.choices, self.value, self._start = sorted({*choices, value}), value, value
        super().__init__()

    def choose(self, value: int) -> None:
        """Does what the slider does, with any value."""
        self.choices = sorted({*self.choices, self._checked(value)})
        self.value = value
        self.refresh()

    def reset(self) -> None:
        """Back to where the widget began."""
        self.choose(self._start)

    def __str__(self) -> str:
        return f"{text(self.figure())}\n{self._status()}"

    def _status(self) -> str:
        return f"{self.said()}\nAs code: {self.code()}"

    def _widgets(self):
        import ipywidgets as w

        self._slider = w.SelectionSlider(
            options=self.choices, value=self.value, description=self.label, continuous_update=False, style={"description_width": "initial"},
            layout=w.Layout(width="32em"),
        )  # fmt: skip
        self._slider.observe(self._moved, "value")
        button = w.Button(description="Reset", layout=w.Layout(width="6em"))
        button.on_click(lambda _: self.guarded(self.reset))
        self._figure = go.FigureWidget(self.figure())
        self._figure.layout.width = 940  # a FigureWidget does not grow with its cell
        return [w.HBox([self._slider, button], layout=w.Layout(flex_flow="row wrap")), self._figure]

    def _moved(self, change: dict) -> None:
        if change["new"] != self.value:
            self.guarded(lambda: self.choose(change["new"]))

    def _redraw(self) -> None:
        if list(self._slider.options) != self.choices:
            self._slider.unobserve(self._moved, "value")
            self._slider.options = self.choices
            self._slider.observe(self._moved, "value")
        self._slider.value = self.value
        with self._figure.batch_update():
            self._change(self._figure)


class ChunkSplitter(Slider):
    """A prompt in chunks: state has the chunk size, the chunks and what they cost."""

    label = "chunk size"

    def __init__(self, prompt_tokens: int, chunk: int, shape: str | ModelShape = "smollm2-135m"):
        self.prompt, self.shape = prompt_tokens, shape
        split_cost(prompt_tokens, chunk, shape)  # refuses what cannot be cut
        powers = [2**k for k in range(3, prompt_tokens.bit_length()) if prompt_tokens / 2**k <= 200]
        super().__init__([*powers, prompt_tokens], chunk)

    @property
    def state(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "chunk": self.value, **split_cost(self.prompt, self.value, self.shape)}

    def figure(self) -> go.Figure:
        return views_cost.chunk_plan(self.prompt, self.value, self.shape)

    def said(self) -> str:
        state = self.state
        pairs, keys = state["totals"]["pairs"], state["totals"]["keys read"]
        ratio = state["pairs"][-1] / state["pairs"][0]
        return (
            f"Pairs in pieces {pairs[0]:,}, at once {pairs[1]:,}. The last chunk has {ratio:.3g} times the pairs of the first. "
            f"Keys are read {_times(keys[0] / keys[1])}, the weights {_times(len(state['starts']))}."
        )

    def code(self) -> str:
        """A ModelShape of the caller's is called shape here, as in notebook 30."""
        named = f", shape={self.shape!r}" if self.shape != "smollm2-135m" else ""
        shape = named if isinstance(self.shape, str) else ", shape"
        return f"lab.split_prompt({self.prompt}, {self.value}{shape})"

    def _change(self, figure: go.FigureWidget) -> None:
        new = self.figure()
        for old, trace in zip(figure.data, new.data):
            old.update(x=trace.x, y=trace.y, text=trace.text, customdata=trace.customdata)
        figure.layout.update(title=new.layout.title, xaxis3=new.layout.xaxis3, meta=new.layout.meta)

    def _checked(self, value: int) -> int:
        split_cost(self.prompt, value, self.shape)
        return value


def _times(ratio: float) -> str:
    return "once" if ratio == 1 else f"{ratio:.3g} times"


class FreeLunch(Slider):
    """What a prompt chunk of so many tokens costs, on one machine or several. curves: Lunch objects; knees: of each."""

    label = "tokens in the chunk"

    def __init__(self, curves: Sequence[Lunch], tokens: int):
        if not curves:
            raise ValueError(
                "free_lunch needs at least one curve: lab.measure_lunch(lab.roof()) measures this machine's"
            )
        self.curves, self.knees = list(curves), [knee(curve) for curve in curves]
        super().__init__(sorted({size for curve in curves for size in curve.sizes}), tokens)
        self._checked(tokens)

    @property
    def state(self) -> dict[str, Any]:
        rows = [
            {"source": c.meta["source"], "label": c.label, "decodes": c.decodes, "ms": c.at(self.value), "first_ms": c.at(c.sizes[0]), "knee": k}
            for c, k in zip(self.curves, self.knees)
        ]  # fmt: skip
        return {"tokens": self.value, "curves": rows}

    def figure(self) -> go.Figure:
        return views_cost.lunch(self.curves, self.knees, self.value)

    def said(self) -> str:
        tokens, lines = f"{self.value} token{'s' * (self.value > 1)}", []
        for row in self.state["curves"]:
            beside = f" beside {row['decodes']} decodes" if row["decodes"] else ""
            if row["ms"] is None:
                cost = "not measured"
            else:
                cost = f"{row['ms']:.3g} ms, {row['ms'] / row['first_ms']:.2f} times the smallest step"
            mode = "" if row["label"] == "live" else f", {row['label']}"
            bend = "launch-bound" if row["label"] == "eager" else row["knee"]
            lines.append(f"{row['source']}{mode}: {tokens}{beside}: {cost}; {bend}")
        return "\n".join(lines)

    def code(self) -> str:
        return f"lab.free_lunch(…, tokens={self.value})"

    def _change(self, figure: go.FigureWidget) -> None:
        new = self.figure()
        figure.layout.update(shapes=new.layout.shapes, meta=new.layout.meta)

    def _checked(self, value: int) -> int:
        most = max(c.sizes[-1] for c in self.curves)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"tokens must be a whole number from 1 to {most}, got {value!r}")
        return value


def split_prompt(prompt_tokens: int, chunk: int, shape: str | ModelShape = "smollm2-135m") -> ChunkSplitter:
    """The chunk splitter: a slider over the chunk size, and what each chunk of the prompt reads and computes."""
    return ChunkSplitter(prompt_tokens, chunk, shape)


def free_lunch(*curves: Lunch, tokens: int = 50) -> FreeLunch:
    """The free-lunch meter: a slider over the tokens of a prompt chunk, and what they cost on each curve."""
    return FreeLunch(curves, tokens)
