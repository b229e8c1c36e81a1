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


def largest_of_all_rows(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [int(result.logits.argmax())]
        output += new
    return output


def largest_of_all_rows_of_the_text(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [int(result.logits[-1].argmax())]
        output += new
    return output


def argmax_down_the_rows(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, t = result.cache, result.logits[0].argmax(0)
        output.append(t)
        new = [t]
    return output


def appends_to_the_prompt(model, ids, n):
    P, new, cache = len(ids), list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [_best(result.logits)]
        ids.append(new[0])
    return ids[P:]


def gives_a_tensor(model, ids, n):
    return torch.tensor(_right(model, ids, n))


def gives_a_tuple(model, ids, n):
    return tuple(_right(model, ids, n))


def _right(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [_best(result.logits)]
        output += new
    return output


def prompt_token_by_token(model, ids, n):
    cache = None
    for token in ids:
        result = model(torch.tensor([[token]]), cache=cache)
        cache = result.cache
    output = [_best(result.logits)]
    while len(output) < n:
        result = model(torch.tensor([output[-1:]]), cache=result.cache)
        output.append(_best(result.logits))
    return output


def stops_after_the_end_token(model, ids, n):
    output, new, cache = [], list(ids), None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache, new = result.cache, [_best(result.logits)]
        output += new
        if new == [2]:  # what tokenizer.eos_token_id is, here and in the notebook
            break
    return output


def stops_before_the_end_token(model, ids, n):
    output = stops_after_the_end_token(model, ids, n)
    return output[:-1] if output[-1] == 2 else output


def no_return(model, ids, n):
    _right(model, ids, n)


def the_two_swapped(N, W, b):
    return W * b, 2 * N * W


def without_the_tokens(N, W, b):
    return 2 * W, W * b


def a_tensor_for_the_flops(N, W, b):
    return torch.tensor([1, 2]), 3


def no_return_either(N, W, b):
    print(end="")


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
    ("10.1", "flattened", largest_of_all_rows),
    ("10.1", "flattened", largest_of_all_rows_of_the_text),
    ("10.1", "no_number", argmax_down_the_rows),
    ("10.1", "changed_inputs", appends_to_the_prompt),
    ("10.1", "no_list", gives_a_tensor),
    ("10.1", "no_list", gives_a_tuple),
    ("10.1", "prompt_in_pieces", prompt_token_by_token),
    ("10.1", "stopped_at_end", stops_after_the_end_token),
    ("10.1", "stopped_at_end", stops_before_the_end_token),
    ("10.1", "no_return", no_return),
    ("10.2", "swapped", the_two_swapped),
    ("10.2", "no_tokens", without_the_tokens),
    ("10.2", "no_number", a_tensor_for_the_flops),
    ("10.2", "no_return", no_return_either),
    ("10.2", "mul_add", one_operation_a_weight),
    ("10.2", "weights_reread", weights_for_each_token),
    ("10.2", "bytes_per_value", values_for_bytes),
]
