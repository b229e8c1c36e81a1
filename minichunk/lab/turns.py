"""A shared GPU in a classroom: live timings take turns, and say when somebody else was on the card.

with lab.gpu_turn():                 # "2 before you …", then your turn
    timings = measure()
run.meta["noisy"] = lab.noisy(timings)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock
import numpy as np
import torch

SPREAD = 0.10  # of the median, between P5 and P95


def _folder() -> Path:
    """One queue for all users of this host: MINICHUNK_TURNS, else a folder that everybody may write to."""
    folder = Path(os.environ.get("MINICHUNK_TURNS") or Path(tempfile.gettempdir()) / "minichunk-turns")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # somebody else's, and already open to all
        folder.chmod(0o1777)
    return folder


@contextlib.contextmanager
def gpu_turn(card: int = 0, poll: float = 0.5, say: Callable[[str], None] = print) -> Iterator[None]:
    """Waits until nobody else measures on this card. Says how many are before you, each time that changes.

    First come, first served. A kernel that dies loses its place: its lock is the operating system's.
    """
    folder = _folder()
    ticket = folder / f"card{card}-{time.time_ns():020d}-{os.getpid()}"
    mine = filelock.FileLock(ticket, mode=0o666)
    with mine:
        told = None
        while (before := _before(ticket)) > 0:
            if before != told:
                say(f"GPU {card}: {before} before you")
                told = before
            time.sleep(poll)
        if told is not None:
            say(f"GPU {card}: your turn")
        try:
            yield
        finally:
            ticket.unlink(missing_ok=True)


def _before(ticket: Path) -> int:
    """Older tickets of the same card whose kernels are alive. Those of dead ones are taken away."""
    count = 0
    card = ticket.name.split("-")[0]
    for other in sorted(ticket.parent.glob(f"{card}-*")):
        if other.name >= ticket.name:
            break
        try:
            with filelock.FileLock(other, timeout=0, mode=0o666):
                other.unlink(missing_ok=True)
        except (filelock.Timeout, PermissionError):
            count += 1
    return count


def noisy(timings: Sequence[float] = (), device: int | str | None = None) -> str | None:
    """Why these timings should be stamped NOISY, or None. timings: repeats of one measurement, any unit.

    device: a CUDA device to look at; None looks at none. Reasons: a spread (P5 to P95) above 10% of the median, or
    another process on the card.
    """
    if len(timings) > 1:
        low, middle, high = np.percentile(timings, [5, 50, 95])
        if high - low > SPREAD * middle:
            return f"spread {100 * (high - low) / middle:.0f}% of the median"
    if device is not None:
        others = _others(str(torch.cuda.get_device_properties(device).uuid), os.getpid(), _nvidia_smi())
        if others:
            return f"{others} other process{'es' * (others > 1)} on the card"
    return None


def _nvidia_smi() -> str:
    """The driver's list of computing processes, "pid, card's uuid" a line."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def _others(uuid: str, pid: int, listing: str) -> int:
    """Processes on the card besides this one. In a container the driver may know us under another pid: then one of the
    listed is us."""
    pids = [int(row.split(",")[0]) for row in listing.splitlines() if uuid in row]
    return max(0, len(pids) - 1) if pid not in pids else len(pids) - 1
