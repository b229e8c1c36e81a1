"""A widget's module and style: what all widgets share (static/kit.*), then its own. Joined here, so that no build step
is needed and the saved page needs no import."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"


def module(name: str) -> str:
    """The JavaScript module of the widget `name`."""
    return _joined(f"{name}.mjs", "kit.mjs")


def style(name: str) -> str:
    """Its style sheet."""
    return _joined(f"{name}.css", "kit.css")


def _joined(own: str, shared: str) -> str:
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in (shared, own))
