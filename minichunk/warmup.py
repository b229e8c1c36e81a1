"""minichunk warmup: compile the layers and capture the graphs of a model once, so that later starts find the compiler's caches."""

from __future__ import annotations

import time
from typing import Annotated

import typer


def warmup(
    model: Annotated[str, typer.Option(help="smollm2, a hub id, a folder, random:llama-3-8b, …")] = "smollm2",
    budget: Annotated[int, typer.Option(min=1, help="Tokens in a step, at most.")] = 512,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 64,
):
    """Compile a model's layers and capture its CUDA graphs, with a progress bar."""
    from minichunk import Engine

    start = time.perf_counter()
    with Engine(model, max_batch_tokens=budget, max_requests=min(max_requests, budget)) as engine:
        loaded = time.perf_counter()
        engine.warmup(progress=True)
        typer.echo(f"loaded in {loaded - start:.1f} s, warm after {time.perf_counter() - loaded:.1f} s more")
        typer.echo(engine.explain())
