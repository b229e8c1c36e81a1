"""Where the project's own files lie, from a checkout and from an installed wheel."""

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
