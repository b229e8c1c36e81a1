"""What all checks share: values in words, arguments by name, inputs that must stay as they are, causes of all exercises.

Nothing here imports torch: arrays (torch's and numpy's) are known by what they can do.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections import deque
from typing import Any, Callable

# The causes that every exercise recognises, by key, beside its own.
CAUSES = {
    "no_return": "got None: is the `return` missing, or not reached?",
    "generator": "a generator can be read only once. Make a list: square brackets around it, or append in the place of yield.",
    "no_number": "{odd}. Wrong axis?",
    "changed_inputs": "you changed {name}, which the caller needs again. Work on a copy: {copy}.",
}


# --- values in words -----------------------------------------------------------------------------------------------
def is_array(value: Any) -> bool:
    """Whether it is a tensor or a numpy array (numpy's single numbers too)."""
    return hasattr(value, "shape") and hasattr(value, "tolist") and hasattr(value, "dtype")


def number(value: Any) -> bool:
    """One real number, numpy's and torch's included, but not True or False, and no array [1]."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or not hasattr(value, "__add__"):
        return False
    if is_array(value) and tuple(value.shape):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return "bool" not in str(getattr(value, "dtype", ""))


def plural(count: int, word: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} {word}{'s' * (count != 1)}"


def kind(value: Any) -> str:
    """What a value is: "None", "a tensor of 512 numbers", "a list of 3", "'abc'"."""
    if is_array(value):
        name, size = "a tensor" if type(value).__module__.startswith("torch") else "an array", math.prod(value.shape)
        return f"{name} of {size} numbers" if size != 1 else f"{name} of shape {list(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        return short(value, 40)
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name} of {len(value)}" if hasattr(value, "__len__") else f"{article} {name}"


def odd_entry(values: Any) -> str:
    """The first entry of a list or tuple that is an array in the place of a number, in words; "" where there is none."""
    if isinstance(values, list | tuple):
        for n, value in enumerate(values):
            if is_array(value) and tuple(value.shape):
                return f"entry {n} is {kind(value)}; each must be one number"
    return ""


def short(value: Any, most: int = 300) -> str:
    """repr on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else text[:most] + "…"


def named(fn: Callable, args: tuple) -> str:
    """Arguments by fn's own names: "ids [67], n = 1". What has no words of its own (a model) is left out."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    names += [f"argument {n}" for n in range(len(names), len(args))]
    said = [(name, short(value)) for name, value in zip(names, args)]
    return ", ".join(f"{n} = {v}" if len(n) == 1 else f"{n} {v}" for n, v in said if " object at 0x" not in v)


# --- inputs --------------------------------------------------------------------------------------------------------
def copied(value: Any) -> Any:
    """The value for a learner's function, so that no change reaches the caller's: containers, arrays and dataclasses are
    copied, other objects (a model, a pool, named tuples) are the same ones."""
    if type(value) in (list, tuple, set):
        return type(value)(copied(v) for v in value)
    if type(value) is dict:
        return {k: copied(v) for k, v in value.items()}
    if is_array(value):
        return value.clone() if hasattr(value, "clone") else value.copy()
    return copy.deepcopy(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def snapshot(value: Any) -> Any:
    """What a value holds, to be compared with == later; an object that is no container, array or dataclass is itself."""
    if isinstance(value, dict):
        return "dict", tuple((k, snapshot(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return "items", tuple(snapshot(v) for v in value)
    if is_array(value):
        return "array", tuple(value.shape), repr(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "fields", tuple(snapshot(getattr(value, f.name)) for f in dataclasses.fields(value))
    return "itself", (value,)


def _holds_what_changes(value: Any) -> bool:
    """A list, dict, set or array, or a tuple with one in it."""
    if isinstance(value, tuple):
        return any(map(_holds_what_changes, value))
    return isinstance(value, list | dict | set) or is_array(value)


def copy_of(name: str, value: Any) -> str:
    """The expression that copies an argument."""
    if is_array(value):
        return f"{name}.clone()" if hasattr(value, "clone") else f"{name}.copy()"
    flat = isinstance(value, list | dict | set) and not any(map(_holds_what_changes, value))
    return f"{type(value).__name__}({name})" if flat else f"copy.deepcopy({name})"
