"""The triton backend: our own kernels (triton_kernels.py) behind the AttentionBackend protocol.

A mixed batch is two launches of one kernel, decode rows and prompt rows, side by side on two streams: where one runs
out of programs the other fills the multiprocessors. What is launched depends on the bucket alone, so a CUDA graph
captured once can replay with new integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minichunk.attention.base import LayerSpec, StepMeta, Unsupported
from minichunk.attention.triton_kernels import ITEM, append_kv_kernel, attention_kernel, merge_kernel, plan_kernel

LOG2E = 1.4426950408889634  # scores are kept in base 2: exp2 is one instruction
INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 when this file was imported


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the attention kernel. `fill`: pieces wanted per multiprocessor, over all KV heads."""

    lines: int  # BLOCK_M: query rows × heads of a group
    keys: int  # BLOCK_N
    warps: int
    stages: int
    fill: int
    min_piece: int = 256  # keys: a shorter piece costs more to start and to merge than it saves
    registers: int | None = None  # a thread's at most, so that more programs fit on a multiprocessor


def default_tiles(dtype: torch.dtype, head_dim: int) -> tuple[Tile, Tile]:
    """(prompt, decode) shapes, chosen on an H200 (docs/kernels.md)."""
    if dtype == torch.float32:  # exact products on the plain units: small tiles, or the registers overflow
        return Tile(32 if head_dim <= 128 else 16, 16, 4, 2, 2), Tile(16, 16, 4, 2, 4)
    if head_dim > 128:
        return Tile(64, 32, 4, 3, 2), Tile(16, 32, 4, 3, 4)
    return Tile(128, 64, 8, 3, 2, registers=128), Tile(16, 64, 2, 3, 4)


@dataclass(slots=True)
class Work:
    """The items of one launch: `plan_kernel`'s output, and the grid that holds whatever it may write."""

    tile: Tile
    items: Tensor  # int32 [max_items, ITEM]
    total: Tensor  # int32 [1]
    max_parts: int  # pieces of cut tiles, at most


class TritonAttention:
    """The backend of this file. `num_sms` and `tiles` (prompt, decode) are for tests and tuning; by default they
    follow the card, the dtype and the head size."""

    name = "triton"
    graph_safe = True  # what it launches depends on the bucket alone

    def __init__(self, num_sms: int | None = None, tiles: tuple[Tile, Tile] | None = None, overlap: bool = True):
        self._num_sms, self._tiles, self._overlap = num_sms, tiles, overlap
        self._work: dict[tuple, list[Work]] = {}
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._last = "no batch yet"

    def check(self, layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises Unsupported, naming the layer's number that is out of reach."""
        device = torch.device(device)
        if not INTERPRETED and device.type != "cuda":
            raise Unsupported(
                f"triton runs on a CUDA device, not on {device}: use attention='torch', or set TRITON_INTERPRET=1 to test"
            )
        if not INTERPRETED and torch.cuda.get_device_capability(device) < (8, 0):
            raise Unsupported("triton needs compute capability 8.0 or above (Ampere): use attention='torch'")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise Unsupported(f"triton serves float32, float16 and bfloat16, not {dtype}: use attention='torch'")
        if INTERPRETED and dtype == torch.bfloat16:
            raise Unsupported("Triton's interpreter multiplies bfloat16 wrongly: use float32 or float16 there")
        if block_size < 1:
            raise Unsupported(f"block_size must be at least 1, got {block_size}")
        for i, layer in enumerate(layers):
            size = layer.head_dim
            if layer.value_dim != size:
                raise Unsupported(
                    f"layer {i}: values of size {layer.value_dim} with keys of size {size}: use attention='torch'"
                )
            if not 8 <= size <= 256 or size % 8:
                raise Unsupported(
                    f"layer {i}: head size {size} is not a multiple of 8 in 8 … 256: use attention='torch'"
                )
            if layer.num_heads % layer.num_kv_heads:
                raise Unsupported(
                    f"layer {i}: {layer.num_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
                )
            if not layer.scale > 0:
                raise Unsupported(f"layer {i}: scale {layer.scale} is not positive: use attention='torch'")
            if layer.sliding_window is not None and layer.sliding_window < 1:
                raise Unsupported(f"layer {i}: a sliding window of {layer.sliding_window} keys")

    def plan(self, meta: StepMeta) -> None:
        """Forgets the last step's work lists. `attend` makes the new ones on the device, at the first layer of each
        (group, window): one small launch each, also inside a captured graph."""
        self._work = {}

    def append_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta) -> None:
        """Scatters key, value [T, kv_heads, head_dim] to the slots of meta.slot_mapping."""
        append_kv(key, value, key_cache, value_cache, meta.slot_mapping)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, meta: StepMeta, layer: LayerSpec, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend. Output rows outside every sequence (a bucket's padding) are left as they are.

        In a captured graph meta.max_seqlen_q is a bound for the bucket: 1 promises that all rows are decodes.
        """
        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window, query.dtype)
        works = self._work.get(key)
        if works is None:
            works = self._work[key] = self._make_work(meta, layer, query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        launches = [(out, query, key_cache, value_cache, meta.block_tables, work, layer, sinks) for work in works]
        if len(launches) == 2 and self._overlap and query.is_cuda:
            if query.device not in self._side:
                self._side[query.device] = torch.cuda.Stream(query.device)
            side = self._side[query.device]
            parts = [partials(work, layer, query) for work in works]  # from the main stream's memory: it waits below
            side.wait_stream(torch.cuda.current_stream())
            paged_attention(*launches[0], parts[0])
            with torch.cuda.stream(side):
                paged_attention(*launches[1], parts[1])
            torch.cuda.current_stream().wait_stream(side)
        else:
            for launch in launches:
                paged_attention(*launch, partials(launch[5], layer, query))
        return out

    def explain(self) -> str:
        """One line on the last batch planned."""
        return self._last

    def _make_work(self, meta: StepMeta, layer: LayerSpec, query: Tensor) -> list[Work]:
        tokens, seqs = query.shape[0], meta.seq_lens_k.shape[0]
        prompt, decode = self._tiles or default_tiles(query.dtype, layer.head_dim)
        group = layer.num_heads // layer.num_kv_heads
        prompt, decode = _fit(prompt, group), _fit(decode, group)
        num_sms = self._num_sms or (
            torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 4
        )
        few = decode.lines // group  # sequences of up to this many rows go in the decode shape
        works = [make_work(meta, decode, layer, num_sms, min(seqs, tokens), 1, few)]
        if meta.max_seqlen_q > few:
            most_tiles = tokens // (prompt.lines // group) + min(seqs, tokens // (few + 1))
            works.append(make_work(meta, prompt, layer, num_sms, most_tiles, few + 1, 0))
        shapes = " + ".join(f"{w.tile.lines}×{w.tile.keys}" for w in works)
        self._last = (
            f"triton: {tokens} rows of {seqs} sequences, tiles {shapes} (lines × keys), "
            f"{group} heads to a KV head, long histories split over up to {num_sms} multiprocessors"
        )
        return works


def _fit(tile: Tile, group: int) -> Tile:
    """A tile holds at least one row of the whole group."""
    lines = max(tile.lines, triton.next_power_of_2(group))
    return replace(tile, lines=lines)


def append_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatters key, value [T, kv_heads, head_dim] to slots of the caches [blocks, block_size, kv_heads, head_dim]."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    append_kv_kernel[(tokens,)](
        key, value, key_cache, value_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[1], HEADS=heads, HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


def make_work(
    meta: StepMeta, tile: Tile, layer: LayerSpec, num_sms: int, most_tiles: int, fewest_rows: int, most_rows: int
) -> Work:
    """Launches plan_kernel for the sequences with fewest_rows … most_rows rows (0: no upper end)."""
    group = layer.num_heads // layer.num_kv_heads
    target = max(1, num_sms * tile.fill // layer.num_kv_heads)
    device, seqs = meta.seq_lens_k.device, meta.seq_lens_k.shape[0]
    items = torch.empty((most_tiles + target, ITEM), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    plan_kernel[(seqs,)](
        meta.cu_seqlens_q, meta.seq_lens_k, items, total, seqs, target, tile.min_piece,
        FEWEST_ROWS=fewest_rows, MOST_ROWS=most_rows, WINDOW=layer.sliding_window or 0,
        BLOCK_Q=tile.lines // group, BLOCK_N=tile.keys, SEQS=triton.next_power_of_2(seqs), LANES=64, num_warps=4,
    )  # fmt: skip
    return Work(tile, items, total, 2 * target)


def partials(work: Work, layer: LayerSpec, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the acc, m and l of cut tiles, float32: [parts, kv_heads, lines, head_dim], [parts, kv_heads, lines] twice."""
    shape = (work.max_parts, layer.num_kv_heads, work.tile.lines)
    size = triton.next_power_of_2(max(layer.head_dim, 16))
    new = lambda *s: torch.empty(s, dtype=torch.float32, device=query.device)  # noqa: E731
    return new(*shape, size), new(*shape), new(*shape)


def paged_attention(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, work: Work, layer: LayerSpec,
    sinks: Tensor | None, parts: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Computes the rows of `out` that `work` names: attention_kernel, then merge_kernel, on the current stream."""
    tile, group = work.tile, layer.num_heads // layer.num_kv_heads
    grid = (layer.num_kv_heads, work.items.shape[0])
    block_d = triton.next_power_of_2(max(layer.head_dim, 16))
    cap = layer.softcap
    small = max(key_cache.stride(0) * key_cache.shape[0], value_cache.stride(0) * value_cache.shape[0]) < 2**31
    attention_kernel[grid](
        query, key_cache, value_cache, out, *parts, work.items, work.total, block_tables, query if sinks is None else sinks,
        layer.scale * LOG2E, cap or 0.0, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0),
        GROUP=group, HEAD_DIM=layer.head_dim, BLOCK_SIZE=key_cache.shape[1], WINDOW=layer.sliding_window or 0,
        SOFTCAP=bool(cap), SINKS=sinks is not None, PRECISION="ieee",
        OFFSET=tl.int32 if small else tl.int64, BLOCK_M=tile.lines, BLOCK_N=tile.keys, BLOCK_D=block_d,
        num_warps=tile.warps, num_stages=tile.stages, **({"maxnreg": tile.registers} if tile.registers else {}),
    )  # fmt: skip
    merge_kernel[grid](
        out, *parts, work.items, work.total, out.stride(0), out.stride(1),
        GROUP=group, HEAD_DIM=layer.head_dim, BLOCK_M=tile.lines, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
