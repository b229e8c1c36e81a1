"""Serving under load: a trace's arrivals replayed in real time, per policy and budget: TTFT, TBT, stalls, throughput.

Every replay has an engine of its own, warmed up. Its Run can be kept: for the scrubber, and as
a trace, since `workloads.read` takes a Run too.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minichunk.record import RequestRecord, Run


def requests_of(trace: Sequence, vocab: int) -> list[tuple[float, list[int], int]]:
    """(arrival, token ids, new tokens), by arrival. The ids are made up: the lengths and arrivals are what counts."""
    from minichunk.workloads import prompt_ids

    made = [(r.arrival, [t % vocab for t in prompt_ids(r, i)], r.output_tokens) for i, r in enumerate(trace)]
    return sorted(made, key=lambda r: r[0])


def replay(
    model: str, trace: Sequence, policy: str, budget: int, *, max_model_len: int, max_requests: int = 256,
    num_blocks: int | None = None, gpu_memory: float = 0.5, **engine_options,
) -> Run:  # fmt: skip
    """Serves the trace once with an engine of its own; returns its Run. trace: workloads.TraceRequest.

    Every request runs to its recorded output length, without a prefix cache unless the trace says which blocks repeat.
    """
    from tqdm import tqdm

    from minichunk import Engine, SamplingParams

    shares = any(r.block_hashes for r in trace)
    with Engine(
        model, policy=policy, max_batch_tokens=budget, max_model_len=max_model_len, max_requests=max_requests,
        num_blocks=num_blocks, gpu_memory=gpu_memory, prefix_cache=shares, **engine_options,
    ) as engine:  # fmt: skip
        engine.warmup(progress=True)
        todo = [
            (at, ids, SamplingParams(max_tokens=new, ignore_eos=True))
            for at, ids, new in requests_of(trace, engine.vocab_size)
        ]
        gc.collect()
        gc.freeze()  # the model's many objects need not be looked at again: a collection of them would be a stall
        try:
            with tqdm(total=len(todo), unit="request", desc=f"{policy} {budget}") as bar:
                engine.replay(todo, on_step=lambda record: bar.update(len(record.finished)))
        finally:
            gc.unfreeze()
        engine.run.meta["explain"] = engine.explain()
        return engine.run


def replay_transformers(model: str, trace: Sequence, budget: int) -> Run:
    """The same arrivals through transformers' continuous batching; a Run without steps."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    from minichunk.models import load

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    net = load(model, device=device, dtype=dtype, seed=0).model
    net.set_attn_implementation("flash_attention_2" if device.type == "cuda" else "sdpa")
    todo = requests_of(trace, net.config.vocab_size)
    longest = max(new for _, _, new in todo)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=budget, allow_block_sharing=False)
    hints = WorkloadHints(
        max_prompt_length=max(len(ids) for _, ids, _ in todo), max_generated_length=longest, num_requests=len(todo)
    )
    records: dict = {}
    with torch.no_grad(), net.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, workload_hints=hints
    ) as manager:  # fmt: skip
        for name, ids, new in (("warm", [1, 2, 3], 4), ("up", [4] * budget, 4)):
            manager.add_request(ids, request_id=name, max_new_tokens=new, eos_token_id=-1)
        for _ in range(2):
            _next_result(manager)
        start = time.perf_counter()  # the clock of its own timestamps
        while len(records) < len(todo) or any(r.finished is None for r in records.values()):
            while len(records) < len(todo) and time.perf_counter() >= start + todo[len(records)][0]:
                at, ids, new = todo[len(records)]
                name = str(len(records))
                manager.add_request(ids, request_id=name, max_new_tokens=new, eos_token_id=-1, record_timestamps=True)
                records[name] = RequestRecord(name, ids, [], at)
            wait = start + todo[len(records)][0] - time.perf_counter() if len(records) < len(todo) else 1.0
            result = _next_result(manager, max(wait, 1e-4))
            if result is not None:
                record = records[result.request_id]
                record.output_ids, record.finished = list(result.generated_tokens), time.perf_counter() - start
                record.token_times = [t - start for t in result.timestamps]
    meta = {
        "model": model,
        "policy": "transformers continuous batching",
        "max_batch_tokens": budget,
        "device": str(device),
    }
    return Run(meta, records)


def _next_result(manager, timeout: float = 60.0):
    result = manager.get_result(timeout=timeout)
    if result is None and not manager.is_running():
        raise RuntimeError("transformers' generation thread ended early; its message stands above")
    if result is not None and result.error:
        raise RuntimeError(f"transformers: request {result.request_id}: {result.error}")
    return result


def row(name: str, run: Run, slo: float) -> dict:
    """The figures of Run.summary in milliseconds, and the stalls above `slo` seconds."""
    s = run.summary()
    ms = lambda value: None if value is None else round(value * 1e3, 2)  # noqa: E731
    begin = min(r.arrival for r in run.requests.values())
    seconds = max(r.token_times[-1] for r in run.requests.values() if r.token_times) - begin
    return {
        "run": name, "requests": s["requests"], "ttft_p50_ms": ms(s["ttft"]["p50"]), "ttft_p99_ms": ms(s["ttft"]["p99"]),
        "tbt_p50_ms": ms(s["tbt"]["p50"]), "tbt_p99_ms": ms(s["tbt"]["p99"]), "tbt_max_ms": ms(s["tbt"]["max"]),
        "stalls": run.stalls(slo), "gaps": len(run.tbts), "seconds": round(seconds, 2),
        "output_tokens_per_s": round(s["output_tokens"] / seconds, 1),
        "mixed_share": None if s["mixed_share"] is None else round(s["mixed_share"], 3), "steps": s["steps"],
        "preemptions": s["preemptions"], "explain": run.meta.get("explain"),
    }  # fmt: skip


def serve(
    model: str, trace_name: str, policies: Sequence[str], budgets: Sequence[int], count: int | None, slo: float,
    keep: Path | None, peer: str | None = None, **options,
) -> dict:  # fmt: skip
    """Replays the trace for every policy and budget, then through the peer with the first budget. Policies that never cut
    get one budget, which holds the longest request. What cannot run is refused (ValueError) before the first replay."""
    import torch

    from minichunk.bench.machine import about
    from minichunk.options import Limits
    from minichunk.scheduler import make_policy
    from minichunk.workloads import load

    trace = load(trace_name, n=count)
    longest = max(r.prompt_tokens + r.output_tokens for r in trace)
    options.setdefault("overlap", torch.cuda.is_available())
    cells = []
    for name in policies:
        policy = make_policy(name)
        for budget in budgets if policy.may_cut else [max(longest, *budgets)]:
            Limits.of(policy, None, budget, None, options.setdefault("max_requests", 256), longest)
            cells.append((name, budget))
    if peer and torch.cuda.is_available() and not any(map(importlib.util.find_spec, ("flash_attn", "kernels"))):
        raise ValueError(
            f"{peer} runs with flash_attention_2 on a GPU, and flash-attn is not installed: "
            "pip install flash-attn --no-build-isolation, or leave out the peer"
        )
    rows = []
    for policy, budget in cells:
        run = replay(model, trace, policy, budget, max_model_len=longest, **options)
        rows.append(_said(row(f"{policy} {budget}", run, slo)))
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            run.save(keep / f"serve_{policy.replace('(', '_').replace(')', '')}_{budget}.json.gz")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if peer:
        rows.append(_said(row(f"{peer} {budgets[0]}", replay_transformers(model, trace, budgets[0]), slo)))
    return {
        **about(), "what": "a trace's arrivals replayed", "model": model, "trace": Path(trace_name).name, "slo_s": slo,
        "overlap": options["overlap"], "rows": rows,
    }  # fmt: skip


def _said(row: dict) -> dict:
    print({k: v for k, v in row.items() if k != "explain"}, file=sys.stderr, flush=True)
    return row
