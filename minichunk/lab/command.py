"""`minichunk lab` and `minichunk progress`: functions that typer turns into commands."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from typing import Annotated, Optional

import typer

from minichunk.lab import copies
from minichunk.lab.checks import Bug, Exercise, exercises
from minichunk.lab.exercises import solved_path
from minichunk.lab.places import my_dir
from minichunk.lab.predictions import events, score


def lab(
    notebook: Annotated[Optional[str], typer.Argument(help="Number of a notebook, e.g. 40. Default: 00.")] = None,
    fresh: Annotated[
        Optional[str], typer.Option(help="Make a new copy of this notebook; your old one is kept.")
    ] = None,
    port: Annotated[int, typer.Option(help="JupyterLab's port.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Copy the notebooks to my/ on first use, and open JupyterLab on one of them."""
    try:
        for line in copies.make_copies():
            typer.echo(line)
        if fresh:
            copy, kept = copies.fresh(fresh)
            typer.echo(f"{copy.name} is new" + (f"; your old one is {kept.name}" if kept else ""))
        target = my_dir() / copies.find(notebook or fresh or "00").name
    except (KeyError, FileNotFoundError) as error:
        typer.echo(error.args[0] if isinstance(error, KeyError) else str(error), err=True)
        raise typer.Exit(1) from None
    if importlib.util.find_spec("jupyterlab") is None:
        typer.echo(
            f'JupyterLab is not installed in this Python ({sys.executable}): pip install "minichunk[notebooks]"',
            err=True,
        )
        raise typer.Exit(1)
    command = [sys.executable, "-m", "jupyterlab", str(target), f"--port={port}", f"--ServerApp.root_dir={my_dir()}"]
    command += [] if browser else ["--no-browser"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # a container: Jupyter asks root to say so
        command += ["--allow-root"]
    raise typer.Exit(run_until_told(command, {**os.environ, "MINICHUNK_MY": str(my_dir().resolve())}))


def run_until_told(command: list[str], env: dict[str, str]) -> int:
    """Runs the command; → its exit code, 0 after Ctrl-C. However this process is asked to end, the command ends first: it
    gets SIGTERM, at which JupyterLab stops its kernels."""

    def told(number: int, _frame) -> None:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), told)
    child = subprocess.Popen(command, env=env)
    try:
        return child.wait()
    except KeyboardInterrupt:  # Ctrl-C is how one leaves JupyterLab
        return 0
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def progress() -> None:
    """Which exercises are done, by notebook, and how the predictions went."""
    try:
        notebooks = copies.originals()
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    rows = {id: _row(id, entry) for id, entry in exercises().items() if id[:2] in notebooks}
    typer.echo(f"Exercises: {sum(not row.startswith('○') for row in rows.values())} of {len(rows)} done")
    for number, path in notebooks.items():
        here = [row for id, row in rows.items() if id[:2] == number]
        for line in [path.stem.replace("_", " "), *(f"  {row}" for row in here)] if here else []:
            typer.echo(line)
    typer.echo("\n" + score())


def _row(id: str, entry: Exercise | Bug) -> str:
    """An exercise and how it stands: ✔ passed or right, ✘ answered wrong, ○ still to do."""
    if isinstance(entry, Exercise):
        return f"{'✔' if solved_path(id).exists() else '○'} {id} {entry.name}"
    answer = next((e for e in events(id) if e["event"] in ("lock", "late")), None)
    if answer is None:
        return f"○ {id} which bug?"
    right = answer["guess"] == entry.options[entry.right][0]
    late = ", after seeing" * (answer["event"] == "late")
    return f"{'✔' if right else '✘'} {id} which bug? (answered {'right' if right else 'wrong'}{late})"
