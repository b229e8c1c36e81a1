"""Wrong answers to 30.1 and 30.2, as learners write them: (exercise, key, function)."""

import math

import numpy as np
import torch


def top_left(start, length):
    return torch.tril(torch.ones(length, start + length, dtype=torch.bool))


def not_even_itself(start, length):
    return torch.arange(start + length)[None, :] < torch.arange(start, start + length)[:, None]


def everything(start, length):
    return np.ones((length, start + length), dtype=bool)


def own_square(start, length):
    return np.tri(length, dtype=bool)


def equal_parts(prompt, chunk):
    count = math.ceil(prompt / chunk)
    return [prompt * (prompt + 1) / 2 / count for _ in range(count)]


def full_square(prompt, chunk):
    return [min(chunk, prompt - s) * min(s + chunk, prompt) for s in range(0, prompt, chunk)]


def whole_chunks_only(prompt, chunk):
    return [chunk * k * chunk + chunk * (chunk + 1) // 2 for k in range(prompt // chunk)]


def without_history(prompt, chunk):
    pairs = []
    while prompt > 0:
        n = min(chunk, prompt)
        pairs.append(n * (n + 1) // 2)
        prompt -= n
    return pairs


WRONG = [
    ("30.1", "top_left", top_left),
    ("30.1", "no_self", not_even_itself),
    ("30.1", "sees_future", everything),
    ("30.1", "no_history", own_square),
    ("30.2", "equal_parts", equal_parts),
    ("30.2", "no_causal_half", full_square),
    ("30.2", "lost_tokens", whole_chunks_only),
    ("30.2", "no_history", without_history),
]
