"""Notebook 30: the mask of a chunk (30.1), the pairs of every chunk (30.2)."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch

from minichunk.lab.checks import Exercise, Result, close, number


# --- 30.1 ---------------------------------------------------------------------------------------------------------
def chunk_mask(start, length):
    rows = torch.arange(start, start + length)[:, None]
    return torch.arange(start + length) <= rows


CHUNKS = [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (9, 12), (64, 7)]  # start, length
MASK_MISTAKES: dict[str, Callable] = {
    "top_left": lambda row, key, start: key <= row,
    "no_self": lambda row, key, start: key < row + start,
    "sees_future": lambda row, key, start: key >= 0,
}


def check_mask(fn: Callable) -> Result:
    answers = [(case, _array(fn(*case))) for case in CHUNKS]
    for (start, length), mask in answers:
        case = f"start {start}, length {length}: tokens {_span(start, length)} are new, {start} before them are cached"
        wanted = _mask(start, length, lambda row, key, start: key <= row + start)
        if mask is None or mask.shape != wanted.shape:
            shape = "no array of True and False" if mask is None else f"shape {list(mask.shape)}"
            key = "no_history" if mask is not None and mask.shape == (length, length) and start else "unknown"
            rule = "A mask has a row for each new token and a column for each token so far: [length, start + length]."
            return MASK.wrong(key, rule, case, shape, f"shape {[length, start + length]}", f"{shape}, expected {[length, start + length]}")  # fmt: skip
        found = _first_bad_row(mask, start, length)
        if found:
            key = next((key for key, sees in MASK_MISTAKES.items() if _explains(sees, answers)), "unknown")
            rule = "Attention chunk by chunk must equal attention over the whole prompt."
            return MASK.wrong(key, rule, case, _draw(mask), _draw(wanted), found)
    return Result(True, "passed", MASK.passed)


def _array(mask: Any) -> np.ndarray | None:
    """The mask as booleans, or None where it is none."""
    try:
        found = np.asarray(mask)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 2 or found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
        return None
    return found.astype(bool)


def _mask(start: int, length: int, sees: Callable) -> np.ndarray:
    return np.array([[sees(row, key, start) for key in range(start + length)] for row in range(length)])


def _explains(sees: Callable, answers: list[tuple]) -> bool:
    return all(mask is not None and np.array_equal(mask, _mask(*case, sees)) for case, mask in answers)


def _first_bad_row(mask: np.ndarray, start: int, length: int) -> str:
    """Attention with this mask against the same rows of attention over the whole; the first row that differs, decoded."""
    rng, n = np.random.default_rng(30), start + length
    q, k, v = rng.normal(size=(3, n, 4))
    whole = attention(q, k, v, np.tri(n, dtype=bool))[start:]
    chunk = attention(q[start:], k, v, mask)
    for row in range(length):
        error = np.abs(chunk[row] - whole[row]).max()
        if not error < 1e-9:  # also where it is not a number
            said = f"row {row} is token {start + row}: it sees {_keys(mask[row])}, expected keys {_span(0, start + row + 1)}"
            return said + ("; its output is not a number" if np.isnan(error) else f"; its output is off by {error:.2g}")
    return ""


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """softmax(q·k / √d) v in float64, one head; a row that sees no key gives nan."""
    scores = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    top = scores.max(1, keepdims=True)
    weights = np.where(mask, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    with np.errstate(invalid="ignore"):
        return weights @ v / weights.sum(1, keepdims=True)


def _keys(row: np.ndarray) -> str:
    seen = np.flatnonzero(row)
    if not len(seen):
        return "no key at all"
    if len(seen) == seen[-1] - seen[0] + 1:
        return f"keys {_span(seen[0], len(seen))}"
    return f"keys {', '.join(map(str, seen))}"


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}…{first + count - 1}"


def _draw(mask: np.ndarray) -> str:
    if mask.size > 60:
        return f"a mask {list(mask.shape)}"
    return "".join("\n        " + " ".join("■" if seen else "·" for seen in row) for row in mask)


MASK = Exercise(
    "30.1",
    chunk_mask,
    check_mask,
    causes={
        "top_left": "row i is token start + i. You let it see keys 0…i, as if the chunk were the start of the prompt.",
        "no_self": "a token sees itself, too: key <= row, not key < row.",
        "sees_future": "a token must not see the ones after it, though they are in the same chunk.",
        "no_history": "the columns of the cached tokens are missing: a row sees all `start` tokens before the chunk.",
    },
    passed=f"{len(CHUNKS)} chunks give the rows that the whole prompt gives, to the ninth digit.",
)


# --- 30.2 ---------------------------------------------------------------------------------------------------------
def chunk_pairs(prompt, chunk):
    pairs = []
    for start in range(0, prompt, chunk):
        length = min(chunk, prompt - start)
        pairs.append(length * start + length * (length + 1) // 2)
    return pairs


SPLITS = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 2), (7, 3), (12, 16), (40, 8), (571, 64)]  # prompt, chunk
Spans = list[tuple[int, int]]


def spans(prompt: int, chunk: int) -> Spans:
    """[(start, length), …] of the chunks."""
    return [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]


def count_pairs(start: int, length: int) -> int:
    """Pairs counted one token after the other: token t sees the t + 1 tokens up to itself."""
    return sum(t + 1 for t in range(start, start + length))


def _equal(prompt: int, chunk: int) -> list[float]:
    parts = spans(prompt, chunk)
    return [prompt * (prompt + 1) / 2 / len(parts)] * len(parts)


PAIRS_MISTAKES: dict[str, Callable[[int, int], list]] = {
    "equal_parts": _equal,
    "no_causal_half": lambda p, c: [n * (a + n) for a, n in spans(p, c)],
    "lost_tokens": lambda p, c: [count_pairs(a, n) for a, n in spans(p, c) if n == c],
    "no_history": lambda p, c: [count_pairs(0, n) for _, n in spans(p, c)],
}


def check_pairs(fn: Callable) -> Result:
    answers = [(case, fn(*case), [count_pairs(a, n) for a, n in spans(*case)]) for case in SPLITS]
    for (prompt, chunk), got, wanted in answers:
        if _same(got, wanted):
            continue
        key = next((k for k, gives in PAIRS_MISTAKES.items() if all(_same(g, gives(*c)) for c, g, _ in answers)), "unknown")  # fmt: skip
        total = prompt * (prompt + 1) // 2
        rule = f"A number for each chunk, and all of them sum to P(P + 1)/2 = {total}: cutting neither adds work nor saves any."
        return PAIRS.wrong(key, rule, f"prompt {prompt}, chunk {chunk}", got, wanted, _first_chunk(prompt, chunk, got, wanted))  # fmt: skip
    return Result(True, "passed", PAIRS.passed)


def _same(got: Any, wanted: list) -> bool:
    try:
        got = list(got)
    except TypeError:
        return False
    return len(got) == len(wanted) and all(close(a, b) for a, b in zip(got, wanted))


def _first_chunk(prompt: int, chunk: int, got: Any, wanted: list[int]) -> str:
    try:
        got = list(got)
    except TypeError:
        return f"expected a list with a number for each of {len(wanted)} chunks, got {got!r}"
    for k, (start, length) in enumerate(spans(prompt, chunk)):
        if k >= len(got):
            return f"chunk {k} (tokens {_span(start, length)}) is missing: {len(got)} of {len(wanted)} chunks are there"
        if not (number(got[k]) and close(got[k], wanted[k])):
            tokens = [f"token {t} sees {t + 1}" for t in range(start, start + length)]
            tokens = tokens if length <= 3 else [tokens[0], "…", tokens[-1]]
            return f"chunk {k} (tokens {_span(start, length)}): you have {got[k]}, counted {wanted[k]}: {', '.join(tokens)}"
    return f"{len(got)} chunks, expected {len(wanted)}"


PAIRS = Exercise(
    "30.2",
    chunk_pairs,
    check_pairs,
    causes={
        "equal_parts": "the chunks are not equal: a later one has more history to look at.",
        "no_causal_half": "inside the chunk a token sees only those up to itself: length·(length + 1)/2, not length².",
        "lost_tokens": "the last chunk may be shorter, and you dropped it: range(0, prompt, chunk), and min for its length.",
        "no_history": "each of the chunk's tokens also sees the `start` tokens before the chunk: length·start more pairs.",
    },
    passed=f"{len(SPLITS)} splits, each summing to P(P + 1)/2.",
    slow="your loop does not end: the start never moves on",
)

EXERCISES = [MASK, PAIRS]
