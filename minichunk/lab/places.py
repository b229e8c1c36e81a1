"""Where the lab's files are: the course's notebooks, and the learner's own folder."""

from __future__ import annotations

import os
from pathlib import Path

import minichunk


def course_root() -> Path:
    """The checkout that holds notebooks/: the nearest one above the working directory, else the package's own.

    Raises FileNotFoundError where there is none.
    """
    here = Path.cwd().resolve()
    package = Path(minichunk.__file__).resolve().parent.parent
    for folder in (here, *here.parents, package):
        if (folder / "notebooks" / "source").is_dir():
            return folder
    raise FileNotFoundError(
        f"no course notebooks above {here}. They come with the repository: run this inside a clone of minichunk, "
        "or set MINICHUNK_MY to the folder where your work shall lie."
    )


def my_dir() -> Path:
    """The learner's folder: MINICHUNK_MY, or my/ beside notebooks/. Not created here."""
    named = os.environ.get("MINICHUNK_MY")
    return Path(named).expanduser() if named else course_root() / "my"
