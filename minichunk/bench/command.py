"""minichunk bench …: each measurement as a command. One JSON a run, to stdout or --out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench():
    """Measurements: one JSON a run. Nothing else may run beside them."""


Out = Annotated[Path | None, typer.Option(help="Write the JSON here instead of to stdout.")]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="smollm2, a folder, random:llama-3-8b, …")] = "smollm2",
    trace: Annotated[str | None, typer.Option(help="A trace file or a name from `minichunk workloads`: replay its arrivals.")] = None,
    peer: Annotated[str | None, typer.Option(help="transformers: the same prompts through its continuous batching.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many (default 16, or the whole trace).")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="With --trace: policies to compare (repeatable).")] = None,
    budget: Annotated[list[int] | None, typer.Option(min=1, help="Tokens a step (repeatable with --trace).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Without --trace: new tokens of each request.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: min(4, cores)).")] = None,
    slo: Annotated[float, typer.Option(help="With --trace: a gap above this many seconds is a stall.")] = 0.2,
    keep: Annotated[Path | None, typer.Option(help="With --trace: a folder for the Runs.")] = None,
    out: Out = None,
):  # fmt: skip
    """Throughput of a set of prompts (against a peer), or latency under a trace's arrivals."""
    from minichunk.bench import peer as sides
    from minichunk.bench import serve as room

    if trace is not None:
        result = room.serve(model, trace, policy or ["mixed"], budget or [1024], requests, slo, keep)
    elif peer == "transformers":
        result = sides.compare(
            model, requests or 16, max_tokens=max_tokens, budget=(budget or [512])[0], threads=threads
        )
    else:
        raise typer.BadParameter("give --peer transformers, or --trace")
    sides.write_json(result, out)
