"""What a step costs: floating-point operations, bytes, seconds.

A step is a list of chunks; each brings `length` new tokens after `start` computed ones. Four sums say it all:

    tokens   Σ length                                   the linear layers see rows, whoever they belong to
    samples  chunks that end their request's tokens      rows of the logits
    pairs    Σ length·start + length(length+1)/2         (query, key) pairs under the causal mask
    keys     Σ start + length                            cached tokens read

From them every operator's FLOPs and bytes follow as exact integers (`operators`), and from those the seconds:
an operator needs max(FLOPs/peak, bytes/bandwidth); operators follow one another, so a step needs their sum, the
**serial roof**. `CostModel` adds what real kernels lose; `fit` learns it from measured steps.

Formulas: Kaplan et al. 2020 (arXiv 2001.08361) for the linear layers, Williams et al. 2009 for the roofline,
Narayanan et al. 2021 (arXiv 2104.04473) for tensor parallelism.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from minichunk.paths import data_path

# --- the two machines: a model's shape, and a GPU ------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide its cost. Sizes in elements, `dtype_bytes` per element.

    gated: the MLP has gate, up and down (3 matrices, SwiGLU), else up and down (2).
    tied: the output head is the embedding. window: sliding window of `window_layers` layers, None without.
    layer_vectors: 1-D parameters of a layer (norms, biases; None: two norms). other_params: those outside the layers
    beside the embeddings (None: the last norm). Both count as parameters; their work is not in FLOPs.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    window: int | None = None
    window_layers: int = 0
    layer_vectors: int | None = None
    other_params: int | None = None
    dtype_bytes: int = 2

    @classmethod
    def of(cls, config: Any, dtype_bytes: int = 2) -> ModelShape:
        """The shape of a transformers config. Raises ValueError for a kind whose matrices it does not know."""
        kind = config.model_type
        if kind not in _GATED:
            raise ValueError(
                f"no cost formula for model type {kind!r} (known: {', '.join(sorted(_GATED))}); "
                "if its layers are q, k, v, o and a dense MLP, give ModelShape(...) the numbers yourself"
            )
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        ffn = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
        qkv, gpt = (heads + 2 * kv_heads) * head_dim, kind in ("gpt2", "opt")
        vectors, other = 2 * hidden, hidden
        if kind == "qwen3":
            vectors += 2 * head_dim
        if kind == "qwen2":
            vectors += qkv
        if gpt:
            positions = config.max_position_embeddings + (2 if kind == "opt" else 0)
            vectors, other = 4 * hidden + qkv + hidden + ffn + hidden, (positions + 2) * hidden
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if kinds is not None:
            windowed = sum(k == "sliding_attention" for k in kinds)
        else:
            windowed = config.num_hidden_layers if kind == "mistral" and window else 0
        return cls(
            getattr(config, "_name_or_path", "") or kind, config.num_hidden_layers, hidden, heads, kv_heads, head_dim, ffn,
            config.vocab_size, gated=_GATED[kind], tied=bool(config.tie_word_embeddings), window=window if windowed else None,
            window_layers=windowed, layer_vectors=vectors, other_params=other, dtype_bytes=dtype_bytes,
        )  # fmt: skip

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices: h(H+2K)d + Hd·h + 3hI (2hI when not gated)."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def params(self) -> int:
        """All parameters."""
        vectors = 2 * self.hidden if self.layer_vectors is None else self.layer_vectors
        other = self.hidden if self.other_params is None else self.other_params
        return self.layers * (self.layer_weights + vectors) + (1 if self.tied else 2) * self.vocab * self.hidden + other

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one cached token takes, over all layers: 2 L K d b."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


_GATED = {"llama": True, "mistral": True, "qwen2": True, "qwen3": True, "gpt2": False, "opt": False}


def _shapes() -> dict[str, ModelShape]:
    """Published shapes, from each model's own config; GPT-3 and OPT-13B from their papers (2005.14165, 2205.01068)."""
    llama = [
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, window=4096, window_layers=32),
        ModelShape("yi-6b", 32, 4096, 32, 4, 128, 11008, 64000),
        ModelShape("yi-34b", 60, 7168, 56, 8, 128, 20480, 64000),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True, layer_vectors=2 * 1024 + 2 * 128),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, layer_vectors=2 * 4096 + 2 * 128),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    ]

    def gpt(name, layers, hidden, heads, vocab, positions):
        return ModelShape(
            name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, gated=False, tied=True,
            layer_vectors=13 * hidden, other_params=(positions + 2) * hidden,
        )  # fmt: skip

    llama += [gpt("gpt-3-175b", 96, 12288, 96, 50257, 2048), gpt("opt-13b", 40, 5120, 40, 50272, 2050)]
    return {shape.name: shape for shape in llama}


SHAPES = _shapes()


def shape_named(name: str | ModelShape) -> ModelShape:
    """The published shape `name`; a ModelShape is given back. Unknown: ValueError with the list."""
    if isinstance(name, ModelShape):
        return name
    if name not in SHAPES:
        raise ValueError(f"unknown model shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


@dataclass(frozen=True)
class GPU:
    """A GPU as the cost model sees it: peak in FLOP/s, bandwidth in bytes/s, memory in bytes, link in bytes/s one way.

    Use `dataclasses.replace(gpu, peak=…, bandwidth=…)` to put measured ceilings in the place of the data sheet's.
    """

    name: str
    peak: float
    bandwidth: float
    memory: float
    sms: int
    link: float
    link_latency: float = 20e-6  # seconds of one small all-reduce; Vidur measured 16–46 µs inside an A100 host

    @property
    def ridge(self) -> float:
        """FLOP per byte at which compute and bandwidth take equally long. With 2-byte weights it is also about the number
        of tokens at which a linear layer turns compute-bound: a weight is read once (2 bytes), used once a token (2 FLOP)."""
        return self.peak / self.bandwidth


def gpus() -> dict[str, GPU]:
    """The GPUs of data/gpus.json by name."""
    table = json.loads(data_path("gpus.json").read_text(encoding="utf-8"))["gpus"]
    return {
        g["name"]: GPU(
            g["name"], g["tflops"] * 1e12, g["hbm_gbs"] * 1e9, g["mem_gb"] * 1e9, g["sms"], g["link_gbs"] * 1e9
        )
        for g in table
    }


def gpu_named(name: str | GPU) -> GPU:
    """The GPU `name` of data/gpus.json; case and spaces do not matter, a unique beginning is enough ("h200")."""
    if isinstance(name, GPU):
        return name

    def plain(text):
        return text.lower().replace(" ", "").replace("-", "")

    table = gpus()
    found = [g for n, g in table.items() if plain(n) == plain(name)] or [
        g for n, g in table.items() if plain(n).startswith(plain(name))
    ]
    if len(found) != 1:
        some = [g.name for g in found] or list(table)
        raise ValueError(f"GPU {name!r} is {'not unique' if found else 'unknown'}; choose among {', '.join(some)}")
    return found[0]


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The sums of a step that its cost depends on. `window_*`: the same under the sliding window."""

    tokens: int
    samples: int
    pairs: int
    keys: int
    sequences: int = 0
    window_pairs: int = 0
    window_keys: int = 0


def work(chunks: Iterable, window: int | None = None, row_tile: int | None = None) -> Work:
    """Sums over a step's chunks.

    chunks: `Chunk` objects, (start, length), (start, length, samples), or a StepRecord's (id, start, length, is_last,
    is_decode). (start, length) samples. window: keys a token may see, itself included.
    row_tile: a kernel that cannot keep the keys in its L2 reads them once per tile of so many query rows.
    """
    if isinstance(chunks, Work):
        return chunks
    tokens = samples = pairs = keys = sequences = window_pairs = window_keys = 0
    for chunk in chunks:
        start, length, sampled = _parts(chunk)
        reads = 1 if row_tile is None else -(-length // row_tile)
        sequences += 1
        tokens += length
        samples += sampled
        pairs += length * start + length * (length + 1) // 2
        keys += reads * (start + length)
        if window:
            whole = min(max(window - start, 0), length)  # tokens that still see all before them
            window_pairs += whole * start + whole * (whole + 1) // 2 + (length - whole) * window
            window_keys += reads * min(start + length, window + length - 1)
    return Work(tokens, samples, pairs, keys, sequences, window_pairs, window_keys)


def _parts(chunk) -> tuple[int, int, bool]:
    if not isinstance(chunk, (tuple, list)):
        return chunk.start, chunk.length, chunk.is_last
    match len(chunk):
        case 2:
            return chunk[0], chunk[1], True
        case 3:
            return chunk
        case 5:
            return chunk[1], chunk[2], chunk[3]
    raise ValueError(f"a chunk is (start, length), (start, length, samples) or a StepRecord's five, got {chunk!r}")


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operator, summed over the layers, on one GPU of `tp`.

    gemms: (rows, columns, depth) of its matrix products; executed `repeats` times. flops, nbytes: all repeats together.
    comm_bytes: payload of the all-reduces, `repeats` of them.
    """

    name: str
    flops: int
    nbytes: int
    repeats: int
    gemms: tuple = ()
    comm_bytes: int = 0

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory traffic."""
        return self.flops / self.nbytes if self.nbytes else math.inf


def operators(model: str | ModelShape, chunks: Iterable | Work, tp: int = 1) -> list[Operator]:
    """FLOPs and bytes of a step, operator by operator, on one of `tp` GPUs. Exact integers.

    qkv, o, mlp: weights once, activations in and out. attention: useful pairs (causal), keys and values read, queries
    read, output written. kv_write: the new keys and values. norms: residual read, normalised, added back (6 h a token).
    logits: only rows that sample, 4-byte logits out. embed: a row read and written.
    Raises ValueError when heads or FFN do not divide by tp.
    """
    s = shape_named(model)
    if tp < 1 or s.heads % tp or s.ffn % tp:
        raise ValueError(f"{s.name} has {s.heads} heads and an FFN of {s.ffn}: they do not divide into {tp} GPUs")
    w = work(chunks, s.window)
    n, b, layers, h, d = w.tokens, s.dtype_bytes, s.layers, s.hidden, s.head_dim
    heads, kv_heads, ffn, vocab = s.heads // tp, -(-s.kv_heads // tp), s.ffn // tp, -(-s.vocab // tp)
    qkv, up = (heads + 2 * kv_heads) * d, (2 if s.gated else 1) * ffn
    windowed = s.window_layers if s.window else 0
    pairs = (layers - windowed) * w.pairs + windowed * w.window_pairs
    keys = (layers - windowed) * w.keys + windowed * w.window_keys
    kv = 2 * kv_heads * d * b  # bytes of one token in one layer

    def linear(name, repeats, gemms, activations):
        """activations: elements read and written per repeat, beside the weights."""
        flops = 2 * sum(m * c * k for m, c, k in gemms)
        weights = sum(c * k for _, c, k in gemms)
        return Operator(name, repeats * flops, repeats * (weights * b + activations), repeats, tuple(gemms))

    out = [
        Operator("embed", 0, 2 * n * h * b, 1),
        linear("qkv", layers, [(n, qkv, h)], n * (h + qkv) * b),
        Operator("kv_write", 0, layers * n * kv, layers),
        Operator("attention", 4 * heads * d * pairs, keys * kv + layers * 2 * n * heads * d * b, layers),
        linear("o", layers, [(n, h, heads * d)], n * (heads * d + h) * b),
        linear("mlp", layers, [(n, up, h), (n, h, ffn)], n * (2 * h + 2 * up + 2 * ffn) * b),
        Operator("norms", 0, layers * 6 * n * h * b, layers),
        linear("logits", 1, [(w.samples, vocab, h)], w.samples * (h * b + 4 * vocab)),
    ]
    if tp > 1:
        out.append(Operator("all_reduce", 0, 0, 2 * layers, comm_bytes=2 * layers * n * h * b))
    return out


LINEAR = ("qkv", "o", "mlp", "logits")


def flops(model: str | ModelShape, chunks: Iterable | Work) -> dict[str, int]:
    """Useful FLOPs of a step: {"linear", "attention", "logits", "total"}; one multiply-add is 2."""
    parts = {op.name: op.flops for op in operators(model, chunks)}
    linear = parts["qkv"] + parts["o"] + parts["mlp"]
    return {
        "linear": linear,
        "attention": parts["attention"],
        "logits": parts["logits"],
        "total": linear + parts["attention"] + parts["logits"],
    }


def traffic(model: str | ModelShape, chunks: Iterable | Work) -> dict[str, int]:
    """Bytes a step moves: {"weights", "kv_read", "kv_write", "activations", "total"}."""
    s = shape_named(model)
    w = work(chunks, s.window)
    windowed = s.window_layers if s.window else 0
    total = sum(op.nbytes for op in operators(s, w))
    weights = s.dtype_bytes * (s.layers * s.layer_weights + s.hidden * s.vocab)
    kv_read = ((s.layers - windowed) * w.keys + windowed * w.window_keys) * (s.kv_bytes_per_token // s.layers)
    kv_write = s.kv_bytes_per_token * w.tokens
    rest = total - weights - kv_read - kv_write
    return {"weights": weights, "kv_read": kv_read, "kv_write": kv_write, "activations": rest, "total": total}


def arithmetic_intensity(model: str | ModelShape, chunks: Iterable | Work) -> float:
    """FLOP per byte of a whole step. Above the GPU's ridge the step is compute-bound, below it bandwidth-bound."""
    return flops(model, chunks)["total"] / traffic(model, chunks)["total"]


def ridge(gpu: str | GPU) -> float:
    """FLOP per byte at which the GPU's compute and bandwidth balance."""
    return gpu_named(gpu).ridge


def kv_bytes_per_token(model: str | ModelShape) -> int:
    """Bytes of one cached token over all layers and GPUs."""
    return shape_named(model).kv_bytes_per_token


def kv_tokens_that_fit(
    model: str | ModelShape, gpu: str | GPU, tp: int = 1, fraction: float = 0.9, reserve: float = 0
) -> int:
    """Tokens of keys and values that fit beside the weights in `fraction` of the memory of `tp` GPUs, `reserve` bytes
    (activations) kept free on all of them together. 0 or less: the weights alone do not fit."""
    s, gpu = shape_named(model), gpu_named(gpu)
    room = fraction * gpu.memory * tp - s.params * s.dtype_bytes - reserve
    copies = max(1, tp / s.kv_heads)  # fewer KV heads than GPUs: each head is stored more than once
    return math.floor(room / (s.kv_bytes_per_token * copies))


def split(prompt_tokens: int, chunk: int, start: int = 0) -> list[tuple[int, int, bool]]:
    """A prompt cut into chunks: [(start, length, samples), …]. Each is a step of its own in a bare chunked prefill."""
    end = start + prompt_tokens
    return [(p, min(chunk, end - p), p + chunk >= end) for p in range(start, end, chunk)]


# --- quantisation -------------------------------------------------------------------------------------------------------


def padded(rows: int, tile: int) -> int:
    """Rows that a kernel with row tiles of `tile` really computes."""
    return -(-rows // tile) * tile


def waves(rows: int, columns: int, sms: int, tile: tuple[int, int] = (128, 128)) -> int:
    """Rounds in which `sms` multiprocessors work off the output tiles of a [rows, columns] product, one tile each."""
    return -(-(-(-rows // tile[0]) * -(-columns // tile[1])) // sms)


def tiled_pairs(start: int, length: int, row_tile: int, key_tile: int) -> int:
    """(query, key) pairs that a tiled causal attention kernel computes: masked parts of its tiles are work too."""
    return sum(
        row_tile * padded(start + min(row + row_tile, length), key_tile) for row in range(0, length, row_tile)
    )  # fmt: skip


# --- time ---------------------------------------------------------------------------------------------------------------

GROUP = {"qkv": "linear", "o": "linear", "mlp": "linear", "logits": "linear", "attention": "attention"}


@dataclass(frozen=True)
class Efficiency:
    """What real kernels reach. All 1 and 0: the roof.

    compute, memory: share of peak and of bandwidth, for linear layers (`linear_*`), attention, and the rest (memory only).
    knee: near the ridge neither side hides the other fully: t = (t_compute^knee + t_memory^knee)^(1/knee); inf is max().
    launch: seconds that each operator of each layer adds. overhead: seconds a step that no operator explains
    (scheduling, packing, sampling), and per_request: such seconds for each request in the step. link: share of link
    bandwidth that an all-reduce reaches.
    tile: GEMM row tile in tokens (padded rows cost like real ones), or (rows, columns), which counts whole waves.
    """

    linear_compute: float = 1.0
    linear_memory: float = 1.0
    attention_compute: float = 1.0
    attention_memory: float = 1.0
    other_memory: float = 1.0
    link: float = 1.0
    knee: float = math.inf
    launch: float = 0.0
    overhead: float = 0.0
    per_request: float = 0.0
    tile: int | tuple[int, int] = 1

    def __post_init__(self):
        for name in (f.name for f in fields(self) if f.name != "tile"):
            value = getattr(self, name)
            if not (value >= 0 if name in _SECONDS else value > 0):
                raise ValueError(f"{name} must be {'at least' if name in _SECONDS else 'above'} 0, got {value}")
        if self.knee < 1:
            raise ValueError(f"knee must be at least 1 (compute and memory one after the other), got {self.knee}")


_SECONDS = ("launch", "overhead", "per_request")
ROOF = Efficiency()
# Fitted on published A100 timings, see docs/simulator.md: layers on Vidur's (MLSys'24), attention on Sarathi-Serve's
# (OSDI'24). The 3 ms of overhead is an assumption; `fit` replaces all of it by measurements of your own GPU.
TYPICAL = Efficiency(0.67, 0.83, 0.24, 0.8, knee=2.4, launch=8e-6, overhead=3e-3)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step of `shape` on `tp` GPUs. `shape` and `gpu` may be names.

    overlapped: compute and memory of different operators run beside each other: max(Σ compute, Σ memory), a bound that
    serial kernels cannot reach; else Σ max(compute, memory).
    """

    shape: str | ModelShape
    gpu: str | GPU
    tp: int = 1
    efficiency: Efficiency = ROOF
    overlapped: bool = False

    def __post_init__(self):
        object.__setattr__(self, "shape", shape_named(self.shape))
        object.__setattr__(self, "gpu", gpu_named(self.gpu))
        operators(self.shape, [(0, 1)], self.tp)  # refuses a tp that does not divide

    def sides(self, op: Operator) -> tuple[float, float, float]:
        """Seconds that an operator's compute, memory traffic and communication take, each alone."""
        e, gpu, group = self.efficiency, self.gpu, GROUP.get(op.name, "other")
        compute = 0.0
        if op.flops:
            share = e.linear_compute if group == "linear" else e.attention_compute
            compute = self._flops_executed(op) / (share * gpu.peak)
        share = {"linear": e.linear_memory, "attention": e.attention_memory, "other": e.other_memory}[group]
        comm = 0.0
        if op.comm_bytes:
            moved = 2 * (self.tp - 1) / self.tp * op.comm_bytes  # ring: reduce-scatter, then all-gather
            comm = op.repeats * gpu.link_latency + moved / (e.link * gpu.link)
        return compute, op.nbytes / (share * gpu.bandwidth), comm

    def _flops_executed(self, op: Operator) -> float:
        tile = self.efficiency.tile
        if tile == 1 or not op.gemms:
            return op.flops
        if isinstance(tile, int):
            return 2 * op.repeats * sum(padded(m, tile) * c * k for m, c, k in op.gemms)
        per_wave = 2 * tile[0] * tile[1] * self.gpu.sms
        return op.repeats * sum(waves(m, c, self.gpu.sms, tile) * per_wave * k for m, c, k in op.gemms)

    def table(self, chunks: Iterable | Work) -> list[dict]:
        """A row per operator: name, flops, bytes, intensity, compute_s, memory_s, comm_s, seconds, bound."""
        rows = []
        for op in operators(self.shape, chunks, self.tp):
            compute, memory, comm = self.sides(op)
            bound = "link" if comm else "compute" if compute > memory else "memory"
            rows.append(
                {
                    "name": op.name,
                    "flops": op.flops,
                    "bytes": op.nbytes,
                    "intensity": op.intensity,
                    "compute_s": compute,
                    "memory_s": memory,
                    "comm_s": comm,
                    "seconds": self._together(op, compute, memory, comm),
                    "bound": bound,
                }  # fmt: skip
            )
        return rows

    def _together(self, op: Operator, compute: float, memory: float, comm: float) -> float:
        return self._join(compute, memory) + comm + op.repeats * self.efficiency.launch

    def _join(self, compute: float, memory: float) -> float:
        knee = self.efficiency.knee
        if knee == math.inf or not compute or not memory:
            return max(compute, memory)
        high, low = max(compute, memory), min(compute, memory)
        return high * (1 + (low / high) ** knee) ** (1 / knee)

    def seconds(self, chunks: Iterable | Work) -> float:
        """Seconds of the step; 0 tokens take no time."""
        w = work(chunks, self.shape.window)
        if not w.tokens:
            return 0.0
        return self.seconds_of(operators(self.shape, w, self.tp), w)

    def seconds_of(self, ops: Sequence[Operator], w: Work) -> float:
        """Seconds of these operators, and what the step costs beside them."""
        e, sides = self.efficiency, [self.sides(op) for op in ops]
        beside = e.overhead + w.sequences * e.per_request
        if self.overlapped:
            compute, memory, comm = (sum(side) for side in zip(*sides))
            return self._join(compute, memory) + comm + sum(op.repeats for op in ops) * e.launch + beside
        return sum(self._together(op, *side) for op, side in zip(ops, sides)) + beside

    def utilisation(self, chunks: Iterable | Work) -> tuple[float, float]:
        """(MFU, MBU): share of peak FLOP/s and of bandwidth that the step reaches."""
        ops, seconds = operators(self.shape, work(chunks, self.shape.window), self.tp), self.seconds(chunks)
        return (
            sum(op.flops for op in ops) / (seconds * self.gpu.peak),
            sum(op.nbytes for op in ops) / (seconds * self.gpu.bandwidth),
        )

    def largest_budget(
        self, slo: float, decodes: int = 0, context: int = 1024, start: int = 0, limit: int = 65536
    ) -> int:
        """Most tokens a step may hold so that it ends within `slo` seconds: `decodes` at `context` cached tokens each, the
        rest one prompt chunk after `start` tokens. At most `limit`; 0 when the decodes alone take longer."""
        resident = [(context, 1)] * decodes

        def fits(chunk):
            return self.seconds(resident + [(start, chunk, False)] * (chunk > 0)) <= slo

        if decodes > limit or (decodes and not fits(0)):
            return 0
        low, high = 0, limit - decodes  # fits(low) holds
        if fits(high):
            return limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low + decodes


def serial_roof(model: str | ModelShape, chunks: Iterable | Work, gpu: str | GPU, tp: int = 1) -> float:
    """Seconds below which no engine that runs its operators one after the other can get: Σ max(FLOPs/peak, bytes/bandwidth)."""
    return CostModel(model, gpu, tp).seconds(chunks)


def overlapped_roof(model: str | ModelShape, chunks: Iterable | Work, gpu: str | GPU, tp: int = 1) -> float:
    """Seconds with perfect overlap of all operators: max(Σ FLOPs/peak, Σ bytes/bandwidth)."""
    return CostModel(model, gpu, tp, overlapped=True).seconds(chunks)


# --- calibration ----------------------------------------------------------------------------------------------------------

_LEARNABLE = (
    "linear_compute", "linear_memory", "attention_compute", "attention_memory", "other_memory", "link", "knee", *_SECONDS,
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """A calibrated model and how well it holds. ratios: predicted / measured, per measurement.

    learned: names of the efficiencies that the measurements could say something about; the others kept their start value.
    """

    model: CostModel
    ratios: list[float]
    learned: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        """Mean |predicted/measured - 1|."""
        return float(np.mean(np.abs(np.array(self.ratios) - 1)))

    @property
    def max_error(self) -> float:
        return float(np.max(np.abs(np.array(self.ratios) - 1)))

    def __str__(self):
        e = self.model.efficiency
        values = ", ".join(f"{name} {getattr(e, name):.3g}" for name in self.learned)
        return f"{values}; error mean {self.mean_error:.1%}, worst {self.max_error:.1%} of {len(self.ratios)} steps"


def fit(
    model: CostModel,
    measured: Sequence[tuple],
    learn: Sequence[str] = ("linear_compute", "linear_memory", "attention_compute", "attention_memory", "overhead"),
    only: Sequence[str] | None = None,
    rounds: int = 60,
) -> Fit:
    """Learns efficiencies from measured steps: least squares on predicted / measured - 1.

    measured: [(chunks, seconds), …]. learn: names in Efficiency; one that no measurement depends on keeps its value.
    only: operator names the measurement covers (e.g. ("qkv", "o", "mlp") for linear layers timed alone), None for all.
    A measured step may bring its own model, (chunks, seconds, model), e.g. of another tp: it gets the same efficiencies.
    Levenberg–Marquardt over the logarithms, numeric derivatives: the roof has kinks, but few parameters.
    """
    unknown = set(learn) - set(_LEARNABLE)
    if unknown:
        raise ValueError(f"cannot learn {', '.join(sorted(unknown))}; there are {', '.join(_LEARNABLE)}")
    if len(measured) < 1 or any(not m[1] > 0 for m in measured):
        raise ValueError(f"fit needs measured steps with seconds above 0, got {len(measured)}")
    models = [m[2] if len(m) > 2 else model for m in measured]
    steps = [work(m[0], of.shape.window) for m, of in zip(measured, models)]
    wanted = np.array([m[1] for m in measured])

    def ratios(values):
        e = replace(model.efficiency, **{name: _bounded(name, v) for name, v in zip(learn, values)})
        predicted = [_seconds(replace(of, efficiency=e), w, only) for w, of in zip(steps, models)]
        return replace(model, efficiency=e), np.array(predicted) / wanted

    start = replace(model.efficiency, knee=min(model.efficiency.knee, 8.0)) if "knee" in learn else model.efficiency
    calls = sum(op.repeats for op in operators(model.shape, steps[0], model.tp))
    smallest = {"overhead": wanted.min() / 1e3, "per_request": wanted.min() / 1e4, "launch": wanted.min() / 1e3 / calls}
    values = np.array(
        [math.log(max(getattr(start, n), smallest[n]) if n in _SECONDS else getattr(start, n)) for n in learn]
    )
    trial, now = ratios(values)
    damping, used = 1e-2, np.zeros(len(learn), bool)
    for _ in range(rounds):
        # backwards: an efficiency that starts at its upper bound of 1 can only fall
        slope = np.stack([(now - ratios(values - 1e-4 * unit)[1]) / 1e-4 for unit in np.eye(len(learn))], axis=1)
        used |= np.abs(slope).max(axis=0) > 1e-3
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -slope.T @ (now - 1))
        proposal = values + np.clip(step, -1, 1)
        better, then = ratios(proposal)
        if np.sum((then - 1) ** 2) < np.sum((now - 1) ** 2):
            values, trial, now, damping = proposal, better, then, damping / 3
        else:
            damping *= 4
        if damping > 1e8:
            break
    return Fit(trial, now.tolist(), [name for name, was in zip(learn, used) if was])


def _bounded(name: str, log_value: float) -> float:
    value = math.exp(min(max(log_value, -30), 30))
    if name in _SECONDS:
        return value
    return min(max(value, 1.0), 64.0) if name == "knee" else min(max(value, 0.01), 1.0)


def _seconds(model: CostModel, w: Work, only: Sequence[str] | None) -> float:
    if only is None:
        return model.seconds(w)
    return model.seconds_of([op for op in operators(model.shape, w, model.tp) if op.name in only], w)


def efficiency_from(values: dict) -> Efficiency:
    """An Efficiency from a dict (JSON): unknown names are errors."""
    known = {f.name for f in fields(Efficiency)}
    if set(values) - known:
        raise ValueError(
            f"unknown efficiencies {', '.join(sorted(set(values) - known))}; there are {', '.join(sorted(known))}"
        )
    return Efficiency(**values)
