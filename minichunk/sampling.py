"""From logits to tokens. Each sample uses one uniform number u = f(seed, index of the token), and nothing else.

There is no generator state, so preemption, the order of the batch and CUDA graphs cannot change what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from minichunk.request import Request, SamplingParams, TokenLogprobs

HAS_TRITON = find_spec("triton") is not None
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the two arguments alone."""
    return (_mix(_mix(seed & _MASK) ^ index) >> 11) * 2.0**-53


def request_seed(engine_seed: int, number: int) -> int:
    """The seed of a request that brought none."""
    return _mix(_mix(engine_seed & _MASK) ^ number)


def sample(logits: Tensor, requests: Sequence[Request]) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """logits float32 [n, V], a row a request → a token id each, and its log-probabilities where asked for.

    A row that holds no finite maximum (NaN, or nothing but -inf) gives None: that request alone has failed.
    """
    # All of this is queued behind the forward; the one wait of a step is tolist.
    chosen = choose_plain(logits, requests) if all(is_plain(r.params) for r in requests) else _checked(logits, requests)
    tokens = [token if token >= 0 else None for token in chosen.tolist()]
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    for i, request in enumerate(requests):
        if request.params.logprobs is not None and tokens[i] is not None:
            row = torch.log_softmax(logits[i], dim=-1)
            top = torch.topk(row, min(request.params.logprobs, row.numel()))
            logprobs[i] = TokenLogprobs(
                tokens[i], float(row[tokens[i]]), dict(zip(top.indices.tolist(), top.values.tolist()))
            )
    return tokens, logprobs


def choose_plain(logits: Tensor, requests: Sequence[Request], out: Tensor | None = None) -> Tensor:
    """int64 [n] on the device, into `out` if given: the tokens of plain requests, -1 where a row has no finite maximum.
    Waits for nothing."""
    if not (logits.is_cuda and HAS_TRITON):
        chosen = _checked(logits, requests)
        return chosen if out is None else out.copy_(chosen)
    from minichunk.sampling_kernel import pick

    return pick(logits, _put(_numbers(requests), torch.float64, logits.device), out)


def _checked(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """`choose`, -1 where a row has no finite maximum."""
    best, greedy = logits.max(dim=-1)  # NaN anywhere in a row makes its maximum NaN
    return torch.where(torch.isfinite(best), choose(logits, requests, greedy), -1)


def is_plain(params: SamplingParams) -> bool:
    """Greedy or a draw from the whole distribution, and nothing is wanted but the token."""
    return not params.top_k and params.top_p == 1 and params.repetition_penalty == 1 and params.logprobs is None


def _numbers(requests: Sequence[Request]) -> list[list[float]]:
    """[temperatures, uniforms] of the next tokens."""
    return [
        [r.params.temperature for r in requests],
        [_next_uniform(r) if r.params.temperature else 0.0 for r in requests],
    ]


def _next_uniform(request: Request) -> float:
    return uniform(request.seed, len(request.token_ids) - request.num_prompt_tokens)


def choose(logits: Tensor, requests: Sequence[Request], greedy: Tensor | None = None) -> Tensor:
    """int64 [n]: the chosen token of each row. greedy: the rows' argmax where it is known. Does not change `logits`."""
    params = [r.params for r in requests]
    if any(p.repetition_penalty != 1 for p in params):
        logits, greedy = _penalised(logits, requests), None
    chosen = logits.argmax(dim=-1) if greedy is None else greedy
    drawn = [i for i, p in enumerate(params) if p.temperature > COLDEST]
    for draw, rows in (
        (_draw, [i for i in drawn if not params[i].top_k and params[i].top_p == 1]),
        (_draw_likely, [i for i in drawn if params[i].top_k or params[i].top_p < 1]),
    ):
        if rows:
            u = [_next_uniform(requests[i]) for i in rows]
            if len(rows) == len(params):
                return draw(logits, params, u)
            index = _put(rows, torch.int64, logits.device)
            chosen = chosen.index_copy(0, index, draw(logits[index], [params[i] for i in rows], u))
    return chosen


def _put(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """values on the device, without waiting for what is queued there (a copy from pageable memory would)."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _penalised(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits of tokens seen in prompt or output: positive ones divided, negative ones multiplied by the penalty."""
    logits = logits.clone()
    for row, request in zip(logits, requests):
        if request.params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            score, penalty = row[seen], request.params.repetition_penalty
            row[seen] = torch.where(score > 0, score / penalty, score * penalty)
    return logits


COLDEST = 1e-6  # below it a draw is greedy: dividing by less could leave float32's range
BLOCK = 128  # tokens whose weights are summed first


def _draw(logits: Tensor, params: Sequence, u: list[float]) -> Tensor:
    """Inverse of the cumulative distribution at u, over all tokens in the order of their ids. int64 [n].

    In two steps, first a block of tokens and then the token in it, so that nothing as wide as the vocabulary is added
    up in float64 or sorted.
    """
    rows, vocab = logits.shape
    temperature, point = _put([[[p.temperature] for p in params], [[x] for x in u]], torch.float64, logits.device)
    weights = (logits / temperature.float()).softmax(-1)
    weights = F.pad(weights, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    block, rest = _invert(weights.sum(-1, dtype=torch.float64), point, scaled=True)
    inside = weights[torch.arange(rows, device=logits.device), block[:, 0]].double()
    token, _ = _invert(inside, rest, scaled=False)
    return (block * BLOCK + token).clamp(max=vocab - 1)[:, 0]


def _invert(weights: Tensor, point: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    """weights float64 [n, m], point [n, 1] → the first place whose running sum is above point, and how far point lies
    above the sum before it. scaled: point is a share of the whole. A place of weight 0 is never found."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    point = torch.minimum(point * total if scaled else point, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, point, right=True).clamp(max=weights.shape[1] - 1)  # NaN finds no place
    return place, (point - (sums - weights).gather(-1, place)).clamp(min=0)


def _draw_likely(logits: Tensor, params: Sequence, u: list[float]) -> Tensor:
    """As _draw, for rows with top-k or top-p: in float64 over the kept tokens, from likely to unlikely. int64 [n]."""
    device = logits.device
    column = lambda values, dtype: _put(values, dtype, device)[:, None]  # noqa: E731
    ranked, order = torch.sort(
        logits.double() / column([p.temperature for p in params], torch.float64), dim=-1, descending=True, stable=True
    )
    probs = ranked.softmax(-1)
    vocab = probs.shape[1]
    top_k = column([min(p.top_k or vocab, vocab) for p in params], torch.int64)
    probs = probs.masked_fill(torch.arange(vocab, device=device) >= top_k, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs  # a token stays while those before it have not reached p
    top_p = column([p.top_p for p in params], torch.float64)
    probs = probs.masked_fill((before >= top_p) & (top_p < 1), 0)
    cumulative = probs.cumsum(-1)
    point = column(u, torch.float64) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, point, right=True)
    # Rounding must not reach a dropped token; a row of NaN keeps none, and must not point outside.
    place = torch.minimum(place, (probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return order.gather(-1, place).squeeze(-1)
