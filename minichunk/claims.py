"""Every numbered claim of the article that this course began with, checked.

data/claims.json holds each claim in our own words, a verdict with its reason and source, and the name of a function of
this module. The function computes what speaks for or against the claim: a small dict of numbers. `expect` in the file is
what it gave when the verdict was written; tests/test_claims.py runs them all again and fails when a number moves.

    verdicts    T true · C true under conditions · M misleading · W wrong · U unsupported
    kinds       computed (arithmetic, or code run on a CPU) · simulated · recorded (on an H200) · published (typed in from
                a paper) · opinion (nothing to compute)

What a paper printed is typed in here beside its source, and what a document says is said in the reason; all other
numbers come from the cost model, the simulator, the pool, the packer and the attention that the engine itself uses.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from minichunk import workloads
from minichunk.attention.base import StepMeta
from minichunk.attention.torch_backend import TorchAttention
from minichunk.blocks import BlockPool, BlockTable
from minichunk.costmodel import (
    ROOF,
    SHAPES,
    TYPICAL,
    CostModel,
    arithmetic_intensity,
    flops,
    gpu_named,
    kv_tokens_that_fit,
    operators,
    shape_named,
    split,
    tiled_pairs,
    traffic,
)  # fmt: skip
from minichunk.engine import Engine
from minichunk.packing import PackedBatch, pack_tokens
from minichunk.paths import data_path
from minichunk.record import Run
from minichunk.request import Chunk, Request, SamplingParams
from minichunk.scheduler import POLICIES, RequestView
from minichunk.shapes import tiny_model
from minichunk.simulator import capacity, simulate
from minichunk.workloads import TraceRequest

VERDICTS = {"T": "true", "C": "true under conditions", "M": "misleading", "W": "wrong", "U": "unsupported"}
KINDS = ("computed", "simulated", "recorded", "published", "opinion")
EVIDENCE: dict[str, Callable[[], dict]] = {}


# --- the file ----------------------------------------------------------------------------------------------------------
@cache
def load() -> dict[int, dict]:
    """{number: claim} of data/claims.json: id, part, claim, verdict, reason, source, kind, evidence, expect and, where
    0.1% is too strict, tolerance (relative, for floats; everything else must be equal)."""
    return {c["id"]: c for c in json.loads(data_path("claims.json").read_text(encoding="utf-8"))["claims"]}


def find(id: int) -> dict:
    """The claim with this number; KeyError with the range."""
    if id not in load():
        raise KeyError(f"no claim {id!r}: they are numbered {min(load())} to {max(load())}")
    return load()[id]


def evidence(id: int) -> dict:
    """Computes a claim's evidence anew. Most take milliseconds, the simulated ones up to a minute."""
    return dict(EVIDENCE[find(id)["evidence"]]())


def reason(id: int) -> str:
    """Why the verdict is what it is, the expected numbers put in."""
    return find(id)["reason"].format(**find(id)["expect"])


def moved(expect: dict, found: dict, tolerance: float = 1e-3) -> list[str]:
    """What differs between expected and computed evidence, in words; empty when all is as it was."""
    out = [f"{name}: expected, not computed" for name in expect.keys() - found.keys()]
    out += [f"{name}: computed {found[name]!r}, not expected" for name in found.keys() - expect.keys()]
    for name in expect.keys() & found.keys():
        was, now = expect[name], found[name]
        if isinstance(was, float) and isinstance(now, int | float) and not isinstance(now, bool):
            same = math.isclose(was, now, rel_tol=tolerance, abs_tol=1e-12)
        else:
            same = was == now and type(was) is type(now)
        if not same:
            out.append(f"{name}: was {was!r}, is {now!r}")
    return sorted(out)


def computes(fn: Callable[[], dict]) -> Callable[[], dict]:
    """Registers an evidence function; it runs once a process."""
    EVIDENCE[fn.__name__] = cache(fn)
    return EVIDENCE[fn.__name__]


# --- what many functions use ---------------------------------------------------------------------------------------------
SEVEN, A100, H200 = "llama-2-7b", "A100-80-SXM", "H200-SXM"
BATCH = [(0, 512)] * 2 + [(1024, 1)] * 30  # the article's batch; the decodes' 1,024 cached tokens are our assumption


@cache
def rush(policy: str = "mixed", budget: int | None = None, rate: float = 2.0) -> Run:
    """150 requests like ShareGPT's at `rate` a second: Mistral-7B on one A100, as in Sarathi-Serve."""
    requests = workloads.poisson(drawn("sharegpt-8k", 150), rate)
    cost = CostModel("mistral-7b", "A100-80-PCIe", efficiency=TYPICAL)
    return simulate(requests, cost, policy=policy, max_batch_tokens=budget, prefix_cache=False)


def fixed(prompt: int, output: int, n: int) -> tuple[TraceRequest, ...]:
    return (TraceRequest(0.0, prompt, output),) * n


def drawn(trace: str, n: int) -> tuple[TraceRequest, ...]:
    return tuple(workloads.sample(trace, n, 0, max_total=8192))


def capacity_of(requests: list[TraceRequest], policy: str, slo: float, budget: int | None, low: float = 0.5) -> float:
    """Requests a second that Mistral-7B on an A100 serves with P99 TBT ≤ slo and median queueing ≤ 2 s, to within 4%."""
    cost = CostModel("mistral-7b", "A100-80-PCIe", efficiency=TYPICAL)
    options = dict(policy=policy, max_batch_tokens=budget, prefix_cache=False)
    return capacity(requests, cost, slo, workers=1, low=low, tolerance=0.04, **options).rate


def chunks_of(*parts: tuple[int, int], names: str = "") -> list[Chunk]:
    """Chunks (start, length) of made-up requests, called by number or by the letters of `names`; a length of 1 after a start
    is a decode."""
    out = []
    for n, (start, length) in enumerate(parts):
        prompt = start if length == 1 and start else start + length
        request = Request(names[n] if names else n, list(range(start + length)), prompt, num_computed=start)
        out.append(Chunk.of(request, length))
    return out


# --- the idea (1–20) ---------------------------------------------------------------------------------------------------------
@computes
def mixed_equals_alone() -> dict:
    """A small model answers three prompts in mixed steps, and transformers answers each alone."""
    model, rng = tiny_model("llama"), np.random.default_rng(1)
    prompts = [rng.integers(3, 500, n).tolist() for n in (5, 40, 23)]
    with Engine(model, device="cpu", max_batch_tokens=16, max_requests=4, num_blocks=32, max_model_len=128) as engine:
        engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        run = engine.run
    differ = 0
    for prompt, record in zip(prompts, run.requests.values()):
        ids = list(prompt)
        for token in record.output_ids:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            differ += ids[-1] != token
    return {
        "mixed_steps": sum(s.is_mixed for s in run.steps),
        "tokens": run.output_tokens,
        "tokens_that_differ": differ,
    }


@computes
def budget_trades() -> dict:
    """Llama-2-7B, A100, 32 people read; the rest of each step is prompt."""
    cost = CostModel(SEVEN, A100, efficiency=TYPICAL)
    out = {}
    for budget in (256, 2048):
        seconds = cost.seconds([(1024, 1)] * 32 + [(0, budget - 32, False)])
        out |= {f"ms_{budget}": 1e3 * seconds, f"prompt_tokens_per_s_{budget}": (budget - 32) / seconds}
    return out


@computes
def longest_stall() -> dict:
    return {
        "longest_gap_s": max(rush("prefill_first").tbts),
        "longest_gap_mixed_s": max(rush("mixed", 512).tbts),
        "prompt_4096_s": CostModel(SEVEN, A100, efficiency=TYPICAL).seconds([(0, 4096)]),
    }


@computes
def prompt_is_linear_layers() -> dict:
    parts = flops(SEVEN, [(0, 4096)])
    return {
        "attention_share": parts["attention"] / parts["total"],
        "intensity": arithmetic_intensity(SEVEN, [(0, 4096)]),
        "ridge_a100": gpu_named(A100).ridge,
        "ridge_h200": gpu_named(H200).ridge,
    }


@computes
def decode_is_bandwidth() -> dict:
    decodes, cost = [(1024, 1)] * 30, CostModel(SEVEN, A100)
    parts = traffic(SEVEN, decodes)

    def compute_bound(n, name):
        return next(r["bound"] for r in cost.table([(0, 1)] * n) if r["name"] == name) == "compute"

    return {
        "intensity": arithmetic_intensity(SEVEN, decodes),
        "ridge": cost.gpu.ridge,
        "weights_gb": parts["weights"] / 1e9,
        "kv_read_gb": parts["kv_read"] / 1e9,
        "mlp_turns_at": next(n for n in range(1, 1000) if compute_bound(n, "mlp")),
        "o_turns_at": next(n for n in range(1, 1000) if compute_bound(n, "o")),
    }


@computes
def who_mixes() -> dict:
    shares = {p: rush(p, b).summary()["mixed_share"] for p, b in [("prefill_first", None), ("whole_prompt", None), ("mixed", 512)]}  # fmt: skip
    return {f"mixed_steps_{policy}": share for policy, share in shares.items()}


@computes
def budget_for_a_promise() -> dict:
    """Largest budget beside 32 decodes at 1,024 tokens."""
    out = {}
    for gpu, slo in [(A100, 0.05), (A100, 0.1), (H200, 0.05), (H200, 0.1)]:
        cost = CostModel(SEVEN, gpu, efficiency=TYPICAL)
        out[f"{gpu[:4].lower()}_{slo * 1e3:.0f}_ms"] = cost.largest_budget(slo, decodes=32)
    return out


@computes
def a_mixed_plan() -> dict:
    """The plan for 30 decodes and a prompt of 4,096 within 512 tokens."""
    decodes = [RequestView(n, 1025, 1024, 1000, float(n)) for n in range(30)]
    plan = POLICIES["mixed"].plan_step(decodes, [RequestView("P", 4096, 0, 4096, 99.0)], 512, None)
    return {
        "decodes": sum(r.is_decode for r, _ in plan),
        "prompt_tokens": sum(n for r, n in plan if not r.is_decode),
        "tokens": sum(n for _, n in plan),
    }


@cache
def _kernels() -> dict:
    table = json.loads(data_path("recorded/h200/kernels.json").read_text(encoding="utf-8"))["batches"]
    return {name: {k: c["median"] for k, c in batch["contenders"].items()} for name, batch in table.items()}


@computes
def one_call_on_an_h200() -> dict:
    """µs of one layer's attention: 2 × 512 chunks and 30 decodes at 2,048, 32 query and 8 KV heads of 128."""
    mixed = next(v for name, v in _kernels().items() if name.startswith("2×512"))
    return {
        "flash_attn_us": float(mixed["flash_attn"]),
        "flashinfer_prefill_us": float(mixed["flashinfer:fa2"]),
        "flashinfer_batch_us": float(mixed["flashinfer:batch"]),
        "flash_attn_over_batch": mixed["flash_attn"] / mixed["flashinfer:batch"],
    }


@computes
def who_takes_blocks() -> dict:
    """20 tokens enter a pool of 8 blocks: what the pool's grow takes, and what append_kv takes."""
    pool, table = BlockPool(8, 16), BlockTable(16)
    grown = len(pool.grow(table, 20))
    before = pool.num_free
    meta = StepMeta.of(PackedBatch.build(chunks_of((0, 20)), [table], 16), "cpu")
    key, cache_ = torch.ones(20, 1, 4), torch.zeros(8, 16, 1, 4)
    TorchAttention().append_kv(key, key, cache_, cache_.clone(), meta)
    written = int((cache_[:, :, 0, 0] != 0).sum())
    return {"taken_by_grow": grown, "taken_by_append": before - pool.num_free, "tokens_written": written}


SARATHI_SERVE = {  # Agrawal et al., OSDI'24: capacity over vLLM's
    "published_strict_mistral": 2.6, "published_100_ms": 3.5, "published_relaxed_yi": 1.65,
    "published_falcon": 5.6,
}  # fmt: skip


@computes
def capacity_gain() -> dict:
    """mixed over prefill_first: requests a second at a tail latency, and tokens a second with everything there at once."""
    requests, out = drawn("sharegpt-8k", 200), {}
    for slo, budget in ((0.1, 512), (0.5, 2048)):
        first, mixed = capacity_of(requests, "prefill_first", slo, None), capacity_of(requests, "mixed", slo, budget)
        name = f"{slo * 1e3:.0f}_ms"
        out |= {f"prefill_first_{name}": first, f"mixed_{name}": mixed, f"gain_{name}": mixed / first}
    cost = CostModel("mistral-7b", "A100-80-PCIe", efficiency=TYPICAL)
    kinds = ("prefill_first", None), ("mixed", 512), ("mixed", 2048)
    first, small, large = (
        simulate(requests, cost, policy=p, max_batch_tokens=b, prefix_cache=False).duration for p, b in kinds
    )
    return out | {"offline_512": first / small, "offline_2048": first / large, **SARATHI_SERVE}


TABLE_4 = {  # Sarathi-Serve: Yi-34B, two A100, ShareGPT, budget 1,024; seconds
    "published_ttft_p50": 0.76, "published_tbt_p99": 0.14, "published_hybrid_ttft_p50": 0.53, "published_hybrid_tbt_p99": 0.68,
}  # fmt: skip


@computes
def which_latency() -> dict:
    s = rush("mixed", 512, rate=2.5).summary()
    return {"tbt_p99_s": s["tbt"]["p99"], "ttft_p50_s": s["ttft"]["p50"], "ttft_p99_s": s["ttft"]["p99"], **TABLE_4}


@computes
def eight_chunks() -> dict:
    return {"chunks": len(split(4096, 512))}


@computes
def chunks_are_not_equal() -> dict:
    def shares(model, prompt, part="total"):
        each = [flops(model, [chunk])[part] for chunk in split(prompt, 512)]
        return each[0] / sum(each), each[-1] / sum(each), each[-1] / each[0]

    first, last, _ = shares(SEVEN, 4096)
    first_attention, last_attention, _ = shares(SEVEN, 4096, "attention")
    whole, chunked = 775.4, 922.0  # ms, Yi-34B on two A100, 4,095 tokens: Sarathi-Serve's artifact, figure 9
    return {
        "first_share": first, "last_share": last, "attention_first": first_attention, "attention_last": last_attention,
        "last_over_first_131k": shares("llama-3-8b", 131072)[2],
        "published_whole_over_chunk": whole / (chunked / 8), "published_cost": chunked / whole - 1,
    }  # fmt: skip


@computes
def starving() -> dict:
    first, mixed = (rush(*p).summary()["tbt"]["p99"] for p in (("prefill_first",), ("mixed", 512)))
    return {"tbt_p99_prefill_first_s": first, "tbt_p99_mixed_s": mixed, **TABLE_4}


@computes
def the_chunked_request_waits() -> dict:
    """A prompt of 4,096 comes beside 30 decodes at 1,024: its first token, whole and in a budget of 512."""
    cost, decodes = CostModel(SEVEN, A100, efficiency=TYPICAL), [(1024, 1)] * 30
    chunks = split(4096, 512 - 30)
    return {
        "whole_s": cost.seconds([(0, 4096)]),
        "chunked_s": sum(cost.seconds([*decodes, c]) for c in chunks),
        "others_longest_gap_chunked_s": max(cost.seconds([*decodes, c]) for c in chunks),
        "chunks_before_the_first_token": sum(not samples for _, _, samples in chunks),
    }


@computes
def first_come_is_not_urgent() -> dict:
    """A prompt of 4,096 came first, then a request that now decodes: who runs in a step of 512?"""
    prompt, decode = RequestView("P", 4096, 0, 4096, 0.0), RequestView("D", 101, 100, 90, 1.0)
    arrival = []
    left = 512
    for r in sorted([prompt, decode], key=lambda r: r.arrival):
        arrival.append(min(r.num_left, left))
        left -= arrival[-1]
    mixed = {r.id: n for r, n in POLICIES["mixed"].plan_step([decode], [prompt], 512, None)}
    return {"decode_by_arrival": arrival[1], "decode_mixed": mixed["D"], "prompt_mixed": mixed["P"]}


@computes
def leftover_order() -> dict:
    requests = drawn("sharegpt-8k", 200)
    leftover, mixed = (capacity_of(requests, p, 0.1, 512) for p in ("leftover", "mixed"))
    return {"leftover": leftover, "mixed": mixed, "mixed_over_leftover": mixed / leftover}


@computes
def one_product_for_all() -> dict:
    """Matrix products of a layer, and the rows of each."""
    layer = [op for op in operators(SEVEN, BATCH) if op.name in ("qkv", "o", "mlp")]
    return {"products": sum(len(op.gemms) for op in layer), "rows": layer[0].gemms[0][0]}


# --- counting (21–26) --------------------------------------------------------------------------------------------------------
def pair_counts(chunks: list[tuple[int, int]]) -> tuple[int, int]:
    """The article's "FLOPs" of prompts and of decodes, (length, 1) of them apart: Σ length² and Σ cached length."""
    return sum(n * n for _, n in chunks if n > 1), sum(start for start, n in chunks if n == 1)


def density_ratio(prompts: int, decodes: int) -> float:
    """The article's "compute density" of those two counts: (P + D) / max(P, D)."""
    return (prompts + decodes) / max(prompts, decodes)


def balance(chunks: list[tuple[int, int]], model: str = SEVEN, gpu: str = A100) -> float:
    """Seconds of compute over seconds of memory traffic at the roof: 1 is balanced, above it compute-bound."""
    return arithmetic_intensity(model, chunks) / gpu_named(gpu).ridge


@computes
def count_tokens() -> dict:
    tokens = sum(length for _, length in BATCH)
    smallest = next(b for b in (512, 1024, 2048) if b >= tokens)
    return {"tokens": tokens, "one_chunk_and_decodes": 512 + 30, "smallest_usual_budget": smallest}


@computes
def ratio_by_kind() -> dict:
    pairs = np.random.default_rng(0).integers(1, 10**6, (500, 2)).tolist()
    try:
        empty = density_ratio(0, 0)
    except ZeroDivisionError:
        empty = "division by zero"
    return {
        "prompts_only": density_ratio(2 * 512**2, 0), "decodes_only": density_ratio(0, 30 * 1024), "equal": density_ratio(512**2, 512**2),
        "batch": density_ratio(*pair_counts(BATCH)), "smallest": min(density_ratio(*p) for p in pairs),
        "largest": max(density_ratio(*p) for p in pairs), "empty": empty,
    }  # fmt: skip


@cache
def random_batches(n: int = 500) -> list[tuple[float, float]]:
    """(density ratio, balance) of n batches: 0 to 3 chunks of 64 to 1,024 tokens, 0 to 1,023 decodes with 64 to 4,096 cached."""
    rng, out = np.random.default_rng(0), []
    while len(out) < n:
        prompts = rng.integers(64, 1025, rng.integers(0, 4)).tolist()
        decodes = rng.integers(64, 4097, int(2 ** rng.uniform(0, 10)) if rng.random() < 0.8 else 0).tolist()
        if prompts or decodes:
            batch = [(0, p) for p in prompts] + [(c, 1) for c in decodes]
            out.append((density_ratio(*pair_counts(batch)), balance(batch)))
    return out


@computes
def ratio_against_balance() -> dict:
    ratio, true = np.array(random_batches()).T
    near_one, even = ratio < 1.1, (true > 0.8) & (true < 1.25)
    equal = [[(0, 512)] + [(1024, 1)] * 256, [(0, 1024)] + [(4096, 1)] * 256]
    rank = lambda v: np.argsort(np.argsort(v))  # noqa: E731
    return {
        "batch_ratio": density_ratio(*pair_counts(BATCH)), "batch_balance": balance(BATCH),
        "prompts_balance": balance([(0, 512)] * 2), "decodes_balance": balance([(1024, 1)] * 30),
        "ratio_2_short": balance(equal[0]), "ratio_2_long": balance(equal[1]),
        "near_one": int(near_one.sum()), "near_one_lowest_balance": float(true[near_one].min()),
        "near_one_highest_balance": float(true[near_one].max()), "balanced": int(even.sum()),
        "balanced_lowest_ratio": float(ratio[even].min()), "balanced_highest_ratio": float(ratio[even].max()),
        "rank_correlation": float(np.corrcoef(rank(ratio), rank(true))[0, 1]),
    }  # fmt: skip


@computes
def pairs_are_not_flops() -> dict:
    parts = flops(SEVEN, BATCH)
    first, second = (start * 512 + 512 * 513 // 2 for start in (0, 512))
    return {
        "linear_share": (parts["linear"] + parts["logits"]) / parts["total"], "tflop": parts["total"] / 1e12,
        "article_pairs_a_chunk": 512**2, "pairs_first_chunk": first, "pairs_second_chunk": second,
    }  # fmt: skip


@computes
def loop_variable() -> dict:
    """The article's sum, run on two requests."""
    r = [RequestView("A", 10, 9, 5, 0.0), RequestView("B", 20, 19, 5, 0.0)]
    try:
        total = eval("sum(1 * num_computed for request in requests)", {"requests": r})
    except NameError as error:
        total = type(error).__name__
    return {"as_written": total, "repaired": sum(1 * request.num_computed for request in r)}


# --- FlashAttention (27–39) ----------------------------------------------------------------------------------------------------
def attention(q, k, v, visible=None) -> np.ndarray:
    """Dense attention in float64. q [n, d], k and v [m, d]; row i sees visible[i] keys (default: aligned bottom-right)."""
    visible = len(k) - len(q) + 1 + np.arange(len(q)) if visible is None else visible
    scores = np.where(np.arange(len(k)) < visible[:, None], q @ k.T / math.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


@computes
def online_softmax() -> dict:
    """One sequence, nothing packed: keys in tiles of 64 with a running maximum and sum, and no row of scores kept."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 300, 32))
    out = np.zeros((300, 32))
    top, total = np.full(300, -np.inf), np.zeros(300)
    for at in range(0, 300, 64):
        keys = np.arange(at, min(at + 64, 300))
        scores = np.where(keys <= np.arange(300)[:, None], q @ k[keys].T / math.sqrt(32), -np.inf)
        above = np.maximum(top, scores.max(axis=1))
        weights, shrink = np.exp(scores - above[:, None]), np.exp(top - above)
        out, total, top = out * shrink[:, None] + weights @ v[keys], total * shrink + weights.sum(axis=1), above
    error = float(np.abs(out / total[:, None] - attention(q, k, v)).max())
    return {"equal": error < 1e-12, "tiles": len(range(0, 300, 64)), "sequences_packed": 1}


@computes
def packed_integers() -> dict:
    """Two chunks of 512 (512 and 0 cached) and three decodes, as the engine packs them."""
    tokens, _, cu, keys, _ = pack_tokens(chunks_of((512, 512), (0, 512), (700, 1), (900, 1), (1300, 1)))
    return {
        "rows": len(tokens), "keys": sum(keys), "cu_seqlens_q": cu, "cu_seqlens_k": [0, *np.cumsum(keys).tolist()],
    }  # fmt: skip


@computes
def scores_never_stored() -> dict:
    n, s = 4096, shape_named(SEVEN)
    return {
        "matrix_gb_a_layer": s.heads * n * n * s.dtype_bytes / 1e9, "qkvo_gb_a_layer": 4 * n * s.hidden * s.dtype_bytes / 1e9,
        "causal_skip": n * n / tiled_pairs(0, n, 128, 128),
    }  # fmt: skip


@cache
def qkvpacked_rows() -> list[tuple[str, float, float, bool]]:
    """(request, relative error, relative error of the varlen call with both lists, output is the row's own v) of each packed
    row of the course's batch: A decodes at length 8, B brings 12 tokens after 9, C is a new prompt of 3.

    qkvpacked has one cu_seqlens and no cache, so a row sees the new tokens of its chunk and nothing before them.
    """
    rng, out = np.random.default_rng(0), []
    for name, start, length in (("A", 7, 1), ("B", 9, 12), ("C", 0, 3)):
        q, k, v = rng.standard_normal((3, start + length, 64))
        truth = attention(q, k, v)[start:]
        packed, varlen = attention(q[start:], k[start:], v[start:]), attention(q[start:], k, v)
        for i in range(length):
            size = np.linalg.norm(truth[i])
            errors = (float(np.linalg.norm(x[i] - truth[i]) / size) for x in (packed, varlen))
            out.append((name, *errors, bool(np.allclose(packed[i], v[start + i]))))
    return out


@computes
def qkvpacked_on_a_mixed_batch() -> dict:
    rows = qkvpacked_rows()
    wrong = [r for r in rows if r[1] > 1e-6]
    return {
        "rows": len(rows), "wrong_rows": len(wrong), "requests_with_wrong_rows": " and ".join(sorted({r[0] for r in wrong})),
        "decode_error": rows[0][1], "decode_is_its_own_v": rows[0][3], "varlen_exact": all(r[2] < 1e-12 for r in rows),
    }  # fmt: skip


@computes
def bytes_of_qkv() -> dict:
    s = shape_named(SEVEN)
    token = s.qkv_width * s.dtype_bytes
    return {
        "bytes_a_token_a_layer": token, "tokens_of_200_mb": 200_000_000 // token, "chunk_mb_a_layer": 512 * token / 1e6,
        "chunk_mb": 512 * token * s.layers / 1e6, "batch_1027_mb_a_layer": 1027 * token / 1e6,
    }  # fmt: skip


PCIE = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}  # transfers a second on a lane, 128 of 130 bits are data (PCI-SIG)


def pcie_bandwidth(version: str, lanes: int = 16) -> float:
    """Bytes a second, one way."""
    return PCIE[version] * lanes * 128 / 130 / 8


@computes
def pcie_against_hbm() -> dict:
    one_way, a40, a80, h200 = pcie_bandwidth("4.0"), *(gpu_named(g).bandwidth for g in ("A100-40-SXM", A100, H200))
    return {
        "pcie_gb_s": one_way / 1e9, "pcie_both_ways_gb_s": 2 * one_way / 1e9, "a100_40_gb_s": a40 / 1e9,
        "a100_80_gb_s": a80 / 1e9, "h200_gb_s": h200 / 1e9, "hbm_over_pcie": a80 / one_way,
        "ms_at_64_gb_s": 1e3 * 200e6 / 64e9, "ms_from_hbm": 1e3 * 200e6 / a80,
    }  # fmt: skip


@computes
def shared_memory() -> dict:
    table = {g["name"]: g["smem_kb"] for g in json.loads(data_path("gpus.json").read_text(encoding="utf-8"))["gpus"]}
    return {"a100_kb": table[A100], "h200_kb": table[H200]}


@computes
def tiles_in_shared_memory() -> dict:
    """KiB of a query tile, a key tile and a value tile of 128-wide 2-byte heads."""
    size = lambda rows, keys: (rows + 2 * keys) * 128 * 2 / 1024  # noqa: E731
    return {"kib_128x128": size(128, 128), "kib_128x64": size(128, 64), "kib_64x128": size(64, 128), "published_slower": 0.28}  # fmt: skip


@computes
def split_keys_need_sums() -> dict:
    """A decode's keys in two halves on two multiprocessors: what each must write so that the halves can be joined."""
    q, (k, v) = (
        np.random.default_rng(0).standard_normal((1, 64)),
        np.random.default_rng(1).standard_normal((2, 1000, 64)),
    )
    halves = [(attention(q, k[h], v[h]), np.exp(q @ k[h].T / 8).sum()) for h in (slice(0, 300), slice(300, 1000))]
    (a, sum_a), (b, sum_b) = halves
    truth = attention(q, k, v)
    error = lambda x: float(np.linalg.norm(x - truth) / np.linalg.norm(truth))  # noqa: E731
    return {
        "with_sums_exact": error((a * sum_a + b * sum_b) / (sum_a + sum_b)) < 1e-12,
        "outputs_alone_error": error((a + b) / 2), "sum_bytes_per_output_byte": 4 / (128 * 2),
    }  # fmt: skip


@computes
def a_chunk_of_512() -> dict:
    s, peak = shape_named(SEVEN), gpu_named(A100).peak
    layer = flops(SEVEN, [(0, 512)])["attention"] / s.layers
    return {
        "attention_us_a_layer": 1e6 * layer / peak, "attention_us_a_layer_at_40_percent": 1e6 * layer / peak / 0.4,
        "attention_ms": 1e3 * layer * s.layers / peak / 0.4, "model_ms_at_peak": 1e3 * flops(SEVEN, [(0, 512)])["total"] / peak,
        "published_linear_ms": VIDUR_7B[512],
    }  # fmt: skip


FLASH_1 = {128: 9.0, 512: 0.78 / 0.21, 1024: 3.1, 4096: 3.5}  # FlashAttention (2205.14135), table 9, forward


@computes
def flash_against_standard() -> dict:
    return {f"published_{n}": x for n, x in FLASH_1.items()}


# --- PagedAttention (40–48) --------------------------------------------------------------------------------------------------
@computes
def table_round_trip() -> dict:
    """1,000 tokens in blocks scattered over a pool: every position has one place, and every place one position."""
    table = BlockTable(16, np.random.default_rng(0).permutation(200)[:63].tolist())
    slots = [table.slot(p) for p in range(1000)]
    return {
        "positions": 1000, "blocks": len(table), "places": len(set(slots)),
        "neighbours_side_by_side": sum(b == a + 1 for a, b in zip(table.block_ids, table.block_ids[1:])),
    }  # fmt: skip


@computes
def size_of_a_block() -> dict:
    """MiB of a block of 16 tokens over all layers; tokens in 16 MiB."""
    names = (SEVEN, "llama-3-8b", "llama-2-70b", "yi-34b", "gpt-3-175b")
    mib = {n: 16 * SHAPES[n].kv_bytes_per_token / 2**20 for n in names}
    short = lambda n: n.replace("-", "_").replace("llama_2", "llama2").replace("llama_3", "llama3")  # noqa: E731
    out = {f"mib_{short(n)}": x for n, x in mib.items()}
    out |= {f"tokens_in_16_mib_{short(n)}": 16 * 2**20 // SHAPES[n].kv_bytes_per_token for n in names[:3]}
    s = SHAPES[SEVEN]
    return out | {"kib_a_layer_7b": mib[SEVEN] * 1024 / s.layers, "cpu_pages_in_a_block": mib[SEVEN] * 2**20 / 4096}


@computes
def slot_map_is_redundant() -> dict:
    table = BlockTable(16, np.random.default_rng(1).permutation(500)[:256].tolist())
    kept = {p: table.block_ids[p // 16] * 16 + p % 16 for p in range(4096)}
    return {"entries": len(kept), "blocks": len(table), "differ": sum(table.slot(p) != s for p, s in kept.items())}


@cache
def mixed_slots() -> tuple[PackedBatch, torch.Tensor]:
    """A step of 2 chunks and 30 decodes over a scattered pool, and the slots its tokens go to."""
    chunks, size = chunks_of((0, 512), (512, 512), *[(1024 + 7 * n, 1) for n in range(30)]), 16
    order = iter(np.random.default_rng(0).permutation(4096).tolist())
    tables = [BlockTable(size, [next(order) for _ in range(-(-c.end // size))]) for c in chunks]
    batch = PackedBatch.build(chunks, tables, size)
    return batch, torch.from_numpy(batch.slot_mapping)


@computes
def append_scatters() -> dict:
    batch, slots = mixed_slots()
    key = torch.randn(batch.num_tokens, 2, 4, generator=torch.Generator().manual_seed(0))
    keys, values = torch.zeros(2, 4096, 16, 2, 4)
    TorchAttention().append_kv(key, -key, keys, values, StepMeta.of(batch, "cpu"))
    flat = keys.view(-1, 2, 4)
    return {
        "tokens": batch.num_tokens, "found_at_their_slots": int((flat[slots] == key).all(dim=(1, 2)).sum()),
        "slots_written": int((flat != 0).any(dim=(1, 2)).sum()),
    }  # fmt: skip


@computes
def slots_need_no_atomics() -> dict:
    """No slot is written twice in a step, so any order of plain stores gives the same bytes."""
    batch, slots = mixed_slots()
    key = torch.randn(batch.num_tokens, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for seed in range(5):
        order, cache_ = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed)), torch.zeros(65536, 8)
        cache_[slots[order]] = key[order]
        results.append(cache_)
    twice = sum(n > 1 for step in _run_slots() for n in Counter(step).values())
    return {
        "tokens": len(slots), "distinct_slots": len(set(slots.tolist())), "orders_tried": len(results),
        "orders_that_differ": sum(not torch.equal(r, results[0]) for r in results),
        "steps_of_a_run": len(rush("mixed", 512).steps), "slots_written_twice_in_a_step": twice,
    }  # fmt: skip


def _run_slots():
    """The slots of every step of a simulated run."""
    run = rush("mixed", 512)
    tables: dict = {}
    for step in run.steps:
        for id, blocks in step.grown.items():
            tables.setdefault(id, []).extend(blocks)
        yield [tables[id][p // 16] * 16 + p % 16 for id, start, n, _, _ in step.chunks for p in range(start, start + n)]
        for id in (*step.finished, *step.preempted):
            tables.pop(id, None)


@computes
def fragmentation() -> dict:
    """Percent of reserved slots without a token, 50 requests alive (median of 40 draws); (B-1)/2 slots a request for blocks
    of B, so the least mean length that keeps it below 3% (Kwon et al., SOSP'23, figure 2, for the published ones)."""
    from minichunk.lab.scenes_blocks import waste

    out = {}
    for trace in ("sharegpt-8k", "azure-conv"):
        name = trace.split("-")[0]
        for way, percents in waste(trace, 8192 if name == "sharegpt" else 15050).items():
            key = {
                "contiguous: a power of two": "pow2",
                "contiguous: exact length": "oracle",
                "blocks of 16": "blocks16",
            }
            key = key.get(way) or ("max" if way.startswith("contiguous: ") else None)
            out |= {f"{name}_{key}": float(np.median(percents))} if key else {}
    least = {f"length_for_3_percent_b{b}": math.ceil((b - 1) / 2 * (1 - 0.03) / 0.03) for b in (16, 256)}
    return (
        out | least | {"published_max": 79.6, "published_pow2": 73.2, "published_oracle": 61.8, "published_vllm": 3.7}
    )


# --- scheduling and tuning (49–56) -------------------------------------------------------------------------------------------
@computes
def share_against_decodes_first() -> dict:
    """Requests a second at P99 TBT ≤ 100 ms and a budget of 512: no fixed share, and prompts held to 30% or 70%."""
    loads = {
        "short_prompts": fixed(256, 512, 300), "long_prompts": fixed(1024, 256, 200),
        "code": drawn("azure-code", 300),
    }  # fmt: skip
    out = {}
    for load_, requests in loads.items():
        for name, policy in (("none", "mixed"), ("30", "share(0.3)"), ("70", "share(0.7)")):
            out[f"{load_}_{name}"] = capacity_of(requests, policy, 0.1, 512, low=2.0)
        tokens = [sum(getattr(r, f"{side}_tokens") for r in requests) for side in ("prompt", "output")]
        out[f"{load_}_prompt_share"] = tokens[0] / sum(tokens)
    return out


@computes
def leftover_starves() -> dict:
    """How often a policy that serves prompts first leaves a running decode without its token."""
    steps = starved = 0
    policy = POLICIES["leftover"]

    def plan_step(running, waiting, budget, chunk_size):
        nonlocal steps, starved
        plan = policy.plan_step(running, waiting, budget, chunk_size)
        given = {r.id for r, _ in plan}
        decodes = [r for r in running if r.is_decode]
        steps += bool(decodes)
        starved += any(r.id not in given for r in decodes)
        return plan

    requests = workloads.poisson(drawn("sharegpt-8k", 150), 2.0)
    cost = CostModel("mistral-7b", "A100-80-PCIe", efficiency=TYPICAL)
    run = simulate(requests, cost, policy=plan_step, max_batch_tokens=512, prefix_cache=False)
    return {
        "steps_with_decodes": steps, "share_with_a_decode_left_out": starved / steps,
        "tbt_p99_s": run.summary()["tbt"]["p99"], "tbt_p99_mixed_s": rush("mixed", 512).summary()["tbt"]["p99"],
    }  # fmt: skip


@computes
def one_number_hides_operators() -> dict:
    """Llama-3-8B, A100, 512 + 32 decodes: the share of peak in the step, and in two of its operators."""
    cost = CostModel("llama-3-8b", A100, efficiency=TYPICAL)
    chunks = [(0, 512)] + [(1024, 1)] * 32
    each = {r["name"]: r["flops"] / r["seconds"] / cost.gpu.peak for r in cost.table(chunks)}
    return {"step": cost.utilisation(chunks)[0], "mlp": each["mlp"], "attention": each["attention"]}


@cache
def both_sides(gpu: str = A100, decodes: int = 32) -> list[tuple[int, float, float, float, float]]:
    """(chunk, compute and bandwidth used by serial kernels at 100% efficiency, and with perfect overlap) for Llama-3-8B."""
    out = []
    for chunk in range(0, 4097, 16):
        batch = [(1024, 1)] * decodes + [(0, chunk)] * (chunk > 0)
        sides = [CostModel("llama-3-8b", gpu, efficiency=ROOF, overlapped=o).utilisation(batch) for o in (False, True)]
        out.append((chunk, *sides[0], *sides[1]))
    return out


@computes
def compute_85_with_bandwidth_60() -> dict:
    serial, overlapped = [], []
    for gpu in (A100, H200):
        for decodes in (32, 64, 128):
            for chunk, c, m, c_over, m_over in both_sides(gpu, decodes):
                serial += [(gpu, decodes, chunk)] * (c >= 0.85 and m >= 0.6)
                overlapped += [(gpu, decodes, chunk)] * (c_over >= 0.85 and m_over >= 0.6)
    at_512 = next(r for r in both_sides() if r[0] == 512)
    first = [c for g, d, c in overlapped if (g, d) == (A100, 32)]
    return {
        "compute_512": at_512[1], "bandwidth_512": at_512[2], "serial_settings_that_meet_both": len(serial),
        "overlapped_from": min(first), "overlapped_to": max(first), "published_nanoflow": 0.685, "published_tensorrt": 0.378,
    }  # fmt: skip


# Vidur (Agrawal et al., MLSys'24), microsoft/vidur (MIT), data/profiling/compute: ms of a step's layers without attention.
VIDUR_7B = {512: 33.4, 1024: 67.9, 2048: 133.4}  # Llama-2-7B, A100
VIDUR_70B = {  # Llama-2-70B: {(GPU, tensor-parallel degree): (256 tokens, 512 tokens)}
    ("A100", 1): (178.5, 326.8), ("A100", 2): (90.3, 170.4), ("A100", 4): (51.0, 89.3), ("A100", 8): (30.4, 51.8),
    ("H100", 1): (61.1, 100.5), ("H100", 2): (32.6, 56.7), ("H100", 4): (19.2, 30.0), ("H100", 8): (11.5, 17.7),
    ("A40", 1): (342.3, 751.4), ("A40", 2): (182.3, 336.2), ("A40", 4): (113.7, 180.8), ("A40", 8): (58.1, 94.4),
}  # fmt: skip


@computes
def bigger_chunks_when_compute_bound() -> dict:
    """TFLOP/s that the layers reach, and ms a step."""
    s = shape_named(SEVEN)
    rate = {n: 2e-9 * n * s.layers * s.layer_weights / ms for n, ms in VIDUR_7B.items()}
    return {f"tflop_s_{n}": r for n, r in rate.items()} | {f"published_ms_{n}": ms for n, ms in VIDUR_7B.items()}


@computes
def more_decodes_when_bandwidth_bound() -> dict:
    """Llama-3-8B, A100, decodes at 1,024 cached tokens: intensity, and what more decodes or a chunk do to it and to a step."""
    model, cost = "llama-3-8b", CostModel("llama-3-8b", A100)
    few, many, mixed = ([(1024, 1)] * n + [(0, c)] * bool(c) for n, c in ((64, 0), (128, 0), (64, 256)))
    out = {
        f"intensity_{k}": arithmetic_intensity(model, b)
        for k, b in (("64", few), ("128", many), ("64_and_chunk", mixed))
    }
    return out | {
        "ridge": cost.gpu.ridge, "attention_intensity": next(op.intensity for op in operators(model, many) if op.name == "attention"),
        "ms_64": 1e3 * cost.seconds(few), "ms_128": 1e3 * cost.seconds(many), "ms_64_and_chunk": 1e3 * cost.seconds(mixed),
    }  # fmt: skip


def gain_70b() -> dict[tuple[str, int], float]:
    """Tokens a second at 512 over 256, minus 1, by GPU and tensor-parallel degree."""
    return {key: 2 * a / b - 1 for key, (a, b) in VIDUR_70B.items()}


@computes
def chunk_256_to_512() -> dict:
    gains = gain_70b()
    cost = CostModel("llama-2-70b", A100, 4, efficiency=TYPICAL)
    step = lambda c: (c - 32) / cost.seconds([(1024, 1)] * 32 + [(0, c - 32, False)])  # noqa: E731
    return {f"{g.lower()}_tp{tp}": x for (g, tp), x in gains.items()} | {
        "lowest": min(gains.values()), "highest": max(gains.values()), "prompt_rate_beside_32_decodes": step(512) / step(256) - 1,
    }  # fmt: skip


@computes
def memory_of_a_larger_chunk() -> dict:
    """What 256 more tokens a step hold in one layer of Llama-2-70B on one of four GPUs: residual in and out, qkv, attention's
    output, gate, up and their product; each is freed before the next layer."""
    s, tp = shape_named("llama-2-70b"), 4
    elements = 2 * s.hidden + s.qkv_width // tp + s.heads * s.head_dim // tp + 3 * s.ffn // tp
    more = 256 * elements * s.dtype_bytes
    kept = [sum(length for _, length, _ in split(4096, c)) for c in (256, 512)]
    return {
        "mb_a_gpu": more / 1e6, "kv_tokens": more / (s.kv_bytes_per_token / tp), "kv_tokens_of_a_prompt_256": kept[0],
        "kv_tokens_of_a_prompt_512": kept[1],
    }  # fmt: skip


# --- the comparison and the example (57–66) ----------------------------------------------------------------------------------
@computes
def chunks_of_a_prompt_are_sequential() -> dict:
    run = rush("mixed", 512)
    ids = [[c[0] for c in step.chunks] for step in run.steps]
    prompts = Counter(c[0] for s in run.steps for c in s.chunks if not c[4])
    return {
        "steps": len(ids), "most_chunks_of_a_request_in_a_step": max(max(Counter(i).values()) for i in ids),
        "most_steps_of_a_prompt": max(prompts.values()),
    }  # fmt: skip


@computes
def varlen_removes_padding() -> dict:
    rows = sum(n for _, n in BATCH)
    long = next(v for name, v in _kernels().items() if name.startswith("1×2048"))
    return {
        "packed_rows": rows, "padded_rows": len(BATCH) * 512, "flash_attn_us": float(long["flash_attn"]),
        "flashinfer_batch_us": float(long["flashinfer:batch"]),
    }  # fmt: skip


@computes
def blocks_are_scattered() -> dict:
    """Of neighbouring blocks in the tables, how many lie side by side in memory, late in a run."""
    run = rush("mixed", 512)
    tables = run.tables_at(len(run.steps) * 3 // 4)
    pairs = [(a, b) for t in tables.values() for a, b in zip(t, t[1:])]
    return {"side_by_side": sum(b == a + 1 for a, b in pairs) / len(pairs), "published_kernel_slower_low": 0.2, "published_kernel_slower_high": 0.26}  # fmt: skip


@computes
def updating_is_the_small_part() -> dict:
    parts = traffic(SEVEN, BATCH)
    return {"kv_write_gb": parts["kv_write"] / 1e9, "kv_read_gb": parts["kv_read"] / 1e9, "read_over_write": parts["kv_read"] / parts["kv_write"]}  # fmt: skip


@computes
def requests_of_175b() -> dict:
    s, gpu = shape_named("gpt-3-175b"), gpu_named(A100)
    peak = 8 * gpu.peak / flops(s, [(0, 1)])["total"]
    room = kv_tokens_that_fit(s, A100, 8)
    alive = room // 1024
    free_links = replace(gpu, link=math.inf, link_latency=0.0)
    bound, linked = (
        alive / CostModel(s, g, 8, overlapped=True).seconds([(1023, 1)] * alive) for g in (free_links, gpu)
    )
    return {
        "tokens_s_at_peak": peak, "tokens_a_request": peak / 1200, "weights_gb": s.params * 2 / 1e9, "kv_tokens": room,
        "kv_tokens_a_request": room / 1200, "alive_at_1024": alive, "tokens_s_bound_at_1024": bound, "tokens_s_with_all_reduces": linked, "published_orca_requests_s": 6.81,
    }  # fmt: skip


@computes
def prefill_in_150_ms() -> dict:
    s, peak = shape_named("gpt-3-175b"), 8 * gpu_named(A100).peak
    fits = lambda share: max(n for n in range(1, 2000) if flops(s, [(0, n)])["total"] <= 0.15 * share * peak)  # noqa: E731
    return {"tokens_at_100_percent": fits(1.0), "tokens_at_50_percent": fits(0.5)}


@computes
def busy_is_not_efficient() -> dict:
    """One decode, Llama-2-7B, A100 at the roof: a kernel runs all the time."""
    compute, bandwidth = CostModel(SEVEN, A100).utilisation([(1024, 1)])
    return {"busy": 1.0, "compute": compute, "bandwidth": bandwidth}


@computes
def weights_of_175b() -> dict:
    s = shape_named("gpt-3-175b")
    small, large = (8 * gpu_named(g).memory / 1e9 for g in ("A100-40-SXM", A100))
    return {
        "params_billion": s.params / 1e9,
        "weights_gb": s.params * 2 / 1e9,
        "eight_40_gb": small,
        "eight_80_gb": large,
    }


@computes
def nothing_to_compute() -> dict:
    return {}


@computes
def tally() -> dict:
    """Verdicts over the claims themselves; the last one is about the article as a whole."""
    counts = Counter(c["verdict"] for c in load().values() if c["id"] < 66)
    return {VERDICTS[v].replace(" ", "_"): counts[v] for v in VERDICTS} | {"claims": sum(counts.values())}
