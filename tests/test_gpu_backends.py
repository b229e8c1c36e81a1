"""The four backends on a card, on the same batches: each against the torch reference in float32.

    pytest --noconftest -m gpu tests/test_gpu_backends.py      (flash-attn and flashinfer-python installed, nvcc there)

FlashInfer compiles a kernel for each kind of layer at its first use: minutes, once.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minichunk.attention import LayerSpec, StepMeta, make_backend
from minichunk.attention.trial import TOLERANCE, scattered

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SMS = torch.cuda.get_device_properties(0).multi_processor_count
PACKAGES = {"flash_attn": "flash_attn", "flashinfer": "flashinfer"}
NAMES = [
    "triton",
    "flash_attn",
    "flashinfer:fa2",
    "flashinfer:default",
    "flashinfer:split",
    "flashinfer:split_fa3",
    "flashinfer:batch",
]
LAYERS = {
    "GQA 4": dict(),
    "MHA": dict(num_heads=8, num_kv_heads=8),
    "MQA": dict(num_heads=8, num_kv_heads=1),
    "group of 7": dict(num_heads=14, num_kv_heads=2),
    "window of 33": dict(sliding_window=33),
    "window of 1": dict(sliding_window=1),
    "soft cap": dict(softcap=3.0),
    "own scale": dict(scale=0.2),
    "head size 64": dict(head_dim=64, value_dim=64, scale=0.125),
}
checked = {}


def layer(**more):
    return LayerSpec(**{**dict(num_heads=16, num_kv_heads=4, head_dim=128, value_dim=128, scale=128**-0.5), **more})


def ready(name, spec):
    """The backend after its check for this kind of layer; None where it must refuse."""
    package = PACKAGES.get(name.partition(":")[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if spec.sliding_window and name == "flashinfer:batch":
        return None
    if (name, spec) not in checked:
        backend = make_backend(name, DEVICE)
        backend.check([spec], 256 if name == "flash_attn" else 16, DTYPE, DEVICE)
        checked[name, spec] = backend
    return checked[name, spec]


def compare(name, spec, sizes, seed=0, empty=None):
    """Same queries, keys and values for every backend, whatever its block size. Slots that hold no token are NaN for
    those that promise not to let them through, large for the packages, which mask after the product."""
    backend = ready(name, spec)
    if backend is None:
        return
    block_size = 256 if name == "flash_attn" else 16
    batch, tables = scattered(sizes, block_size)
    draw = torch.Generator("cuda").manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=draw, device=DEVICE).to(DTYPE)  # noqa: E731
    keys = [
        (make(h + n, spec.num_kv_heads, spec.head_dim), make(h + n, spec.num_kv_heads, spec.value_dim))
        for h, n in sizes
    ]
    query = make(batch.num_tokens, spec.num_heads, spec.head_dim)
    shape = (1 + max(map(max, tables)), block_size, spec.num_kv_heads)
    dirt = float("nan") if name == "triton" else 3.0
    cache = [torch.full((*shape, d), dirt, device=DEVICE, dtype=DTYPE) for d in (spec.head_dim, spec.value_dim)]
    for table, pair, (history, _) in zip(tables, keys, sizes):
        slots = torch.tensor(
            [table[p // block_size] * block_size + p % block_size for p in range(history)],
            dtype=torch.int64,
            device=DEVICE,
        )
        for pool, rows in zip(cache, pair):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, rows[:history])
    new = [torch.cat([pair[i][h:] for pair, (h, _) in zip(keys, sizes)]) for i in (0, 1)]
    wanted = torch.cat(
        [reference(query[a:b], *pair, spec) for a, b, pair in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], keys)]
    )
    if empty is not None:  # a sequence without rows, as a broken-off chunk leaves one
        batch = replace(
            batch, cu_seqlens_q=np.insert(batch.cu_seqlens_q, empty, batch.cu_seqlens_q[empty]),
            seq_lens_k=np.insert(batch.seq_lens_k, empty, 1), block_tables=np.insert(batch.block_tables, empty, 0, 0),
            chunks=[*batch.chunks, batch.chunks[0]],
        )  # fmt: skip
    meta = StepMeta.of(batch, DEVICE)
    backend.plan(meta)
    backend.append_kv(*new, *cache, meta)
    out = backend.attend(query, *cache, meta, spec)
    error = (out.float() - wanted).abs().nan_to_num(torch.inf).max().item()
    assert error < TOLERANCE[DTYPE], f"{name}: {error} for (history, rows) {sizes}; {backend.explain()}"


def reference(query, keys, values, spec):
    """Dense float32 attention of one sequence: query [q, H, d], keys and values [k, K, d] → [q, H, d]."""
    q, k = len(query), len(keys)
    group = spec.num_heads // spec.num_kv_heads
    wide = lambda x: x.float().repeat_interleave(group, 1)  # noqa: E731
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide(keys)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at, key = torch.arange(k - q, k, device=DEVICE)[:, None], torch.arange(k, device=DEVICE)[None]
    seen = key <= at
    if spec.sliding_window:
        seen &= key > at - spec.sliding_window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), wide(values))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.tuples(st.integers(0, 700), st.one_of(st.just(1), st.just(1), st.integers(1, 300))), min_size=1, max_size=9),
    seed=st.integers(0, 5), empty=st.booleans(),
)  # fmt: skip
def test_any_batch_any_kind_of_layer(name, kind, sizes, seed, empty):
    compare(name, layer(**LAYERS[kind]), sizes, seed, len(sizes) // 2 if empty else None)


TRAPS = {
    "causal is not the default": [(0, 64), (0, 33)],
    "rows with one key": [(0, 1), (0, 1), (0, 1)],
    "one decode": [(513, 1)],
    "decodes and a sequence without rows": [(5, 1), (255, 1), (256, 1), (16, 1)],
    "a chunk that starts inside a block": [(19, 30), (300, 1)],
    "a chunk far behind a long history": [(8000, 64), (8191, 1)],
    "a chunk of 2048 beside 64 decodes": [(6144, 2048), *[(4095, 1)] * 64],
    "256 decodes": [(n, 1) for n in range(900, 1156)],
    "decodes before, between and behind chunks": [(50, 1), (0, 40), (60, 1), (10, 25), (70, 1)],
    "histories of very different lengths": [(30000, 1), (3, 1), (0, 2)],
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", NAMES)
def test_traps(name, trap):
    compare(name, layer(num_heads=32, num_kv_heads=8), TRAPS[trap], empty=1 if "without rows" in trap else None)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("flashinfer")])
def test_no_plan_overflows_the_workspace(name):
    """Few KV heads and few sequences with long histories are cut into the most pieces; then many rows."""
    spec = layer(num_heads=32, num_kv_heads=4)
    for sizes in ([(40000, 1)], [(20000, 31)], [(40000, 1)] * 3, [(3000, 1)] * SMS, [(4000, 4096)], [(100, 60)] * 100):
        compare(name, spec, sizes)


def small_model():
    """Two layers with heads that all four serve, and weights as small as a new model's: rounding seldom changes a token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE, DTYPE)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(
    "attention", ["auto", "triton", "flash_attn", "flashinfer", "flashinfer:fa3", "flashinfer:batch"]
)
def test_an_engine_generates_what_the_reference_generates(attention, graphs):
    """Greedy tokens over chunks, decodes and mixed steps. Where bfloat16 rounds otherwise a token may change, and with it
    all that follow; a wrong kernel leaves hardly one."""
    from minichunk import Engine, SamplingParams

    package = PACKAGES.get(attention.partition(":")[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, n).tolist() for n in (5, 300, 40, 17, 90)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    options = dict(
        max_batch_tokens=64, max_requests=8, max_model_len=512, block_size=256 if attention == "flash_attn" else 16
    )
    model = small_model()
    with Engine(model, attention="torch", compile="off", **options) as engine:
        wanted = [c.token_ids for c in engine.generate(prompts, params)]
    with Engine(model, attention=attention, graphs=graphs, compile="off", check=True, **options) as engine:
        got = [c.token_ids for c in engine.generate(prompts, params)]
        assert engine.run.summary()["mixed_share"] > 0.2
        print(engine.explain())
    agree = sum(x == y for a, b in zip(got, wanted) for x, y in zip(a, b))
    assert agree >= 24, f"{agree} of 40 tokens agree: {got} {wanted}"
