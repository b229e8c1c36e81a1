"""What a check is: an exercise as data, the result of checking it, and the exercises of all notebooks.

One module a notebook: the reference answer, the cases, and the wrong answers that are recognised, by key.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from minichunk.lab.checks import shared
from minichunk.lab.checks.shared import number


class Result(NamedTuple):
    """ok; key: "passed", one of the exercise's causes or of shared.CAUSES, or "not_started", "raised", "too_slow", "unknown";
    message: all that the learner reads; first_difference: the first value that differs, decoded."""

    ok: bool
    key: str
    message: str
    first_difference: str = ""


@dataclass(frozen=True)
class Exercise:
    """check(fn) → Result, with fn already guarded by the watchdog. causes: {key: the likely cause, in words}.

    passed: one line for a right answer. slow: why a call does not end, most likely. part: what of the engine it is, for
    the titles of figures ("scheduler"), empty where no engine runs it. show(*arguments): the input in words, for an
    exception in the learner's code. errors: (key, type, part of its text), the exceptions whose cause is known.
    """

    id: str
    reference: Callable
    check: Callable[[Callable], Result]
    causes: dict[str, str]
    passed: str
    slow: str = "a loop does not end"
    part: str = ""
    show: Callable[..., str] | None = None
    errors: tuple[tuple[str, type[Exception], str], ...] = ()

    @property
    def name(self) -> str:
        return self.reference.__name__

    def key_of_error(self, error: BaseException) -> str:
        """The cause of an exception in the learner's code, or "raised"."""
        known = (key for key, kind, text in self.errors if isinstance(error, kind) and text in str(error))
        return next(known, "raised")

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether the answer is what becomes of the arguments: its reference returns nothing."""
        tree = ast.parse(inspect.getsource(self.reference))
        return not any(isinstance(node, ast.Return) and node.value for node in ast.walk(tree))

    def wrong(self, key: str, rule: str, case: str, got: Any, wanted: Any, difference: str, **words: str) -> Result:
        """A wrong answer in one form: the rule that failed, the smallest input, the first difference, the cause.

        Pass `got` as it came: an "unknown" answer that is None, or holds an array in the place of a number, gets its
        cause here. words: what shared.CAUSES[key] leaves open.
        """
        odd = shared.odd_entry(got)
        if key == "unknown" and got is None and wanted is not None:
            key = "no_return"
        elif key == "unknown" and odd:
            key, words = "no_number", {"odd": odd}
        said = got if isinstance(got, str) else str(got) if len(str(got)) <= 300 and not odd else shared.short(got, 90)
        lines = [rule, "", f"Smallest input found:  {case}", f"Your answer:  {said}", f"Expected:     {wanted}"]
        lines += ["", f"First difference:  {difference}"]
        cause = self.causes.get(key) or shared.CAUSES.get(key, "").format(**words)
        if cause:
            lines += [f"Likely cause:  {cause}"]
        return Result(False, key, "\n".join(lines), difference)


@dataclass(frozen=True)
class Bug:
    """A "which bug?" exercise: `broken` runs unseen, the learner picks one of the options.

    options: {key: (what the learner reads, what is said when it is picked)}; right: the key that is true.
    """

    id: str
    broken: Callable
    question: str
    options: dict[str, tuple[str, str]]
    right: str


@functools.cache
def _all() -> dict[str, Exercise | Bug]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "shared":
            continue
        for entry in importlib.import_module(f"{__name__}.{module.name}").EXERCISES:
            found[entry.id] = entry
    return dict(sorted(found.items()))


def exercises() -> dict[str, Exercise | Bug]:
    """{id: exercise} of all notebooks, in order."""
    return dict(_all())


def find(id: str, kind: type) -> Any:
    """The Exercise or Bug with this id; a KeyError names the ones that exist."""
    entry = _all().get(id)
    if not isinstance(entry, kind):
        known = ", ".join(i for i, e in _all().items() if isinstance(e, kind))
        raise KeyError(f"no {kind.__name__.lower()} {id!r}; there are {known}")
    return entry


def close(a: Any, b: Any) -> bool:
    return number(a) and number(b) and abs(float(a) - float(b)) <= 1e-9 * max(1.0, abs(float(b)))
