"""`minichunk doctor --class 30`: what a room of learners would need of this machine, measured with one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from minichunk import smollm2
from minichunk.doctor import Check
from minichunk.threads import cores, num_threads

# One learner's kernel: the lab's engine, one question answered, peak memory read off.
_KERNEL = """
import json, resource, sys
from minichunk import SamplingParams, lab
with lab.engine() as engine:
    engine.chat("Why does ice float on water?", SamplingParams(max_tokens=8))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps(peak))
"""


def kernel_bytes() -> int:
    """Peak memory of a kernel that runs the course's model, measured in a process of its own (about 15 s)."""
    done = subprocess.run([sys.executable, "-c", _KERNEL], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a kernel of the course could not run here: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def checks(learners: int, one: int | None = None) -> list[Check]:
    """Memory, cores and disk for `learners` kernels at once. one: bytes of a kernel, measured when not given."""
    if learners < 1:
        raise ValueError(f"a class has at least 1 learner, got {learners}")
    one = kernel_bytes() if one is None else one
    return [_memory(learners, one), _cores(learners), _model(learners)]


def _memory(learners: int, one: int) -> Check:
    free, wanted = memory_available(), learners * one
    found = f"{learners} × {one / 2**30:.2f} GiB (measured) = {wanted / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
    fits = free // one
    return Check("memory", found, "ok" if wanted <= free else "bad", "" if wanted <= free else f"this machine holds {fits} kernels: spread the class, or let {-(-learners // max(1, fits))} learners share a notebook")  # fmt: skip


def _cores(learners: int) -> Check:
    each = num_threads()
    found = f"{learners} kernels of {each} threads on {cores()} cores"
    if learners * each <= cores():
        return Check("cores", found, "ok")
    return Check("cores", found + ": steps slow down when all run at once, and timings are not comparable", "bad", "MINICHUNK_THREADS=1, and take turns with the measured cells")  # fmt: skip


def _model(learners: int) -> Check:
    folder = smollm2.home()
    found = f"one copy for all in {folder} (MINICHUNK_HOME; may be read-only)"
    if smollm2.is_ready():
        return Check("model", found, "ok")
    room = shutil.disk_usage(next(p for p in [folder, *folder.parents] if p.exists())).free
    return Check(
        "model", f"not there yet; {room / 2**30:.0f} GiB of disk are free", "bad", "make model, before the class"
    )


def memory_available() -> int:
    """Bytes that new processes can use: the kernel's own estimate on Linux, all physical memory elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
