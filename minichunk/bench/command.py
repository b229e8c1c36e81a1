"""minichunk bench …: each measurement as a command. One JSON a run, to stdout or --out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench():
    """Measurements: one JSON a run. Nothing else may run beside them."""


def need_cuda(what: str) -> None:
    """Ends the command with one line where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        typer.echo(f"{what} needs a CUDA device; `minichunk doctor` says what is missing", err=True)
        raise typer.Exit(1)


Out = Annotated[Path | None, typer.Option(help="Write the JSON here instead of to stdout.")]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="smollm2, a folder, random:llama-3-8b, …")] = "smollm2",
    trace: Annotated[str | None, typer.Option(help="A trace file, a saved Run, or a name from `minichunk workloads`: replay its arrivals.")] = None,
    peer: Annotated[str | None, typer.Option(help="transformers: the same requests through its continuous batching.")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="With --trace: requests running at once, at most.")] = 256,
    overlap: Annotated[bool | None, typer.Option(help="With --trace: plan a step while the last one runs (default: on a GPU).")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many (default 16, or the whole trace).")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="With --trace: policies to compare (repeatable).")] = None,
    budget: Annotated[list[int] | None, typer.Option(min=1, help="Tokens a step (default 1024 with --trace, where it can be repeated, else 512). A policy that never cuts prompts runs once, with a budget that holds the longest request.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Without --trace: new tokens of each request.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: min(4, cores)).")] = None,
    slo: Annotated[float, typer.Option(help="With --trace: a gap above this many seconds is a stall.")] = 0.2,
    keep: Annotated[Path | None, typer.Option(help="With --trace: a folder for the Runs.")] = None,
    out: Out = None,
):  # fmt: skip
    """Throughput of a set of prompts (against a peer: 4 to 16 fresh processes, some minutes), or latency under a trace's
    arrivals."""
    from minichunk.bench import peer as sides
    from minichunk.bench import serve as room

    if trace is not None:
        if peer not in (None, "transformers"):
            raise typer.BadParameter(f"--peer knows transformers, got {peer!r}")
        options = {"max_requests": max_requests} | ({} if overlap is None else {"overlap": overlap})
        try:
            result = room.serve(
                model, trace, policy or ["mixed"], budget or [1024], requests, slo, keep, peer, **options
            )
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
    elif peer == "transformers":
        result = sides.compare(
            model, requests or 16, max_tokens=max_tokens, budget=(budget or [512])[0], threads=threads
        )
    else:
        raise typer.BadParameter("give --peer transformers, or --trace")
    sides.write_json(result, out)


@app.command()
def steps(
    repeats: Annotated[int, typer.Option(min=1, help="Replays of each case, there and again on the way back.")] = 30,
    profile: Annotated[bool, typer.Option("--profile", help="Also list each step's kernels by time.")] = False,
    free_lunch: Annotated[bool, typer.Option("--free-lunch", help="The sweep of chunk sizes 1 … 4096 instead, graph and eager.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="The GPU's idle time between decode steps of the engine instead, without and with overlap.")] = False,
    out: Out = None,
):  # fmt: skip
    """Steps on the GPU beside their serial roof: decodes, mixed batches."""
    need_cuda("bench steps")
    from minichunk.bench import steps as room
    from minichunk.bench.peer import write_json

    if free_lunch:
        result = room.free_lunch()
    elif idle:
        result = {"readings": [room.idle(overlap=overlap) for overlap in (False, True)]}
    else:
        result = room.steps(repeats, profile=profile)
    write_json(result, out)


@app.command()
def offline(
    peer: Annotated[str | None, typer.Option(help="transformers: its continuous batching, with flash_attention_2.")] = None,
    budget: Annotated[int, typer.Option(min=256, help="Tokens a step, at most.")] = 8192,
    out: Out = None,
):  # fmt: skip
    """nano-vllm's benchmark on the GPU: 256 requests of 100–1024 tokens in and out, output tokens a second."""
    need_cuda("bench offline")
    from minichunk.bench import offline as room
    from minichunk.bench.peer import write_json

    if peer not in (None, "transformers"):
        raise typer.BadParameter(f"--peer knows transformers, got {peer!r}")
    write_json(room.offline(peer, budget), out)


@app.command()
def kernels(
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each contender, order balanced.")] = 30,
    table: Annotated[Path | None, typer.Option(help="Also put this card's row into this table, which attention='auto' reads.")] = None,
    out: Out = None,
):  # fmt: skip
    """Attention on the GPU: ours, FlashInfer's and flash-attn's where they are installed, beside the roof."""
    need_cuda("bench kernels")
    from minichunk.bench import kernels as room
    from minichunk.bench.peer import write_json

    result = room.run(rounds)
    if table:
        room.write_table(result, table)
    write_json(result, out)


def record(
    folder: Annotated[Path, typer.Argument(help="Where the files go, e.g. data/recorded/h200.")],
    trace: Annotated[str | None, typer.Option(help="The trace to serve: a file, or a name from `minichunk workloads`. The part serve needs one, the others none.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="kernels, steps, free_lunch, offline, serve (repeatable; default all).")] = None,
):  # fmt: skip
    """Makes the measurements of data/recorded again on this GPU: a fresh process each, some minutes each."""
    from minichunk.bench import record as room

    need_cuda("record")
    if trace is None and "serve" in (only or room.PARTS):
        raise typer.BadParameter("the part serve needs a trace: --trace FILE, or --only another part")
    try:
        failed = room.record(folder, trace or "", only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if failed:
        typer.echo(f"failed: {', '.join(failed)}; their messages stand above", err=True)
        raise typer.Exit(1)
