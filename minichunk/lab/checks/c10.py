"""Notebook 10: generate with a cache (10.1), FLOPs and bytes of a product (10.2)."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable

import torch

from minichunk.lab.checks import Exercise, Result, close, number
from minichunk.lab.checks.shared import kind, odd_entry, plural, short
from minichunk.shapes import tiny_model, tiny_tokenizer


# --- 10.1 ---------------------------------------------------------------------------------------------------------
def generate_cached(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache = result.cache
        token = int(result.logits[0, -1].argmax())
        output.append(token)
        new = [token]
    return output


@dataclass(frozen=True)
class Call:
    """One call of the model: how many tokens were new and how many cached, the likeliest token after each new one, and
    the index of the largest of all its logits when the rows are laid end to end."""

    new: int
    cached: int
    best: list[int]
    flat: int


class Counted:
    """A transformers model that counts what it is fed.

    model(new, cache=None), with `new` [1, new tokens], gives .logits [1, new tokens, vocabulary] and .cache for the next
    call. The cache's older name in transformers, past_key_values, is understood, too. Raises ValueError for `new` of
    another shape.
    """

    def __init__(self, model: Any):
        self._model, self.calls = model, []
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @property
    def tokens_fed(self) -> int:
        return sum(call.new for call in self.calls)

    def __call__(self, input_ids: torch.Tensor, cache: Any = None, *, past_key_values: Any = None, **options: Any) -> SimpleNamespace:  # fmt: skip
        cache = past_key_values if cache is None else cache
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.numel():
            shape = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise ValueError(f"the model takes a tensor [1, new tokens], as torch.tensor([new]) makes it, got {shape}")
        cached = cache.get_seq_length() if cache is not None else 0
        with torch.inference_mode():
            out = self._model(input_ids, **{"use_cache": True, self._name: cache, **options})
        rows = out.logits[0]
        self.calls.append(Call(input_ids.shape[1], cached, rows.argmax(-1).tolist(), int(rows.argmax())))
        return SimpleNamespace(logits=out.logits, cache=out[self._name], past_key_values=out[self._name])


@functools.cache
def _tiny() -> tuple:
    model = tiny_model().eval()
    model.generation_config.eos_token_id = None
    return model, tiny_tokenizer()


def transformers_answer(model: Any, ids: list[int], n: int) -> list[int]:
    """n tokens, greedy, from transformers' own generate; the model's generation_config names no eos."""
    with torch.inference_mode():
        new = torch.tensor([ids])
        out = model.generate(new, attention_mask=torch.ones_like(new), max_new_tokens=n, do_sample=False, pad_token_id=0)  # fmt: skip
    return out[0, len(ids) :].tolist()


TEXTS = [
    ("a", 1),
    ("a", 2),
    ("The cat", 1),
    ("The cat", 3),
    ("one two three", 6),
    ("Hello world, this is", 12),
    ("red and moon", 8),  # the model's end token, 2, comes sixth
]


def check_generate(fn: Callable) -> Result:
    model, tokenizer = _tiny()
    for text, n in TEXTS:
        ids, counted = tokenizer(text)["input_ids"], Counted(model)
        answer = fn(counted, ids, n)
        wanted = transformers_answer(model, ids, n)
        found = _problem(answer, counted.calls, ids, n, wanted, tokenizer)
        if found:
            key, rule, difference = found
            case = f"ids {ids} (“{text}”, P = {len(ids)}), n = {n}, a model of two layers"
            got = answer if odd_entry(answer) or answer is None else f"{short(answer, 120)}, {_calls(counted)}"
            return GENERATE.wrong(key, rule, case, got, f"{wanted}, tokens fed: P + n − 1 = {len(ids) + n - 1}", difference)  # fmt: skip
    return Result(True, "passed", GENERATE.passed)


def _problem(answer: Any, calls: list[Call], ids: list[int], n: int, wanted: list[int], tokenizer: Any) -> tuple[str, str, str] | None:  # fmt: skip
    """(key, the rule that failed, first difference), or None for a right answer."""
    rule = "generate_cached returns a list of token ids."
    if not isinstance(answer, list):
        return "unknown" if answer is None else "no_list", rule, f"got {kind(answer)}"
    if not all(map(number, answer)):
        return "unknown", rule, odd_entry(answer) or f"got {short(answer, 120)}"
    got = [int(t) for t in answer]
    if len(got) != n:
        rule = "The answer is the n new tokens, no more and no fewer."
        there = f"{plural(len(got), 'token')}, expected {n}"
        if got == wanted[: len(got)] and tokenizer.eos_token_id in wanted[len(got) - 1 : len(got) + 1]:
            return "stopped_at_end", rule, f"{there}: yours stop at {_token(tokenizer.eos_token_id, tokenizer)}"
        prompt = ", the prompt's among them" if got[: len(ids)] == ids and len(got) > n else ""
        return "length", rule, there + prompt
    fed, rule = sum(call.new for call in calls), "Each token is fed once: the prompt, then each new token but the last."
    if fed != len(ids) + n - 1:
        again = next((k for k, call in enumerate(calls) if k and call.new > 1), None)
        if again is not None:
            return "tokens_refed", rule, f"call {again} feeds {calls[again].new} tokens, and only 1 of them is new"
        key = "last_fed" if fed == len(ids) + n else "unknown"
        calls_said = plural(len(calls), "call")
        return key, rule, f"{plural(fed, 'token')} fed in {calls_said}, expected {len(ids) + n - 1}"
    if calls[0].new != len(ids):
        rule = "The prompt is fed in one call, each new token in its own."
        return (
            "prompt_in_pieces",
            rule,
            f"the first call feeds {plural(calls[0].new, 'token')}; the prompt has {len(ids)}",
        )
    lost = next((k for k, call in enumerate(calls) if k and not call.cached), None)
    if lost is not None:
        rule = "Every call but the first goes on from the cache of the call before."
        return "cache_lost", rule, f"call {lost} feeds {plural(calls[lost].new, 'token')} and has no token in the cache"
    i = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), None)
    if i is None:
        return None
    said = f"token {i} of the answer: you have {_token(got[i], tokenizer)}, expected {_token(wanted[i], tokenizer)}"
    rule = "The next token follows the last token that was fed."
    rows = calls[i].best if i < len(calls) else []
    if rows and got[i] == calls[i].flat >= len(tokenizer):
        row, column = divmod(got[i], len(tokenizer))
        return "flattened", rule, f"{said}; {got[i]} = {row} · {len(tokenizer)} + {column}: row {row}, token {column}"
    if got[i] in rows[:-1]:
        said += f"; yours follows row {rows.index(got[i])} of the logits, and the last new token is row {len(rows) - 1}"
        return "wrong_row", rule, said
    return "unknown", "The tokens are those of transformers' own generate.", said


def _token(id: int, tokenizer: Any) -> str:
    return f"{id} {tokenizer.decode([id])!r}" if 0 <= id < len(tokenizer) else f"{id} (no such token)"


def _calls(counted: Counted) -> str:
    new = [call.new for call in counted.calls]
    if not new:
        return "the model was never called"
    return f"tokens fed: {' + '.join(map(str, new))}" + f" = {sum(new)}" * (len(new) > 1)


GENERATE = Exercise(
    "10.1",
    generate_cached,
    check_generate,
    causes={
        "tokens_refed": "you feed tokens that the cache holds already. After the first call, feed the newest token alone.",
        "wrong_row": "the logits have a row for each token that was fed. The next token is in the last row: logits[0, -1].",
        "length": "count the tokens: the first call gives the first one already, and the prompt is no part of the answer.",
        "last_fed": "you feed the last token, too, though nobody asks what comes after it. Stop before that call.",
        "cache_lost": "you call the model without the cache: it sees a lone token at position 0. Pass on result.cache.",
        "flattened": "argmax over all rows at once gives an index into all the logits laid end to end. Take the last row: "
        "logits[0, -1].",
        "prompt_in_pieces": "the model takes many tokens at once: feed the whole list ids in the first call.",
        "no_list": "return a plain list: .tolist() makes one of a tensor, list(…) of a tuple.",
        "stopped_at_end": "you stop at the end token. Return exactly n tokens, also past it.",
    },
    passed=f"{len(TEXTS)} answers equal those of transformers, and P + n − 1 tokens were fed each time.",
)


# --- 10.2 ---------------------------------------------------------------------------------------------------------
def flops_and_bytes(N, W, b):
    flops = 2 * N * W
    nbytes = W * b
    return flops, nbytes


def count_product(N: int, k: int, m: int) -> tuple[int, int]:
    """(multiplications and additions, weights fetched) of a product [N, k] × [k, m], done by hand: a weight is fetched
    once and used for all N rows."""
    rows, sums = [[1.0] * k for _ in range(N)], [[0.0] * m for _ in range(N)]
    operations = fetched = 0
    for i in range(k):
        for j in range(m):
            weight, fetched = 0.5, fetched + 1
            for row, out in zip(rows, sums):
                product = row[i] * weight
                out[j] += product
                operations += 2
    return operations, fetched


PRODUCTS = [
    (5, (2, 3), 4),
    (1, (2, 3), 4),
    (3, (4, 5), 4),
    (50, (8, 6), 2),
    (7, (1, 1), 1),
]  # N, shape of the weights, b
FLOPS_MISTAKES = {"mul_add": lambda N, W, b: N * W, "no_tokens": lambda N, W, b: 2 * W}
BYTES_MISTAKES = {
    "weights_reread": lambda N, W, b: N * W * b,
    "bytes_per_value": lambda N, W, b: W,
}


def check_cost(fn: Callable) -> Result:
    answers = []
    for N, (k, m), b in PRODUCTS:
        operations, fetched = count_product(N, k, m)
        answers.append(((N, k, m, b), fn(N, k * m, b), (operations, fetched * b)))
    for case, got, wanted in answers:
        pair = _pair(got)
        if pair and close(got[0], wanted[0]) and close(got[1], wanted[1]):
            continue
        N, k, m, b = case
        text = f"N = {N}, W = {k * m} ({k} × {m}), b = {b}"
        rule = "FLOPs counted in the product, bytes of the weights, each fetched once."
        if not pair:
            there = odd_entry(got) or f"expected a pair (FLOPs, bytes), got {kind(got)}"
            return COST.wrong("unknown", rule, text, got, wanted, there)
        if all(close(g[0], w[1]) and close(g[1], w[0]) for _, g, w in answers if _pair(g)):
            there = f"you have ({got[0]}, {got[1]}), counted ({wanted[0]}, {wanted[1]})"
            return COST.wrong("swapped", rule, text, tuple(got), wanted, there)
        part, mistakes = (1, BYTES_MISTAKES) if close(got[0], wanted[0]) else (0, FLOPS_MISTAKES)
        key = next((key for key, gives in mistakes.items() if _explains(gives, part, answers)), "unknown")
        difference = (
            f"FLOPs: you have {got[0]}, counted {wanted[0]}: each of {plural(N, 'token')} meets each of {plural(k * m, 'weight')}, "
            "a multiplication and an addition"
            if part == 0
            else f"bytes: you have {got[1]}, counted {wanted[1]}: each of {plural(k * m, 'weight')} of {plural(b, 'byte')} is fetched once and serves "
            + (f"all {N} tokens" if N > 1 else "the token")
        )
        return COST.wrong(key, rule, text, tuple(got), wanted, difference)
    return Result(True, "passed", COST.passed)


def _pair(got: Any) -> bool:
    return isinstance(got, list | tuple) and len(got) == 2 and all(map(number, got))


def _explains(gives: Callable, part: int, answers: list[tuple]) -> bool:
    """Whether this mistake gives that part of the pair in every answer."""
    return all(_pair(got) and close(got[part], gives(N, k * m, b)) for (N, k, m, b), got, _ in answers)


COST = Exercise(
    "10.2",
    flops_and_bytes,
    check_cost,
    causes={
        "swapped": "the two are swapped: (flops, nbytes).",
        "no_tokens": "N is missing: each of the N tokens meets each weight.",
        "mul_add": "the factor 2 is missing. A weight is multiplied and the product is added: two operations.",
        "weights_reread": "you read the weights once for each token. They are fetched once, and all tokens use them.",
        "bytes_per_value": "you counted values. Each takes b bytes.",
    },
    passed="five products counted by hand; FLOP per byte are 2·N / b, however large the matrix.",
)

EXERCISES = [GENERATE, COST]
