"""The auto backend on a CUDA device: which kernels run, by the kind of batch and the card, and why.

data/attention.json holds, for each card that was measured (`minichunk bench kernels --table`), the share of the roof that
each contender reached on decodes, prompts and mixed batches. A contender is asked in that order whether it serves this
model here, which it tries on small batches (trial.py); what it refuses is kept for `explain`.
"""

from __future__ import annotations

import json
import logging

import torch
from torch import Tensor

from minichunk.attention.base import AttentionBackend, LayerSpec, StepMeta, Unsupported, make_backend
from minichunk.attention.trial import first_line, trial
from minichunk.paths import data_path

log = logging.getLogger(__name__)
KINDS = ("decodes", "prompts", "mixed")


def kind_of(meta: StepMeta) -> str:
    """decodes, prompts or mixed. A graph is captured without a batch: one bound for all but decodes."""
    if meta.max_seqlen_q == 1:
        return "decodes"
    return "mixed" if meta.host is None or (meta.host.query_lens == 1).any() else "prompts"


def table(card: str) -> tuple[dict[str, dict[str, float]], str]:
    """{kind: {contender: share of the roof}} of this card, and where it is from. A card that nobody measured gets the
    first one's order."""
    measured = json.loads(data_path("attention.json").read_text(encoding="utf-8"))
    name = card if card in measured else next(iter(measured))
    row = measured[name]
    note = "" if name == card else f", no figures for {card}"
    return {kind: row[kind] for kind in KINDS}, f"measured on {name}, {row['date']}{note}"


class AutoAttention:
    """Chooses among the other backends. graphs: steps run as CUDA graphs where a backend allows it; a step launched
    kernel by kernel is bound by the host, so a backend that allows it is then preferred to any faster one that does not."""

    def __init__(self, graphs: bool = True):
        self._graphs = graphs
        self._chosen: dict[str, AttentionBackend] = {}
        self._refused: dict[str, str] = {}  # contender: why
        self._current: AttentionBackend | None = None
        self._why = "not asked yet"
        self._asked: tuple | None = None

    @property
    def name(self) -> str:
        names = list(dict.fromkeys(b.name for b in self._chosen.values()))
        return names[0] if len(names) == 1 else f"auto({', '.join(names)})" if names else "auto"

    @property
    def graph_safe(self) -> bool:
        return bool(self._chosen) and all(getattr(b, "graph_safe", False) for b in self._chosen.values())

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Chooses for every kind of batch. Never refuses: the torch reference comes last. Asked the same again (an engine
        has one runner to verify its model and one to serve it), it stays with its choice."""
        if self._chosen and self._asked == (layers, block_size, dtype, device):
            return
        shares, source = table(torch.cuda.get_device_name(device))
        self._asked = list(layers), block_size, dtype, device
        self._made: dict[str, AttentionBackend] = {}
        self._order = {kind: [*sorted(shares[kind], key=shares[kind].get, reverse=True), "torch"] for kind in KINDS}
        self._chosen, self._refused = {}, {}
        safe = self._graphs and self._serves("triton")
        if safe:
            self._chosen = dict.fromkeys(KINDS, self._made["triton"])
            self._why = "the only one that a CUDA graph can replay with other lengths"
        else:
            self._chosen = {kind: self._next(kind) for kind in KINDS}
            self._why = f"the fastest that serves this model here ({source})"
        for contender, reason in self._refused.items():
            log.warning("attention: %s left out: %s", contender, reason)

    def _serves(self, contender: str) -> bool:
        """Makes and tries a contender once; remembers why not."""
        if contender in self._refused:
            return False
        if contender not in self._made:
            try:
                backend = make_backend(contender, self._asked[3])
                backend.check(*self._asked)
                if contender == "triton":  # its check reads numbers alone; another card may lack memory or a compiler
                    trial(backend, *self._asked)
            except torch.OutOfMemoryError as error:
                self._refused[contender] = f"no memory to try it: {first_line(error)}"
                return False
            except (Unsupported, ImportError) as error:
                self._refused[contender] = str(error)
                return False
            self._made[contender] = backend
        return True

    def _next(self, kind: str) -> AttentionBackend:
        return self._made[next(c for c in self._order[kind] if self._serves(c))]

    def plan(self, meta: StepMeta) -> None:
        """Once a step. A contender whose plan fails is left out from then on, and the next one takes over."""
        kind = kind_of(meta)
        while True:
            self._current = failed = self._chosen[kind]
            try:
                return self._current.plan(meta)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if failed.name == "torch" or meta.host is None:
                    raise
                contender = next(name for name, backend in self._made.items() if backend is failed)
                self._refused[contender] = f"its plan failed: {first_line(error)}"
                log.warning("attention: %s left out: %s", contender, self._refused[contender])
                self._chosen = {k: self._next(k) if b is failed else b for k, b in self._chosen.items()}

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        self._current.append_kv(key, value, key_cache, value_cache, meta)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._current.attend(query, key_cache, value_cache, meta, layer, sinks)

    def explain(self) -> str:
        """What was chosen, why, what was left out and why, and the last batch."""
        if not self._chosen:
            return f"auto: {self._why}"
        by_name: dict[str, list[str]] = {}
        for kind, backend in self._chosen.items():
            by_name.setdefault(backend.name, []).append(kind)
        chosen = ", ".join(
            name if len(by_name) == 1 else f"{name} for {' and '.join(kinds)}" for name, kinds in by_name.items()
        )
        left_out = "".join(f"; left out {c}: {reason}" for c, reason in self._refused.items())
        last = f"; {self._current.explain()}" if self._current else ""
        return f"auto took {chosen}, {self._why}{left_out}{last}"
