"""The same prompts through minichunk and through transformers' continuous batching, order balanced (A B B A).

Each reading is a fresh process with its own copy of the model from disk. Readings of one side that differ by more
than 10% are taken again: something else was running.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

MOST_ROUNDS = 4
AGREE = 1.10  # two readings of one side


def make_prompts(tokenizer, count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """`count` token lists of shortest … longest tokens, cut from the demo's documents. The same on every machine."""
    from minichunk.paths import data_path

    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = " ".join(json.loads(line)["prompt"] for line in lines)
    ids, rng = tokenizer(text)["input_ids"], random.Random(seed)
    prompts = []
    for _ in range(count):
        length = rng.randint(shortest, longest)
        start = rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


def compare(
    model: str = "smollm2", requests: int = 16, shortest: int = 20, longest: int = 400, max_tokens: int = 32,
    budget: int = 512, threads: int | None = None, peer: str = "transformers",
) -> dict:  # fmt: skip
    """Runs the comparison; returns readings, their means and the ratio of output tokens per second."""
    from minichunk import __version__
    from minichunk.threads import num_threads

    spec = dict(model=model, requests=requests, shortest=shortest, longest=longest, max_tokens=max_tokens, budget=budget,
                threads=threads or num_threads())  # fmt: skip
    readings: dict[str, list[dict]] = {"minichunk": [], peer: []}
    loads = []
    for round in range(1, MOST_ROUNDS + 1):
        readings = {"minichunk": [], peer: []}
        for side in ("minichunk", peer, peer, "minichunk"):
            loads.append(os.getloadavg()[0])
            readings[side].append(_fresh(side, spec))
            print(
                f"{side:13} {readings[side][-1]['tokens_per_s']:7.2f} tokens/s   (load before: {loads[-1]:.2f})",
                file=sys.stderr,
            )
        if all(_spread(r) <= AGREE for r in readings.values()):
            break
        after = (
            "once more"
            if round < MOST_ROUNDS
            else f"still so after {round} tries: something else runs here, do not quote this"
        )
        print(f"two readings of one side differ by more than 10%: {after}", file=sys.stderr)
    rate = {side: sum(x["tokens_per_s"] for x in r) / len(r) for side, r in readings.items()}
    tokens = {json.dumps(x["tokens"]) for r in readings.values() for x in r}
    for reading in (x for r in readings.values() for x in r):
        del reading["tokens"]
    return {
        "spec": spec, "readings": readings, "tokens_per_s": rate, "ratio": rate["minichunk"] / rate[peer],
        "same_tokens": len(tokens) == 1, "agree": all(_spread(r) <= AGREE for r in readings.values()),
        "loads": loads, "versions": {"minichunk": __version__, **_versions()}, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["minichunk", *sys.argv[1:]]),
    }  # fmt: skip


def _spread(readings: list[dict]) -> float:
    rates = [r["tokens_per_s"] for r in readings]
    return max(rates) / min(rates)


def _versions() -> dict:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "numpy")} | {"python": sys.version.split()[0]}


def _fresh(side: str, spec: dict) -> dict:
    """One reading in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "minichunk.bench.peer", side, json.dumps(spec)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the {side} side ended with code {done.returncode}; its message stands above")
    return json.loads(done.stdout.splitlines()[-1])


def _minichunk(spec: dict) -> tuple[list, float, dict]:
    from minichunk import Engine, SamplingParams

    engine = Engine(spec["model"], max_batch_tokens=spec["budget"], device="cpu")
    prompts = make_prompts(engine.tokenizer, spec["requests"], spec["shortest"], spec["longest"])
    params = SamplingParams(max_tokens=spec["max_tokens"], ignore_eos=True)
    engine.generate(prompts[0][:8], SamplingParams(max_tokens=2))  # the first products set up the threads' buffers
    warm = len(engine.run.steps)
    start = time.perf_counter()
    out = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    steps = engine.run.steps[warm:]
    parts = {part: sum(s.times[part] for s in steps) / seconds for part in steps[0].times}
    return [c.token_ids for c in out], seconds, {"share_of_time": parts, "steps": len(steps)}


def _transformers(spec: dict) -> tuple[list, float, dict]:
    """Continuous batching of transformers itself, on a model and tokenizer that it loads from the same files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from minichunk.models import ensure

    folder = ensure(spec["model"]) if spec["model"] == "smollm2" else spec["model"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = make_prompts(AutoTokenizer.from_pretrained(folder), spec["requests"], spec["shortest"], spec["longest"])
    config = GenerationConfig(max_new_tokens=spec["max_tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    limits = dict(max_batch_tokens=spec["budget"], num_blocks=4 * spec["requests"])
    _generate_batch(model, [prompts[0][:8]], config, limits)
    start = time.perf_counter()
    out = _generate_batch(model, prompts, config, limits)
    seconds = time.perf_counter() - start
    by_prompt = {tuple(o.prompt_ids): o.generated_tokens for o in out.values()}
    return [by_prompt[tuple(p)] for p in prompts], seconds, {}


def _generate_batch(model, prompts, config, limits: dict):
    from transformers.generation import ContinuousBatchingConfig

    return model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**limits),
        progress_bar=False,
    )


def _one_side(side: str, spec: dict) -> dict:
    import torch

    torch.set_num_threads(spec["threads"])
    tokens, seconds, more = {"minichunk": _minichunk, "transformers": _transformers}[side](spec)
    count = sum(map(len, tokens))
    peak = _peak_bytes()
    return {
        "seconds": seconds,
        "output_tokens": count,
        "tokens_per_s": count / seconds,
        "peak_bytes": peak,
        "tokens": tokens,
        **more,
    }


def _peak_bytes() -> int | None:
    """The most memory this process ever held; None on Windows, which does not count it this way."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_json(result: dict, path: Path | None) -> None:
    """To `path` or stdout; a list of plain values takes one line."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", lambda m: "[" + re.sub(r",\n\s*", ", ", m[1]) + "]", text)
    path.write_text(text + "\n", encoding="utf-8") if path else print(text)


if __name__ == "__main__":
    print(json.dumps(_one_side(sys.argv[1], json.loads(sys.argv[2]))))
