"""Models made here: random weights in two layers for tests (tiny), or in published shapes for timing (random)."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from minichunk.smollm2 import ModelError


def _rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


_TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=[0, 2],  # <|endoftext|> and <|im_end|>
    pad_token_id=0,
)
# What each variant is there to test.
TINY: dict[str, dict] = {
    "llama": dict(model_type="llama"),
    "mha": dict(model_type="llama", num_key_value_heads=4),
    "tied": dict(model_type="llama", tie_word_embeddings=True),
    "untied": dict(model_type="llama"),
    "qwen3": dict(model_type="qwen3"),
    "mistral": dict(model_type="mistral", sliding_window=6),
    "gemma2": dict(
        model_type="gemma2", sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=3.0,
        final_logit_softcapping=30.0, layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": dict(
        model_type="gpt_oss", sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_rope(1e4),
    ),
}  # fmt: skip
_LLAMA = dict(model_type="llama", bos_token_id=None, eos_token_id=None, pad_token_id=None)
_QWEN3 = dict(_LLAMA, model_type="qwen3")
# Published shapes: the config.json of Qwen/Qwen3-0.6B, meta-llama/Meta-Llama-3-8B, HuggingFaceTB/SmolLM2-135M and
# meta-llama/Llama-2-7b.
RANDOM: dict[str, dict] = {
    "qwen3-0.6b": dict(
        _QWEN3, vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_parameters=_rope(1e6), tie_word_embeddings=True,
    ),
    "llama-3-8b": dict(
        _LLAMA, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters=_rope(5e5), tie_word_embeddings=False,
    ),
    "smollm2-135m": dict(
        _LLAMA, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters=_rope(1e5), tie_word_embeddings=True,
    ),
    "llama-2-7b": dict(
        _LLAMA, vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
        rms_norm_eps=1e-5, rope_parameters=_rope(1e4), tie_word_embeddings=False,
    ),
}  # fmt: skip


def tiny_model(
    variant: str = "llama", seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Two layers of 64 with random weights, drawn in float32 on the CPU: the same everywhere for the same seed."""
    model = _from_shape({**_TINY, **_shape(TINY, "tiny", variant)}, torch.device(device), dtype)
    # Spread wide enough that the next token hangs on the whole context and greedy text does not run in a circle.
    return _fill(model, torch.Generator().manual_seed(seed), 0.3, torch.float32)


def random_model(
    variant: str, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A published shape with random weights, drawn on the device: for timing, where only the sizes count."""
    model = _from_shape(_shape(RANDOM, "random", variant), torch.device(device), dtype)
    return _fill(model, torch.Generator(device).manual_seed(seed), 0.02, dtype)


def _shape(table: dict[str, dict], kind: str, variant: str) -> dict:
    if variant not in table:
        raise ModelError(f"no model {kind}:{variant}; there are {', '.join(f'{kind}:{name}' for name in table)}")
    return table[variant]


def _from_shape(shape: dict, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this config with memory but no values in its weights, made directly on the device in the dtype."""
    config = AutoConfig.for_model(**shape)
    with torch.device(device), no_init_weights():
        # eager: some versions of transformers pick sdpa for Gemma2 by themselves, which leaves the soft cap out.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    model.tie_weights()
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator, std: float, drawn_in: torch.dtype) -> PreTrainedModel:
    """Normal weights in the order of the parameters, the norms near one."""
    norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    for name, weight in model.named_parameters():
        mean, spread = (norm, 0.1) if "norm" in name else (0.0, std)
        if "q_norm" in name or "k_norm" in name:
            mean = 2.0  # scores spread enough to look at a few tokens, not at all alike
        drawn = torch.empty(weight.shape, dtype=drawn_in, device=generator.device)
        weight.copy_(drawn.normal_(mean, spread, generator=generator))
    return model


# Byte-level tokens in which text, half characters and stop strings across tokens can be tested.
_WORDS = """ the of and to in is that for it as with was on be by are this have not from at or which an were you can
    all their there been one will would more when who what about some time them her than its into only other new two may
    then do first any my now such like our over man me even most made after also did many before must through years
    where much your way well down should because each just those people how too little state good very make world still own
    see work long here between both under never same another know while last might great old year off come since
    against right used take three""".split()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly 512 tokens (256 bytes, 253 beginnings of common words, 3 special ones), with a chat
    template. Text that holds no special token survives encode and decode unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = set(tokens), []
    for word in _WORDS:
        piece = "Ġ"  # the byte-level alphabet's space
        for letter in word:
            if piece + letter not in known and len(tokens) < 512:
                merges.append((piece, letter))
                known.add(piece + letter)
                tokens.append(piece + letter)
            piece += letter
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=special[2], pad_token=special[0], additional_special_tokens=[special[1]],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
