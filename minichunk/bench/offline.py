"""nano-vllm's benchmark (its bench.py): 256 requests of 100–1024 random tokens in and 100–1024 out, all at once.

Qwen3-0.6B's shape with random weights in bfloat16, against transformers' continuous batching with flash_attention_2.
Each reading is a fresh process that warms up first (graphs captured, a few short requests); order A B B A.
transformers decodes greedily, its faster way; minichunk draws at temperature 0.6, as the benchmark says.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

from minichunk.bench.machine import about, clocks

SHAPE = "qwen3-0.6b"
REQUESTS = 256


def requests(count: int = REQUESTS) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each request, drawn in nano-vllm's order from seed 0."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(count)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


def offline(
    peer: str | None = "transformers", budget: int = 8192, count: int = REQUESTS, order: str = "", overlap: bool = True
) -> dict:
    """Output tokens a second of both, and their ratio."""
    sides = {"A": "minichunk", "B": peer}
    order = order or ("ABBA" if peer else "AA")
    readings: dict[str, list[dict]] = {}
    for letter in order:
        reading = _fresh(sides[letter], dict(budget=budget, count=count, overlap=overlap))
        readings.setdefault(sides[letter], []).append(reading)
        print(
            f"{sides[letter]:13} {reading['seconds']:.2f} s, {reading['tokens_per_s']:.0f} output tokens/s",
            file=sys.stderr,
            flush=True,
        )
    rate = {side: sum(x["tokens_per_s"] for x in r) / len(r) for side, r in readings.items()}
    return {
        **about(), "what": "nano-vllm's benchmark", "model": SHAPE, "requests": count, "budget": budget, "overlap": overlap, "order": order,
        "readings": readings, "tokens_per_s": rate, "ratio": rate["minichunk"] / rate[peer] if peer else None, "clocks_after": clocks(),
    }  # fmt: skip


def _fresh(side: str, spec: dict) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "minichunk.bench.offline", side, json.dumps(spec)], env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the {side} side ended with code {done.returncode}; its message stands above")
    return json.loads(done.stdout.splitlines()[-1])


def _minichunk(spec: dict) -> dict:
    from minichunk import Engine, SamplingParams

    todo = requests(spec["count"])
    begin = time.perf_counter()
    engine = Engine(
        f"random:{SHAPE}", device="cuda", dtype="bfloat16", max_requests=spec["count"], max_batch_tokens=spec["budget"],
        max_model_len=4096, gpu_memory=0.8, overlap=spec["overlap"],
    )  # fmt: skip
    loaded = time.perf_counter()
    engine.warmup()
    warm = time.perf_counter()
    engine.generate([[1, 2, 3], [4] * 700], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.6))
    prompts = [prompt for prompt, _ in todo]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6) for _, n in todo]
    first = len(engine.run.steps)
    start = time.perf_counter()
    out = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    steps = engine.run.steps[first:]
    shares = {part: round(sum(s.times[part] for s in steps) / seconds, 4) for part in steps[0].times}
    return {
        **_rate(sum(len(c.token_ids) for c in out), seconds), "steps": len(steps), "share_of_time": shares,
        "tokens_decodes_ms": [[s.num_tokens, s.num_decodes, round(s.duration * 1e3, 3)] for s in steps],
        "load_s": round(loaded - begin, 2), "warmup_s": round(warm - loaded, 2), "explain": engine.explain(),
    }  # fmt: skip


def _transformers(spec: dict) -> dict:
    import torch
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    from minichunk.shapes import random_model

    todo = requests(spec["count"])
    model = random_model(SHAPE, device="cuda", dtype=torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    config = GenerationConfig(max_new_tokens=1024, do_sample=False, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(max_prompt_length=1024, max_generated_length=1024, num_requests=len(todo))
    with torch.no_grad(), model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(), workload_hints=hints
    ) as manager:  # fmt: skip

        def run(work) -> int:
            for prompt, new in work:
                manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            tokens = done = 0
            while done < len(work):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended early")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    tokens, done = tokens + len(result.generated_tokens), done + 1
            return tokens

        run([([1, 2, 3], 4), ([4] * 700, 4)])
        start = time.perf_counter()
        tokens = run(todo)
        seconds = time.perf_counter() - start
    return {**_rate(tokens, seconds), "attention": "flash_attention_2"}


def _rate(tokens: int, seconds: float) -> dict:
    return {"seconds": round(seconds, 4), "output_tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}


if __name__ == "__main__":
    print(json.dumps({"minichunk": _minichunk, "transformers": _transformers}[sys.argv[1]](json.loads(sys.argv[2]))))
