"""How close the simulator comes to published measurements: the tables of docs/simulator.md.

    python tools/check_simulator.py steps              seconds
    python tools/check_simulator.py latency            a minute
    python tools/check_simulator.py capacity           a quarter of an hour on one core (--workers for more)

Every published number is typed in here beside its source. Nothing is fetched.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from minichunk import workloads
from minichunk.costmodel import CostModel, Efficiency, fit, operators, split, work
from minichunk.simulator import capacity, simulate

# --- Vidur (Agrawal et al., MLSys'24), repository microsoft/vidur, MIT, data/profiling/compute: mlp.csv.
# Milliseconds of a step's layers without attention, embedding and output head: medians of all operators, times layers.
TOKENS = (1, 64, 128, 256, 512, 1024, 2048, 4096)
VIDUR = {
    ("A100-80-SXM", "llama-2-7b", 1): (9.3, 9.7, 12.2, 17.8, 33.4, 67.9, 133.4, 258.4),
    ("A100-80-SXM", "llama-2-7b", 2): (5.0, 5.3, 7.5, 10.6, 18.0, 32.4, 68.2, 127.1),
    ("A100-80-SXM", "llama-2-7b", 4): (3.1, 3.3, 4.1, 6.6, 10.2, 17.7, 33.9, 67.5),
    ("A100-80-SXM", "llama-3-8b", 1): (9.7, 11.2, 13.2, 19.5, 34.6, 75.1, 145.6, 273.6),
    ("A100-80-SXM", "llama-2-70b", 1): (89.4, 93.9, 108.5, 178.5, 326.8, 678.8, 1221.7, 2476.5),
    ("A100-80-SXM", "llama-2-70b", 4): (24.9, 26.8, 33.2, 51.0, 89.3, 183.8, 330.2, 640.8),
    ("A100-80-SXM", "llama-2-70b", 8): (14.2, 15.2, 18.6, 30.4, 51.8, 92.4, 183.4, 346.5),
    ("H100-SXM", "llama-2-7b", 1): (5.6, 5.9, 6.4, 9.2, 12.0, 21.0, 40.3, 83.5),
    ("H100-SXM", "llama-2-7b", 4): (2.0, 2.3, 2.5, 3.0, 4.3, 7.6, 13.4, 25.3),
    ("H100-SXM", "llama-2-70b", 1): (50.0, 50.7, 51.8, 61.1, 100.5, 234.8, 430.1, 881.4),
    ("H100-SXM", "llama-2-70b", 4): (14.3, 15.3, 15.9, 19.2, 30.0, 62.1, 110.6, 222.8),
    ("A40", "llama-2-7b", 1): (23.9, 30.0, 30.3, 44.6, 71.1, 136.9, 259.5, 522.9),
    ("A40", "llama-2-70b", 4): (63.9, 72.6, 75.0, 113.7, 180.8, 349.3, 691.1, 1318.5),
}
TAUGHT = [("llama-2-7b", 1), ("llama-2-7b", 4)]  # the rest is predicted
LAYERS = ("qkv", "kv_write", "o", "mlp", "norms")

# --- Sarathi-Serve (Agrawal et al., OSDI'24), repository microsoft/sarathi-serve, Apache-2.0, branch osdi-sarathi-serve,
# osdi-experiments: Yi-34B, two A100-80 PCIe. Milliseconds.
YI_PREFILL = {
    128: 48.1,
    512: 105.6,
    1024: 214.3,
    2048: 366.0,
    4096: 757.6,
    8192: 1863.3,
    16384: 4407.5,
}  # figure-2; 256 was its warm-up
YI_DECODE = {1: 46.8, 2: 47.5, 4: 48.8, 8: 69.7, 16: 77.3, 32: 87.9, 64: 127.8, 128: 189.3}  # figure-2
YI_CONTEXT = 1024  # of those decodes: our assumption, the file does not say
YI_TABLE_2 = [
    ("4 decodes", [(1024, 1)] * 4, 68.1),
    ("1,021 + 3 decodes", [(0, 1021)] + [(1024, 1)] * 3, 217.6),
    ("1,024", [(0, 1024)], 217.2),
]  # table-2
YI_CHUNKED = {  # figure-9: {prompt: {chunk: total}}
    2047: {512: 435.7, 1024: 444.2, 2048: 377.7},
    4095: {512: 922.0, 1024: 932.3, 2048: 793.9, 4095: 775.4},
    8191: {512: 1958.5, 1024: 1946.2, 2048: 1643.4, 8191: 1754.2},
    16383: {512: 4512.8, 1024: 4357.6, 2048: 3651.6, 16383: 4535.0},
}  # fmt: skip
# Table 4 of the paper: Yi-34B, ShareGPT, budget 1,024, 128 requests: (median TTFT, P99 TBT) in seconds. No rate is given.
YI_TABLE_4 = {"hybrid batching only": (0.53, 0.68), "chunked prefills only": (1.04, 0.17), "both": (0.76, 0.14)}

# The paper's section 5 and figures 10 and 12: capacity over vLLM's, by P99 TBT.
CAPACITY = [
    # model, gpu, tp, trace, SLO, budget, published ratio to prefill-first, to whole-prompt, source
    ("mistral-7b", "A100-80-PCIe", 1, "sharegpt-8k", 0.1, 512, 3.5, None, "fig. 12 at 100 ms (2.6 in the abstract)"),
    ("yi-34b", "A100-80-PCIe", 2, "sharegpt-8k", 0.2, 512, 3.7, 4.0, "section 5.1, strict"),
    ("yi-34b", "A100-80-PCIe", 2, "sharegpt-8k", 1.0, 2048, 1.65, None, "fig. 12 at 1 s"),
    ("llama-3-8b", "H200-SXM", 1, "azure-conv", 0.1, 512, None, None, ""),
]  # fmt: skip


def layers_fit(gpu: str):
    """Four numbers from 16 (A40: 8) measured steps of Llama-2-7B."""
    measured = [
        ([(0, n, False)], ms / 1e3, CostModel(model, gpu, tp))
        for (on, model, tp), row in VIDUR.items()
        if on == gpu and (model, tp) in TAUGHT
        for n, ms in zip(TOKENS, row)
    ]
    return fit(
        CostModel("llama-2-7b", gpu), measured, ("linear_compute", "linear_memory", "knee", "launch"), only=LAYERS
    )


def yi_fit():
    """The A100's layers as fitted above; three more numbers from 15 whole steps. Decode attention is held at 0.8."""
    layers = layers_fit("A100-80-SXM").model.efficiency
    model = CostModel("yi-34b", "A100-80-PCIe", 2, efficiency=replace(layers, attention_memory=0.8))
    steps = [([(0, n)], ms / 1e3) for n, ms in YI_PREFILL.items()]
    steps += [([(YI_CONTEXT, 1)] * n, ms / 1e3) for n, ms in YI_DECODE.items()]
    return fit(model, steps, ("attention_compute", "overhead", "per_request"))


def serving() -> Efficiency:
    """For capacity: the fitted kernels, but 3 ms a step beside them: with the overhead of the artifact's step timings a
    decode step of 32 would already take half of the paper's strict SLO, which is five such steps."""
    return replace(yi_fit().model.efficiency, overhead=0.003, per_request=0.0)


def row(*cells) -> None:
    print("| " + " | ".join(c if isinstance(c, str) else f"{c:.2f}" for c in cells) + " |")


def head(*cells) -> None:
    row(*cells)
    print("|" + "---|" * len(cells))


def vidur_ratios(gpu: str):
    """The fit, and {(model, tp): predicted / measured for each of TOKENS}."""
    found, ratios = layers_fit(gpu), {}
    for (on, model, tp), measured in VIDUR.items():
        if on == gpu:
            cost, ratios[model, tp] = CostModel(model, gpu, tp, efficiency=found.model.efficiency), []
            for n, ms in zip(TOKENS, measured):
                w = work([(0, n, False)])
                layers = [op for op in operators(model, w, tp) if op.name in LAYERS]
                ratios[model, tp].append(1e3 * cost.seconds_of(layers, w) / ms)
    return found, ratios


def yi_ratios():
    """The fit, and a row (step, measured ms, predicted / measured, "fitted" or "predicted") for each step."""
    found = yi_fit()
    names = [f"prefill {n:,}" for n in YI_PREFILL] + [f"{n} decodes" for n in YI_DECODE]
    measured = [*YI_PREFILL.values(), *YI_DECODE.values()]
    rows = [(name, ms, ratio, "fitted") for name, ms, ratio in zip(names, measured, found.ratios)]
    for name, chunks, ms in YI_TABLE_2:
        rows.append((f"{name} (table 2)", ms, 1e3 * found.model.seconds(chunks) / ms, "predicted"))
    for prompt, totals in YI_CHUNKED.items():
        for chunk, ms in totals.items():
            seconds = sum(found.model.seconds([c]) for c in split(prompt, chunk))
            rows.append((f"{prompt:,} in chunks of {chunk:,} (fig. 9)", ms, 1e3 * seconds / ms, "predicted"))
    return found, rows


def steps() -> None:
    print("### Layers without attention, predicted / measured (Vidur)\n")
    head("GPU, model, TP; tokens:", *(f"{n:,}" for n in TOKENS))
    fits = {}
    for gpu in dict.fromkeys(key[0] for key in VIDUR):
        fits[gpu], ratios = vidur_ratios(gpu)
        for (model, tp), values in ratios.items():
            row(f"{gpu}, {model}, {tp}{' (fitted)' if (model, tp) in TAUGHT else ''}", *values)
    for gpu, found in fits.items():
        print(f"\n{gpu}: {found}")
    found, rows = yi_ratios()
    print(f"\n### Yi-34B on two A100, predicted / measured (Sarathi-Serve)\n\n{found}\n")
    head("step", "measured, ms", "ratio", "")
    for name, ms, ratio, how in rows:
        row(name, f"{ms}", ratio, how)


def latency(requests: int) -> None:
    print(f"### Table 4 of Sarathi-Serve: Yi-34B, ShareGPT, budget 1,024, {requests} requests\n")
    cost = yi_fit().model
    policies = {
        "hybrid batching only": dict(policy="whole_prompt", max_batch_tokens=8192),
        "chunked prefills only": dict(policy=chunks_alone(), max_batch_tokens=1024),
        "both": dict(policy="mixed", max_batch_tokens=1024),
    }
    trace = workloads.sample("sharegpt-8k", requests, 0, max_total=8192)

    def run(name, rate):
        return simulate(workloads.poisson(trace, rate), cost, **policies[name])

    rates = [0.1 * k for k in range(2, 21)]
    rate = min(rates, key=lambda r: abs(np.median(run("both", r).ttfts) - YI_TABLE_4["both"][0]))
    print(
        f"The paper gives no rate. {rate:.1f} a second is where the simulated median TTFT of the third row comes nearest.\n"
    )
    head("", "TTFT P50 published", "simulated", "ratio", "TBT P99 published", "simulated", "ratio")
    for name, (ttft, tbt) in YI_TABLE_4.items():
        s = run(name, rate).summary()
        row(name, ttft, s["ttft"]["p50"], s["ttft"]["p50"] / ttft, tbt, s["tbt"]["p99"], s["tbt"]["p99"] / tbt)


def chunks_alone():
    """A policy: prompts are cut, but a step holds prompt chunks or decodes, never both; the two take turns."""
    prompts_turn = True

    def plan_step(running, waiting, budget, chunk_size):
        nonlocal prompts_turn
        decodes = [(r, 1) for r in running if r.is_decode][:budget]
        prompts, left = [], budget
        for r in [r for r in running if not r.is_decode] + list(waiting):
            length = min(r.num_left, left)
            prompts += [(r, length)] * (length > 0)
            left -= length
        now = prompts if prompts and (prompts_turn or not decodes) else decodes
        prompts_turn = now is decodes
        return now or prompts

    return plan_step


def capacities(rows: list[int], requests: int, workers: int, tolerance: float, artifact: bool) -> None:
    print(f"### Capacity: highest rate with P99 TBT ≤ SLO and median queueing ≤ 2 s, {requests} requests\n")
    head("model, GPU, trace", "SLO, s", "budget", "prefill_first", "whole_prompt", "mixed", "mixed / prefill_first", "published", "ratio", "mixed / whole_prompt", "published", "source")  # fmt: skip
    for model, gpu, tp, trace, slo, budget, to_vllm, to_orca, source in (CAPACITY[i] for i in rows):
        cost = CostModel(model, gpu, tp, efficiency=yi_fit().model.efficiency if artifact else serving())
        asked = workloads.sample(trace, requests, 0, max_total=8192)

        def rate(policy, **options):
            options |= dict(prefix_cache=False)  # the papers' systems had none
            found = capacity(
                asked, cost, slo, policy=policy, workers=workers, low=0.125, tolerance=tolerance, **options
            )
            return found.rate

        first, whole, mixed = rate("prefill_first"), rate("whole_prompt"), rate("mixed", max_batch_tokens=budget)
        gain, other = (mixed / r if r else float("nan") for r in (first, whole))
        row(
            f"{model} {tp}×{gpu} {trace}", f"{slo}", f"{budget}", first, whole, mixed, gain, to_vllm or "–",
            gain / to_vllm if to_vllm else "–", other, to_orca or "–", source,
        )  # fmt: skip


def offline(requests: int) -> None:
    print(f"\n### All at once: total tokens a second, {requests} requests\n")
    head("model, GPU, trace", "prefill_first", "whole_prompt", "mixed 512", "mixed 2048")
    for model, gpu, trace in [("mistral-7b", "A100-80-PCIe", "sharegpt-8k"), ("llama-3-8b", "H200-SXM", "azure-conv")]:
        cost = CostModel(model, gpu, efficiency=serving())
        asked = workloads.sample(trace, requests, 0, max_total=8192)
        total = sum(r.prompt_tokens + r.output_tokens for r in asked)
        kinds = [("prefill_first", None), ("whole_prompt", None), ("mixed", 512), ("mixed", 2048)]
        rates = [
            total / simulate(asked, cost, policy=p, max_batch_tokens=b, prefix_cache=False).duration for p, b in kinds
        ]
        row(f"{model} {gpu} {trace}", *(f"{r:,.0f}" for r in rates))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "latency", "capacity"])
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.04)
    parser.add_argument(
        "--artifact", action="store_true", help="capacity with the overheads fitted on the artifact, not 3 ms"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(CAPACITY)), help="of the capacity table")
    given = parser.parse_args()
    if given.what == "steps":
        steps()
    elif given.what == "latency":
        latency(128)
    else:
        capacities(given.rows, given.requests, given.workers, given.tolerance, given.artifact)
        if not given.artifact:
            offline(given.requests)
