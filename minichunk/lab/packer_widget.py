"""The packer: build a mixed batch by hand, read its integers in both libraries' forms, break one, run it, read the check.

What it computes is in packer_batch.py; here are the widget's state, its Run button and its text twin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import traitlets

from minichunk.lab import colors, kit, packer_batch
from minichunk.lab.packer_batch import (
    FORMS,
    MOST_KEYS,
    MOST_REQUESTS,
    SCATTER,
    TOLERANCE,
    edited,
    example,
    integers,
    is_wrong,
    mistakes,
    num_blocks,
    with_blocks,
)

ALIGNMENTS = ("bottom-right", "top-left")
DEVICES = ("auto", "cpu")
MOST_BUDGET = 64  # what a screen holds


# --- the widget ------------------------------------------------------------------------------------------------------
class Packer(kit.Widget):
    """`state`: {"chunks", "edits", "align", "errors"}; set it from Python or with the mouse, the same. What is left out is as
    at the start (chunks: the running example).

    chunks: [{"id": "A", "start": tokens in the cache, "length": new ones, "is_last", "is_decode", "blocks"}], the last three
    may be left out. edits: {"seq_lens_k[1]": 12}, your own integers. align: how the picture of the mask is aligned.
    errors: None, or what the last Run found: per form an error a packed row (None for NaN), or None for a form refused;
    "sampled": of the row that each logits_rows names, against the one it should name.
    `status`: one line in the widget. `report`: what check() said when it ran.
    """

    _esm = kit.module("packer")
    _css = kit.style("packer")
    called = "packer"
    setup = traitlets.Dict().tag(sync=True)
    report = traitlets.Unicode().tag(sync=True)
    asked = traitlets.Int().tag(sync=True)  # how often the Run button was pressed

    def __init__(self, budget: int = 16, block_size: int = 4, device: str = "auto"):
        for name, value, most in (("budget", budget, MOST_BUDGET), ("block_size", block_size, 16)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number in 1…{most}, got {value!r}")
        if device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
        self.budget, self.block_size, self.device = budget, block_size, device
        setup = {
            "budget": budget, "block_size": block_size, "example": with_blocks(example(budget), block_size), "scatter": list(SCATTER),
            "num_blocks": num_blocks(block_size), "most_requests": MOST_REQUESTS, "most_keys": MOST_KEYS, "tolerance": TOLERANCE,
            "themes": colors.THEMES, "hatches": list(colors.HATCHES),
            "where": "GPU" if device == "auto" and torch.cuda.is_available() else "CPU",
        }  # fmt: skip
        super().__init__(setup=setup, state={})

    def _checked(self, given: dict) -> dict:
        start = {"chunks": example(self.budget), "edits": {}, "align": ALIGNMENTS[0], "errors": None}
        if unknown := set(given) - set(start):
            raise ValueError(f"state has {', '.join(start)}, not {', '.join(sorted(map(str, unknown)))}")
        state = {**start, **given}
        if state["align"] not in ALIGNMENTS:
            raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}, got {state['align']!r}")
        state["chunks"] = self._checked_chunks(state["chunks"])
        right = integers(state["chunks"], self.block_size)
        edited(right, state["edits"])
        same = lambda key, value: edited(right, {key: value}) == right  # noqa: E731
        state["edits"] = {key: value for key, value in state["edits"].items() if not same(key, value)}
        if state["errors"] is not None:
            self._check_errors(state["errors"], right)
        return state

    def _checked_chunks(self, chunks: Sequence[dict]) -> list[dict]:
        if len(chunks) > MOST_REQUESTS:
            raise ValueError(f"the packer holds {MOST_REQUESTS} requests, got {len(chunks)}")
        found = []
        for given in chunks:
            c = {"is_last": True, "is_decode": False, "blocks": [], **given}
            if set(c) != {"id", "start", "length", "is_last", "is_decode", "blocks"}:
                raise ValueError(
                    f"a chunk has id, start, length and, if you like, is_last, is_decode, blocks; got {given}"
                )
            if c["id"] not in [colors.letter(n) for n in range(MOST_REQUESTS)] or c["id"] in [f["id"] for f in found]:
                raise ValueError(
                    f"each id is a letter of its own, A…{colors.letter(MOST_REQUESTS - 1)}; got {c['id']!r}"
                )
            whole = all(isinstance(c[k], int) and not isinstance(c[k], bool) for k in ("start", "length"))
            if not whole or c["start"] < 0 or c["length"] < 1 or c["start"] + c["length"] > MOST_KEYS:
                raise ValueError(
                    f"{c['id']}: start must be 0 or more, length 1 or more, both together at most {MOST_KEYS}; got {c['start']!r}, {c['length']!r}"
                )
            if c["is_decode"] and (c["length"] != 1 or not c["is_last"] or c["start"] < 1):
                raise ValueError(f"{c['id']}: a decode has one new token, its last, after a history of at least 1")
            found.append({k: c[k] for k in ("id", "start", "length", "is_last", "is_decode", "blocks")})
        if (tokens := sum(c["length"] for c in found)) > self.budget:
            raise ValueError(f"{tokens} new tokens are more than the budget of {self.budget}")
        blocks = [b for c in found for b in c["blocks"]]
        if len(set(blocks)) < len(blocks) or any(b not in range(num_blocks(self.block_size)) for b in blocks):
            raise ValueError(f"blocks must differ and lie in 0…{num_blocks(self.block_size) - 1}, got {blocks}")
        return with_blocks(found, self.block_size)

    @staticmethod
    def _check_errors(errors: dict, right: dict[str, list]) -> None:
        sizes = {**dict.fromkeys(FORMS, len(right["positions"])), "sampled": len(right["logits_rows"])}
        if set(errors) != set(sizes) or any(e is not None and len(e) != sizes[k] for k, e in errors.items()):
            raise ValueError(f"errors must be None or have {sizes} numbers; let run() find them")

    def set_state(self, sync_data):
        """Run comes as {"state", "asked"} in one message, so that no older state can overtake it, and is always answered."""
        try:
            super().set_state(sync_data)
        finally:
            if "asked" in sync_data:
                self.send({"done": sync_data["asked"]})

    @traitlets.observe("asked")
    def _run_button(self, change) -> None:
        self.run()

    @property
    def right(self) -> dict[str, list]:
        """The batch's right integers, by name."""
        return integers(self.state["chunks"], self.block_size)

    @property
    def integers(self) -> dict[str, list]:
        """The integers as they stand in the widget, your edits included."""
        return edited(self.right, self.state["edits"])

    def run(self) -> dict | None:
        """What the Run button does: the attention on the integers as they stand, both forms, against float64. → the errors.

        A form whose integers reach outside is not run; the status line says why.
        """
        chunks, ints = self.state["chunks"], self.integers
        if not chunks:
            self.state = {**self.state, "errors": None}
            self.status = self.report = "nothing to run: the batch is empty"
            return None
        errors, verdict = packer_batch.run(chunks, ints, self.block_size, self.device)
        with self.hold_sync():
            self.report = self.check()
            self.state = {**self.state, "errors": errors}
            self.status = verdict
        return errors

    def check(self) -> str:
        """Names each wrong integer, decoded. Runs nothing."""
        found = mistakes(self.state["chunks"], self.right, self.integers, self.block_size)
        return "\n".join(found) if found else "Every integer is right."

    def reset(self) -> None:
        """Back to the running example."""
        self.state, self.status, self.report = {}, "", ""

    def __str__(self) -> str:
        return text(self.state, self.budget, self.block_size)


def text(state: dict, budget: int, block_size: int) -> str:
    """The widget in words. * marks an integer that you changed."""
    chunks, right = state["chunks"], integers(state["chunks"], block_size)
    got = edited(right, state["edits"])
    star = lambda g, w: f"{g}{'*' * (g != w)}"  # noqa: E731
    flat = lambda name: " ".join(star(g, w) for g, w in zip(got[name], right[name]))  # noqa: E731
    tables = " · ".join(
        f"{c['id']} [{' '.join(star(g, w) for g, w in zip(a, b))}]"
        for c, a, b in zip(chunks, got["block_tables"], right["block_tables"])
    )
    tokens, decodes = sum(c["length"] for c in chunks), sum(c["is_decode"] for c in chunks)
    bar = round(24 * tokens / budget)
    what = lambda c: "decode" if c["is_decode"] else "prompt chunk, last" if c["is_last"] else "prompt chunk"  # noqa: E731
    lines = [
        f"packer · {decodes} decode{'s' * (decodes != 1)} + {len(chunks) - decodes} prompt chunk{'s' * (len(chunks) - decodes != 1)} · "
        f"blocks of {block_size}",
        f"budget   {'█' * bar}{'░' * (24 - bar)} {tokens} of {budget} tokens",
        "requests "
        + (" · ".join(f"{c['id']} {c['start']} + {c['length']} ({what(c)})" for c in chunks) or "none")
        + "   (history + new)",
        f"rows     positions {flat('positions')} · slot_mapping {flat('slot_mapping')} · logits_rows {flat('logits_rows')}",
        f"FlashAttention  cu_seqlens_q {flat('cu_seqlens_q')} · seq_lens_k {flat('seq_lens_k')} · block_tables {tables}",
        "FlashInfer      " + " · ".join(f"{name} {flat(name)}" for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")),
    ]  # fmt: skip
    if state["errors"] is not None:
        cu = right["cu_seqlens_q"]
        for form, title in FORMS.items():
            e = state["errors"][form]
            lines.append(
                f"errors   {title}: "
                + (
                    " · ".join(_of_request(c, e[a:b]) for c, a, b in zip(chunks, cu, cu[1:]))
                    if e
                    else "refused, not run"
                )
            )
        found = mistakes(chunks, right, got, block_size)
        lines += [f"check    {sentence}" for sentence in found or ["Every integer is right."]]
    return "\n".join(lines)


def _of_request(c: dict, errors: list) -> str:
    wrong = sum(map(is_wrong, errors))
    worst = "NaN" if None in errors else f"{max(errors):.0e}"
    return f"{c['id']} {f'{wrong} of {len(errors)} rows wrong' if wrong else 'right'}, largest {worst}"


def packer(budget: int = 16, block_size: int = 4, device: str = "auto") -> Packer:
    """The packer, with the running example in it: a batch of at most `budget` tokens, its keys in blocks of `block_size`.

    device: where Run computes: "auto" takes the GPU where there is one.
    """
    return Packer(budget, block_size, device)
