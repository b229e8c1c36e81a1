"""Serving under load: a trace's arrivals replayed in real time, per policy and budget: TTFT, TBT, stalls, throughput.

A Run of each replay can be kept, for the scrubber and for the simulator's replay test.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from minichunk.record import Run


def replay(
    model: str, trace: Sequence, policy: str, budget: int, *, max_model_len: int, max_requests: int = 256,
    num_blocks: int | None = None, gpu_memory: float = 0.5, stop_after: float | None = None, **engine_options,
) -> Run:  # fmt: skip
    """Serves the trace once with an engine of its own; returns its Run. trace: workloads.TraceRequest.

    Token ids are made up from each request's number (the lengths and arrivals are what counts); every request runs to
    its recorded output length, without a prefix cache unless the trace says which blocks repeat.
    """
    from minichunk import Engine, SamplingParams
    from minichunk.workloads import prompt_ids

    shares = any(r.block_hashes for r in trace)
    with Engine(
        model, policy=policy, max_batch_tokens=budget, max_model_len=max_model_len, max_requests=max_requests,
        num_blocks=num_blocks, gpu_memory=gpu_memory, prefix_cache=shares, **engine_options,
    ) as engine:  # fmt: skip
        engine.warmup()
        vocab = engine.vocab_size
        requests = [
            (r.arrival, [t % vocab for t in prompt_ids(r, i)], SamplingParams(max_tokens=r.output_tokens, ignore_eos=True))
            for i, r in enumerate(trace)
        ]
        requests.sort(key=lambda r: r[0])
        engine.replay(requests)
        return engine.run


def table(runs: dict[str, Run], slo: float) -> list[dict]:
    """A row a run: the figures of Run.summary in milliseconds, and the stalls above `slo` seconds."""
    rows = []
    for name, run in runs.items():
        s = run.summary()
        ms = lambda value: None if value is None else round(value * 1e3, 2)  # noqa: E731
        rows.append({
            "run": name, "requests": s["requests"], "ttft_p50_ms": ms(s["ttft"]["p50"]), "ttft_p99_ms": ms(s["ttft"]["p99"]),
            "tbt_p50_ms": ms(s["tbt"]["p50"]), "tbt_p99_ms": ms(s["tbt"]["p99"]), "tbt_max_ms": ms(s["tbt"]["max"]),
            "stalls": run.stalls(slo), "output_tokens_per_s": round(s["output_tokens_per_s"], 1),
            "mixed_share": round(s["mixed_share"], 3), "steps": s["steps"],
        })  # fmt: skip
    return rows


def serve(
    model: str, trace_name: str, policies: Sequence[str], budgets: Sequence[int], count: int | None, slo: float,
    keep: Path | None, **options,
) -> dict:  # fmt: skip
    """Replays the trace for every policy and budget. Policies that never cut get a budget that holds the longest."""
    import torch

    from minichunk import __version__
    from minichunk.scheduler import make_policy
    from minichunk.workloads import load

    trace = load(trace_name, n=count)
    longest = max(r.prompt_tokens + r.output_tokens for r in trace)
    runs = {}
    for policy in policies:
        for budget in budgets if make_policy(policy).may_cut else [max(longest, *budgets)]:
            name = f"{policy} {budget}"
            runs[name] = replay(model, trace, policy, budget, max_model_len=longest, **options)
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                runs[name].save(keep / f"serve_{policy.replace('(', '_').replace(')', '')}_{budget}.json.gz")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "model": model, "trace": trace_name, "requests": len(trace), "slo_s": slo, "rows": table(runs, slo), "device": card,
        "versions": {"minichunk": __version__, "torch": torch.__version__}, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
