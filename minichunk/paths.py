"""Where things lie: the project's own files, from a checkout and from an installed wheel; the CUDA compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(name: str = "") -> Path:
    """The file or folder `name` of data/, e.g. data_path("prompts.jsonl"), data_path("recorded").

    A wheel carries data/ inside the package; a checkout (and an editable install) has it beside the package.
    Raises FileNotFoundError when it is in neither place.
    """
    places = [_PACKAGE / "data", _PACKAGE.parent / "data"]
    for place in places:
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(f"data file {name!r} is in none of {', '.join(map(str, places))}: reinstall minichunk")


def nvcc() -> str | None:
    """The CUDA compiler that FlashInfer would call: under CUDA_HOME or CUDA_PATH, on the PATH, or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "bin")] if home else [None, "/usr/local/cuda/bin"]
    return next((found for place in places if (found := shutil.which("nvcc", path=place))), None)
