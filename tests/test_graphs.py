"""Compiled layers and CUDA graphs: what a CPU can show of them. The rest is behind the mark `gpu`."""

import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minichunk import Engine, SamplingParams
from minichunk.attention.torch_backend import TorchAttention
from minichunk.blocks import BlockTable
from minichunk.compiled import merge_projections, share_products
from minichunk.families import forward_packed, probe, twin
from minichunk.graphs import (
    MOST_GRAPHS,
    SMALLEST_MIXED,
    Arrays,
    Bucket,
    fed,
    fill,
    find_bucket,
    make_buckets,
    num_bytes,
    views,
)
from minichunk.models import load
from minichunk.packing import PackedBatch, pack_tokens
from minichunk.request import Chunk, Request
from minichunk.runner import ModelRunner, chunk_logits

SIZES = (16, 16, 8, 24, 1, 33)  # tokens of the steps


class Counting:
    """A compiler that counts the graphs it is given and runs them as they are, after sharing equal products."""

    def __init__(self):
        self.graphs, self.saved = 0, 0

    def __call__(self, module, inputs):
        self.graphs += 1
        self.saved += share_products(module.graph)
        module.recompile()
        return module.forward


def six_layers():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model, **options):
    """Of two sequences whose chunks make steps of SIZES tokens."""
    runner = ModelRunner(model, probe(model), TorchAttention(), num_blocks=40, block_size=4, **options)
    ids = np.random.default_rng(0).integers(60, size=(2, 60)).tolist()
    steps, done = [], [0, 0]
    for size in SIZES:
        step = []
        for i, length in enumerate((size // 2, size - size // 2)):
            if length:
                step.append((i, done[i], length))
                done[i] += length
        steps.append(step)
    return chunk_logits(runner, ids, steps), runner


@pytest.mark.parametrize("merge", [False, True])
def test_one_layer_is_compiled_for_all_layers_and_sizes(merge):
    model, count = twin(six_layers()), Counting()
    wanted, _ = logits(model)
    found, runner = logits(model, compile=count, merge=merge)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert runner.mode == "compiled" and "compiled layers" in runner.explain()
    assert count.graphs <= 3
    assert count.saved == (3 * count.graphs if merge else 0)  # k and v beside q, up beside gate


@pytest.mark.parametrize("name", ["tiny:qwen3", "tiny:gemma2", "tiny:gemma3", "tiny:mistral"])
def test_families_that_differ_inside_a_layer(name):
    try:
        loaded = load(name)
    except ValueError:
        pytest.skip(f"no {name}")
    wanted, _ = logits(loaded.model)
    found, runner = logits(loaded.model, compile=Counting(), merge=True)
    assert runner.mode == "compiled", runner.explain()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_two_engines_on_one_model_do_not_meet():
    model = twin(six_layers())
    wanted, _ = logits(model)
    runners = [logits(model, compile=Counting()) for _ in range(2)]
    again = chunk_logits(runners[0][1], [[5] * 8], [[(0, 0, 8)]])
    torch.testing.assert_close(again, chunk_logits(runners[1][1], [[5] * 8], [[(0, 0, 8)]]))
    torch.testing.assert_close(runners[0][0], wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_that_cannot_be_compiled_runs_as_it_is_and_explain_says_so():
    class Odd(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden, **kwargs):
            if hidden.sum().item() == 12345.0:  # reads a value: no graph can hold that
                return hidden
            return self.layer(hidden, **kwargs)

    model = twin(six_layers())
    model.model.layers[3] = Odd(model.model.layers[3])
    wanted, _ = logits(model)
    found, runner = logits(model, compile=Counting())
    assert runner.mode == "eager" and "layers not compiled" in runner.explain()
    assert torch.equal(found, wanted)


def test_merged_projections_leave_the_other_modules_at_work_and_store_nothing_twice():
    model = six_layers()
    ids, rows = torch.arange(9), torch.arange(9)

    def causal(module, query, key, value, *, sinks=None, **_):
        k, v = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=True).transpose(1, 2)

    first, second = twin(model), twin(model)
    wanted = forward_packed(first, ids, ids, rows, causal)
    assert merge_projections(second) == 12
    torch.testing.assert_close(forward_packed(second, ids, ids, rows, causal), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(forward_packed(first, ids, ids, rows, causal), wanted)
    q, k = (getattr(first.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    with torch.no_grad():
        k.mul_(2)  # a change is seen by both
    torch.testing.assert_close(
        forward_packed(second, ids, ids, rows, causal),
        forward_packed(first, ids, ids, rows, causal),
        rtol=1e-5,
        atol=1e-6,
    )


# ------------------------------------------------------------------------------------------------------------ buckets


@pytest.mark.parametrize(
    "max_requests, budget", [(1, 1), (1, 2), (3, 7), (64, 512), (256, 256), (256, 16384), (1000, 8192)]
)
def test_every_batch_within_the_limits_has_a_bucket_that_is_not_much_larger(max_requests, budget):
    decodes, mixed = make_buckets(max_requests, budget, max_blocks=8)
    assert len(decodes) + len(mixed) <= MOST_GRAPHS
    assert all(b.tokens >= 2 for b in decodes + mixed)
    for seqs in range(1, max_requests + 1):
        bucket = find_bucket(batch_of(seqs, seqs), decodes, mixed)
        assert bucket.decodes and seqs <= bucket.seqs <= max(2 if max_requests < 600 else 16, 2 * seqs)
    for tokens in {2, 3, budget // 3, budget - 1, budget} & set(range(2, budget + 1)):
        for seqs in {1, min(max_requests, tokens - 1)}:
            bucket = find_bucket(batch_of(tokens, seqs), decodes, mixed)
            assert not bucket.decodes and tokens <= bucket.tokens and seqs <= bucket.seqs
            assert bucket.tokens <= max(1.25 * SMALLEST_MIXED, 1.8 * tokens)


def batch_of(tokens, seqs):
    """A batch with those sizes, for find_bucket."""
    batch = PackedBatch.__new__(PackedBatch)
    batch.token_ids, batch.seq_lens_k, batch.block_tables = np.zeros(tokens), np.zeros(seqs), np.zeros((seqs, 1))
    return batch


def mixed_batch(rng, block_size, num_blocks):
    """Decodes and chunks over blocks that lie anywhere."""
    free = rng.sample(range(num_blocks), num_blocks)
    chunks, tables = [], []
    for i in range(rng.randint(1, 5)):
        start, length = rng.choice([(rng.randint(1, 20), 1), (rng.randint(0, 9), rng.randint(1, 9))])
        request = Request(i, [rng.randrange(60) for _ in range(start + length)], max(1, start))
        request.num_computed = start
        chunks.append(Chunk.of(request, length))
        tables.append([free.pop() for _ in range(-(-(start + length) // block_size))])
    return PackedBatch.build(chunks, tables, block_size)


@pytest.mark.parametrize("seed", range(20))
def test_a_padded_batch_is_the_batch_and_rows_that_touch_the_spare_block_alone(seed):
    rng, block_size, num_blocks = random.Random(seed), 4, 50
    batch = mixed_batch(rng, block_size, num_blocks)
    bucket = Bucket(batch.num_tokens + rng.randint(0, 7), batch.num_seqs + rng.randint(0, 4), 9, False)
    buffer = torch.from_numpy(np.random.default_rng(seed).integers(0, 255, num_bytes(bucket), dtype=np.uint8))  # stale
    arrays = Arrays(*(x.numpy() for x in views(buffer, bucket)))
    fill(arrays, batch, spare_slot=num_blocks * block_size)
    t, s, n = batch.num_tokens, batch.num_seqs, len(batch.logits_rows)
    for name in ("token_ids", "positions", "slot_mapping"):
        assert np.array_equal(getattr(arrays, name)[:t], getattr(batch, name))
    assert np.array_equal(arrays.cu_seqlens_q[: s + 1], batch.cu_seqlens_q)
    assert np.array_equal(arrays.seq_lens_k[:s], batch.seq_lens_k)
    assert np.array_equal(arrays.logits_rows[:n], batch.logits_rows)
    assert np.array_equal(arrays.block_tables[:s, : batch.block_tables.shape[1]], batch.block_tables)
    # padding: valid inputs, written to the spare block; sequences without rows or keys
    assert not arrays.token_ids[t:].any() and not arrays.positions[t:].any() and not arrays.logits_rows[n:].any()
    assert (arrays.slot_mapping[t:] // block_size == num_blocks).all()
    assert (arrays.cu_seqlens_q[s:] == t).all() and not arrays.seq_lens_k[s:].any()


@pytest.mark.parametrize("seed", range(20))
def test_the_arrays_packed_at_once_are_those_of_pack_tokens_and_place(seed):
    rng, size = random.Random(seed), 4
    batch = mixed_batch(rng, size, 50)
    tables = [
        BlockTable(size, [int(b) for b in row[: -(-c.end // size)]]) for row, c in zip(batch.block_tables, batch.chunks)
    ]
    plain = PackedBatch.build(batch.chunks, tables, size, pack=lambda chunks: pack_tokens(chunks))
    for table in tables:
        table.as_array(len(table) - 1)  # part of it is known, the rest was appended since
    quick = PackedBatch.build(batch.chunks, tables, size)
    for name in ("token_ids", "positions", "cu_seqlens_q", "seq_lens_k", "logits_rows", "block_tables", "slot_mapping"):
        a, b = getattr(plain, name), getattr(quick, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name


def test_a_block_tables_array_follows_what_became_of_the_table():
    table = BlockTable(4, [7, 3])
    assert table.as_array(2).tolist() == [7, 3]
    table.block_ids.extend(range(40))
    assert table.as_array(42).tolist() == table.block_ids
    table.block_ids.clear()
    table.block_ids.extend([9, 8, 1])
    assert table.as_array(3).tolist() == [9, 8, 1]
    table.block_ids = [5, 6, 2]  # a step was undone
    assert table.as_array(3).tolist() == [5, 6, 2]


def test_tokens_of_the_step_before_take_their_places():
    last = torch.tensor([70, -1, 72, 73])
    feed, ids = torch.tensor([-1, 2, 0, -1, 1]), torch.tensor([10, 11, 12, 13, 14])
    assert fed(ids, feed, last).tolist() == [10, 72, 70, 13, 0]
    bucket = Bucket(7, 7, 2, True)
    arrays = Arrays(*(x.numpy() for x in views(torch.full((num_bytes(bucket),), 77, dtype=torch.uint8), bucket)))
    fill(arrays, None, 0, feed=feed.numpy())
    assert arrays.feed.tolist() == [-1, 2, 0, -1, 1, -1, -1]
    fill(arrays, None, 0)
    assert arrays.feed.tolist() == [-1] * 7


def test_a_batch_of_padding_alone():
    bucket = Bucket(8, 3, 2, False)
    arrays = Arrays(*(x.numpy() for x in views(torch.full((num_bytes(bucket),), 77, dtype=torch.uint8), bucket)))
    fill(arrays, None, spare_slot=40)
    assert not arrays.cu_seqlens_q.any() and not arrays.seq_lens_k.any() and not arrays.token_ids.any()
    assert (arrays.slot_mapping == 40).all()


def test_the_arrays_of_a_bucket_do_not_overlap():
    bucket = Bucket(5, 3, 7, False)
    buffer = torch.zeros(num_bytes(bucket), dtype=torch.uint8)
    for i, array in enumerate(views(buffer, bucket)):
        array.fill_(i + 1)
    for i, array in enumerate(views(buffer, bucket)):
        assert (array == i + 1).all() and array.data_ptr() % array.element_size() == 0


def test_on_a_cpu_nothing_is_compiled_and_explain_says_so():
    with Engine("tiny", max_model_len=64) as engine:
        assert engine.runner.mode == "eager"
        assert "graphs off" in engine.explain() and "compile off" in engine.explain()
        engine.warmup()


def test_a_backend_that_is_not_graph_safe_gets_no_graphs():
    model = twin(six_layers())
    runner = ModelRunner(model, probe(model), TorchAttention(), 8, 4, buckets=make_buckets(2, 8, 4))
    assert runner.graphs is None and "no graphs: what torch attention launches depends on more" in runner.explain()


# ---------------------------------------------------------------------------------------------------------- on a GPU

PROMPTS = [[(7 * i * i + 3 * i + s) % 500 + 3 for i in range(n)] for s, n in enumerate((1, 5, 33, 70, 120, 2))]


def outputs(**options):
    params = [SamplingParams(max_tokens=12 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    with Engine(
        **{"max_batch_tokens": 48, "max_requests": 5, "max_model_len": 256, "check": True, **options}
    ) as engine:
        return [c.token_ids for c in engine.generate(PROMPTS, params)], engine.explain()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "tiny:qwen3", "tiny:gemma2", "tiny:tied"])
def test_float32_on_the_gpu_gives_the_cpu_engines_tokens(model):
    wanted, _ = outputs(model=model, device="cpu")
    for options in (
        dict(),
        dict(compile="off"),
        dict(graphs="off"),
        dict(compile="off", graphs="off"),
        dict(overlap=True),
        dict(attention="torch"),
    ):
        found, explanation = outputs(model=model, device="cuda", dtype="float32", **options)
        assert found == wanted, (options, explanation)


@pytest.mark.gpu
def test_a_graph_writes_its_batchs_slots_and_the_spare_block_and_nothing_else():
    from minichunk.attention import make_backend

    loaded = load("tiny", device="cuda", dtype=torch.float32)
    num_blocks, block_size = 60, 4
    runner = ModelRunner(
        loaded.model, loaded.layers, make_backend("triton", torch.device("cuda")), num_blocks, block_size,
        compile=True, buckets=make_buckets(6, 64, 16),
    )  # fmt: skip
    rng = random.Random(0)
    for _ in range(30):
        batch = mixed_batch(rng, block_size, num_blocks)
        for tensor in (t for pair in runner.kv for t in pair):
            tensor.normal_()
        before = [t.clone() for pair in runner.kv for t in pair]
        runner.run(batch)
        torch.cuda.synchronize()
        assert runner.graphs.last is not None
        written = torch.zeros((num_blocks + 1) * block_size, dtype=torch.bool, device="cuda")
        written[torch.from_numpy(batch.slot_mapping).cuda()] = True
        written[-block_size:] = True
        for old, new in zip(before, (t for pair in runner.kv for t in pair)):
            same = (old == new).flatten(2).all(-1).flatten()
            assert same[~written].all()
            assert not same[torch.from_numpy(batch.slot_mapping).cuda()].any()


@pytest.mark.gpu
def test_bfloat16_is_as_near_to_float32_as_transformers_own_bfloat16_forward_is(capsys):
    """Same weights, rounded to bfloat16. The tolerance is transformers' own distance from its float32 forward, and a
    quarter more; greedy tokens that differ from the float32 model's are counted for both."""
    from minichunk.attention import make_backend
    from minichunk.shapes import random_model

    half = load("random:qwen3-0.6b", device="cuda", dtype=torch.bfloat16)
    runner = ModelRunner(
        half.model, half.layers, make_backend("triton", torch.device("cuda")), 64, 16,
        compile=True, merge=True, buckets=make_buckets(8, 64, 16),
    )  # fmt: skip
    own = random_model("qwen3-0.6b", device="cuda", dtype=torch.bfloat16).eval()
    ids = np.random.default_rng(0).integers(10000, size=(2, 200)).tolist()
    steps = [[(0, at, 31), (1, at, 33)] for at in (0,)] + [[(0, 31, 1), (1, 33, 60)], [(0, 32, 1), (1, 93, 1)]]
    steps += [[(0, 33 + i, 1), (1, 94 + i, 1)] for i in range(60)]
    found = chunk_logits(runner, ids, steps).float()
    ends = [(i, start + length - 1) for step in steps for i, start, length in step]
    with torch.inference_mode():
        tokens = torch.tensor(ids, device="cuda")
        theirs = own(input_ids=tokens, use_cache=False).logits.float()
        exact = own.float()(input_ids=tokens, use_cache=False).logits
    theirs, exact = (torch.stack([x[i, at] for i, at in ends]) for x in (theirs, exact))
    error, allowed = ((x - exact).norm() / exact.norm() for x in (found, theirs))
    flips = [int((x.argmax(-1) != exact.argmax(-1)).sum()) for x in (found, theirs)]
    with capsys.disabled():
        print(f"bfloat16: relative error {error:.4f} (transformers {allowed:.4f}), greedy tokens that differ from float32 in "
              f"{len(ends)} rows: {flips[0]} (transformers {flips[1]})")  # fmt: skip
    assert error <= 1.25 * allowed
