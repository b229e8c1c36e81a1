"""minichunk simulate and minichunk workloads: the command lines of simulator.py and workloads.py."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from minichunk import workloads
from minichunk.costmodel import TYPICAL, CostModel, efficiency_from
from minichunk.simulator import capacity, simulate

err = Console(stderr=True)


def simulate_command(
    model: Annotated[str, typer.Option(help="A published shape: llama-3-8b, llama-2-70b, yi-34b, qwen3-0.6b, …")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="A GPU of data/gpus.json: h200, a100-80-sxm, h100-sxm, l4, …")] = "h200",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (tensor parallelism).")] = 1,
    trace: Annotated[str, typer.Option(help="A workload's name (minichunk workloads) or a trace file.")] = "azure-conv",
    requests: Annotated[int, typer.Option(min=1, help="How many of its requests.")] = 500,
    policy: Annotated[str, typer.Option(help="mixed, prefill_first, whole_prompt, leftover or 'share(x)'.")] = "mixed",
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens in a step, at most (default 512; the longest request where prompts stay whole).")] = None,
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Tokens of one request in a step, at most.")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests running at once, at most.")] = 128,
    slo_tbt: Annotated[float | None, typer.Option(help="Seconds between two tokens of a request, at most. Without --rate: search the capacity.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second; without it and without --slo-tbt, the trace's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and arrivals.")] = 0,
    efficiency: Annotated[str, typer.Option(help="typical (fitted on published A100 timings), roof, or a JSON file.")] = "typical",
    workers: Annotated[int, typer.Option(min=0, help="Processes of the capacity search; 0: one a core.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Save the run here (.json.gz), to look at it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
):  # fmt: skip
    """What a GPU you do not have would do: the real scheduler on a virtual clock."""
    try:
        cost = CostModel(model, gpu, tp, efficiency=_efficiency(efficiency))
        options = {"policy": policy, "max_batch_tokens": budget, "chunk_size": chunk_size, "max_requests": max_requests}
        asked = {
            "model": model,
            "gpu": cost.gpu.name,
            "tp": tp,
            "trace": trace,
            "requests": requests,
            "seed": seed,
            **options,
        }
        todo = workloads.load(trace, requests, seed)
        if slo_tbt is not None and rate is None:
            if save:
                raise ValueError("--save needs one run: give --rate beside --slo-tbt")
            found = capacity(todo, cost, slo_tbt, seed=seed, workers=workers or None, progress=not json, **options)
            out = {**asked, "slo_tbt": slo_tbt, "capacity": found.rate, "probes": [asdict(p) for p in found.probes]}
            _print_capacity(out) if not json else typer.echo(jsonlib.dumps(out))
            return
        run = simulate(workloads.poisson(todo, rate, seed) if rate else workloads.recorded(todo), cost, **options)
    except (ValueError, OSError) as error:
        err.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(1) from error
    out = {**asked, "max_batch_tokens": run.meta["max_batch_tokens"], "rate": rate, "summary": run.summary()}
    if slo_tbt is not None:
        out |= {"slo_tbt": slo_tbt, "stalls": run.stalls(slo_tbt), "gaps": len(run.tbts)}
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        run.save(save)
    typer.echo(jsonlib.dumps(out)) if json else _print_run(out, save)


def _efficiency(name: str):
    if name == "typical":
        return TYPICAL
    if name == "roof":
        return efficiency_from({})
    try:
        return efficiency_from(jsonlib.loads(Path(name).read_text(encoding="utf-8")))
    except (jsonlib.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: no JSON object of efficiencies ({error})") from error


def _say(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _print_run(out: dict, save: Path | None) -> None:
    s, console = out["summary"], Console()
    console.print(f"{out['model']} on {out['tp']} × {out['gpu']}, {out['trace']}, {s['requests']} requests, policy {out['policy']}, budget {out['max_batch_tokens']}: SIMULATED", highlight=False)  # fmt: skip
    table = Table("", "P50", "P99", "max")
    for name, key in (("TTFT", "ttft"), ("TBT", "tbt")):
        table.add_row(name, *(_say(s[key][q]) for q in ("p50", "p99", "max")))
    console.print(table)
    per_second = s["output_tokens_per_s"] or 0.0
    console.print(f"{s['steps']:,} steps, {s['seconds']:.1f} s, {per_second:,.0f} output tokens/s, mixed steps {s['mixed_share'] or 0:.0%}, preemptions {s['preemptions']}", highlight=False)  # fmt: skip
    if "stalls" in out:
        console.print(f"{out['stalls']:,} of {out['gaps']:,} gaps above {_say(out['slo_tbt'])}", highlight=False)
    if save:
        console.print(f"saved: {save}", highlight=False)


def _print_capacity(out: dict) -> None:
    console, table = Console(), Table("requests/s", "P99 TBT", "median queueing", "")
    for p in out["probes"]:
        table.add_row(
            f"{p['rate']:.2f}", _say(p["tbt_p99"]), _say(p["queue_p50"]), "passes" if p["passed"] else "fails"
        )
    console.print(table)
    console.print(f"{out['model']} on {out['tp']} × {out['gpu']}, {out['trace']}, policy {out['policy']}: {out['capacity']:.2f} requests/s at P99 TBT ≤ {_say(out['slo_tbt'])} and median queueing ≤ 2 s: SIMULATED", highlight=False)  # fmt: skip


def workloads_command(
    download: Annotated[str | None, typer.Option(help="Fetch this published trace from its repository.")] = None,
    folder: Annotated[Path, typer.Option(help="Where to.")] = Path("runs"),
    summarise: Annotated[Path | None, typer.Option(help="Read this trace file and say what is in it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
):
    """The request traces: counts, lengths, arrivals, licences. Lengths come from minichunk's own summary, offline."""
    try:
        if download:
            path = workloads.download(download, folder)
            typer.echo(jsonlib.dumps({"path": str(path)}) if json else str(path))
            return
        if summarise:
            body = workloads.summarise(summarise)
            rows = [workloads.listing_row(summarise.name, body)]
        else:
            rows = workloads.listing()
    except (ValueError, RuntimeError, OSError) as error:
        err.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(1) from error
    if json:
        typer.echo(jsonlib.dumps(rows))
        return
    table = Table(
        "name", "requests", "prompt P50 / P90 / P99", "output P50 / P90 / P99", "arrivals/s", "gap CV", "licence"
    )
    for r in rows:
        lengths = [" / ".join(f"{r[f'{side}_p{q}']:,}" for q in (50, 90, 99)) for side in ("prompt", "output")]
        arrivals = [f"{r['rate']:.2f}", f"{r['gap_cv']:.2f}"] if r["rate"] else ["–", "–"]
        table.add_row(r["name"], f"{r['count']:,}", *lengths, *arrivals, r["licence"] or "")
    Console().print(table)
