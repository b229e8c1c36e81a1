"""Predict, then measure: the learner's number first, the result against it, and the course keeps the score.

`lab.predict(id, question, unit)` shows a field and Lock. `lab.reveal(id, truth, figure)` always gets the truth, and
shows it after the lock (or `lab.skip`). The first lock counts; one made after the truth was shown never does.
Everything is kept in my/predictions.jsonl, one line an event:

    {"id": "40.1", "event": "lock", "guess": 300, "unit": "ms"}     also "skip", "late" (locked after seeing)
    {"id": "40.1", "event": "truth", "truth": 412, "low": 398, "high": 455, "factor": 1.37}

With MINICHUNK_REVEAL=1 (a test of the notebooks) the truth shows at once and nothing is stored.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import time
from statistics import median
from typing import Any, Sequence

from minichunk.lab.checks import Bug, find
from minichunk.lab.places import my_dir
from minichunk.lab.widgets import Panel, figure_bundle

Guess = float | str


class Refused(ValueError):
    """An answer that cannot be taken. IPython shows the text alone, and Run All stops at the cell."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


_open: dict[str, "Prediction"] = {}  # what stands in this notebook: reveal and predict find each other by id
_waiting: dict[str, "Reveal"] = {}


# --- the file ------------------------------------------------------------------------------------------------------
def events(id: str | None = None) -> list[dict]:
    """All that was stored, or what was stored for one prediction, in order."""
    path = my_dir() / "predictions.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [e for e in lines if id is None or e["id"] == id]


def _store(**event: Any) -> None:
    path = my_dir() / "predictions.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**event, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}, ensure_ascii=False) + "\n")


def _first(id: str, *kinds: str) -> dict | None:
    return next((e for e in events(id) if e["event"] in kinds), None)


def _standing(id: str) -> dict | None:
    """The answer that stands: the lock that counts, else one made after seeing, else a skip."""
    return _first(id, "lock") or _first(id, "late") or _first(id, "skip")


def _showing() -> bool:
    return os.environ.get("MINICHUNK_REVEAL") == "1"


# --- scoring -------------------------------------------------------------------------------------------------------
def factor(guess: float, truth: float, low: float | None = None, high: float | None = None) -> float:
    """How many times off: max(guess / truth, truth / guess), so 1 is exact; 1 as well from low to high (P5 to P95)."""
    if low is not None and low <= guess <= high:
        return 1.0
    return max(guess / truth, truth / guess)


def score() -> str:
    """The learner's predictions so far: each guess beside the truth, the median factor, choices beside chance."""
    rows, factors, right, chance, choices = [], [], 0, 0.0, 0
    for id in dict.fromkeys(e["id"] for e in events()):
        lock, truth = _standing(id), _first(id, "truth")
        if lock["event"] != "lock" or not truth:
            rows.append(f"  {id:<6} {({'skip': 'skipped', 'late': 'after seeing, not scored'}).get(lock['event'], 'locked, the truth is still to come')}")  # fmt: skip
        elif lock.get("options"):
            hit = lock["guess"] == truth["truth"]
            right, choices, chance = right + hit, choices + 1, chance + 1 / len(lock["options"])
            rows.append(f"  {id:<6} {'✔' if hit else '✘'} {lock['guess']}")
        else:
            factors.append(truth["factor"])
            rows.append(f"  {id:<6} you {lock['guess']:g}, truth {_number(truth['truth'])} {lock['unit']}: {_times(truth['factor'], truth.get('low') is not None)}")  # fmt: skip
    if not rows:
        return "No predictions yet."
    lines = ["Predictions", *rows]
    if factors:
        lines.append(f"Numbers: typically (median of {len(factors)}) {_typical(factors)}.")
    if len(factors) >= 10:  # fewer say nothing about a trend
        half = len(factors) // 2
        lines.append(f"First half {_typical(factors[:half])}, second half {_typical(factors[half:])}.")
    if choices:
        lines.append(f"Choices: {right} of {choices} right; guessing would get {chance:.1f} right on average.")
    return "\n".join(lines)


def _times(f: float, spread: bool = False) -> str:
    """How far off. spread: the truth is a measurement, and f is 1 wherever its repeats lie."""
    if f == 1:
        return "within the spread of the measurement" if spread else "exact"
    return "within 5%" if f < 1.05 else f"a factor of {f:.1f} off"


def _typical(factors: list[float]) -> str:
    return "exact or within the spread" if median(factors) == 1 else _times(median(factors))


def _number(value: float) -> str:
    """A truth as the learner reads it: 29, 5.37, 18432."""
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def read_number(text: str) -> float:
    """A number as people write it: "7,5" and "7.5", "18,432,000" and "1,164.5". Raises Refused for "1,164", which is
    1164 for some and 1.164 for others (a lock cannot be taken back), ValueError for what is no number."""
    text = text.strip()
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", text):
        raise Refused(f"{text} can be read in two ways: write {text.replace(',', '')} or {text.replace(',', '.')}")
    grouped = re.fullmatch(r"[1-9]\d{0,2}((,\d{3})+\.\d+|(,\d{3}){2,})", text)
    return float(text.replace(",", "" if grouped else "."))


# --- asking --------------------------------------------------------------------------------------------------------
class Prediction(Panel):
    """One question. state: "open", "locked", "late" (locked after the truth was shown) or "skipped"; guess.

    lock(guess) and skip() do what the buttons do.
    """

    heading = "Predict"

    def __init__(self, id: str, question: str, unit: str = "", options: Sequence[str] = ()):
        self.id, self.question, self.unit, self.options = id, question, unit, tuple(options)
        before = _standing(id)
        self.state = {"lock": "locked", "skip": "skipped", "late": "late"}[before["event"]] if before else "open"
        self.guess: Guess | None = before.get("guess") if before else None
        self._picked: str | None = None
        super().__init__()
        _open[id] = self

    def lock(self, guess: Guess) -> None:
        """Stores the guess: a number, or of options one's words or its number, from 1. The first one counts.

        Raises Refused (a ValueError) when one is stored already, or when this one cannot be a guess.
        """
        if self.state in ("locked", "late"):
            raise Refused(f"{self.id} is locked already: the first answer counts")
        guess = self._option(guess) if self.options else self._above_zero(guess)
        late = _first(self.id, "truth") is not None or _showing()
        self.state, self.guess = ("late" if late else "locked"), guess
        if not _showing():
            _store(id=self.id, event="late" if late else "lock", guess=guess, unit=self.unit, **({"options": self.options} if self.options else {}))  # fmt: skip
        self._settle()

    def _option(self, guess: Guess) -> str:
        if guess in self.options:
            return guess
        if isinstance(guess, int) and not isinstance(guess, bool) and 1 <= guess <= len(self.options):
            return self.options[guess - 1]
        raise Refused(f"choose one of these, by its number or in its words, not {guess!r}:{self._numbered()}")

    def _above_zero(self, guess: Guess) -> float:
        try:
            value = read_number(guess) if isinstance(guess, str) else float(guess)
        except Refused:
            raise
        except (TypeError, ValueError, RuntimeError):
            raise Refused(f'a number, please: lab.lock("{self.id}", 10)') from None
        if not (math.isfinite(value) and value > 0):
            raise Refused(f"a number above 0, please, not {value:g}")
        return value

    def _numbered(self) -> str:
        return "".join(f"\n    {n} ○ {option}" for n, option in enumerate(self.options, 1))

    def skip(self) -> None:
        """Shows the truth without a guess; nothing is scored."""
        if self.state == "open":
            self.state = "skipped"
            if not _showing():
                _store(id=self.id, event="skip")
            self._settle()

    def _settle(self) -> None:
        self.refresh()
        if self.id in _waiting:
            _waiting[self.id].refresh()

    def __str__(self) -> str:
        unit = f" [{self.unit}]" if self.unit else ""
        by_hand = f" Where no buttons show: {self._by_hand()}" if self.state == "open" else ""
        return f"{self.heading} {self.id}: {self.question}{unit}{self._numbered()}\n{self._status()}{by_hand}"

    def _status(self) -> str:
        said = f"{self.guess:g} {self.unit}".strip() if isinstance(self.guess, float | int) else self.guess
        return {
            "open": "Not locked yet.",
            "locked": f"Locked: {said}.",
            "late": f"Locked after seeing: {said}. It is kept, and not scored.",
            "skipped": "Skipped. You can still lock an answer; it is kept as after seeing.",
        }[self.state]

    def _by_hand(self) -> str:
        if self.options:
            return f'lab.lock("{self.id}", n), n from 1 to {len(self.options)}'
        return f'lab.lock("{self.id}", answer)'

    def _widgets(self):
        import ipywidgets as w

        question = w.HTML(f"<span style='font-size:14px'><b>{self.heading}</b> {html.escape(self.question)}</span>")
        lock = w.Button(description="Lock", button_style="primary", layout=w.Layout(width="6em"))
        skip = w.Button(description="Skip", layout=w.Layout(width="6em"))
        lock.on_click(lambda _: self.guarded(self._lock_field))
        skip.on_click(lambda _: self.guarded(self.skip))
        self._lock, self._skip = lock, skip
        if not self.options:
            # The value is sent when the field is left: a click on Lock must not find half of what was typed.
            self._field = w.Text(placeholder="your number", continuous_update=False, layout=w.Layout(width="9em"))
            return [question, w.HBox([self._field, w.HTML(html.escape(self.unit)), lock, skip])]
        # Buttons, not radio buttons: JupyterLab takes the arrow keys that move those; Tab and Space it leaves alone.
        self._choices = [w.Button(layout=w.Layout(width="max-content", max_width="100%")) for _ in self.options]
        for option, button in zip(self.options, self._choices):
            button.on_click(lambda _, option=option: self._pick(option))
        return [question, w.VBox(self._choices), w.HBox([lock, skip])]

    def _pick(self, option: str) -> None:
        self._picked = option
        self._redraw()
        self.say(f"Chosen, not locked yet: {option}")

    def _lock_field(self) -> None:
        value = self._picked if self.options else self._field.value
        if value in (None, ""):
            raise Refused("first give an answer, then lock it")
        if not self.options:
            try:
                value = read_number(value)
            except Refused:
                raise
            except ValueError:
                raise Refused(f"a number, please, not {value!r}") from None
        self.lock(value)

    def _redraw(self) -> None:
        closed = self.state in ("locked", "late")
        for option, button in zip(self.options, self._choices if self.options else ()):
            chosen = option == (self.guess if closed else self._picked)
            button.description = f"{'●' if chosen else '○'} {option}"
            button.disabled = closed
        if not self.options:
            self._field.disabled = closed
        self._lock.disabled, self._skip.disabled = closed, self.state != "open"


def predict(id: str, question: str, unit: str = "", options: Sequence[str] = ()) -> Prediction:
    """Asks for a number in `unit`, or for one of the options. Show it as a cell's last line."""
    return Prediction(id, question, unit, options)


class Reveal(Panel):
    """A truth that waits for the lock. shown: whether it may be seen; factor: of a scored guess, else None."""

    line_first = True

    def __init__(self, id: str, truth: Guess, figure: Any, low: float | None, high: float | None, text: str):
        self.id, self.truth, self.figure, self.low, self.high, self.text = id, truth, figure, low, high, text
        super().__init__()
        _waiting[id] = self
        self.refresh()

    @property
    def shown(self) -> bool:
        return _showing() or _standing(self.id) is not None

    def refresh(self) -> None:
        """Stores the truth the first time that it may be seen, then redraws."""
        if self.shown and not _showing() and _first(self.id, "truth") is None:
            scored = {"factor": self.factor} if self.factor else {}
            _store(id=self.id, event="truth", truth=self.truth, low=self.low, high=self.high, **scored)
        super().refresh()

    @property
    def factor(self) -> float | None:
        lock = _first(self.id, "lock")
        if lock is None or isinstance(self.truth, str):
            return None
        return factor(lock["guess"], self.truth, self.low, self.high)

    def __str__(self) -> str:
        if not self.shown:
            return (
                f'The answer to {self.id} is computed. Lock your prediction above to see it, or lab.skip("{self.id}").'
            )
        unit = _open[self.id].unit if self.id in _open else ""
        lines = [f"{_number(self.truth)} {unit}".strip() if not isinstance(self.truth, str) else self.truth]
        if self.low is not None:
            lines[0] += f" (the repeats lie from {_number(self.low)} to {_number(self.high)}, P5 to P95)"
        lock = _first(self.id, "lock") or _first(self.id, "late")
        if lock:
            said = lock["guess"] if isinstance(lock["guess"], str) else f"{lock['guess']:g} {unit}".strip()
            late = " (after seeing, not scored)" if lock["event"] == "late" else ""
            verdict = f", {_times(self.factor, self.low is not None)}" if self.factor else ""
            if isinstance(self.truth, str) and not late:
                verdict = ": right" if said == self.truth else ": no"
            lines.append(f"You said: {said}{verdict}{late}.")
        return "\n".join(lines + [self.text] * bool(self.text))

    def _status(self) -> str:
        return str(self)

    def _widgets(self):
        import ipywidgets as w

        self._output = w.Output()
        return [self._output]

    def _redraw(self) -> None:
        if self.shown and self.figure is not None:
            self._output.outputs = (figure_bundle(self.figure),)


def reveal(id: str, truth: Any, figure: Any = None, text: str = "") -> Reveal:
    """Shows the truth (a number above 0, an option, or a list of measurements of one quantity) once the guess is locked.

    Of a list the median is the truth, and a guess from P5 to P95 counts as exact. figure: a plotly figure;
    text: a sentence to go with it. Show it as a cell's last line.
    """
    low = high = None
    if isinstance(truth, list | tuple):
        import numpy as np

        low, truth, high = (float(v) for v in np.percentile(truth, [5, 50, 95]))
    if not isinstance(truth, str):
        truth = float(truth)
        if not (math.isfinite(truth) and truth > 0):
            raise ValueError(f"the truth of {id} must be a number above 0, got {truth}")
    return Reveal(id, truth, figure, low, high, text)


def lock(id: str, guess: Guess) -> Prediction:
    """Locks the answer to a prediction of this notebook, as its button does; of options also by number, from 1.

    Raises Refused (a ValueError) where it was not asked yet, and for what cannot be an answer to it.
    """
    if id not in _open:
        raise Refused(f"prediction {id!r} was not asked in this kernel yet: run its cell first")
    _open[id].lock(guess)
    return _open[id]


def skip(id: str) -> None:
    """Shows what `reveal` has for this prediction, without a guess; nothing is scored."""
    (_open.get(id) or Prediction(id, "")).skip()


# --- which bug? ----------------------------------------------------------------------------------------------------
class WhichBug(Prediction):
    """Four causes, one is true. choose(key) does what Lock does; `right` says how it went (None before)."""

    heading = "Which bug?"

    def __init__(self, bug: Bug):
        self.bug = bug
        super().__init__(bug.id, bug.question, "", [text for text, _ in bug.options.values()])

    @property
    def right(self) -> bool | None:
        return None if self.state in ("open", "skipped") else self.guess == self.bug.options[self.bug.right][0]

    def choose(self, key: str) -> None:
        """Locks the option with this key: prompts_first, twice, …"""
        if key not in self.bug.options:
            raise Refused(f"no option {key!r}; there are {', '.join(self.bug.options)}")
        self.lock(self.bug.options[key][0])

    def _status(self) -> str:
        true, why_true = self.bug.options[self.bug.right]
        if self.state == "skipped":
            return f"{true} {why_true}"
        if self.guess is None:
            return super()._status()
        return f"{self.guess} {dict(self.bug.options.values())[self.guess]}" + (
            "" if self.right else f"\n{true} {why_true}"
        )

    def _settle(self) -> None:
        if not _showing() and self.state == "locked" and _first(self.id, "truth") is None:
            _store(id=self.id, event="truth", truth=self.bug.options[self.bug.right][0])
        super()._settle()


def which_bug(id: str) -> WhichBug:
    """The four causes of a "which bug?" exercise, to choose from. The first choice counts."""
    return WhichBug(find(id, Bug))
