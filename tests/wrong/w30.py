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


def true_means_hidden(start, length):
    return torch.arange(start + length) > torch.arange(start, start + length)[:, None]


def one_key_too_many(start, length):
    return torch.ones(length, start + length, dtype=torch.bool).tril(start + 1)


def upper_triangle(start, length):
    return torch.ones(length, start + length, dtype=torch.bool).triu(start)


def upper_triangle_of_the_left(start, length):
    return torch.ones(length, start + length, dtype=torch.bool).triu()


def columns_first(start, length):
    return torch.ones(length, start + length, dtype=torch.bool).tril(start).T


def own_block_only(start, length):
    mask = torch.zeros(length, start + length, dtype=torch.bool)
    mask[:, start:] = torch.ones(length, length, dtype=torch.bool).tril()
    return mask


def to_be_added(start, length):
    seen = torch.arange(start + length) <= torch.arange(start, start + length)[:, None]
    return torch.where(seen, 0.0, -torch.inf)


def to_be_added_with_large_numbers(start, length):
    return np.where(np.arange(start + length) <= np.arange(start, start + length)[:, None], 0.0, -1e9)


def nothing(start, length):
    torch.ones(length, start + length).tril(start)


def no_min(prompt, chunk):
    return [chunk * start + chunk * (chunk + 1) // 2 for start in range(0, prompt, chunk)]


def not_itself(prompt, chunk):
    lengths = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
    return [n * start + n * (n - 1) // 2 for start, n in lengths]


def a_chunk_more(prompt, chunk):
    lengths = [(k * chunk, min(chunk, prompt - k * chunk)) for k in range(prompt // chunk + 1)]
    return [n * start + n * (n + 1) // 2 for start, n in lengths]


def up_to_the_end(prompt, chunk):
    ends = [min(start + chunk, prompt) for start in range(0, prompt, chunk)]
    return [end * (end + 1) // 2 for end in ends]


def start_once(prompt, chunk):
    lengths = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
    return [start + n * (n + 1) // 2 for start, n in lengths]


def _pairs(prompt, chunk):
    lengths = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
    return [n * start + n * (n + 1) // 2 for start, n in lengths]


def divided(prompt, chunk):
    return [2 * n / 2 for n in _pairs(prompt, chunk)]


def as_a_tensor(prompt, chunk):
    return torch.tensor(_pairs(prompt, chunk))


def a_generator(prompt, chunk):
    return (n for n in _pairs(prompt, chunk))


def yields(prompt, chunk):
    yield from _pairs(prompt, chunk)


def rows_of_the_mask(prompt, chunk):
    def mask(start, length):
        return torch.ones(length, start + length).tril(start)

    return [mask(s, min(chunk, prompt - s)).sum(1) for s in range(0, prompt, chunk)]


def prints(prompt, chunk):
    print(end="")


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
    ("30.1", "swapped", true_means_hidden),
    ("30.1", "one_too_many", one_key_too_many),
    ("30.1", "upper", upper_triangle),
    ("30.1", "upper", upper_triangle_of_the_left),
    ("30.1", "transposed", columns_first),
    ("30.1", "history_hidden", own_block_only),
    ("30.1", "additive", to_be_added),
    ("30.1", "additive", to_be_added_with_large_numbers),
    ("30.1", "no_return", nothing),
    ("30.2", "not_cut", no_min),
    ("30.2", "no_self", not_itself),
    ("30.2", "empty_chunk", a_chunk_more),
    ("30.2", "cumulative", up_to_the_end),
    ("30.2", "history_once", start_once),
    ("30.2", "not_whole", divided),
    ("30.2", "no_list", as_a_tensor),
    ("30.2", "generator", a_generator),
    ("30.2", "generator", yields),
    ("30.2", "no_number", rows_of_the_mask),
    ("30.2", "no_return", prints),
    ("30.2", "equal_parts", equal_parts),
    ("30.2", "no_causal_half", full_square),
    ("30.2", "lost_tokens", whole_chunks_only),
    ("30.2", "no_history", without_history),
]
