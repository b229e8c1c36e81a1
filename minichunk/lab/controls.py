"""A selector over finished runs: it only switches, so it answers at once; a button runs another budget live."""

from __future__ import annotations

import html
from typing import Any, Callable

from minichunk.lab.colors import letters
from minichunk.lab.widgets import Panel, figure_bundle
from minichunk.record import Run


def numbers(run: Run) -> dict[str, str]:
    """What the selector's table says of a run."""
    summary = run.summary()
    ms = lambda seconds: f"{seconds * 1e3:,.0f} ms"  # noqa: E731
    return {
        "steps": str(len(run.steps)),
        "mixed steps": str(sum(step.is_mixed for step in run.steps)),
        "longest step": ms(max(step.duration for step in run.steps)),
        "TBT, median": ms(summary["tbt"]["p50"]),
        "TBT, longest": ms(summary["tbt"]["max"]),
        "TTFT, longest": ms(summary["ttft"]["max"]),
    }


class BudgetSelector(Panel):
    """runs: {budget: Run}; budget: the one that is shown. choose(budget) and run(budget) do what slider and button do."""

    def __init__(self, runs: dict[int, Run], view: Callable[[Run], Any], serve: Callable[[int], Run] | None = None):
        if not runs:
            raise ValueError("budget_selector needs at least one run: {budget: run}")
        self.runs, self.view, self.serve = dict(sorted(runs.items())), view, serve
        self.budget = min(self.runs)
        super().__init__()

    @property
    def state(self) -> dict:
        return {"budget": self.budget, "budgets": list(self.runs), **numbers(self.runs[self.budget])}

    def choose(self, budget: int) -> None:
        """Shows another finished run. KeyError names those there are."""
        if budget not in self.runs:
            raise KeyError(f"no run with budget {budget}; there are {', '.join(map(str, self.runs))}")
        self.budget = budget
        self.refresh()

    def run(self, budget: int) -> Run:
        """Runs the scene with another budget now (seconds), and shows it."""
        self.runs = dict(sorted({**self.runs, budget: self.serve(budget)}.items()))
        self.choose(budget)
        return self.runs[budget]

    def __str__(self) -> str:
        rows = {b: numbers(r) for b, r in self.runs.items()}
        names = list(next(iter(rows.values())))
        lines = ["budget".ljust(15) + "".join(f"{b:>12}" for b in rows)]
        lines += [name.ljust(15) + "".join(f"{rows[b][name]:>12}" for b in rows) for name in names]
        return "\n".join(lines)

    def _status(self) -> str:
        return f"Budget {self.budget}. The slider switches between runs that are done."

    def _widgets(self):
        import ipywidgets as w

        self._slider = w.SelectionSlider(
            options=list(self.runs), value=self.budget, description="budget", continuous_update=False,
            layout=w.Layout(width="24em"),
        )  # fmt: skip
        self._slider.observe(self._moved, "value")
        self._table, self._output = w.HTML(), w.Output()
        row = [self._slider]
        if self.serve:
            self._field = w.BoundedIntText(value=2 * self.budget, min=16, max=2048, layout=w.Layout(width="7em"))
            self._button = w.Button(description="Run this budget", tooltip="takes some seconds")
            self._button.on_click(lambda _: self.guarded(self._pressed))
            row += [w.HTML("or another one:"), self._field, self._button]
        return [w.HBox(row, layout=w.Layout(flex_flow="row wrap")), self._table, self._output]

    def _moved(self, change: dict) -> None:
        if change["new"] != self.budget:
            self.choose(change["new"])

    def _pressed(self) -> None:
        self._button.disabled = True
        self.say(f"Running budget {self._field.value} …")
        try:
            self.run(self._field.value)
        finally:
            self._button.disabled = False

    def _redraw(self) -> None:
        if list(self._slider.options) != list(self.runs):
            self._slider.unobserve(self._moved, "value")
            self._slider.options = list(self.runs)
            self._slider.observe(self._moved, "value")
        self._slider.value = self.budget
        cells = "".join(f"<td style='padding-right:1.5em'>{html.escape(name)}<br><b>{html.escape(value)}</b></td>" for name, value in numbers(self.runs[self.budget]).items())  # fmt: skip
        self._table.value = f"<table style='font-size:14px'><tr>{cells}</tr></table>"
        self._output.outputs = (figure_bundle(self.view(self.runs[self.budget])),)


def budget_selector(runs: dict[int, Run], view: Callable[[Run], Any], serve: Callable[[int], Run] | None = None) -> BudgetSelector:  # fmt: skip
    """A slider over {budget: run}, drawn with view(run); serve(budget) → Run, if given, sits behind a button."""
    return BudgetSelector(runs, view, serve)


class StepsTable:
    """A run's steps as a table that unfolds; print it for the text."""

    def __init__(self, run: Run):
        self.run = run

    def __str__(self) -> str:
        return "\n".join(map(str, self.run.steps))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = letters(self.run)
        rows = []
        for step in self.run.steps:
            prompts = " ".join(f"{names[c[0]]}[{c[1]}:{c[1] + c[2]}]" for c in step.chunks if not c[4])
            decodes = " ".join(names[c[0]] for c in step.chunks if c[4])
            cells = [step.index, step.kind, prompts, decodes, f"{step.num_tokens} of {step.budget}", f"{step.duration * 1e3:.0f} ms"]  # fmt: skip
            rows.append(
                "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(str(c))}</td>" for c in cells) + "</tr>"
            )
        head = "".join(f"<th style='text-align:left'>{h}</th>" for h in ("step", "kind", "prompt chunks", "decodes", "tokens", "time"))  # fmt: skip
        mixed = sum(step.is_mixed for step in self.run.steps)
        summary = f"All {len(self.run.steps)} steps as a table; {mixed} of them are mixed"
        return f"<details><summary>{summary}</summary><table><tr>{head}</tr>{''.join(rows)}</table></details>"


def steps_table(run: Run) -> StepsTable:
    """The run's steps as a folded table."""
    return StepsTable(run)
