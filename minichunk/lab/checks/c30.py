"""Notebook 30: the mask of a chunk (30.1), the pairs of every chunk (30.2)."""

from __future__ import annotations

import operator
from typing import Any, Callable

import numpy as np
import torch

from minichunk.lab.checks import Exercise, Result, close, number
from minichunk.lab.checks.shared import is_array, kind, plural, short


# --- 30.1 ---------------------------------------------------------------------------------------------------------
def chunk_mask(start, length):
    rows = torch.arange(start, start + length)[:, None]
    return torch.arange(start + length) <= rows


CHUNKS = [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (9, 12), (64, 7)]  # start, length
MASK_MISTAKES: list[tuple[str, Callable]] = [
    ("top_left", lambda row, key, start: key <= row),
    ("no_self", lambda row, key, start: key < row + start),
    ("sees_future", lambda row, key, start: key >= 0),
    ("swapped", lambda row, key, start: key > row + start),
    ("one_too_many", lambda row, key, start: key <= row + start + 1),
    ("upper", lambda row, key, start: key >= row + start),
    ("upper", lambda row, key, start: key >= row),
    ("history_hidden", lambda row, key, start: start <= key <= row + start),
]


def check_mask(fn: Callable) -> Result:
    given = [(case, fn(*case)) for case in CHUNKS]
    answers = [(case, _array(mask)) for case, mask in given]
    for (start, length), got in given:
        if _additive(got):
            case, wanted = _case(start, length), _draw(_mask(start, length, lambda row, key, start: key <= row + start))
            rule = "A mask says True where the row's token may see the column's, else False."
            return MASK.wrong(
                "additive", rule, case, short(np.asarray(got).tolist(), 120), wanted, "numbers below 0 in the mask"
            )
    for ((start, length), got), (_, mask) in zip(given, answers):
        case = _case(start, length)
        wanted = _mask(start, length, lambda row, key, start: key <= row + start)
        if mask is None or mask.shape != wanted.shape:
            rule = "A mask has a row for each new token and a column for each token so far: [length, start + length]."
            key, said, expected = _no_mask(got, mask, start, length)
            return MASK.wrong(key, rule, case, None if got is None else said, f"shape {list(wanted.shape)}", f"{said}, expected {expected}")  # fmt: skip
        found = _first_bad_row(mask, start, length)
        if found:
            key = next((key for key, sees in MASK_MISTAKES if _explains(sees, answers)), "unknown")
            key = "transposed" if all(m is not None and m.shape == (sum(c), c[1]) for c, m in answers) else key
            rule = "Attention chunk by chunk must equal attention over the whole prompt."
            return MASK.wrong(key, rule, case, _draw(mask), _draw(wanted), found)
    return Result(True, "passed", MASK.passed)


def _case(start: int, length: int) -> str:
    new = f"{_span('token', start, length)} {'is' if length == 1 else 'are'} new"
    return f"start {start}, length {length}: {new}, {start} before {'it' if length == 1 else 'them'} cached"


def _no_mask(got: Any, mask: np.ndarray | None, start: int, length: int) -> tuple[str, str, str]:
    """(key, what it is, what was expected) of an answer that has not the shape of a mask, or not its values."""
    shape = f"[length, start + length] = {[length, start + length]}"
    dims = len(got.shape) if is_array(got) else 2
    if dims != 2:
        return "unknown", f"{plural(dims, 'dimension')} {list(got.shape)}", f"2: {shape}"
    if mask is None:
        said = f"{kind(got)}, with other values than True and False" if is_array(got) else f"got {kind(got)}"
        return "unknown", said, "an array of True and False"
    key = "no_history" if start and mask.shape == (length, length) else "unknown"
    return key, f"shape {list(mask.shape)}", shape


def _array(mask: Any) -> np.ndarray | None:
    """The mask as booleans, or None where it is none."""
    try:
        found = np.asarray(mask)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 2 or found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
        return None
    return found.astype(bool)


def _additive(mask: Any) -> bool:
    """Whether it is a mask to be added to the scores: 0 where a key may be seen, −inf or a large negative where not."""
    return is_array(mask) and (found := np.asarray(mask)).dtype.kind == "f" and bool((found < 0).any())


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
            said = f"row {row} is token {start + row}: it sees {_keys(mask[row])}, expected {_span('key', 0, start + row + 1)}"
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
        return _span("key", int(seen[0]), len(seen))
    return f"keys {', '.join(map(str, seen))}"


def _span(word: str, first: int, count: int) -> str:
    """ "token 3", "tokens 3…5"."""
    return f"{word} {first}" if count == 1 else f"{word}s {first}…{first + count - 1}"


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
        "history_hidden": "the columns of the cached tokens are there, but False: a row sees all of them.",
        "swapped": "your True and False are swapped: True means may see.",
        "one_too_many": "one key too many: row i sees the keys 0…start + i.",
        "upper": "you drew the upper triangle. A row sees what came before it: rows are the new tokens, columns all tokens.",
        "transposed": "rows and columns are swapped: rows are the new tokens, columns all tokens so far.",
        "additive": "that is a float mask with −inf, to be added to scores. Wanted: True and False.",
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
    "not_cut": lambda p, c: [count_pairs(a, c) for a, _ in spans(p, c)],
    "no_self": lambda p, c: [a * n + n * (n - 1) // 2 for a, n in spans(p, c)],
    "empty_chunk": lambda p, c: [count_pairs(a, n) for a, n in spans(p, c)] + [0] * (p % c == 0),
    "cumulative": lambda p, c: [count_pairs(0, a + n) for a, n in spans(p, c)],
    "history_once": lambda p, c: [a + count_pairs(0, n) for a, n in spans(p, c)],
}


def check_pairs(fn: Callable) -> Result:
    answers = [(case, fn(*case), [count_pairs(a, n) for a, n in spans(*case)]) for case in SPLITS]
    unlike = [answer for answer in answers if not _same(*answer[1:])]
    for (prompt, chunk), got, wanted in unlike or answers:
        if unlike:
            key = next((k for k, gives in PAIRS_MISTAKES.items() if all(_same(g, gives(*c)) for c, g, _ in answers)), "unknown")  # fmt: skip
        elif isinstance(got, list) and all(map(_whole, got)):
            continue
        else:
            key = "not_whole" if isinstance(got, list) else "no_list"
        total = prompt * (prompt + 1) // 2
        rule = f"A number for each chunk, and all of them sum to prompt·(prompt + 1)/2 = {total}: cutting neither adds work nor saves any."
        return PAIRS.wrong(key, rule, f"prompt {prompt}, chunk {chunk}", got, wanted, _first_chunk(prompt, chunk, got, wanted))  # fmt: skip
    return Result(True, "passed", PAIRS.passed)


def _whole(n: Any) -> bool:
    try:
        return operator.index(n) is not None
    except TypeError:
        return False


def _same(got: Any, wanted: list) -> bool:
    values = got.tolist() if is_array(got) else got
    return (
        isinstance(values, list | tuple)
        and len(values) == len(wanted)
        and all(close(a, b) for a, b in zip(values, wanted))
    )


def _first_chunk(prompt: int, chunk: int, got: Any, wanted: list[int]) -> str:
    if not isinstance(got, list):
        return f"expected a list of {plural(len(wanted), 'number')}, one a chunk, got {kind(got)}"
    for k, (start, length) in enumerate(spans(prompt, chunk)):
        where = f"chunk {k} ({_span('token', start, length)})"
        if k >= len(got):
            return f"{where} is missing: {plural(len(got), 'chunk')}, expected {len(wanted)}"
        if not close(got[k], wanted[k]):
            tokens = [f"token {t} sees {t + 1}" for t in range(start, start + length)]
            tokens = tokens if length <= 3 else [tokens[0], "…", tokens[-1]]
            have = got[k] if number(got[k]) else kind(got[k])
            return f"{where}: you have {have}, counted {wanted[k]}: {', '.join(tokens)}"
    if len(got) == len(wanted):
        k = next(k for k, n in enumerate(got) if not _whole(n))
        return f"chunk {k}: you have {got[k]}, counted {wanted[k]}"
    return f"{plural(len(got), 'chunk')}, expected {len(wanted)}"


PAIRS = Exercise(
    "30.2",
    chunk_pairs,
    check_pairs,
    causes={
        "equal_parts": "the chunks are not equal: a later one has more history to look at.",
        "no_causal_half": "inside the chunk a token sees only those up to itself: length·(length + 1)/2, not length².",
        "lost_tokens": "the last chunk may be shorter, and you dropped it: range(0, prompt, chunk), and min for its length.",
        "no_history": "each of the chunk's tokens also sees the `start` tokens before the chunk: length·start more pairs.",
        "not_cut": "the last chunk has only prompt − start tokens: min(chunk, prompt − start).",
        "no_self": "a token sees itself, too: length·(length + 1)/2 pairs in the triangle, not length·(length − 1)/2.",
        "empty_chunk": "an empty chunk at the end: range(0, prompt, chunk) stops before it.",
        "cumulative": "these are all pairs up to the chunk's end. Count each chunk's own pairs only.",
        "history_once": "you counted start once for the chunk. It counts once for each token: length·start.",
        "not_whole": "pairs are whole numbers: // 2, not / 2.",
        "no_list": "return a plain list: .tolist() makes one of a tensor, list(…) of a tuple.",
    },
    passed=f"{len(SPLITS)} splits, each summing to prompt·(prompt + 1)/2.",
    slow="your loop does not end: the start never moves on",
)

EXERCISES = [MASK, PAIRS]
