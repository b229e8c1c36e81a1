"""The CUDA compiler and the driver, found without torch."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess


def nvcc() -> str | None:
    """The CUDA compiler that FlashInfer would call: under CUDA_HOME or CUDA_PATH, on the PATH, or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "bin")] if home else [None, "/usr/local/cuda/bin"]
    return next((found for place in places if (found := shutil.which("nvcc", path=place))), None)


def nvcc_cuda(path: str) -> tuple[int, int] | None:
    """(major, minor) of the CUDA that this nvcc compiles for; None when it does not say."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+)\.(\d+)", said)
    return (int(release[1]), int(release[2])) if release else None


def driver_cuda() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the NVIDIA driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10
