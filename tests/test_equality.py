"""Greedy float32 output equals transformers' own generate, whatever the engine's options are."""

import copy
import random
from functools import cache

import pytest
import torch
from transformers import GenerationConfig

from minichunk import Engine, SamplingParams
from minichunk.models import tiny_model

VARIANTS = ["llama", "mha", "tied", "untied", "qwen3", "mistral", "gemma2", "gpt_oss"]
model = cache(tiny_model)
_rng = random.Random(0)
HEAD = [_rng.randrange(3, 512) for _ in range(20)]  # what three prompts share
PROMPTS = [
    [_rng.randrange(3, 512)], [_rng.randrange(3, 512) for _ in range(11)], HEAD + [7, 8, 9], HEAD + [7, 8, 9, 10, 11],
    HEAD[:16], [_rng.randrange(3, 512) for _ in range(37)],
]  # fmt: skip
NEW, NEVER = 12, 10**6  # an eos that no model gives


def generated(own, prompt, new, **options):
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    out = own.generate(torch.tensor([prompt]), generation_config=config, attention_mask=torch.ones(1, len(prompt)))
    return out[0, len(prompt) :].tolist()


@cache
def reference(variant):
    return [generated(model(variant), p, NEW, eos_token_id=NEVER) for p in PROMPTS]


# Every budget, chunk size, block size, policy, prefix cache on and off, roomy and tight pools. A tight pool holds the
# longest request and hardly more.
ROOMY = dict(num_blocks=400)
OPTIONS = {
    "defaults": dict(num_blocks=64),
    "budget 1": dict(max_batch_tokens=1, max_requests=1, block_size=16, **ROOMY),
    "budget 5": dict(max_batch_tokens=5, max_requests=5, block_size=4, **ROOMY),
    "budget 5 without cache": dict(max_batch_tokens=5, max_requests=3, block_size=4, prefix_cache=False, **ROOMY),
    "chunks of 4": dict(max_batch_tokens=16, chunk_size=4, block_size=6, **ROOMY),
    "chunks of 3, tight": dict(max_batch_tokens=64, chunk_size=3, block_size=1, num_blocks=56),
    "tight": dict(max_batch_tokens=64, block_size=4, num_blocks=14),
    "tight without cache": dict(max_batch_tokens=17, block_size=5, num_blocks=11, prefix_cache=False),
    "blocks of 32, tight": dict(max_batch_tokens=40, block_size=32, num_blocks=3),
    "prefill_first": dict(policy="prefill_first", max_batch_tokens=60, block_size=4, **ROOMY),
    "prefill_first, tight": dict(policy="prefill_first", max_batch_tokens=50, block_size=2, num_blocks=28),
    "whole_prompt": dict(policy="whole_prompt", max_batch_tokens=50, block_size=8, **ROOMY),
    "whole_prompt, tight": dict(policy="whole_prompt", max_batch_tokens=50, block_size=3, num_blocks=18),
    "share(0.5)": dict(policy="share(0.5)", max_batch_tokens=9, block_size=4, **ROOMY),
    "share(0.01), tight": dict(policy="share(0.01)", max_batch_tokens=200, max_requests=4, block_size=1, num_blocks=49),
    "leftover": dict(policy="leftover", max_batch_tokens=7, block_size=7, **ROOMY),
    "leftover, tight": dict(policy="leftover", max_batch_tokens=20, chunk_size=6, block_size=4, num_blocks=13),
}


def answers(variant, options, order=None):
    with Engine(model(variant), check=True, **options) as engine:
        order = order or range(len(PROMPTS))
        done = engine.generate([PROMPTS[i] for i in order], SamplingParams(NEW, ignore_eos=True))
        tokens = dict(zip(order, (c.token_ids for c in done)))
        return [tokens[i] for i in sorted(tokens)], engine.run.summary()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_transformers_tokens_under_different_options(variant):
    """Each variant meets the two hardest sets of options, and its own turn of the others."""
    names = list(OPTIONS)
    turn = names[VARIANTS.index(variant) :: len(VARIANTS)]
    for name in dict.fromkeys(["chunks of 4", "tight", *turn]):
        assert answers(variant, OPTIONS[name])[0] == reference(variant), name


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_all_options_give_transformers_tokens(variant, name):
    tokens, summary = answers(variant, OPTIONS[name])
    assert tokens == reference(variant)
    if "tight" in name:
        assert summary["preemptions"] > 0
    elif "without cache" not in name and OPTIONS[name].get("max_requests") != 1:
        assert summary["preemptions"] == 0
    if "without cache" in name:
        assert summary["hit_tokens"] == 0


def test_prefix_hits_are_reached():
    assert answers("llama", OPTIONS["budget 1"])[1]["hit_tokens"] >= 16
    assert answers("mistral", OPTIONS["budget 5"])[1]["hit_tokens"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_arrival_order_does_not_matter(seed):
    order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
    for name in ("budget 5", "tight", "leftover, tight"):
        assert answers("llama", OPTIONS[name], order)[0] == reference("llama")


def test_requests_that_arrive_one_by_one():
    with Engine(model("qwen3"), check=True, **OPTIONS["chunks of 4"]) as engine:
        ids = []
        for prompt in PROMPTS:
            ids.append(engine.add(prompt, SamplingParams(NEW, ignore_eos=True)))
            engine.step()
            engine.step()
        while engine.has_work:
            engine.step()
        assert any(s.is_mixed for s in engine.run.steps)
        assert [engine.result(i).token_ids for i in ids] == reference("qwen3")


def test_the_name_of_a_tiny_model_and_the_model_object_are_the_same_model():
    with Engine("tiny:mistral", num_blocks=64, check=True) as engine:
        done = engine.generate(PROMPTS, SamplingParams(NEW, ignore_eos=True))
    assert [c.token_ids for c in done] == reference("mistral")


def test_a_stop_at_eos_is_that_of_generate():
    """eos is whatever the model says third; generate keeps it."""
    own = copy.deepcopy(model("llama"))
    eos = reference("llama")[1][2]
    own.generation_config.eos_token_id = [eos, 499]
    with Engine(own, num_blocks=64, check=True) as engine:
        done = engine.generate(PROMPTS, SamplingParams(NEW))
    assert [c.token_ids for c in done] == [generated(own, p, NEW, eos_token_id=[eos, 499]) for p in PROMPTS]
    assert done[1].finish_reason == "stop" and done[1].token_ids[-1] == eos


@pytest.mark.parametrize("name", ["chunks of 4", "tight"])
def test_repetition_penalty_is_that_of_generate_with_chunks_and_preemption(name):
    own = model("llama")
    want = [generated(own, p, NEW, eos_token_id=NEVER, repetition_penalty=1.6) for p in PROMPTS]
    assert want != reference("llama")
    with Engine(own, check=True, **OPTIONS[name]) as engine:
        done = engine.generate(PROMPTS, SamplingParams(NEW, ignore_eos=True, repetition_penalty=1.6))
        assert engine.run.summary()["preemptions"] > 0 or name != "tight"
    assert [c.token_ids for c in done] == want


@pytest.mark.parametrize("name", ["chunks of 4", "leftover, tight"])
def test_logprobs_are_those_of_a_dense_forward(name):
    own = model("gemma2")
    with Engine(own, check=True, **OPTIONS[name]) as engine:
        done = engine.generate(PROMPTS, SamplingParams(NEW, ignore_eos=True, logprobs=3))
    for completion in done:
        ids = completion.prompt_ids + completion.token_ids
        with torch.inference_mode():
            rows = own(torch.tensor([ids])).logits[0, len(completion.prompt_ids) - 1 : -1].double().log_softmax(-1)
        assert len(completion.logprobs) == NEW
        for row, token, got in zip(rows, completion.token_ids, completion.logprobs):
            assert got.token_id == token and got.logprob == pytest.approx(float(row[token]), abs=2e-4)
            assert list(got.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)


def test_two_engines_on_one_model_and_the_users_own_generate_between():
    own = tiny_model("gemma2")
    before = {name: p.clone() for name, p in own.state_dict().items()}
    implementation, want = own.config._attn_implementation, reference("gemma2")
    a = Engine(own, check=True, **OPTIONS["tight"])
    b = Engine(own, check=True, **OPTIONS["leftover"])
    ids = [(e, e.add(p, SamplingParams(NEW, ignore_eos=True))) for e in (a, b) for p in PROMPTS]
    for i in range(6):
        a.step()
        b.step()
        assert generated(own, PROMPTS[i], NEW, eos_token_id=NEVER) == want[i]
    while a.has_work or b.has_work:
        b.step()
        a.step()
    assert [e.result(i).token_ids for e, i in ids] == [*want, *want]
    assert own.config._attn_implementation == implementation
    assert all(torch.equal(p, before[name]) for name, p in own.state_dict().items())
    a.close()
    assert [c.token_ids for c in b.generate(PROMPTS, SamplingParams(NEW, ignore_eos=True))] == want
    b.close()
    assert generated(own, PROMPTS[2], NEW, eos_token_id=NEVER) == want[2]


def test_a_learners_attention_that_fails_in_a_layer_ends_the_step_and_nothing_else():
    from minichunk.attention import make_backend

    plain = make_backend("torch", torch.device("cpu"))

    class FailsOnce:
        name, steps, layers = "fails once", 0, 0
        check, explain, append_kv = plain.check, plain.explain, plain.append_kv

        def plan(self, meta):
            self.steps, self.layers = self.steps + 1, 0
            plain.plan(meta)

        def attend(self, *args):
            self.layers += 1
            if (self.steps, self.layers) == (3, 2):
                raise ZeroDivisionError("layer 1 of step 3")
            return plain.attend(*args)

    with Engine(model("llama"), check=True, attention=FailsOnce(), **OPTIONS["budget 5"]) as engine:
        ids = [engine.add(p, SamplingParams(NEW, ignore_eos=True)) for p in PROMPTS]
        for _ in range(2):
            engine.step()
        before = set(engine.pool._index)
        failed = engine.step()
        assert set(engine.pool._index) <= before and failed.finished
        while engine.has_work:
            engine.step()
        assert engine.pool.num_free == engine.num_blocks
        for i, want in zip(ids, reference("llama")):
            done = engine.result(i)
            if i in failed.finished:
                assert done.error == "ZeroDivisionError: layer 1 of step 3" and done.finish_reason == "error"
                assert done.token_ids == want[: len(done.token_ids)]
            else:
                assert done.token_ids == want
        assert 0 < len(failed.finished) < len(PROMPTS)
        again = engine.generate(PROMPTS, SamplingParams(NEW, ignore_eos=True))
        assert [c.token_ids for c in again] == reference("llama")


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_keys_of_one_request_that_turn_to_nan_do_not_reach_the_others(policy):
    """One token's embedding is NaN; its request fails, and its blocks are soon somebody else's."""
    own = copy.deepcopy(model("llama"))
    with torch.no_grad():
        own.get_input_embeddings().weight[500] = float("nan")
    prompts = [p for p in PROMPTS if 500 not in p]
    with Engine(own, policy=policy, max_batch_tokens=80, block_size=16, num_blocks=12, check=True) as engine:
        poison = [500, *range(3, 20)]
        bad = [engine.add(poison[:n], SamplingParams(NEW, ignore_eos=True)) for n in (1, 18)]
        done = engine.generate(prompts, SamplingParams(NEW, ignore_eos=True))
        want = [tokens for p, tokens in zip(PROMPTS, reference("llama")) if 500 not in p]
        for completion, tokens in zip(done, want):
            if 500 not in tokens:
                assert completion.token_ids == tokens
        assert {engine.result(i).finish_reason for i in bad} == {"error"}
        assert engine.pool.num_free == 12


@pytest.mark.smollm2
def test_smollm2_gives_transformers_tokens():
    from transformers import AutoModelForCausalLM

    from minichunk.models import load

    loaded = load("smollm2")
    texts = ["The capital of France is", "Once upon a time there was a cat who", "1, 2, 3, 4, 5, 6,"]
    prompts = [loaded.tokenizer(t)["input_ids"] for t in texts]
    prompts.append((prompts[1] * 9)[:70])
    own = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32, attn_implementation="sdpa").eval()
    own.load_state_dict(loaded.model.state_dict())
    want = [generated(own, p, 10, eos_token_id=2) for p in prompts]
    del own
    for options in (
        dict(max_batch_tokens=24, num_blocks=32),
        dict(max_batch_tokens=64, chunk_size=9, num_blocks=6, policy="leftover"),
    ):
        with Engine("smollm2", check=True, **options) as engine:
            assert [c.token_ids for c in engine.generate(prompts, SamplingParams(10))] == want
            assert any(s.is_mixed for s in engine.run.steps)
