"""Wrong answers to 10.1 and 10.2, as learners write them: (exercise, key, function)."""

import torch


def _best(logits):
    return int(logits[0, -1].argmax())


def whole_text_again(model, ids, n):
    text = list(ids)
    for _ in range(n):
        text.append(_best(model(torch.tensor([text])).logits))
    return text[len(ids) :]


def whole_text_into_the_cache(model, ids, n):
    text, cache = list(ids), None
    for _ in range(n):
        result = model(torch.tensor([text]), past_key_values=cache)
        cache = result.past_key_values
        text.append(_best(result.logits))
    return text[len(ids) :]


def first_row(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, token = result.cache, int(result.logits[0, 0].argmax())
        output.append(token)
        new = [token]
    return output


def one_short(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n - 1):
        result = model(torch.tensor([new]), cache=cache)
        cache = result.cache
        new = [_best(result.logits)]
        output += new
    return output


def first_token_and_n_more(model, ids, n):
    result = model(torch.tensor([ids]))
    output = [_best(result.logits)]
    for _ in range(n):
        result = model(torch.tensor([output[-1:]]), cache=result.cache)
        output.append(_best(result.logits))
    return output


def with_the_prompt(model, ids, n):
    text, new, cache = list(ids), list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [_best(result.logits)]
        text += new
    return text


def feeds_the_last(model, ids, n):
    result = model(torch.tensor([ids]))
    output = []
    for _ in range(n):
        output.append(_best(result.logits))
        result = model(torch.tensor([output[-1:]]), cache=result.cache)
    return output


def forgets_the_cache(model, ids, n):
    output, new = [], list(ids)
    for _ in range(n):
        output.append(_best(model(torch.tensor([new])).logits))
        new = output[-1:]
    return output


def one_operation_a_weight(N, W, b):
    return N * W, W * b


def weights_for_each_token(N, W, b):
    return 2 * N * W, N * W * b


def values_for_bytes(N, W, b):
    return 2 * N * W, W


WRONG = [
    ("10.1", "tokens_refed", whole_text_again),
    ("10.1", "tokens_refed", whole_text_into_the_cache),
    ("10.1", "wrong_row", first_row),
    ("10.1", "length", one_short),
    ("10.1", "length", first_token_and_n_more),
    ("10.1", "length", with_the_prompt),
    ("10.1", "last_fed", feeds_the_last),
    ("10.1", "cache_lost", forgets_the_cache),
    ("10.2", "mul_add", one_operation_a_weight),
    ("10.2", "weights_reread", weights_for_each_token),
    ("10.2", "bytes_per_value", values_for_bytes),
]
