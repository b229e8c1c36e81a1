"""How many CPU threads minichunk computes with."""

import os

MOST = 4  # more threads than this wait for each other at every small product of a decode step


def cores() -> int:
    """Cores that this process may use: its affinity mask where the system has one, else all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads() -> int:
    """MINICHUNK_THREADS if it is set, else min(4, cores()).

    Raises ValueError when MINICHUNK_THREADS is not a whole number of at least 1.
    """
    text = os.environ.get("MINICHUNK_THREADS", "")
    if not text:
        return min(MOST, cores())
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"MINICHUNK_THREADS must be a whole number of at least 1, got {text!r}")
    return int(text)
