"""What the simple widgets share: a box with a status line, a text twin, and errors that can be seen."""

from __future__ import annotations

import html
from typing import Any, Callable


def figure_bundle(figure: Any) -> dict:
    """A plotly figure as one output of an ipywidgets.Output: data, so that nothing is executed or captured."""
    data = {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": figure.layout.meta["text"]}
    return {"output_type": "display_data", "data": _plain(data), "metadata": {}}


def _plain(value: Any) -> Any:
    """JSON's types only: plotly keeps numpy arrays."""
    import json

    from plotly.utils import PlotlyJSONEncoder

    return json.loads(json.dumps(value, cls=PlotlyJSONEncoder))


class Panel:
    """A widget whose state is plain Python. `print(panel)` is its text twin, and stands where no front end answers.

    A subclass gives `_widgets()` (made when first shown), `_status()` (text) and `_redraw()` (state → widgets).
    """

    line_first = False  # the status line above the widgets, where it is the answer

    def __init__(self):
        self.box = self._line = None

    def show(self):
        """The ipywidgets box, made once."""
        if self.box is None:
            import ipywidgets as w

            self._line = w.HTML()
            widgets = self._widgets()
            self.box = w.VBox([self._line, *widgets] if self.line_first else [*widgets, self._line])
            self.refresh()
        return self.box

    def refresh(self) -> None:
        """Brings the widgets, if they are shown, to the state."""
        if self.box is not None:
            self._redraw()
            self.say(self._status())

    def say(self, text: str, alarm: bool = False) -> None:
        body = html.escape(text).replace("\n", "<br>")
        style = "font-size:14px"
        if "  " in text:  # columns
            style += "; white-space:pre-wrap; font-family:var(--jp-code-font-family, monospace)"
        self._line.value = f'<span role="{"alert" if alarm else "status"}" style="{style}">{"⚠ " * alarm}{body}</span>'

    def guarded(self, action: Callable[[], None]) -> None:
        """Runs what a button asks for; an exception is shown in the status line, since nobody sees it elsewhere."""
        try:
            action()
        except Exception as error:
            self.say(f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", alarm=True)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict:
        bundle = self.show()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**(data or {}), "text/plain": str(self)}

    def __repr__(self) -> str:
        return str(self)
