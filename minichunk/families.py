"""Which transformers models can be run over a packed batch, and how.

A transformers model calls one function for attention, found by name in `AttentionInterface`. Ours hands the queries,
keys and values of the packed tokens to a callable that travels with the forward as the keyword `minichunk=`; where the
keys of earlier tokens lie is that callable's business:

    model(input_ids [1, T], position_ids [1, T], minichunk=call)
        layer 0 … N-1:  attention(module, query [1, H, T, D], key, value)  →  call(module, query, key, value, …)

No mask is registered under our name, so transformers builds none and the callable owns causality.
What cannot work that way is refused by name (`check_family`), by what the calls show (`probe`), or by its numbers
(`verify`).
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from minichunk.attention.base import LayerSpec

ATTENTION = "minichunk"
# What `verify` allows, largest difference over largest logit. In half precision the order of additions alone moves the
# logits of a deep model by a few percent; a wrong mask or position moves them by their own size.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


class UnsupportedModel(ValueError):
    """This model would come out wrong or not at all over a packed batch; the message says why."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    minichunk: Callable | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv] → ([1, T, H, Dv], None).

    All is handed to `minichunk(module, query, key, value, scaling=, sliding_window=, softcap=, sinks=)`, which returns
    [1, T, H, Dv]. Which layer it is stands in `module.layer_idx`. The checks are on Python values only, so that
    torch.compile sees none of them.
    """
    if minichunk is None:
        raise UnsupportedModel(
            "attention was called without minichunk=: this is an engine's twin, run it with forward_packed and call "
            "generate on your own model, or the model does not pass keywords on to its attention"
        )
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings a mask of its own, which a packed batch cannot honour")
    if dropout:
        raise UnsupportedModel(f"{type(module).__name__} asks for dropout {dropout}: call model.eval() first")
    if kwargs.get("is_causal") is False or kwargs.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__} asks for attention that is not causal, or for a position bias")
    out = minichunk(
        module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out, None


AttentionInterface.register(ATTENTION, attention)


def forward_packed(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, rows: Tensor, call: Callable
) -> Tensor:
    """token_ids int64 [T], positions int64 [T], rows int64 [n] → logits [n, V] of those packed rows.

    model: a `twin`. call: see `attention`. The model keeps no cache of its own.
    """
    return model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        minichunk=call,
    ).logits[0]


def twin(model: PreTrainedModel, implementation: str = ATTENTION) -> PreTrainedModel:
    """The same weights in modules of their own, with our attention, in eval mode.

    Parameters and buffers are shared (no memory, and a change of a weight is seen by both); `model` is not changed, and
    its own generate goes on working.
    """
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    copied.set_attn_implementation(implementation)
    if text_config(copied)._attn_implementation != implementation:
        raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
    return copied.eval()


def text_config(model: PreTrainedModel) -> Any:
    """The config of the language model, which multimodal models nest."""
    return model.config.get_text_config(decoder=True)


def check_family(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel, by name, for a model whose structure a packed batch cannot honour. Runs nothing."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{name} is not a transformers model")
    reason = next(_reasons(model, model.config, text_config(model)), None)
    if reason:
        raise UnsupportedModel(f"{name} ({model.config.model_type}) is not supported: {reason}")


def _reasons(model: PreTrainedModel, config: Any, text: Any) -> Iterator[str]:
    if not model._supports_attention_backend:
        yield "it does not call transformers' attention interface (_supports_attention_backend is False)"
    for each in (config, text):
        if getattr(each, "is_encoder_decoder", False) or getattr(each, "add_cross_attention", False):
            yield "it has an encoder or cross attention"
        if getattr(each, "use_bidirectional_attention", None) or getattr(each, "is_causal", None) is False:
            yield "its attention is bidirectional"
        for key in ("rope_parameters", "rope_scaling"):
            for kind in sorted(_rope_types(getattr(each, key, None)) & {"dynamic", "longrope", "su"}):
                yield f"rope_type {kind}: its rotations depend on the longest sequence of the batch"
        unknown = set(getattr(each, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if unknown:
            yield f"layers of type {', '.join(sorted(map(str, unknown)))}"
    if model.get_output_embeddings() is None:
        yield "it has no language-model head (load it with AutoModelForCausalLM)"
    accepted = inspect.signature(model.forward).parameters
    missing = {"input_ids", "position_ids", "use_cache", "logits_to_keep"} - accepted.keys()
    if missing:
        yield f"its forward does not take {', '.join(sorted(missing))}"
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        yield "its forward does not take further keywords"


def _rope_types(rope: Any) -> set[str]:
    """Every rope_type named in rope_parameters: one dict, or one per layer type, under the new key or the old `type`."""
    if not isinstance(rope, dict):
        return set()
    found = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    return found.union(*(_rope_types(value) for value in rope.values()))


def probe(model: PreTrainedModel) -> list[LayerSpec]:
    """Runs one token through a twin and writes down what each layer's call asks for, in order of layer_idx.

    Raises UnsupportedModel when the calls do not make one layer each, or a call cannot be served.
    """
    text, seen = text_config(model), {}

    def record(module, query, key, value, *, scaling, sliding_window, softcap, sinks):
        index = getattr(module, "layer_idx", None)
        if index is None or index in seen:
            raise UnsupportedModel(f"{type(module).__name__} was called twice for layer {index}, or has no layer_idx")
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(f"layer {index} ({type(module).__name__}) is not causal")
        seen[index] = _layer_spec(index, query, key, value, scaling, sliding_window, softcap, sinks)
        # [1, T, H, Dv]: one token attends to itself alone
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    device = model.get_input_embeddings().weight.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        forward_packed(model, zero, zero, zero, record)
    count = text.num_hidden_layers
    if sorted(seen) != list(range(count)):
        raise UnsupportedModel(
            f"{type(model).__name__} has num_hidden_layers={count}, but attention was called for layers {sorted(seen)}: "
            "the others keep a state or an attention that a packed batch cannot honour"
        )
    _check_windows(seen, getattr(text, "layer_types", None) or [])
    return [seen[index] for index in range(count)]


def _layer_spec(index, query, key, value, scaling, sliding_window, softcap, sinks) -> LayerSpec:
    shapes = [tuple(t.shape) for t in (query, key, value)]
    heads, kv_heads, head_dim, value_dim = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    wanted = [(1, heads, 1, head_dim), (1, kv_heads, 1, head_dim), (1, kv_heads, 1, value_dim)]
    if shapes != wanted or heads % kv_heads:
        raise UnsupportedModel(f"layer {index} called attention with query, key, value of shapes {shapes}")
    if sinks is not None and sinks.numel() != heads:
        raise UnsupportedModel(f"layer {index} brings {sinks.numel()} sinks for {heads} heads")
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedModel(f"layer {index} brings sliding_window={sliding_window}")
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    softcap = float(softcap) if softcap else None
    return LayerSpec(heads, kv_heads, head_dim, value_dim, scale, sliding_window, softcap, sinks is not None)


def _check_windows(layers: dict[int, LayerSpec], layer_types: Sequence[str]) -> None:
    for index, kind in enumerate(layer_types):
        window = layers[index].sliding_window
        if (kind == "sliding_attention") != (window is not None):
            raise UnsupportedModel(f"layer {index} is of type {kind}, but its call brought sliding_window={window}")


def verify(model: PreTrainedModel, layers: Sequence[LayerSpec], logits_of: Callable[[list, list], Tensor]) -> float:
    """Runs a short mixed batch and compares with the model's own dense forward. Returns the relative error.

    model: a `twin`; layers: its `probe`. `logits_of(sequences, steps)` is the packed side, and the caller's:
        sequences  two lists of token ids, computed from an empty cache
        steps      lists of (sequence, start, length): the chunks of one step, in packed order; each sequence's chunks
                   come in order and cover it once
        returns    float logits [number of chunks, V]: the row of each chunk's last token, step by step, in that order
    Raises UnsupportedModel when the largest difference exceeds TOLERANCE[dtype] times the largest logit.
    """
    sequences, steps = verify_batch(model, layers)
    with torch.inference_mode():
        packed = logits_of(sequences, steps).float()
        dense_model = twin(model, "eager")
        weight = model.get_input_embeddings().weight
        dense = [
            dense_model(input_ids=torch.tensor([s], device=weight.device), use_cache=False).logits[0] for s in sequences
        ]
        wanted = torch.stack([dense[i][start + length - 1] for step in steps for i, start, length in step]).float()
    if packed.shape != wanted.shape:
        raise ValueError(f"logits_of must return {tuple(wanted.shape)}, one row a chunk, got {tuple(packed.shape)}")
    scale, worst = wanted.abs().max().item(), (packed - wanted).abs().max().item()
    error, allowed = worst / scale, _tolerance(weight)
    if not error <= allowed:  # NaN fails too
        raise UnsupportedModel(
            f"{type(model).__name__}: a mixed batch differs from the model's own forward by {worst:.3g} where the largest "
            f"logit is {scale:.3g}: a relative error of {error:.2g}, allowed is {allowed:.2g} in {weight.dtype}"
        )
    return error


def verify_batch(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> tuple[list, list]:
    """Two sequences and three steps: two chunks, a chunk beside a decode, a decode. Longer than a window up to 64."""
    text = text_config(model)
    windows = [layer.sliding_window for layer in layers if layer.sliding_window and layer.sliding_window <= 64]
    longest = max([18] + [w + 6 for w in windows])
    longest = min(longest, getattr(text, "max_position_embeddings", None) or longest)
    first, second = longest // 2, max(1, longest // 3 - 1)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (longest + second + 2,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [ids[:longest], ids[longest:]]
    steps = [
        [(0, 0, first), (1, 0, second)],
        [(1, second, 1), (0, first, longest - first)],
        [(1, second + 1, 1)],
    ]
    return sequences, steps


def _tolerance(weight: Tensor) -> float:
    if weight.dtype is torch.float32 and weight.is_cuda and torch.get_float32_matmul_precision() != "highest":
        return 1e-2  # TF32 products keep ten bits
    return TOLERANCE[weight.dtype]
