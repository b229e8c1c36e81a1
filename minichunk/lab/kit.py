"""What the two JavaScript widgets share. Their module and style: static/kit.*, then the widget's own, joined here, so that no
build step is needed and the saved page needs no import. And `Widget`: plain state that is checked, and a text twin."""

from __future__ import annotations

import html
from pathlib import Path

import anywidget
import traitlets

STATIC = Path(__file__).parent / "static"


def module(name: str) -> str:
    """The JavaScript module of the widget `name`."""
    return _joined(f"{name}.mjs", "kit.mjs")


def style(name: str) -> str:
    """Its style sheet."""
    return _joined(f"{name}.css", "kit.css")


def _joined(own: str, shared: str) -> str:
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in (shared, own))


class Widget(anywidget.AnyWidget):
    """`state`: plain data, set from Python or with the mouse, the same. `status`: one line in the widget. `print(w)`: its text
    twin, which also stands where no front end answers.

    A subclass gives `called` (its name in words), `_checked(given)`, which returns the whole state or raises ValueError,
    KeyError or IndexError with what is wrong, and `__str__`.
    """

    state = traitlets.Dict().tag(sync=True)
    status = traitlets.Unicode().tag(sync=True)

    @traitlets.validate("state")
    def _check_state(self, proposal) -> dict:
        try:
            return self._checked(dict(proposal["value"]))
        except (ValueError, LookupError) as error:  # a TraitError puts the old state back, whoever sent the new one
            raise traitlets.TraitError(str(error.args[0])) from error

    def set_state(self, sync_data):
        """Called with what the browser sends. An exception there is invisible in a notebook, so it is shown as well."""
        if self.status.startswith("error"):
            self.status = ""  # or the same error would not be shown a second time
        try:
            super().set_state(sync_data)
        except Exception as error:
            refused = isinstance(error, (ValueError, traitlets.TraitError))
            self.status = f"error: {error}" if refused else f"error: {type(error).__name__}: {error}"
            raise

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        data["text/plain"] = str(self)
        data["text/html"] = f'<pre aria-label="the {self.called} as text">{html.escape(str(self))}</pre>'
        return bundle
