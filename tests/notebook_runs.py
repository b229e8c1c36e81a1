"""Exceptions that a widget of an executed notebook caught: nbmake does not see them, this does."""

import tempfile
from pathlib import Path

import pytest


def hidden_widget_error(notebook) -> str | None:
    """The first exception that a widget of an executed notebook caught: "ValueError: …" and its traceback.

    ipywidgets' Output (and `interact`, which is built on it) stores an exception in the widget's state, not among
    the cell's outputs, so the cell looks fine.
    """
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    for model in states.get("state", {}).values():
        for output in model["state"].get("outputs") or ():
            if output["output_type"] == "error":
                return f"{output['ename']}: {output['evalue']}\n" + "\n".join(output["traceback"])
    return None


def environment(filename: Path, my: str) -> dict[str, str]:
    """What a notebook runs with. A learner's one as a learner has it, unsolved and with nothing locked; a solution must
    have solved every exercise, and shows every truth. `my` keeps both away from a learner's own folder."""
    solved = {"MINICHUNK_REQUIRE_SOLVED": "1", "MINICHUNK_REVEAL": "1"} if filename.parent.name == "solutions" else {}
    return {"MINICHUNK_MY": my, **solved}


def watch_notebooks() -> None:
    """nbmake passes a notebook whose widgets caught an exception; this makes such a notebook fail."""
    from nbmake import nb_run
    from nbmake.nb_result import NotebookError

    plain = nb_run.NotebookRun.execute

    def execute(self):
        with tempfile.TemporaryDirectory() as my, pytest.MonkeyPatch.context() as patch:
            for name, value in environment(Path(self.filename), my).items():
                patch.setenv(name, value)
            result = plain(self)
        hidden = None if result.error else hidden_widget_error(result.nb)
        if hidden:
            summary = f"a widget hid {hidden.splitlines()[0]}"
            result.error = NotebookError(summary=summary, trace=hidden, failing_cell_index=-1)
        return result

    nb_run.NotebookRun.execute = execute
