"""One decoder layer, compiled once and run for all of them.

    model.layers[0 … N-1]   each wrapped in a CompiledLayer, which calls the same compiled function with
                            (its layer's modules, hidden, its key cache, its value cache, the other arguments)

The layers differ only in tensors, and tensors are arguments: an integer layer number would be burnt into the code and
compile it anew for each layer. The number of tokens is a symbol from the start, so that one graph serves every batch
(and a second one a batch of a single token, which torch.compile treats as its own case).

Inside, attention is one opaque operator that names the two cache tensors it writes; which layer of which runner they
belong to is looked up by their address (`homes`).

Products of the same rows (q, k, v; gate, up) become one: `merge_projections` stores the weights one below the other,
each old projection then is a slice of the whole product, and `merged_inductor` lets the product be computed once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class NotCompilable(RuntimeError):
    """These layers cannot be compiled; the message says why. They run as they are."""


def failures() -> tuple[type[Exception], ...]:
    """What a first forward of compiled layers raises where the compiler cannot follow them."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return NotCompilable, TorchDynamoException, InductorError


class Home(Protocol):
    """Whose cache it is: computes one layer's attention of the step that is running."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor: ...


homes: WeakValueDictionary[int, Home] = WeakValueDictionary()  # address of a key cache → the layer it belongs to


@torch.library.custom_op("minichunk::paged_attention", mutates_args=("key_cache", "value_cache"))
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, sinks: Tensor | None
) -> Tensor:
    """query [T, H, d], key [T, K, d], value [T, K, dv] → [T, H, dv]; the new keys and values are in the caches after it.

    Should the compiler ever hand a copy of the cache, its address is unknown and this is a KeyError, not a slow step.
    """
    return homes[key_cache.data_ptr()].attend(query, key, value, sinks)


@paged_attention.register_fake
def _(query, key, value, key_cache, value_cache, sinks):
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def run_layer(
    layer: nn.Module, hidden: Tensor, key_cache: Tensor, value_cache: Tensor, args: tuple, kwargs: dict
) -> Any:
    """One decoder layer over a packed batch, hidden [1, T, h]. This is what gets compiled."""

    def attention(module, query, key, value, *, sinks=None, **_):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [1, H, T, d] → [T, H, d]
        return paged_attention(q, k, v, key_cache, value_cache, sinks)[None]

    return layer(hidden, *args, **kwargs, minichunk=attention)


class CompiledLayer(nn.Module):
    """Stands where a decoder layer stood."""

    def __init__(self, layer: nn.Module, compiled: Callable, cache: tuple[Tensor, Tensor]):
        super().__init__()
        self.layer, self._compiled, self._cache = layer, compiled, cache

    def __getattr__(self, name: str) -> Any:
        """What the model asks its layer for, such as attention_type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, minichunk: Callable, **kwargs: Any) -> Any:
        tokens = hidden.shape[1]
        for x in pytree.tree_leaves((hidden, args, kwargs)):  # [1, T, …]: hidden, positions, rotations
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == tokens:
                torch._dynamo.maybe_mark_dynamic(x, 1)
        return self._compiled(self.layer, hidden, *self._cache, args, kwargs)


def compile_layers(model: nn.Module, cache: list[tuple[Tensor, Tensor]], backend: str | Callable | None = None) -> None:
    """Wraps the decoder layers of `model` (a twin), in place. cache: (keys, values) of each layer. backend: of
    torch.compile. The compiler itself runs at the first forward. Raises NotCompilable where no list of layers is found."""
    layers = decoder_layers(model, len(cache))
    for key_cache, _ in cache:
        torch._dynamo.maybe_mark_dynamic(key_cache, 0)
    # A code object of its own: torch.compile counts recompilations per code object, and another engine's are not ours.
    own = types.FunctionType(run_layer.__code__.replace(), run_layer.__globals__, "run_layer")
    compiled = torch.compile(own, fullgraph=True, backend=backend or merged_inductor)
    for i, pair in enumerate(cache):
        layers[i] = CompiledLayer(layers[i], compiled, pair)


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The one list whose element i holds the attention of layer i, and of no other layer. Raises NotCompilable."""
    found = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count
        and all({m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)} == {i}
                for i, layer in enumerate(module))
    ]  # fmt: skip
    if len(found) != 1:
        raise NotCompilable(f"{type(model).__name__} has {len(found)} lists of {count} decoder layers, not one")
    return found[0]


# ------------------------------------------------------------------------------------------------ merged projections


class Slice(nn.Module):
    """Columns begin … end of x · weightᵀ + bias, where weight holds several projections one below the other."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, begin: int, end: int):
        super().__init__()
        self.weight, self.bias, self.begin, self.end = weight, bias, begin, end

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)[..., self.begin : self.end]


def merge_projections(model: nn.Module) -> int:
    """Makes slices of one product of q, k, v and of gate, up wherever these are plain linear layers; returns how many
    groups there were. The old parameters become views of the merged ones, so nothing is stored twice: the modules of
    another twin go on working."""
    groups = 0
    for parent in list(model.modules()):
        for names in MERGED:
            parts = [getattr(parent, name, None) for name in names]
            if all(type(p) is nn.Linear for p in parts) and len({(p.in_features, p.bias is None) for p in parts}) == 1:
                _merge(parent, names, parts)
                groups += 1
    return groups


def _merge(parent: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    weight, bias = (_stacked([getattr(p, name) for p in parts]) for name in ("weight", "bias"))
    at = 0
    for name, part in zip(names, parts):
        setattr(parent, name, Slice(weight, bias, at, at + part.out_features))
        at += part.out_features


def _stacked(parameters: list[nn.Parameter | None]) -> nn.Parameter | None:
    if parameters[0] is None:
        return None
    merged = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=False)
    for parameter, view in zip(parameters, merged.data.split([len(p) for p in parameters])):
        parameter.data = view
    return merged


def share_products(graph: torch.fx.Graph) -> int:
    """Computes each linear layer of the same input and weight once; returns how many calls it saved."""
    seen, saved = {}, 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.linear:
            key = (node.args, tuple(sorted(node.kwargs.items())))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
                saved += 1
            seen.setdefault(key, node)
    return saved


def merged_inductor(module: torch.fx.GraphModule, inputs: list) -> Callable:
    """torch.compile's own backend, after `share_products`."""
    from torch._inductor.compile_fx import compile_fx

    share_products(module.graph)
    module.recompile()
    return compile_fx(module, inputs)
