"""What the user asked, what came back, and the chunk: a run of one request's new tokens.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which the first
`num_computed` have their keys and values in the cache; each step computes some more of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a request's next tokens, and when to stop.

    max_tokens: new tokens at most, at least 1.
    temperature: 0 is greedy; else logits are divided by it.
    top_k, top_p: keep the k likeliest (0 = all), then the smallest set whose probability reaches p.
    repetition_penalty: above 1 makes every token already in prompt or output less likely (CTRL, arXiv 1909.05858).
    seed: with it, the same request gives the same tokens whatever runs beside it.
    stop: strings that end the output; they are cut from the text. stop_token_ids: tokens that end it; they are kept.
    ignore_eos: go on after the model's end-of-sequence token.
    logprobs: n ≥ 0 returns each generated token's raw log-probability and those of the n likeliest.

    Raises ValueError when a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: int | tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        ids = (self.stop_token_ids,) if isinstance(self.stop_token_ids, int) else tuple(self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        for id in ids:
            _require_int("each of stop_token_ids", id, 0)
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("top_k", self.top_k, 0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0)
        for name in ("temperature", "top_p", "repetition_penalty"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be above 0 (1 = none), got {self.repetition_penalty}")
        if any(not isinstance(s, str) or s == "" for s in stop):
            raise ValueError(f"stop must hold non-empty strings, got {stop!r}")


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


@dataclass(slots=True)
class Metrics:
    """When things happened to one request, in seconds on the engine's clock.

    queue_time: arrival to first step. ttft: arrival to first token. tbt: gaps between its tokens. e2e: arrival to end.
    A figure that does not exist (no token came) is None.
    """

    arrival: float
    first_scheduled: float | None
    token_times: list[float]
    finished: float | None
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]

    @property
    def e2e(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-probability of one generated token, and of the likeliest ones, {token_id: logprob}."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class Completion:
    """What came back. `text` is None without a tokenizer; `error` says why when finish_reason is "error"."""

    id: int
    prompt_ids: list[int]
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics
    error: str | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the engine. `token_ids` is prompt + output; the last `num_tokens - num_computed` are new."""

    id: int | str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    seed: int = 0
    num_computed: int = 0
    table: Any = None  # its BlockTable while it runs, else None
    keys: list = field(default_factory=list)  # keys of its whole blocks in the prefix index (blocks.py)
    metrics: Metrics = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    detokenizer: Any = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self):
        if self.metrics is None:
            self.metrics = Metrics(self.arrival, None, [], None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decode(self) -> bool:
        """Its next chunk is a decode: one token left, and that one was generated."""
        return len(self.token_ids) - self.num_computed == 1 and self.num_computed >= self.num_prompt_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_slots(self) -> int:
        """Cache slots it can come to need: its last token is sampled but never computed."""
        return self.num_prompt_tokens + self.params.max_tokens - 1


class Chunk(NamedTuple):
    """`length` new tokens of one request, from position `start` = its num_computed.

    is_last: the chunk reaches num_tokens; only then is a token sampled.
    is_decode: length 1, is_last, at or after the end of the prompt. Every other chunk is a prompt chunk.
    """

    request: Request
    start: int
    length: int
    is_last: bool
    is_decode: bool

    @classmethod
    def of(cls, request: Request, length: int) -> Chunk:
        """The request's next `length` tokens."""
        start = request.num_computed
        is_last = start + length == len(request.token_ids)
        return cls(request, start, length, is_last, is_last and length == 1 and start >= request.num_prompt_tokens)

    @property
    def id(self) -> int | str:
        return self.request.id

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.start : self.end]

    def __repr__(self):
        kind = f"{'decode' if self.is_decode else 'prompt'}{', last' * self.is_last}"
        return f"Chunk({self.id}, start={self.start}, length={self.length}, {kind})"
