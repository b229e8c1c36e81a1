"""Which families run over a packed batch, against their own dense forward, and which are refused by name.

The packed side here is a naive cache of this file's own (`Cache`), so nothing of the engine is needed or trusted.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minichunk.families import (
    ATTENTION,
    UnsupportedModel,
    check_family,
    forward_packed,
    probe,
    text_config,
    twin,
    verify,
    verify_batch,
)

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SLIDING_FULL = ["sliding_attention", "full_attention"]
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_local_experts=4)
# model_type → (config, what the calls of the two layers bring beyond scaling)
FAMILIES = {
    "llama": ({}, {}),
    "qwen2": (dict(head_dim=None), {}),
    "qwen3": ({}, {}),
    "mistral": (dict(sliding_window=5), {"sliding_window": (5, 5)}),
    "gemma2": (
        dict(sliding_window=5, layer_types=SLIDING_FULL, attn_logit_softcapping=1.5, query_pre_attn_scalar=12),
        {"sliding_window": (5, None), "softcap": (1.5, 1.5), "scale": (12**-0.5, 12**-0.5)},
    ),
    "gemma3_text": (dict(sliding_window=5, layer_types=SLIDING_FULL), {"sliding_window": (5, None)}),
    "gpt2": (dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True),
             {"num_kv_heads": (4, 4), "scale": (8**-0.5, 8**-0.5 / 2)}),
    "gpt_neox": ({}, {"num_kv_heads": (4, 4)}),
    "opt": (dict(ffn_dim=48, word_embed_proj_dim=32), {"num_kv_heads": (4, 4)}),
    "phi3": (dict(head_dim=None), {}),
    "olmo2": ({}, {}),
    "smollm3": (dict(no_rope_layers=[1, 0]), {}),
    "granite": (dict(attention_multiplier=0.3), {"scale": (0.3, 0.3)}),
    "cohere": ({}, {}),
    "qwen3_moe": (MOE, {}),
    "deepseek_v3": (
        dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, first_k_dense_replace=2,
             num_key_value_heads=4, head_dim=4),
        {"num_kv_heads": (4, 4), "head_dim": (12, 12), "value_dim": (6, 6)},
    ),
    "gpt_oss": (
        dict(MOE, sliding_window=5, layer_types=SLIDING_FULL, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        {"sliding_window": (5, None), "has_sinks": (True, True)},
    ),
}  # fmt: skip


def build(model_type, **changes):
    config = AutoConfig.for_model(model_type, **{k: v for k, v in {**SMALL, **changes}.items() if v is not None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 or "sinks" in name or "bias" in name:
                    weight.normal_(0.0, 0.3)
    return model


class Cache:
    """Keys and values of every sequence and layer in plain tensors, and attention written out. `wrong` breaks it."""

    def __init__(self, model, wrong=None):
        self.model, self.wrong, self.kv = model, wrong, {}

    def logits_of(self, sequences, steps):
        return torch.cat([self.step(sequences, chunks) for chunks in steps])

    def step(self, sequences, chunks):
        self.chunks = chunks
        tokens = [t for i, start, length in chunks for t in sequences[i][start : start + length]]
        positions = [p for _, start, length in chunks for p in range(start, start + length)]
        rows = torch.tensor([length for *_, length in chunks]).cumsum(0) - 1
        return forward_packed(self.model, torch.tensor(tokens), torch.tensor(positions), rows, self)

    def __call__(self, module, query, key, value, *, scaling, sliding_window, softcap, sinks):
        outs, row = [], 0
        for sequence, start, length in self.chunks:
            new = slice(row, row + length)
            row += length
            slot = (sequence, module.layer_idx)
            past = self.kv.get(slot, (key[:, :, :0], value[:, :, :0]))
            k, v = torch.cat([past[0], key[:, :, new]], 2), torch.cat([past[1], value[:, :, new]], 2)
            self.kv[slot] = k, v
            outs.append(self.attend(query[:, :, new], k, v, start, scaling, sliding_window, softcap, sinks))
        return torch.cat(outs, 2).transpose(1, 2)  # [1, T, H, Dv]

    def attend(self, q, k, v, start, scaling, window, softcap, sinks):
        if self.wrong in ("window", "softcap", "sinks"):
            window, softcap, sinks = [
                None if self.wrong == name else it
                for name, it in (("window", window), ("softcap", softcap), ("sinks", sinks))
            ]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = start + torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        seen = (j <= i) if self.wrong != "causality" else (j <= i + 1)
        if window:
            seen &= j > i - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
            scores = torch.cat([scores, column], 3)
            return scores.softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_chunks_equals_its_own_dense_forward(family):
    changes, wanted = FAMILIES[family]
    model = build(family, **changes)
    check_family(model)
    copied = twin(model)
    layers = probe(copied)
    expected = dict(num_heads=(4, 4), num_kv_heads=(2, 2), head_dim=(8, 8), sliding_window=(None, None),
                    softcap=(None, None), has_sinks=(False, False)) | wanted  # fmt: skip
    for name, values in expected.items():
        assert tuple(getattr(layer, name) for layer in layers) == values, name
    assert verify(copied, layers, Cache(copied).logits_of) < 1e-5


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        ("bloom", dict(n_layer=2, n_head=4), "_supports_attention_backend"),
        ("mpt", dict(d_model=32, n_layers=2, n_heads=4), "_supports_attention_backend"),
        ("falcon", dict(alibi=True, head_dim=None), "_supports_attention_backend"),
        ("qwen3_next", dict(MOE, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=2,
                            linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=16),
         "_supports_attention_backend"),
        ("llama", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rope_type dynamic"),
        ("phi3", dict(head_dim=None, original_max_position_embeddings=32, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32}),
         "rope_type longrope"),
        ("gemma3_text", dict(sliding_window=5, layer_types=SLIDING_FULL, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}), "rope_type dynamic"),
        ("llama4_text", dict(MOE, intermediate_size_mlp=48, attention_chunk_size=8,
                             layer_types=["chunked_attention", "full_attention"]), "chunked_attention"),
        ("gemma3_text", dict(sliding_window=5, layer_types=SLIDING_FULL, use_bidirectional_attention=True),
         "bidirectional"),
        ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True), "cross attention"),
    ],
)  # fmt: skip
def test_refused_by_name(family, changes, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        check_family(build(family, **changes))


def test_refuses_a_model_without_head_and_what_is_no_model():
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        check_family(build("llama").model)
    with pytest.raises(UnsupportedModel, match="not a transformers model"):
        check_family(torch.nn.Linear(1, 1))


def test_probe_finds_layers_that_never_call():
    copied = twin(build("llama"))
    text_config(copied).num_hidden_layers = 3
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers=3.*layers \[0, 1\]"):
        probe(copied)


def test_probe_finds_a_layer_index_that_comes_twice():
    copied = twin(build("llama"))
    copied.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModel, match="twice for layer 0"):
        probe(copied)


def test_probe_finds_a_sliding_layer_without_a_window():
    copied = twin(build("gemma2", sliding_window=5, layer_types=SLIDING_FULL))
    copied.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 0 is of type sliding_attention.*sliding_window=None"):
        probe(copied)


def test_probe_finds_a_layer_that_is_not_causal():
    copied = twin(build("llama"))
    copied.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="layer 1 .* not causal"):
        probe(copied)


@pytest.mark.parametrize(
    "family, wrong", [("llama", "causality"), ("mistral", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_verify_finds_what_the_packed_side_forgot(family, wrong):
    copied = twin(build(family, **FAMILIES[family][0]))
    with pytest.raises(UnsupportedModel, match="relative error of"):
        verify(copied, probe(copied), Cache(copied, wrong).logits_of)


def test_verify_finds_nan_and_a_wrong_shape():
    copied = twin(build("llama"))
    layers, good = probe(copied), Cache(copied)
    with pytest.raises(UnsupportedModel, match="relative error of nan"):
        verify(copied, layers, lambda *batch: good.logits_of(*batch) * torch.nan)
    with pytest.raises(ValueError, match="one row a chunk"):
        verify(copied, layers, lambda *batch: Cache(copied).logits_of(*batch)[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verify_in_half_precision(dtype):
    copied = twin(build("llama").to(dtype))
    verify(copied, probe(copied), Cache(copied).logits_of)
    with pytest.raises(UnsupportedModel, match="relative error of"):
        verify(copied, probe(copied), Cache(copied, "causality").logits_of)


def test_verify_batch_covers_each_sequence_once_and_passes_the_window():
    copied = twin(build("mistral", sliding_window=30))
    sequences, steps = verify_batch(copied, probe(copied))
    assert len(sequences[0]) > 30
    for i, sequence in enumerate(sequences):
        chunks = [(start, length) for step in steps for j, start, length in step if j == i]
        assert [p for start, length in chunks for p in range(start, start + length)] == list(range(len(sequence)))
    assert any(len(step) == 2 and {1} < {length for *_, length in step} for step in steps)  # a chunk beside a decode


def test_twin_shares_weights_and_leaves_the_model_alone():
    model, prompt = build("gemma2", **FAMILIES["gemma2"][0]), torch.tensor([[5, 6, 7, 8]])
    implementation = model.config._attn_implementation

    def answer():
        return model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()

    before = answer()
    copied, second = twin(model), twin(model)
    between = answer()
    probe(copied)
    verify(second, probe(second), Cache(second).logits_of)
    assert before == between == answer()
    assert model.config._attn_implementation == implementation != ATTENTION == copied.config._attn_implementation
    for (name, own), (_, shared) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert own is shared, name
    assert not {id(m) for m in model.modules()} & {id(m) for m in copied.modules()}


def test_twin_of_a_model_in_training_mode_is_in_eval_mode():
    model = build("llama").train()
    assert not any(m.training for m in twin(model).modules()) and all(m.training for m in model.modules())


def test_twin_keeps_tied_embeddings_tied():
    copied = twin(build("llama", tie_word_embeddings=True))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def test_generate_on_a_twin_says_what_to_do():
    with pytest.raises(UnsupportedModel, match="generate on your own model"):
        twin(build("llama")).generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def test_forward_packed_computes_only_the_asked_rows_and_compiles_without_a_break():
    copied = twin(build("llama"))

    def call(module, query, key, value, *, scaling, sliding_window, softcap, sinks):
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return value.transpose(1, 2) * scaling

    tokens, positions, rows = torch.arange(3, 9), torch.arange(6), torch.tensor([2, 5])
    plain = forward_packed(copied, tokens, positions, rows, call)
    assert plain.shape == (2, 97)
    compiled = torch.compile(forward_packed, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(copied, tokens, positions, rows, call), plain, atol=1e-6)
