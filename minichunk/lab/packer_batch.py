"""The packer without its widget: a batch built by hand, its integers, the real attention on them, and the check.

`integers` is what the widget shows, from minichunk.packing; static/packer.mjs computes the same, so that building never
asks the kernel (a test holds the two together). `run` sends the learner's own integers through the real attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from minichunk.attention import AttentionBackend, LayerSpec, StepMeta, Unsupported, make_backend
from minichunk.packing import PackedBatch, pack_tokens, place
from minichunk.request import Chunk, Request

FORMS = {"flash_attention": "FlashAttention", "flashinfer": "FlashInfer"}
MOST_REQUESTS, MOST_KEYS = 8, 64  # what a screen holds
SCATTER = (5, 2, 7, 0, 3, 9, 1, 4, 6, 8)  # the order in which each ten blocks are given out
TOLERANCE = 1e-4  # float32 rounding stays a thousand times below, a wrong integer a thousand times above
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 16
LAYER = LayerSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)


# --- the batch -------------------------------------------------------------------------------------------------------
def example(budget: int) -> list[dict]:
    """The running example: A decodes at length 8, B brings 12 tokens after 9, C is a new prompt of 3; C, then B, get
    what the budget leaves them."""
    chunks = []
    for id, start, wanted in (("A", 7, 1), ("B", 9, 12), ("C", 0, 3)):
        if length := min(wanted, budget - sum(c["length"] for c in chunks)):
            is_decode = id == "A"
            chunks.append(
                {"id": id, "start": start, "length": length, "is_last": length == wanted, "is_decode": is_decode}
            )
    return chunks


def num_blocks(block_size: int) -> int:
    """Blocks in the pool: enough for any batch, in whole tens."""
    return -(-MOST_REQUESTS * -(-MOST_KEYS // block_size) // 10) * 10


def with_blocks(chunks: Sequence[dict], block_size: int) -> list[dict]:
    """Each chunk with its block table, as long as it needs: the blocks that it has, then the next free ones."""
    kept = [list(c.get("blocks", ()))[: -(-(c["start"] + c["length"]) // block_size)] for c in chunks]
    taken = {b for blocks in kept for b in blocks}
    free = (b for k in range(num_blocks(block_size)) if (b := k // 10 * 10 + SCATTER[k % 10]) not in taken)
    for c, blocks in zip(chunks, kept):
        blocks += [next(free) for _ in range(-(-(c["start"] + c["length"]) // block_size) - len(blocks))]
    return [{**c, "blocks": blocks} for c, blocks in zip(chunks, kept)]


def as_chunk(c: dict) -> Chunk:
    """The engine's own Chunk. Token ids are made up: 0, 1, 2, …; a chunk that is not the last has one token more to come."""
    end = c["start"] + c["length"]
    total = end + (not c["is_last"])
    request = Request(c["id"], list(range(total)), c["start"] if c["is_decode"] else total, num_computed=c["start"])
    return Chunk.of(request, c["length"])


def integers(chunks: Sequence[dict], block_size: int) -> dict[str, list]:
    """All integers of the batch, by name; block_tables has a list a request. From minichunk.packing alone."""
    if not chunks:
        names = "positions slot_mapping logits_rows seq_lens_k block_tables kv_indices kv_last_page_len".split()
        return {name: [] for name in names} | {"cu_seqlens_q": [0], "qo_indptr": [0], "kv_indptr": [0]}
    real, tables = [as_chunk(c) for c in chunks], [c["blocks"] for c in chunks]
    _, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens(real)
    block_tables, slot_mapping = place(real, tables, block_size)
    batch = PackedBatch.build(real, tables, block_size)
    return {
        "positions": positions, "slot_mapping": slot_mapping, "logits_rows": logits_rows,
        "cu_seqlens_q": cu_seqlens_q, "seq_lens_k": seq_lens_k, "block_tables": block_tables,
        "qo_indptr": batch.cu_seqlens_q.tolist(), "kv_indptr": batch.kv_indptr.tolist(),
        "kv_indices": batch.kv_indices.tolist(), "kv_last_page_len": batch.kv_last_page_len.tolist(),
    }  # fmt: skip


def edited(right: dict[str, list], edits: dict[str, int]) -> dict[str, list]:
    """The integers with the learner's edits, {"seq_lens_k[1]": 12, "block_tables[0][1]": 3}. ValueError where there is no such integer."""
    out = {name: [list(v) if isinstance(v, list) else v for v in values] for name, values in right.items()}
    for key, value in edits.items():
        found = re.fullmatch(r"(\w+)\[(\d+)\](?:\[(\d+)\])?", str(key))
        row = out.get(found[1]) if found else None
        at = int(found[2]) if found else 0
        if row is not None and found[3] and at < len(row) and isinstance(row[at], list):
            row, at = row[at], int(found[3])
        if row is None or at >= len(row) or isinstance(row[at], list):
            raise ValueError(f"this batch has no integer {key!r}; it has {', '.join(right)}, each counted from 0")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 9999:
            raise ValueError(f"{key} must be a whole number of at most four digits, got {value!r}")
        row[at] = value
    return out


# --- the real attention ----------------------------------------------------------------------------------------------
@lru_cache(1)
def _numbers() -> tuple:
    """Random q, k, v for each token of each request, float64 [requests, keys, heads, d], before the rotation."""
    generator = torch.Generator().manual_seed(50)
    new = lambda heads: torch.randn(MOST_REQUESTS, MOST_KEYS, heads, HEAD_DIM, generator=generator, dtype=torch.float64)  # noqa: E731
    return new(HEADS) * 2, new(KV_HEADS), new(KV_HEADS)


def _rotated(x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864), halves rotated: x [n, heads, d] at its positions."""
    half = HEAD_DIM // 2
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * 100 ** -(
        torch.arange(half, dtype=torch.float64) / half
    )
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _of(c: dict) -> int:
    return ord(c["id"]) - ord("A")


def reference(chunks: Sequence[dict]) -> torch.Tensor:
    """What each packed row should get, dense, request by request, float64 [T, heads, d]. Uses no packed integer."""
    q, k, v = _numbers()
    rows = []
    for c in chunks:
        n, start, end = _of(c), c["start"], c["start"] + c["length"]
        queries = _rotated(q[n, start:end], range(start, end))
        keys, values = _rotated(k[n, :end], range(end)), v[n, :end]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(end, end)[start:].tril(start) == 0, -torch.inf)
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(rows)


def checked_batch(chunks: Sequence[dict], ints: dict[str, list], block_size: int, form: str) -> PackedBatch:
    """The PackedBatch that these integers say. Raises ValueError, before anything is read, when one reaches outside the
    pool, the tables or the batch: on a GPU such a read or write would end every other thing this process does there."""
    cu_seqlens_q, seq_lens_k, tables = _as_flash_attention(ints, block_size, form)
    blocks = num_blocks(block_size)
    _within("block_tables" if form == "flash_attention" else "kv_indices", [b for t in tables for b in t], blocks)
    _within("slot_mapping", ints["slot_mapping"], blocks * block_size)
    real = [as_chunk(c) for c in chunks]
    packed = [t for c in real for t in c.token_ids], ints["positions"], cu_seqlens_q, seq_lens_k, ints["logits_rows"]
    return PackedBatch.build(
        real, tables, block_size, pack=lambda chunks: packed, place=lambda *_: (tables, ints["slot_mapping"])
    )


def _cache(chunks: Sequence[dict], block_size: int) -> list[torch.Tensor]:
    """[keys, values], float32 [blocks, block_size, kv_heads, d]: the histories at their right places; slots that nobody
    filled hold other numbers, as in a pool that has been used."""
    _, k, v = _numbers()
    generator, shape = torch.Generator().manual_seed(51), (num_blocks(block_size), block_size, KV_HEADS, HEAD_DIM)
    cache = [torch.randn(shape, generator=generator) for _ in range(2)]
    for c in chunks:
        slots = [c["blocks"][p // block_size] * block_size + p % block_size for p in range(c["start"])]
        for side, x in zip(cache, (_rotated(k[_of(c), : c["start"]], range(c["start"])), v[_of(c), : c["start"]])):
            side.view(-1, KV_HEADS, HEAD_DIM)[slots] = x.float()
    return cache


def attend(
    chunks: Sequence[dict], ints: dict[str, list], block_size: int, form: str, backend: AttentionBackend, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """The backend, float32 on the device, on exactly these integers; float32 [T, heads, d] on the CPU.

    The batch's own keys go where `slot_mapping` says, rotated as `positions` say. A row that sees no key is NaN, whatever
    the backend leaves there. Raises ValueError when an integer reaches outside; the backend is not called then.
    """
    batch = checked_batch(chunks, ints, block_size, form)
    new = [torch.cat([x[_of(c), c["start"] : c["start"] + c["length"]] for c in chunks]) for x in _numbers()]
    new[:2] = (_rotated(x, ints["positions"]) for x in new[:2])
    query, key, value, *cache = (x.float().to(device) for x in (*new, *_cache(chunks, block_size)))
    meta = StepMeta.of(batch, device)
    backend.plan(meta)
    backend.append_kv(key, value, *cache, meta)
    out = backend.attend(query, *cache, meta, LAYER).cpu()  # every row is somebody's: cu_seqlens_q rises from 0 to T
    before = np.repeat(batch.seq_lens_k - np.diff(batch.cu_seqlens_q), batch.query_lens)  # keys before a chunk's first
    first = np.repeat(batch.cu_seqlens_q[:-1], batch.query_lens)
    out[before + np.arange(len(first)) - first < 0] = torch.nan
    return out


def _as_flash_attention(ints: dict[str, list], block_size: int, form: str) -> tuple:
    """(cu_seqlens_q, seq_lens_k, block tables) as the form says them."""
    if form == "flash_attention":
        return ints["cu_seqlens_q"], ints["seq_lens_k"], ints["block_tables"]
    indptr, indices, last = ints["kv_indptr"], ints["kv_indices"], ints["kv_last_page_len"]
    if indptr[0] != 0 or indptr[-1] != len(indices) or any(b <= a for a, b in zip(indptr, indptr[1:])):
        raise ValueError(f"kv_indptr must rise from 0 to {len(indices)}, at least a page a request, got {indptr}")
    if any(not 1 <= n <= block_size for n in last):
        raise ValueError(f"kv_last_page_len must lie in 1..{block_size}, the size of a page, got {last}")
    tables = [indices[a:b] for a, b in zip(indptr, indptr[1:])]
    seq_lens_k = [(len(t) - 1) * block_size + n for t, n in zip(tables, last)]  # so none reaches behind its own pages
    width = max(
        -(-MOST_KEYS // block_size), *map(len, tables)
    )  # or a page lost would be called a position out of range
    return ints["qo_indptr"], seq_lens_k, [t + [0] * (width - len(t)) for t in tables]


def _within(name: str, values: list[int], room: int) -> None:
    if outside := [v for v in values if not 0 <= v < room]:
        raise ValueError(f"{name} must lie in 0..{room - 1}, the pool, got {outside[0]}")


def row_errors(got: torch.Tensor, wanted: torch.Tensor) -> list[float | None]:
    """Per row the largest absolute difference; None where a number is NaN: the row saw no key."""
    worst = (got.double() - wanted).abs().amax((1, 2)).tolist()
    return [float(f"{e:.3g}") if np.isfinite(e) else None for e in worst]


def is_wrong(error: float | None) -> bool:
    return error is None or error > TOLERANCE


@lru_cache
def backend_on(device: str, block_size: int) -> tuple[AttentionBackend, torch.device, str]:
    """(the backend, its device, both in words) for "cpu" or "auto": the GPU where there is one. Chosen once.

    Raises ValueError when that GPU cannot serve.
    """
    on = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu")
    backend = make_backend("auto", on)
    try:
        backend.check([LAYER], block_size, torch.float32, on)
    except Unsupported as error:
        raise ValueError(f'the packer cannot run on this GPU: {error}, here lab.packer(device="cpu")') from error
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else "the CPU"
    return backend, on, f"{backend.name} on {name}, float32"


def run(chunks: Sequence[dict], ints: dict[str, list], block_size: int, device: str = "auto") -> tuple[dict, str]:
    """The attention on these integers, both forms, against float64: (errors, one line that says it all).

    errors: per form the error of each packed row (None for NaN), or None for a form that reaches outside and was not run;
    "sampled": of the row that each logits_rows names, against the one it should name.
    """
    backend, on, where = backend_on(device, block_size)
    wanted, last = reference(chunks), integers(chunks, block_size)["logits_rows"]
    errors, refused = dict.fromkeys((*FORMS, "sampled")), {}
    for form in FORMS:
        try:
            out = attend(chunks, ints, block_size, form, backend, on)
        except ValueError as error:
            refused[form] = str(error)
            continue
        errors[form] = row_errors(out, wanted)
        if errors["sampled"] is None:
            errors["sampled"] = row_errors(out[ints["logits_rows"]], wanted[last])
    return errors, _verdict(errors, refused, where)


def _verdict(errors: dict, refused: dict[str, str], where: str) -> str:
    """The status line after a run. refused: why a form was not run."""
    if len(refused) == len(FORMS):
        why = " · ".join(dict.fromkeys(refused.values()))
        return f"error: both forms were refused, nothing was run: {why}"
    said, picked = [], sum(map(is_wrong, errors["sampled"]))
    for form, title in FORMS.items():
        if form in refused:
            said.append(f"{title}'s form was refused, not run: {refused[form]}")
            continue
        wrong, rows = sum(map(is_wrong, errors[form])), len(errors[form])
        worst = "" if wrong else f" to {max(errors[form]):.0e}"
        said.append(
            f"{title}'s form: {f'{wrong} of {rows} rows wrong' if wrong else f'all {rows} rows agree with float64{worst}'}"
        )
    if picked:
        said.append(f"{picked} of {len(errors['sampled'])} sampled rows wrong")
    return "error: " * bool(refused) + " · ".join([*said, where])


# --- the check -------------------------------------------------------------------------------------------------------
def mistakes(chunks: Sequence[dict], right: dict[str, list], got: dict[str, list], block_size: int) -> list[str]:
    """A sentence for each wrong integer: what it is, what it must be, and why."""
    said, batch = [], _Batch(chunks, right, block_size)
    for name, values in right.items():
        for i, wanted in enumerate(values):
            if isinstance(wanted, list):
                pairs = [(f"{name}[{i}][{k}]", (i, k), w, got[name][i][k]) for k, w in enumerate(wanted)]
            else:
                pairs = [(f"{name}[{i}]", (i,), wanted, got[name][i])]
            said += [f"{key} is {g}: {getattr(batch, name)(*at, g, w)}" for key, at, w, g in pairs if g != w]
    return said


def _rows(a: int, b: int, word: str = "row") -> str:
    """Rows a … b - 1 in words."""
    return f"{word} {a}" if b - a == 1 else f"{word}s {a}…{b - 1}"


class _Batch:
    """Decodes integers: a method a list, (index…, got, wanted) → what follows "name[index] is got: "."""

    def __init__(self, chunks: Sequence[dict], right: dict[str, list], block_size: int):
        self.chunks, self.right, self.size = chunks, right, block_size
        self.cu = right["cu_seqlens_q"]

    def token(self, row: int) -> str:
        n = next(n for n, end in enumerate(self.cu[1:]) if row < end)
        return f"{self.chunks[n]['id']}'s token {self.chunks[n]['start'] + row - self.cu[n]}"

    def block(self, b: int) -> str:
        """What block b does: "holds …"."""
        for c in self.chunks:
            if b in c["blocks"]:
                first, end = c["blocks"].index(b) * self.size, c["start"] + c["length"]
                return f"holds {c['id']}'s {_rows(first, min(first + self.size, end), 'token')}"
        return "holds nothing of this batch" if 0 <= b < num_blocks(self.size) else "lies outside the pool"

    def slot(self, s: int) -> str:
        """What is in slot s."""
        b, at = divmod(s, self.size)
        for c in self.chunks:
            if b in c["blocks"]:
                p = c["blocks"].index(b) * self.size + at
                return f"{c['id']}'s token {p}" if p < c["start"] + c["length"] else f"empty, {c['id']}'s"
        return "nobody's" if 0 <= b < num_blocks(self.size) else "outside the pool"

    def cu_seqlens_q(self, i: int, got: int, wanted: int) -> str:
        rows = self.cu[-1]
        if i == 0:
            return f"the first row is {self.chunks[0]['id'] if self.chunks else 'nobody'}'s, so it must be 0."
        before = self.chunks[i - 1]["id"]
        why = f"{before} has {_rows(self.cu[i - 1], wanted)}, so it must be {wanted}"
        if i == len(self.chunks):
            return f"{why}, the number of all rows."
        after, a, b = self.chunks[i]["id"], *sorted((got, wanted))
        a, b = max(a, 0), min(b, rows)
        moved = f"{_rows(a, b)} {'goes' if b - a == 1 else 'go'} to {before if got > wanted else after}'s keys"
        own = min(got, wanted) - self.cu[i - 1]  # rows that stay with `before`: its last row is another one now
        off = f"{abs(got - wanted)} key{'s' * (abs(got - wanted) > 1)} too {'few' if got > wanted else 'many'}"
        sees = f", and {before}'s own {'row sees' if own == 1 else 'rows each see'} {off}" if own > 0 else ""
        return f"{why}: {moved}{sees}."

    qo_indptr = cu_seqlens_q

    def seq_lens_k(self, n: int, got: int, wanted: int) -> str:
        c, off = self.chunks[n], abs(got - wanted)
        why = f"{c['id']} has {c['start']} tokens of history and {c['length']} new, so it must be {wanted}"
        rows, keys = _rows(self.cu[n], self.cu[n + 1]), f"{off} key{'s' * (off > 1)}"
        sees = "sees" if c["length"] == 1 else "each see"
        if got > wanted:
            return f"{why}: {rows} {sees} {keys} too many, tokens that come later or slots with other numbers in them."
        lost = ": the history is not counted, and" if got == c["length"] else ": the new ones are not counted, and" if got == c["start"] else ":"  # fmt: skip
        return f"{why}{lost} {rows} {sees} {keys} too few, the newest, {'its' if c['length'] == 1 else 'their'} own among them."

    def positions(self, row: int, got: int, wanted: int) -> str:
        last = row + 1 in self.cu
        readers = "which the request's later tokens will read" if last else "which its request's next rows read"
        return f"row {row} is {self.token(row)}, so it must be {wanted}: its query is rotated to the wrong place, and its key, {readers}."

    def slot_mapping(self, row: int, got: int, wanted: int) -> str:
        where = lambda s: f"block {s // self.size} · {self.size} + {s % self.size}"  # noqa: E731
        return (
            f"row {row} is {self.token(row)}, whose slot is {wanted} = {where(wanted)}. Its key goes to {got} = {where(got)} "
            f"({self.slot(got)}), and whoever reads slot {wanted} finds other numbers."
        )

    def logits_rows(self, j: int, got: int, wanted: int) -> str:
        c = [c for c in self.chunks if c["is_last"]][j]
        inside = 0 <= got < self.cu[-1]
        reads = f"the next token would be chosen after {self.token(got)}" if inside else "there is no such row"
        return f"{c['id']}'s last row is {wanted}, so it must be {wanted}: {reads}."

    def block_tables(self, n: int, k: int, got: int, wanted: int) -> str:
        c = self.chunks[n]
        tokens = _rows(k * self.size, min((k + 1) * self.size, c["start"] + c["length"]), "token")
        lie = "lie" if "…" in tokens else "lies"
        return f"{c['id']}'s {tokens} {lie} in block {wanted}, so it must be {wanted}. Block {got} {self.block(got)}."

    def kv_indices(self, j: int, got: int, wanted: int) -> str:
        n = next(n for n, end in enumerate(self.right["kv_indptr"][1:]) if j < end)
        return self.block_tables(n, j - self.right["kv_indptr"][n], got, wanted)

    def kv_indptr(self, i: int, got: int, wanted: int) -> str:
        if i == 0:
            return "the first page is the first request's, so it must be 0."
        c, pages = self.chunks[i - 1], len(self.chunks[i - 1]["blocks"])
        before = self.right["kv_indptr"][i - 1]
        why = f"{before} pages lie before {c['id']}'s, and its {c['start'] + c['length']} tokens fill {pages} of {self.size}"
        moved = ""
        if i < len(self.chunks) and got != wanted:
            a, b = sorted((got, wanted))
            to = c["id"] if got > wanted else self.chunks[i]["id"]
            moved = f": {_rows(a, b, 'page')} {'goes' if b - a == 1 else 'go'} to {to}"
        return f"{why}, so it must be {wanted}{moved}."

    def kv_last_page_len(self, n: int, got: int, wanted: int) -> str:
        c = self.chunks[n]
        end, full = c["start"] + c["length"], len(c["blocks"]) - 1
        return (
            f"{c['id']}'s {end} tokens are {full} full page{'s' * (full != 1)} of {self.size} and {wanted} in the last, so it must be {wanted}: "
            f"its rows see {abs(got - wanted)} key{'s' * (abs(got - wanted) > 1)} too {'many' if got > wanted else 'few'}."
        )
