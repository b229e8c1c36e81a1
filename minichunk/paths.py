"""Where the project's own files lie, from a checkout and from an installed wheel."""

import sys
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


def pinned_torch() -> str | None:
    """The torch that `make setup` installs, when this Python is the checkout's own environment."""
    pin = _PACKAGE.parent / "requirements-torch.txt"
    if Path(sys.prefix).parent != _PACKAGE.parent or not pin.exists():
        return None
    return next(
        line.partition("==")[2].strip()
        for line in pin.read_text(encoding="utf-8").splitlines()
        if line.startswith("torch==")
    )
