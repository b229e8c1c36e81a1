"""Attention over blocks: one protocol, several backends.

`make_backend(name, device)` gives one by name; a learner's own object with the same methods goes in its place.
"""

from minichunk.attention.base import AttentionBackend, LayerSpec, StepMeta, Unsupported, make_backend

__all__ = ["AttentionBackend", "LayerSpec", "StepMeta", "Unsupported", "make_backend"]
