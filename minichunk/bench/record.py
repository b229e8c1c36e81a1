"""minichunk record: every GPU measurement that data/recorded holds, made again on this card.

Each part is a fresh process, so that none finds another's memory or clocks, and a file appears when its part is done:

    kernels.json     attention alone, and this card's row of the table that attention="auto" reads (attention.json)
    steps.json       whole steps beside their roof, and the idle time between decode steps without and with overlap
    free_lunch.json  what a chunk beside decodes costs
    offline.json     nano-vllm's benchmark, transformers beside it
    serve.json       a trace's arrivals: mixed at three budgets, prefill_first, transformers
    serve_….json.gz  Runs of two of these replays, which the scrubber opens and `bench serve --trace` replays
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minichunk.record import Run

SERVED = "random:llama-3-8b"
BUDGETS = (1024, 512, 8192)


def kernels(folder: Path, trace: str) -> dict:
    from minichunk.bench import kernels as room

    result = room.run()
    room.write_table(result, folder / "attention.json")
    return result


def steps(folder: Path, trace: str) -> dict:
    from minichunk.bench import steps as room

    return room.steps(profile=True) | {"idle": {"readings": [room.idle(overlap=overlap) for overlap in (False, True)]}}


def free_lunch(folder: Path, trace: str) -> dict:
    from minichunk.bench import steps as room

    return room.free_lunch()


def offline(folder: Path, trace: str) -> dict:
    from minichunk.bench import offline as room

    return room.offline("transformers")


def serve(folder: Path, trace: str) -> dict:
    from minichunk.bench import serve as room

    with tempfile.TemporaryDirectory(dir=folder) as kept:
        result = room.serve(SERVED, trace, ["mixed", "prefill_first"], BUDGETS, None, 0.2, Path(kept), "transformers")
        for pattern in (f"serve_mixed_{BUDGETS[0]}.json.gz", "serve_prefill_first_*.json.gz"):  # enough to look at
            path = next(Path(kept).glob(pattern))
            label(path, result["card"] or "cpu")
            os.replace(path, folder / path.name)
    return result


PARTS = {part.__name__: part for part in (kernels, steps, free_lunch, offline, serve)}


def record(folder: Path, trace: str, parts: list[str] | None = None) -> list[str]:
    """Runs the parts (default: all) and returns the names of those that failed; their messages are on stderr.

    trace: what the part `serve` serves, a file or a name of minichunk.workloads; "" where it is not among them.
    """
    for name in parts or []:
        if name not in PARTS:
            raise ValueError(f"no part {name!r}; there are {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in parts or PARTS:
        print(f"— {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", "minichunk.bench.record", name, str(folder), trace]).returncode:
            failed.append(name)
    return failed


def label(path: Path, card: str) -> None:
    """Says in a kept Run that it is a recording."""
    run = Run.load(path)
    run.meta["source"] = f"RECORDED {card} {run.meta['date']}"
    run.save(path)


def _part(name: str, folder: Path, trace: str) -> None:
    from minichunk.bench.peer import write_json

    folder.mkdir(parents=True, exist_ok=True)
    # what each result says of its command, without anybody's folders
    sys.argv[1:] = ["record", folder.name, *(["--trace", Path(trace).name] if trace else []), "--only", name]
    write_json(PARTS[name](folder, trace), folder / f"{name}.json")


if __name__ == "__main__":
    _part(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
