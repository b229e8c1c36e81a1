"""minichunk: a small, complete LLM inference engine that runs prompts and decodes together in mixed batches.

from minichunk import Engine, SamplingParams
engine = Engine("smollm2")
engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("minichunk")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"

_HOMES = {
    "Engine": "engine", "SamplingParams": "request", "Completion": "request", "Request": "request", "Chunk": "request",
    "Policy": "scheduler", "BlockPool": "blocks", "BlockTable": "blocks", "Run": "record", "StepRecord": "record",
    "PackedBatch": "packing", "pack_tokens": "packing", "place": "packing",
}  # fmt: skip
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Loads a room when it is first used: `minichunk --help` must not wait for torch."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"minichunk.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'minichunk' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOMES])
