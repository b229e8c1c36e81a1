"""What every GPU measurement says about itself: versions, card, clocks, command."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from minichunk import __version__
from minichunk.costmodel import GPU, gpu_named

# Measured on an H200: copy 4.28 TB/s, an 8192³ bf16 product 716–790 TFLOP/s.
CEILINGS = {"peak": 790e12, "bandwidth": 4.3e12}


def roof_gpu() -> GPU:
    """The H200 with its measured ceilings in the place of the data sheet's."""
    return replace(gpu_named("h200"), **CEILINGS)


def about() -> dict:
    """Versions, card, driver, date and the command of this process."""
    import torch

    found = {}
    for name in ("torch", "triton", "transformers", "flashinfer-python", "flash-attn", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {
        "versions": {"minichunk": __version__, **found, "python": sys.version.split()[0], "cuda": torch.version.cuda},
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": (smi("driver_version") or {}).get("driver_version"), "clocks": clocks(), "ceilings": CEILINGS, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["minichunk", *sys.argv[1:]]),
    }  # fmt: skip


def clocks() -> dict | None:
    """Clocks (MHz), temperature (°C) and power (W) as nvidia-smi reports them now; None without it."""
    return smi("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def smi(*names: str) -> dict | None:
    """What nvidia-smi says of the first GPU, {name: text}; None without it."""
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
        values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(names, (value.strip() for value in values)))
