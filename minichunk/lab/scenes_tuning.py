"""Notebook 90: one simulated server under one load, tuned by hand, and the settings that nothing beats."""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable, Sequence
from typing import Any

from minichunk import workloads
from minichunk.costmodel import TYPICAL, CostModel
from minichunk.lab.checks.shared import plural
from minichunk.lab.exercises import code_of
from minichunk.lab.predictions import Refused
from minichunk.lab.widgets import Panel
from minichunk.paths import data_path
from minichunk.record import Run
from minichunk.scheduler import Policy, make_policy
from minichunk.simulator import simulate

MODEL, CARD, TRACE = "llama-3-8b", "A100-80-SXM", "azure-conv"
LEAST = 128  # a budget below the most requests that run at once could not serve all their decodes


@functools.cache
def serve(policy: str | Policy | Callable = "mixed", budget: int | None = 512, block_size: int = 16, rate: float = 6.0, n: int = 200) -> Run:  # fmt: skip
    """A simulated run: n requests like Azure's conversations, `rate` a second, Llama-3-8B on one A100. No model is loaded.

    budget: at least LEAST, the most requests that run at once; for a policy that never cuts prompts give None.
    A policy may be a plan_step of your own.
    """
    requests = workloads.poisson(workloads.sample(TRACE, n, 0, max_total=8192), rate)
    cost = CostModel(MODEL, CARD, efficiency=TYPICAL)
    options: dict[str, Any] = dict(policy=policy, max_batch_tokens=budget, block_size=block_size, prefix_cache=False)
    if not isinstance(policy, str | Policy):
        options["chunk_size"] = budget
    run = simulate(requests, cost, **options)
    if code_of(policy):
        run.meta["code"] = code_of(policy)
    return run


def measured(card: str = "h200") -> list[dict]:
    """What `minichunk record` measured on this card under 480 of Azure's conversations, 17 a second, on Llama-3-8B's shape: a
    row a policy and budget, by policy and budget, times in ms. Raises FileNotFoundError where nothing is recorded."""
    rows = json.loads(data_path(f"recorded/{card}/serve.json").read_text(encoding="utf-8"))["rows"]
    ours = [row for row in rows if row["mixed_share"] is not None]  # without the peer
    return sorted(ours, key=lambda row: (row["run"].split()[0], int(row["run"].split()[1])))


def recorded_run(name: str = "mixed 1024", card: str = "h200") -> Run:
    """One of those measurements step by step: "mixed 1024" or "prefill_first 8192"."""
    return Run.load(data_path(f"recorded/{card}/serve_{name.replace(' ', '_')}.json.gz"))


def waits(run: Run) -> tuple[float, float]:
    """(P99 TBT, median TTFT) of a run, seconds: what a server's readers and its newcomers wait for."""
    s = run.summary()
    return s["tbt"]["p99"], s["ttft"]["p50"]


def prompts_in_longest_gap(run: Run) -> int:
    """How many requests' prompts ran, whole or in part, between the two tokens that lie farthest apart."""
    pairs_of_tokens = [p for r in run.requests.values() for p in zip(r.token_times, r.token_times[1:])]
    start, end = max(pairs_of_tokens, key=lambda p: p[1] - p[0])
    inside = [step for step in run.steps if start < step.end < end]
    return len({id for step in inside for id, _, _, _, is_decode in step.chunks if not is_decode})


def pairs(run: Run) -> list[tuple[float, list[float]]]:
    """(TTFT, [TBT, …]) of every request, seconds."""
    return [(r.ttft, r.tbt) for r in run.requests.values()]


class Tuner(Panel):
    """Policy and budget, tried by hand. tries: [(policy, budget, P99 TBT, median TTFT)] in seconds; best: the try with the
    shortest median TTFT of those whose P99 TBT keeps the promise, or None."""

    def __init__(self, slo: float, policies: Sequence[str | Policy | Callable]):
        if not slo > 0:
            raise ValueError(f"slo must be above 0 seconds, got {slo}")
        self.slo = slo
        self.policies = {getattr(make_policy(p), "name", getattr(p, "__name__", "yours")): p for p in policies}
        self.tries: list[tuple[str, int, float, float]] = []
        super().__init__()

    def run(self, policy: str, budget: int) -> Run:
        """Simulates it, keeps it among the tries, and gives the Run. Raises Refused (a ValueError) for what cannot be tried."""
        if policy not in self.policies:
            raise Refused(f"no policy {policy!r}; there are {', '.join(self.policies)}")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST:
            raise Refused(f"a budget is a whole number of tokens, at least {LEAST}, not {budget!r}")
        run = serve(self.policies[policy], budget)
        if (policy, budget) not in [t[:2] for t in self.tries]:
            self.tries.append((policy, budget, *waits(run)))
        self.refresh()
        return run

    @property
    def best(self) -> tuple[str, int, float, float] | None:
        return min((t for t in self.tries if t[2] <= self.slo), key=lambda t: t[3], default=None)

    def _rows(self) -> list[list[str]]:
        return [
            [policy, f"{budget:,}", f"{tbt * 1e3:.0f} ms", "kept" if tbt <= self.slo else "broken", f"{ttft * 1e3:.0f} ms"]
            for policy, budget, tbt, ttft in self.tries
        ]  # fmt: skip

    def summary(self) -> str:
        """The best try in words: "best of 3 tries: mixed, budget 1,024, P99 TBT 90 ms, median TTFT 150 ms"."""
        best, tries = self.best, plural(len(self.tries), "try").replace("trys", "tries")
        if best is None:
            return f"{tries}, none keeps the promise" if self.tries else "nothing tried yet"
        return f"best of {tries}: {best[0]}, budget {best[1]:,}, P99 TBT {best[2] * 1e3:.0f} ms, median TTFT {best[3] * 1e3:.0f} ms"  # fmt: skip

    def _status(self) -> str:
        return f"Promise: P99 TBT ≤ {self.slo * 1e3:.0f} ms. So far: {self.summary()}."

    def __str__(self) -> str:
        lines = ["  ".join(f"{cell:>14}" for cell in row) for row in [HEAD, *self._rows()]]
        return "\n".join([*lines, self._status(), "Where no buttons show: tuner.run(policy, budget)"])

    def _widgets(self):
        import ipywidgets as w

        self._policy = w.Dropdown(options=list(self.policies), description="policy")
        self._budget = w.BoundedIntText(value=512, min=LEAST, max=8192, step=64, description="budget")
        self._button = w.Button(description="Run", button_style="primary")
        self._button.on_click(lambda _: self.guarded(self._pressed))
        self._table = w.HTML()
        return [w.HBox([self._policy, self._budget, self._button]), self._table]

    def _pressed(self) -> None:
        self._button.disabled = True
        self.say("Simulating …")
        try:
            self.run(self._policy.value, self._budget.value)
        finally:
            self._button.disabled = False

    def _redraw(self) -> None:
        cells = lambda row, tag: "".join(f"<{tag} style='padding-right:1.5em;text-align:left'>{html.escape(c)}</{tag}>" for c in row)  # noqa: E731  # fmt: skip
        rows = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self._rows())
        self._table.value = f"<table style='font-size:14px'><tr>{cells(HEAD, 'th')}</tr>{rows}</table>"


HEAD = ["policy", "budget", "P99 TBT", "promise", "median TTFT"]


def tuner(slo: float, policies: Sequence[str | Policy | Callable] = ("mixed", "share(0.7)", "share(0.3)", "leftover")) -> Tuner:  # fmt: skip
    """Tries policies and budgets by hand against a promise of `slo` seconds P99 TBT. Show it as a cell's last line."""
    return Tuner(slo, policies)
