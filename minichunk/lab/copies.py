"""Learners work on copies: notebooks/ stays as it came, my/ holds what they changed."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path

from minichunk.lab.places import course_root, my_dir


def originals() -> dict[str, Path]:
    """{"40": notebooks/40_the_mixed_batch.ipynb, …}"""
    return {p.name[:2]: p for p in sorted((course_root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def find(number: str) -> Path:
    """The original whose number this is ("40", or the file's name). KeyError with the numbers there are."""
    there = originals()
    digits = re.match(r"\d{1,2}", number)
    key = digits[0].zfill(2) if digits else number
    if key not in there:
        raise KeyError(f"there is no notebook {number}; there are {', '.join(there)}")
    return there[key]


def make_copies() -> list[str]:
    """Copies into my/ what is not there yet, never over a file; a line for each original that changed since."""
    my = my_dir()
    my.mkdir(parents=True, exist_ok=True)
    known, lines = _known(my), []
    for number, original in originals().items():
        if not (my / original.name).exists():
            _copy(original, my)
        elif known.get(original.name) != _digest(original):
            lines.append(
                f"{original.name} has changed since you copied it. "
                f"`minichunk lab --fresh {number}` gives you the new one and keeps yours."
            )
    return lines


def fresh(number: str) -> tuple[Path, Path | None]:
    """A new copy of one notebook. Returns (copy, where the old one lies now, None if there was none)."""
    original, my = find(number), my_dir()
    my.mkdir(parents=True, exist_ok=True)
    copy, kept = my / original.name, None
    if copy.exists():
        stem = f"{copy.stem}.until-{time.strftime('%Y%m%d-%H%M%S')}"
        kept = next(p for n in range(100) if not (p := my / f"{stem}{f'-{n}' * bool(n)}.ipynb").exists())
        copy.rename(kept)
    _copy(original, my)
    return copy, kept


def _copy(original: Path, my: Path) -> None:
    (my / original.name).write_bytes(original.read_bytes())
    (my / ".originals.json").write_text(json.dumps({**_known(my), original.name: _digest(original)}, indent=1))


def _known(my: Path) -> dict[str, str]:
    """{notebook: digest of the original that the copy was made from}"""
    path = my / ".originals.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
