"""minichunk doctor | demo | …: the command line. Each command imports its room when it runs, so `--help` needs no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="A small, complete LLM inference engine: prompts and decodes together in mixed batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False):
    if version:
        from minichunk import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    learners: Annotated[
        int | None, typer.Option("--class", min=1, help="Also: what a room of this many learners would need here.")
    ] = None,
):
    """What this machine has, what minichunk uses of it, and the command that mends each fault (exit code 1: the CPU
    path would not work)."""
    from minichunk import doctor as room

    found = room.checks()
    _print_checks(found)
    if learners is not None:
        from minichunk import classroom

        Console().print(f"\nA class of {learners} on this machine (one kernel is measured, about 15 s):")
        _print_checks(classroom.checks(learners))
    raise typer.Exit(0 if room.works(found) else 1)


def _print_checks(found) -> None:
    console = Console(soft_wrap=True)
    style = {"ok": "[green]ok [/]", "off": "[dim]–  [/]", "bad": "[red]bad[/]"}
    width = max(len(check.name) for check in found)
    for check in found:
        console.print(f"{style[check.state]} {escape(check.name):{width}}  ", end="")
        console.print(check.found, style="red" if check.state == "bad" else None, markup=False, highlight=False)
        if check.fix:
            console.print(f"    {'':{width}}  → {check.fix}", markup=False, highlight=False)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="smollm2, a hub id or a folder.")] = "smollm2",
    policy: Annotated[str, typer.Option(help="mixed, prefill_first, whole_prompt, leftover or 'share(x)'.")] = "mixed",
    budget: Annotated[int, typer.Option(min=1, help="Tokens in a step, at most.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of the cache.")] = 16,
    prompts: Annotated[Path | None, typer.Option(help="A .jsonl like data/prompts.jsonl, the default.")] = None,
    save: Annotated[Path, typer.Option(help="Where the run is saved.")] = Path("runs/demo.json.gz"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
):
    """Replay documents and short questions with SmolLM2, and watch them share the steps."""
    from minichunk import demo as room

    room.main(model, policy, budget, block_size, prompts, save, json)


def attach(name: str, target: str, help: str) -> None:
    """Adds the command `name`: the function or typer app at target ("module:attribute"), imported when it is called."""

    @app.command(
        name,
        help=help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context):
        module, _, attribute = target.partition(":")
        room = getattr(import_module(module), attribute)
        if not isinstance(room, typer.Typer):
            function, room = room, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            room.command()(function)
        room(context.args, prog_name=f"minichunk {name}")


# One line a command.
attach("bench", "minichunk.bench.command:app", "Measure kernels, steps and serving; one JSON a run.")
attach("record", "minichunk.bench.command:record", "Make data/recorded again on this GPU.")
attach(
    "lab", "minichunk.lab.command:lab", "Copy the notebooks to my/ on first use, and open JupyterLab on one of them."
)
attach("warmup", "minichunk.warmup:warmup", "Compile a model and capture its CUDA graphs, with a progress bar.")
attach("simulate", "minichunk.cli_simulate:simulate_command", "A trace through the scheduler on a virtual clock.")
attach(
    "workloads", "minichunk.cli_simulate:workloads_command", "The request traces minichunk knows, and their lengths."
)
attach("progress", "minichunk.lab.command:progress", "Exercises solved and predictions made so far.")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
