"""Notebook 50: pack the batch (50.1), attention over it (50.2), which bug? (50.3)."""

from __future__ import annotations

import random
from typing import Any, Callable

from minichunk.lab.checks import Bug, Exercise, Result
from minichunk.lab.checks.shared import is_array, kind, plural
from minichunk.request import Chunk, Request, SamplingParams


# --- 50.1 ---------------------------------------------------------------------------------------------------------
def pack_tokens(chunks):
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = [], [], [0], [], []
    for chunk in chunks:
        token_ids += chunk.token_ids
        positions += range(chunk.start, chunk.start + chunk.length)
        cu_seqlens_q.append(len(token_ids))
        seq_lens_k.append(chunk.start + chunk.length)
        if chunk.is_last:
            logits_rows.append(len(token_ids) - 1)
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows


NAMES = ("token_ids", "positions", "cu_seqlens_q", "seq_lens_k", "logits_rows")


def chunk_of(id: str, start: int, length: int, total: int, prompt: int) -> Chunk:
    """A chunk of a request with made-up tokens: A's are 100, 101, …, B's 200, 201, …"""
    first = 100 * (ord(id) - 64)
    return Chunk.of(Request(id, list(range(first, first + total)), prompt, num_computed=start), length)


def batches(count: int = 120, seed: int = 50) -> list[list[Chunk]]:
    """Batches as the engine makes them, small ones first; the running example is the fourth."""
    rng, found = random.Random(seed), []
    found.append([chunk_of("A", 0, 2, 2, 2)])
    found.append([chunk_of("A", 2, 1, 3, 2)])
    found.append([chunk_of("A", 0, 2, 3, 3)])
    found.append([chunk_of("A", 7, 1, 8, 6), chunk_of("B", 9, 12, 21, 21), chunk_of("C", 0, 3, 3, 3)])
    for n in range(count):
        batch = []
        for k in range(1 + n // 40 + rng.randint(0, 2)):
            total = rng.randint(1, 6 + n // 8)
            start = rng.choice([0, total - 1, rng.randrange(total)])
            prompt = start if start and start == total - 1 and rng.random() < 0.6 else total
            batch.append(chunk_of(chr(65 + k), start, rng.choice([total - start, rng.randint(1, total - start)]), total, prompt))  # fmt: skip
        found.append(batch)
    return found


def draw(chunks: list[Chunk]) -> str:
    """The chunks in words, a line each."""
    lines = [f"{len(chunks)} chunk{'s' * (len(chunks) > 1)}"]
    for c in chunks:
        what = "a decode" if c.is_decode else "the last of its prompt" if c.is_last else "not the last of its prompt"
        lines.append(f"    {c.id}: start {c.start}, length {c.length}, is_last {c.is_last} ({what}), token_ids {_few(c.token_ids)}")  # fmt: skip
    return "\n".join(lines)


def _few(values: list[int]) -> str:
    return str(values) if len(values) <= 6 else f"[{values[0]}, {values[1]}, … {values[-1]}]"


def row_name(chunks: list[Chunk], row: int) -> str:
    """ "packed row 7 = request B, token 15": what a row of the batch is."""
    first = 0
    for c in chunks:
        if first <= row < first + c.length:
            return f"packed row {row} = request {c.id}, token {c.start + row - first}"
        first += c.length
    return f"row {row} (the batch has {plural(first, 'row')}, from 0)"


def _ends(chunks: list[Chunk]) -> list[int]:
    return pack_tokens(chunks)[2][1:]


PACK_MISTAKES = {  # what each known mistake makes of a list
    "positions": {
        "rope_restart": [lambda chunks: [p for c in chunks for p in range(c.length)]],
        "one_sequence": [lambda chunks: list(range(sum(c.length for c in chunks)))],
    },
    "token_ids": {"first_tokens": [lambda chunks: [t for c in chunks for t in c.request.token_ids[: c.length]]]},
    "cu_seqlens_q": {
        "no_zero": [_ends],
        "lengths": [lambda chunks: [0, *(c.length for c in chunks)], lambda chunks: [c.length for c in chunks]],
    },
    "seq_lens_k": {
        "history_lost": [lambda chunks: [c.length for c in chunks]],
        "new_lost": [lambda chunks: [c.start for c in chunks]],
    },
    "logits_rows": {
        "sampled_partial": [lambda chunks: [end - 1 for end in _ends(chunks)]],
        "row_off_by_one": [lambda chunks: [end for c, end in zip(chunks, _ends(chunks)) if c.is_last], _ends],
        "decode_left_out": [
            lambda chunks: [e - 1 for c, e in zip(chunks, _ends(chunks)) if c.is_last and not c.is_decode]
        ],
        "row_not_packed": [
            lambda chunks: [c.end - 1 for c in chunks if c.is_last],
            lambda chunks: [c.length - 1 for c in chunks if c.is_last],
        ],
    },
}


def _no_lists(got: Any) -> tuple[str, str] | None:
    """(key, what it is) of an answer that is not five lists of whole numbers, else None."""
    if not isinstance(got, tuple | list):
        return "dict" if isinstance(got, dict) else "unknown", f"got {kind(got)}"
    if len(got) != 5:
        return "not_five", f"got {plural(len(got), 'value')}, expected 5"
    for name, part in zip(NAMES, got):
        if not isinstance(part, tuple | list | range):
            return "no_lists" if is_array(part) else "unknown", f"{name} is {kind(part)}"
        for i, x in enumerate(part):
            if isinstance(x, bool) or not isinstance(x, int):
                key = "nested" if isinstance(x, tuple | list | range) else "no_lists" if is_array(x) else "unknown"
                return key, f"{name}[{i}] is {kind(x)}"
    return None


def _lists(got: Any) -> list[list[int]] | None:
    """The five lists, or None."""
    return None if _no_lists(got) else [list(part) for part in got]


def check_pack(fn: Callable) -> Result:
    for n, chunks in enumerate(batches()):
        got = fn(chunks)
        lists, wanted, odd = _lists(got), pack_tokens(chunks), _no_lists(got)
        if odd:
            key, there = odd
            rule = f"pack_tokens returns five lists of whole numbers: {', '.join(NAMES)}."
            return PACK.wrong(key, rule, draw(chunks), got, wanted, there)
        if lists != list(wanted) and (found := _whole_mistake(lists, wanted, chunks)):
            key, there = found
            rule = f"pack_tokens returns five lists about all chunks, in this order: {', '.join(NAMES)}."
            return PACK.wrong(key, rule, draw(chunks), tuple(lists), wanted, there)
        for part, name in enumerate(NAMES):
            if lists[part] != wanted[part]:
                answers = [(chunks, lists[part])]
                for other in batches()[n + 1 : n + 20]:  # what else it says tells two mistakes apart
                    found = _lists(fn(other))
                    answers += [(other, found[part])] if found else []
                return _explain(name, answers, wanted)
    return _drive(fn)


def _whole_mistake(lists: list[list[int]], wanted: tuple, chunks: list[Chunk]) -> tuple[str, str] | None:
    """(key, difference) of a mistake that is not one list's: another order, or the first chunk alone."""
    if sorted(lists) == sorted(wanted):
        at = next(i for i, (a, b) in enumerate(zip(lists, wanted)) if a != b)
        return "order", f"where {NAMES[at]} belongs, {NAMES[list(wanted).index(lists[at])]} stands"
    if len(chunks) > 1 and lists == list(pack_tokens(chunks[:1])):
        return "early_return", f"there are {len(chunks)} chunks, and the lists are those of {chunks[0].id} alone"
    return None


RULES = {
    "token_ids": "token_ids are the chunks' new tokens, one chunk after the other.",
    "positions": "A token's position is its place in its own request; the history counts.",
    "cu_seqlens_q": "cu_seqlens_q starts with 0; entry i + 1 is where the rows of chunk i end.",
    "seq_lens_k": "seq_lens_k counts the keys that a request has after this step: its history and its new tokens.",
    "logits_rows": "logits_rows names the last row of each chunk that is_last, and no other row.",
}


def _explain(name: str, answers: list[tuple], all_wanted: tuple) -> Result:
    chunks, got = answers[0]
    wanted, cu = all_wanted[NAMES.index(name)], all_wanted[2]
    explains = {
        key: sum(mistake(c) == list(a) for c, a in answers)
        for key, ways in PACK_MISTAKES[name].items()
        for mistake in ways
        if mistake(chunks) == got
    }
    key = max(explains, key=explains.get, default="unknown")
    at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
    there = f"{name} has length {len(got)}, expected {len(wanted)}" if len(got) != len(wanted) else ""
    if at < min(len(got), len(wanted)):
        there += f"{'; ' * bool(there)}{name}[{at}]: you wrote {got[at]}, expected {wanted[at]}"
        if name == "positions":
            n = next(i for i in range(len(chunks)) if cu[i] <= at < cu[i + 1])
            there += f" = start {chunks[n].start} + {at - cu[n]}"
        if name == "seq_lens_k":
            there += f" = {chunks[at].start} in the cache + {chunks[at].length} new, of request {chunks[at].id}"
    if name in ("positions", "token_ids") and at < cu[-1]:
        there = f"{row_name(chunks, at)}: {there}"
    extra = next((r for r in got if r not in wanted), None)
    if name == "logits_rows" and extra is not None:
        there += f"; you sample {row_name(chunks, extra)}"
    return PACK.wrong(key, RULES[name], draw(chunks), f"{name} {got}", f"{name} {wanted}", there)


def _drive(fn: Callable) -> Result:
    """A tiny model's engine under the learner's packer, against transformers' own forward, token by token."""
    import torch

    from minichunk.engine import Engine
    from minichunk.families import twin

    prompts = [[5, 9, 4, 7, 3, 8], list(range(10, 45)), [6, 2, 11]]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    with Engine("tiny", max_batch_tokens=16, max_requests=8, max_model_len=64, num_blocks=48, block_size=4, pack=fn, device="cpu") as engine:  # fmt: skip
        done, dense = engine.generate(prompts, params), twin(engine.model, "eager")
        mixed = sum(step.is_mixed for step in engine.run.steps)
    worst = 0.0
    with torch.inference_mode():
        for n, answer in enumerate(done):
            rows = dense(torch.tensor([answer.prompt_ids + answer.token_ids])).logits[0].float().log_softmax(-1)
            for k, (token, said) in enumerate(zip(answer.token_ids, answer.logprobs)):
                row = rows[len(answer.prompt_ids) + k - 1]
                worst = max(worst, abs(float(row[token]) - said.logprob))
                if int(row.argmax()) != token or worst > 1e-3:
                    rule = "A model under your packer says what transformers says for each request alone."
                    there = f"request {chr(65 + n)}, output token {k}: log-probability {said.logprob:.4f}, transformers {float(row[token]):.4f}"
                    return PACK.wrong("unknown", rule, f"prompts of {[len(p) for p in prompts]} tokens, budget 16", token, int(row.argmax()), there)  # fmt: skip
    return Result(True, "passed", f"{PACK.passed} A tiny model ran on it, {mixed} mixed steps: log-probabilities within {worst:.0e} of transformers'.")  # fmt: skip


PACK = Exercise(
    "50.1",
    pack_tokens,
    check_pack,
    causes={
        "rope_restart": "you count positions from 0 in every chunk. They go on from chunk.start: the model's rotary "
        "embedding tells it how far apart two tokens are.",
        "one_sequence": "you count positions through the whole batch, as if it were one text. Each request has its own.",
        "first_tokens": "you took the request's first tokens. chunk.token_ids are the new ones already.",
        "history_lost": "you wrote the chunk's length. The history in the cache is missing: start + length.",
        "new_lost": "you wrote the history alone. The new tokens are keys too: start + length.",
        "no_zero": "the leading 0 is missing. Chunk i has the rows from entry i up to entry i + 1.",
        "lengths": "these are lengths. 'cu' means cumulative: add them up.",
        "sampled_partial": "you sample every chunk. Only the last token of a request's tokens tells what comes next: "
        "a chunk that is not is_last gets no row.",
        "row_off_by_one": "cu_seqlens_q[i + 1] is the first row behind chunk i. Its last row is one less.",
        "decode_left_out": "a decode is_last too: its one row is sampled.",
        "row_not_packed": "rows count through the whole batch, neither from the chunk's start nor through its request: "
        "len(token_ids) − 1, once the chunk's tokens are in.",
        "nested": "a list in a list: append adds one item. Use += (or extend).",
        "not_five": "return all five lists, with commas between them.",
        "dict": "return the lists alone, without names: token_ids, positions, …",
        "no_lists": "plain lists of whole numbers, please: no tensor, no array (.tolist() makes a list of one).",
        "order": "right lists, in another order.",
        "early_return": "the return stands inside the loop.",
    },
    passed="124 batches, each integer right.",
    part="packer",
)


# --- 50.2 ---------------------------------------------------------------------------------------------------------
def varlen_attention(q, ks, vs, cu_q):
    import torch

    out = torch.empty_like(q)
    for n, (k, v) in enumerate(zip(ks, vs)):
        mine = q[cu_q[n] : cu_q[n + 1]]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", mine, k) / q.shape[2] ** 0.5
        sees = torch.ones(len(mine), len(k), dtype=torch.bool).tril(len(k) - len(mine))
        scores = scores.masked_fill(~sees, -torch.inf)
        out[cu_q[n] : cu_q[n + 1]] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return out


def problems(seed: int = 50) -> list[tuple]:
    """(q, ks, vs, cu_q) in float32, small ones first; the running example with grouped heads is the fifth."""
    import torch

    shapes = [  # (rows, keys) of each request, heads, kv heads, head size
        ([(1, 1)], 1, 1, 2),
        ([(1, 3)], 1, 1, 2),
        ([(2, 4)], 1, 1, 2),
        ([(1, 3), (2, 2)], 4, 2, 2),
        ([(1, 8), (12, 21), (3, 3)], 6, 3, 4),
        ([(5, 5), (1, 30), (7, 9), (1, 1)], 9, 3, 8),
        ([(4, 40)], 8, 2, 16),
    ]
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    found = []
    for requests, heads, kv_heads, dim in shapes:
        cu = [0]
        for rows, _ in requests:
            cu.append(cu[-1] + rows)
        ks, vs = ([new(keys, kv_heads, dim) for _, keys in requests] for _ in range(2))
        found.append((new(cu[-1], heads, dim), ks, vs, cu))
    return found


def dense(q, ks, vs, cu_q, *, keys="all", mask="bottom_right", heads="interleaved", power=0.5, hide="before", axis="keys"):  # fmt: skip
    """The same in float64, head by head, with a known mistake if one is asked for.

    power: the scores are divided by head size ** power. hide: masked keys get the score −inf ("before" the softmax), the
    score 0 ("zero"), or lose their weight "after" it. axis: the softmax runs over keys, rows or heads.
    """
    import torch

    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // ks[0].shape[1]
    both = [torch.cat(x) for x in (ks, vs)]
    for n in range(len(ks)):
        a, b = cu_q[n], cu_q[n + 1]
        k, v = {
            "all": (ks[n], vs[n]), "last": (ks[n][-(b - a) :], vs[n][-(b - a) :]), "cu_q": [x[a:b] for x in both],
        }[keys]  # fmt: skip
        ahead = {"bottom_right": len(k) - (b - a), "one_wide": len(k) - (b - a) + 1, "top_left": 0, "none": len(k)}[
            mask
        ]
        hidden = torch.tensor([[key > row + ahead for key in range(len(k))] for row in range(b - a)])
        of = [h // group if heads == "interleaved" else h % ks[0].shape[1] for h in range(q.shape[1])]
        scores = torch.stack([q[a:b, h].double() @ k[:, g].double().T for h, g in enumerate(of)]) / q.shape[2] ** power
        if hide != "after":
            scores[:, hidden] = 0.0 if hide == "zero" else -torch.inf
        weights = scores.softmax({"keys": 2, "rows": 1, "heads": 0}[axis])
        weights[:, hidden] = weights[:, hidden] if hide == "zero" else 0.0
        for h, g in enumerate(of):
            out[a:b, h] = weights[h] @ v[:, g].double()
    return out


MISTAKES = {
    "decode_equals_own_v": [{"keys": "last"}, {"keys": "cu_q"}],
    "top_left": [{"mask": "top_left"}],
    "heads_interleaved": [{"heads": "repeated"}],
    "sees_future": [{"mask": "none"}],
    "one_too_wide": [{"mask": "one_wide"}],
    "no_scale": [{"power": 0.0}],
    "scale_d": [{"power": 1.0}],
    "score_zero": [{"hide": "zero"}],
    "masked_after": [{"hide": "after"}],
    "softmax_axis": [{"axis": "rows"}, {"axis": "heads"}],
}
TOLERANCE = 1e-4


def _errors(got: Any, wanted: Any) -> Any:
    """Per row and head, or None where the answer is no tensor of that shape."""
    import torch

    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return None
    return (got.double() - wanted).abs().amax(-1).nan_to_num(float("inf"))


def check_varlen(fn: Callable) -> Result:
    cases = problems()
    answers = [fn(*case) for case in cases]
    for case, got in zip(cases, answers):
        wanted = dense(*case)
        errors = _errors(got, wanted)
        if errors is not None and float(errors.max()) <= TOLERANCE:
            continue
        (q, ks, _vs, cu), text = case, _problem_in_words(*case)
        rule = "Each row is the softmax-weighted mean of the values it sees, head by head."
        if errors is None:
            tensor, shape = type(got) is type(q), f"a tensor of shape {tuple(q.shape)}"
            said = f"a tensor of shape {tuple(got.shape)}" if tensor else kind(got)
            said += " (numpy's)" * (is_array(got) and not tensor)
            return VARLEN.wrong("unknown" if tensor or got is None else "no_tensor", "varlen_attention returns a tensor like q.", text, None if got is None else said, shape, f"got {said}, expected {shape}")  # fmt: skip
        row, head = (int(x) for x in (errors > TOLERANCE).nonzero()[0])
        n = next(i for i in range(len(ks)) if cu[i] <= row < cu[i + 1])
        token = len(ks[n]) - (cu[n + 1] - cu[n]) + row - cu[n]
        show = lambda x: "[" + ", ".join(f"{float(value):.3f}" for value in x[:4]) + (", …]" if len(x) > 4 else "]")  # noqa: E731
        there = (
            f"packed row {row} = request {chr(65 + n)}, token {token}, head {head}: you wrote {show(got[row, head])}, "
            f"expected {show(wanted[row, head])} = the weighted mean of values 0…{token}"
        )
        key = "sees_nothing" if bool(got.isnan().any()) else _mistake(cases, answers, case, got)
        return VARLEN.wrong(key, rule, text, f"errors by row {_rows(errors)}", f"below {TOLERANCE:g}", there)  # fmt: skip
    worst = max(float(_errors(got, dense(*case)).max()) for case, got in zip(cases, answers))
    return Result(True, "passed", f"{VARLEN.passed} Largest error {worst:.0e}.")


def _problem_in_words(q: Any, ks: list, vs: list, cu: list[int]) -> str:
    text = "; ".join(f"{chr(65 + n)}: {cu[n + 1] - cu[n]} new, {plural(len(k), 'key')}" for n, k in enumerate(ks))
    return f"{text}; heads {q.shape[1]}, kv heads {ks[0].shape[1]}, head size {q.shape[2]}; cu_q {cu}"


def _rows(errors: Any) -> list[float]:
    return [float(f"{float(e):.1g}") for e in errors.amax(-1)]


def _mistake(cases: list, answers: list, case: tuple, got: Any) -> str:
    """The known mistake that explains this answer, and the most of the others."""

    def same(answer: Any, problem: tuple, options: dict) -> bool:
        errors = _errors(answer, dense(*problem, **options))
        return errors is not None and float(errors.max()) <= TOLERANCE

    explains = {
        key: sum(same(a, c, options) for c, a in zip(cases, answers))
        for key, ways in MISTAKES.items()
        for options in ways
        if same(got, case, options)
    }
    return max(explains, key=explains.get, default="unknown")


VARLEN = Exercise(
    "50.2",
    varlen_attention,
    check_varlen,
    causes={
        "decode_equals_own_v": "you cut the keys as you cut the queries. Then a decode sees one key, the softmax of one "
        "number is 1, and the answer is a bare v. A request's keys are all of ks[n].",
        "top_left": "the mask is aligned top-left: row 0 sees key 0 alone. The new rows are the last ones of their "
        "request: row i sees the keys 0 … len(k) − rows + i.",
        "heads_interleaved": "repeat lays the kv heads out as 0 1 0 1. Query heads 0 and 1 share kv head 0: "
        "repeat_interleave gives 0 0 1 1.",
        "sees_future": "there is no causal mask: a row sees tokens that come after it.",
        "one_too_wide": "your mask is one key too wide: tril(len(k) − rows).",
        "no_scale": "divide the scores by the square root of the head size.",
        "scale_d": "you divide by the head size. Its square root it is.",
        "score_zero": "a score of 0 still weighs e⁰ = 1. Masked scores are -inf, before the softmax.",
        "masked_after": "you mask after the softmax: the weights of a row no longer add up to 1. Mask the scores, with -inf.",
        "softmax_axis": "the softmax runs over the keys, the last axis of [heads, rows, keys].",
        "sees_nothing": "nan: a row sees no key at all. Is the mask one key too narrow, or upside down?",
        "no_tensor": "return one tensor: fill torch.empty_like(q), or torch.cat the requests' parts.",
    },
    passed="seven batches, grouped heads included, against float64.",
    show=_problem_in_words,
)


# --- 50.3 ---------------------------------------------------------------------------------------------------------
def prompt_positions_from_zero(chunks):
    """The hidden bug of 50.3: every prompt chunk counts its positions from 0; decodes are right."""
    token_ids, _positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens(chunks)
    starts = [c.start if c.is_decode else 0 for c in chunks]
    positions = [start + i for start, c in zip(starts, chunks) for i in range(c.length)]
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows


WHICH = Bug(
    "50.3",
    prompt_positions_from_zero,
    "A classmate's packer: no error, and some answers are right, token for token. What is wrong with it?",
    options={
        "row": (
            "It samples the wrong row of a prompt chunk.",
            "Then the first token of every answer would come from another row. Some answers are right from the first token on.",
        ),
        "history": (
            "It forgets the history: seq_lens_k is the chunk's length.",
            "Then every decode would see a single key, and no answer would be right. Some are.",
        ),
        "positions": (
            "It counts the positions of every prompt chunk from 0.",
            "Yes. A prompt that runs in one chunk does start at 0, so its answer is right. The prompts that were cut "
            "into two chunks got the same positions twice.",
        ),
        "neighbours": (
            "It mixes up the rows of two requests that are in one step.",
            "Then it would hurt whoever shares a step with others. Look: the right answers shared every step, too.",
        ),
    },
    right="positions",
)

EXERCISES = [PACK, VARLEN, WHICH]
