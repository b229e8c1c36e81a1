"""Exercises: `plan_step = lab.exercise("40.1", plan_step)` checks the learner's function and decides which one goes on.

Not started: a line says so, and the reference takes its place. Wrong: the cell stops with the explanation and no
traceback. Passed: the learner's own function goes on, and its source is kept in my/solved/ for later notebooks.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import traceback
from pathlib import Path
from typing import Any, Callable

from minichunk.lab.checks import Bug, Exercise, Result, exercises, find, shared
from minichunk.lab.places import my_dir
from minichunk.lab.watchdog import SECONDS, Lazy, Raised, TooSlow, limited

YOUR, REFERENCE = "YOUR", "REFERENCE"
STUCK = (
    "Stuck? With `raise NotImplementedError` in the place of your lines the reference takes over, and you can go on."
)
_passed: dict[str, Callable] = {}  # the functions that passed in this kernel


class WrongAnswer(Exception):
    """An exercise's explanation, or why the engine refuses a plan. IPython shows the text alone, and Run All stops at the cell."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def check(id: str, fn: Callable, seconds: float = SECONDS) -> Result:
    """What the check says about fn, in words: (ok, key, message, first_difference). Raises nothing of fn's."""
    exercise = find(id, Exercise)
    if not callable(fn):
        message = f"{id} checks a function, and got {shared.kind(fn)}. Run the cell that defines {exercise.name}, then this one."
        return Result(False, "no_function", message, f"got {shared.kind(fn)}")
    say = exercise.show or functools.partial(_by_name, exercise)
    call = limited(fn, seconds)
    try:
        result = exercise.check(call)
    except NotImplementedError:
        return Result(False, "not_started", f"{id} {exercise.name}: not started.")
    except TooSlow as slow:
        name, args, limit, stopped = slow.args
        still = "" if stopped else "\nIt could not be stopped and still runs: restart the kernel before you go on."
        lines = [f"{name} did not end within {limit:g} s.", "", f"Smallest input found:  {say(*args)}", ""]
        message = "\n".join([*lines, f"Likely cause:  {exercise.slow}.{still}"])
        return Result(False, "too_slow", message, f"{name} did not end")
    except Raised as raised:
        name, args = raised.args
        error = raised.__cause__
        key, what = exercise.key_of_error(error), f"{type(error).__name__}: {error}"
        lines = [f"{name} raised an error.", "", f"Smallest input found:  {say(*args)}", "", f"    {what}"]
        lines += [_where(error, fn)]
        if key in exercise.causes:
            lines += ["", f"Likely cause:  {exercise.causes[key]}"]
        return Result(False, key, "\n".join(lines), what)
    except Lazy as lazy:
        _, args, value = lazy.args
        got = shared.kind(value)
        return exercise.wrong("generator", "An answer is a value, not something that makes it later.", say(*args), got, "a list", f"got {got}")  # fmt: skip
    except Exception as error:  # nothing of fn's: an answer that the check cannot read
        if call.last is None:
            raise
        args, value = call.last
        rule = f"{exercise.name} returns something that its check cannot read."
        there = shared.odd_entry(value) or f"got {shared.kind(value)} ({type(error).__name__}: {error})"
        return exercise.wrong("unknown", rule, say(*args), value, "an answer as the exercise describes it", there)
    if result.key == "unknown" and call.last and not call.answered and not exercise.in_place:  # it gave None alone
        said = result.message.split("\nLikely cause:")[0]
        return Result(
            False, "no_return", f"{said}\nLikely cause:  {shared.CAUSES['no_return']}", result.first_difference
        )
    if call.change and not exercise.in_place and (result.ok or result.key == "unknown"):
        args, n, after = call.change
        name = [*inspect.signature(exercise.reference).parameters][n]
        rule = "The arguments belong to the caller, who needs them again."
        words = {"name": f"the {type(after).__name__} {name}", "copy": shared.copy_of(name, after)}
        return exercise.wrong("changed_inputs", rule, say(*args), f"afterwards {name} is {shared.short(after, 120)}", f"{name} as it was", f"{name} is not the same after the call", **words)  # fmt: skip
    return result


def _by_name(exercise: Exercise, *args: Any) -> str:
    return shared.named(exercise.reference, args)


def exercise(id: str, fn: Callable) -> Callable:
    """Checks fn and returns the function that the rest of the notebook uses.

    Raises WrongAnswer with the explanation; with MINICHUNK_REQUIRE_SOLVED=1 also when it is not started.
    """
    entry = find(id, Exercise)
    if fn is entry.reference:  # the cell ran again without the one that defines the learner's function
        result = Result(False, "not_started", f"{id} {entry.name}: this is the reference.")
    else:
        result = check(id, fn)
    if result.ok:
        _passed[id] = fn
        print(f"✔ {id} passed: {result.message}\n  {_keep(id, fn)}")
        return fn
    _passed.pop(id, None)
    if result.key != "not_started":
        raise WrongAnswer(f"✘ {id} {entry.name} is not right yet.\n\n{result.message}\n\n{STUCK}")
    if os.environ.get("MINICHUNK_REQUIRE_SOLVED") == "1":
        raise WrongAnswer(f"✘ {id} {entry.name} is not started, and MINICHUNK_REQUIRE_SOLVED=1 asks for it.")
    titles = f", and figures say REFERENCE {entry.part}" if entry.part else ""
    print(f"○ {id} not started: the reference {entry.name} takes its place{titles}.")
    return entry.reference


def code_of(fn: Callable) -> str | None:
    """ "YOUR" for a function that passed its check in this kernel, "REFERENCE" for a reference answer, else None."""
    if any(fn is mine for mine in _passed.values()):
        return YOUR
    if any(fn is e.reference for e in exercises().values() if isinstance(e, Exercise)):
        return REFERENCE
    return None


def solved(id: str) -> Callable:
    """The learner's own answer from my/solved/, checked again; the reference, with a line, where there is none."""
    entry = find(id, Exercise)
    path = solved_path(id)
    if path.exists():
        namespace: dict = {}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)  # the learner's own file
        fn = namespace.get(entry.name)
        result = check(id, fn) if fn else Result(False, "unknown", f"it defines no {entry.name}")
        if result.ok:
            _passed[id] = fn
            return fn
        print(f"○ {path} does not pass any more ({result.key}: {result.message.splitlines()[0]}).")
    print(f"○ {id}: the reference {entry.name} is used, since my/solved/ has no answer that passes.")
    return entry.reference


def broken(id: str) -> Callable:
    """The function with the hidden bug of a "which bug?" exercise, under a name that does not give the bug away."""
    fn = find(id, Bug).broken

    def classmates(*args):
        return fn(*args)

    classmates.__name__ = classmates.__qualname__ = "a classmate's"
    return classmates


def solved_path(id: str) -> Path:
    return my_dir() / "solved" / f"{id}.py"


def _keep(id: str, fn: Callable) -> str:
    """Stores fn's source; the line that says where, or why not."""
    try:
        source = inspect.getsource(fn)
    except (OSError, TypeError) as error:
        return f"Its source could not be read, so later notebooks cannot use it ({error})."
    path = solved_path(id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(inspect.cleandoc(source) + "\n" if source[0].isspace() else source, encoding="utf-8")
    return f"Your source is kept in {path.parent.parent.name}/{path.parent.name}/{path.name}."


def _where(error: BaseException, fn: Callable) -> str:
    """The learner's line that raised, with its number in the cell."""
    file = getattr(getattr(fn, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if not frames:
        return ""
    line = frames[-1].line or linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    return f"    in line {frames[-1].lineno} of your cell:  {line}"
