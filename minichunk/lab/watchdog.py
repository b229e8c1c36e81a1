"""Calls a learner's function and comes back in time, whatever it does."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import threading
from typing import Any, Callable

SECONDS = 5.0


class TooSlow(Exception):
    """The call ran over its time. args: (function name, its arguments, seconds, whether it could be stopped)."""


class Raised(Exception):
    """The learner's function raised `__cause__`; args: (function name, its arguments)."""


class _Stop(SystemExit):
    """Thrown into the learner's thread; `except Exception` does not catch it, and threading reports no SystemExit."""


def limited(fn: Callable, seconds: float = SECONDS) -> Callable:
    """fn with a time limit per call. Lists among the arguments are copied, so the call cannot change the caller's.
    Afterwards `.changed` says whether it tried: whether a copy lost, gained or swapped an element.

    The call runs in its own thread, so that this works on every system and inside Jupyter. Over the limit an
    exception is thrown into that thread: it ends a pure Python loop, but not a sleep or a long call into C.
    Raises TooSlow; Raised from what fn raised; NotImplementedError as it is.
    """

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        outcome: dict[str, Any] = {}
        given = [list(a) if isinstance(a, list) else a for a in args]

        def target():
            try:
                outcome["value"] = fn(*given)
            except _Stop:
                outcome["stopped"] = True
            except BaseException as error:  # a learner's SystemExit or KeyboardInterrupt must not pass for an answer
                outcome["error"] = error

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(target,), daemon=True, name=f"check of {fn.__name__}")
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TooSlow(fn.__name__, args, seconds, _stop(thread))
        call.changed = any(_differs(a, b) for a, b in zip(args, given) if isinstance(a, list))
        if "error" not in outcome:
            return outcome["value"]
        if isinstance(outcome["error"], NotImplementedError):
            raise outcome["error"]
        raise Raised(fn.__name__, args) from outcome["error"]

    call.changed = False
    return call


def _differs(a: list, b: list) -> bool:
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b))


def _stop(thread: threading.Thread) -> bool:
    """Throws _Stop into the thread; a few times, since a bare `except:` in the loop swallows one."""
    for _ in range(5):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        thread.join(0.2)
        if not thread.is_alive():
            return True
    return False
