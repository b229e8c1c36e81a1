"""From logits to tokens. Each sample uses one uniform number u = f(seed, index of the token), and nothing else.

There is no generator state, so preemption, the order of the batch and CUDA graphs cannot change what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minichunk.request import Request, TokenLogprobs

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
    chosen = choose(logits, requests)
    best = logits.max(dim=-1).values  # NaN anywhere in a row makes its maximum NaN
    tokens, fine = torch.stack([chosen, torch.isfinite(best).long()]).tolist()
    tokens = [token if ok else None for token, ok in zip(tokens, fine)]
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    for i, request in enumerate(requests):
        if request.params.logprobs is not None and tokens[i] is not None:
            row = torch.log_softmax(logits[i], dim=-1)
            top = torch.topk(row, min(request.params.logprobs, row.numel()))
            logprobs[i] = TokenLogprobs(
                tokens[i], float(row[tokens[i]]), dict(zip(top.indices.tolist(), top.values.tolist()))
            )
    return tokens, logprobs


def choose(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """int64 [n]: the chosen token of each row. Does not change `logits`."""
    params = [r.params for r in requests]
    if any(p.repetition_penalty != 1 for p in params):
        logits = _penalised(logits, requests)
    greedy = logits.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        u = [uniform(requests[i].seed, len(requests[i].token_ids) - requests[i].num_prompt_tokens) for i in drawn]
        rows = torch.tensor(drawn, device=logits.device)
        greedy[rows] = _draw(logits[rows], [params[i] for i in drawn], u)
    return greedy


def _penalised(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits of tokens seen in prompt or output: positive ones divided, negative ones multiplied by the penalty."""
    logits = logits.clone()
    for row, request in zip(logits, requests):
        if request.params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            score, penalty = row[seen], request.params.repetition_penalty
            row[seen] = torch.where(score > 0, score / penalty, score * penalty)
    return logits


def _draw(logits: Tensor, params: Sequence, u: list[float]) -> Tensor:
    """Inverse of the cumulative distribution at u, in float64, over tokens from likely to unlikely. int64 [n]."""
    device = logits.device
    column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)[:, None]  # noqa: E731
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
    place = torch.minimum(place, (probs > 0).sum(-1, keepdim=True) - 1)  # rounding must not reach a dropped token
    return order.gather(-1, place).squeeze(-1)
