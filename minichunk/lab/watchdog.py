"""Calls a learner's function and comes back in time, whatever it does."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import inspect
import threading
from typing import Any, Callable

from minichunk.lab.checks.shared import copied, snapshot

SECONDS = 5.0


class TooSlow(Exception):
    """The call ran over its time. args: (function name, its arguments, seconds, whether it could be stopped)."""


class Raised(Exception):
    """The learner's function raised `__cause__`; args: (function name, its arguments)."""


class Lazy(Exception):
    """The call gave a generator, which can be read only once. args: (function name, its arguments, what it gave)."""


class _Stop(SystemExit):
    """Thrown into the learner's thread; `except Exception` does not catch it, and threading reports no SystemExit."""


def limited(fn: Callable, seconds: float = SECONDS) -> Callable:
    """fn with a time limit per call. Lists, arrays and dataclasses among the arguments are copied, so that the call
    cannot change the caller's. Afterwards `.changed` says whether it tried in the last call, `.change` where it did
    first: (arguments, index of the changed one, what became of it) or None; `.last` is (arguments, value) of the last call,
    `.answered` whether any call gave something else than None.

    The call runs in its own thread, so that this works on every system and inside Jupyter. Over the limit an
    exception is thrown into that thread: it ends a pure Python loop, but not a sleep or a long call into C.
    Raises TooSlow; Raised from what fn raised; Lazy for a generator; NotImplementedError as it is.
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        outcome: dict[str, Any] = {}
        given = [copied(a) for a in args]
        before = [snapshot(a) for a in given]

        def target():
            try:
                outcome["value"] = fn(*given)
            except _Stop:
                outcome["stopped"] = True
            except BaseException as error:  # a learner's SystemExit or KeyboardInterrupt must not pass for an answer
                outcome["error"] = error

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(target,), daemon=True, name=f"check of {name}")
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TooSlow(name, args, seconds, _stop(thread))
        differs = next((n for n, a in enumerate(given) if snapshot(a) != before[n]), None)
        call.changed = differs is not None
        if call.changed and call.change is None:
            call.change = args, differs, given[differs]
        if "error" in outcome:
            if isinstance(outcome["error"], NotImplementedError):
                raise outcome["error"]
            raise Raised(name, args) from outcome["error"]
        call.last = args, outcome["value"]
        call.answered |= outcome["value"] is not None
        if hasattr(outcome["value"], "__next__") or inspect.iscoroutine(outcome["value"]):
            raise Lazy(name, args, outcome["value"])
        return outcome["value"]

    call.changed, call.answered, call.change, call.last = False, False, None, None
    return call


def _stop(thread: threading.Thread) -> bool:
    """Throws _Stop into the thread; a few times, since a bare `except:` in the loop swallows one."""
    for _ in range(5):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        thread.join(0.2)
        if not thread.is_alive():
            return True
    return False
