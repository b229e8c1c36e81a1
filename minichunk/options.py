"""From an Engine's options to sizes that fit together, and to a runner that was tried. Refusals name the numbers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from minichunk import families
from minichunk.attention import AttentionBackend
from minichunk.blocks import num_blocks_needed
from minichunk.models import Loaded
from minichunk.runner import ModelRunner, block_bytes, chunk_logits

CPU_KV_BYTES = 1 << 30
alive: weakref.WeakSet = weakref.WeakSet()  # engines; read only to name, in an error, who else holds memory


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of an engine, in tokens and requests, consistent with each other and with the model."""

    max_batch_tokens: int
    chunk_size: int | None
    max_requests: int
    max_model_len: int

    @classmethod
    def of(
        cls, policy: Any, positions: int | None, max_batch_tokens: int | None, chunk_size: int | None,
        max_requests: int | None, max_model_len: int | None,
    ) -> Limits:  # fmt: skip
        """Fills in what was left out. positions: the model's, None where it has no limit. Raises ValueError."""
        may_cut = getattr(policy, "may_cut", True)
        if not may_cut and chunk_size is not None:
            raise ValueError(f"policy {policy.name} never cuts a prompt: leave out chunk_size={chunk_size}")
        if max_model_len is None:
            max_model_len = positions or 4096
        elif positions and max_model_len > positions:
            raise ValueError(f"max_model_len {max_model_len} is above the model's {positions} positions")
        budget = max_batch_tokens or (512 if may_cut else max_model_len)
        max_requests = max_requests or min(64, budget)
        if budget < max_requests:
            raise ValueError(
                f"max_batch_tokens {budget} is below max_requests {max_requests}: a step must hold a decode of each"
            )
        return cls(budget, chunk_size, max_requests, max_model_len)


def check_counts(**counts: int | None) -> None:
    """Each is None or a whole number of at least 1; raises ValueError with its name."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device}: torch finds no usable CUDA device here; `minichunk doctor` says why, device='cpu' works"
        )
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"device {device}: kernels and graphs run on the current CUDA device, which is {torch.cuda.current_device()}; choose "
            f"the card with CUDA_VISIBLE_DEVICES={device.index} and device='cuda'"
        )
    return device


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, model: Any) -> torch.dtype:
    if dtype == "auto":
        if not isinstance(model, str) and hasattr(model, "dtype"):
            return model.dtype
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = named.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype must be auto, {', '.join(named)}, got {dtype!r}")
    return found


def fitting_blocks(layers, block_size: int, dtype: torch.dtype, device: torch.device, gpu_memory: float, limits: Limits) -> int:  # fmt: skip
    """As many blocks as max_requests × max_model_len needs, within the memory allowed."""
    if not 0 < gpu_memory <= 1:
        raise ValueError(f"gpu_memory is a share of the card's free memory, above 0 and at most 1, got {gpu_memory}")
    each = block_bytes(layers, block_size, dtype)
    room = CPU_KV_BYTES if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0] * gpu_memory)
    fitting = room // each - 1  # the spare block
    if fitting < 1:
        raise MemoryError(no_room(2 * each, room, device))
    return min(fitting, limits.max_requests * num_blocks_needed(limits.max_model_len, block_size))


def verify(loaded: Loaded, attention: AttentionBackend, block_size: int) -> None:
    """A short mixed batch must match the model's own dense forward, or the model is refused. A learner's own attention
    may be wrong, the model must not be: it is then tried with the reference."""
    small = ModelRunner(loaded.model, loaded.layers, attention, max(8, 256 // block_size), block_size)
    families.verify(loaded.model, loaded.layers, lambda sequences, steps: chunk_logits(small, sequences, steps))


def no_room(wanted: int, room: int | None, device: torch.device) -> str:
    others = ", ".join(repr(e) for e in alive) or "none"
    free = "more than this machine gives" if room is None else f"{room / 1e6:.1f} MB free for them"
    return (
        f"{wanted / 1e6:.1f} MB wanted for keys and values on {device}, {free}. "
        f"Engines still alive in this process: {others}. close() the ones you no longer need, or lower num_blocks, max_requests or max_model_len"
    )


def make_runner(loaded, attention, num_blocks, block_size, dtype, device, compile, graphs, own_weights, overlap, buckets) -> ModelRunner:  # fmt: skip
    for name, value in dict(compile=compile, graphs=graphs).items():
        if value not in ("auto", "off"):
            raise ValueError(f"{name} must be auto or off, got {value!r}")
    wanted, cuda = (num_blocks + 1) * block_bytes(loaded.layers, block_size, dtype), device.type == "cuda"
    try:
        return ModelRunner(
            loaded.model, loaded.layers, attention, num_blocks, block_size,
            compile=cuda and compile == "auto", merge=own_weights, buckets=buckets if cuda and graphs == "auto" else None, overlap=overlap,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
            raise MemoryError(no_room(wanted, room, device)) from error
        raise
