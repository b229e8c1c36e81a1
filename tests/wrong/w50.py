"""Wrong answers to 50.1 and 50.2, as learners write them: (exercise, key, function)."""

import math

import torch


def _pack(chunks, **changed):
    """A right packer with one list changed."""
    lengths = [c.length for c in chunks]
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    lists = {
        "token_ids": [t for c in chunks for t in c.token_ids],
        "positions": [p for c in chunks for p in range(c.start, c.end)],
        "cu_seqlens_q": [0, *ends],
        "seq_lens_k": [c.end for c in chunks],
        "logits_rows": [end - 1 for c, end in zip(chunks, ends) if c.is_last],
    }
    return tuple({**lists, **changed}.values())


def positions_from_zero(chunks):
    return _pack(chunks, positions=[p for c in chunks for p in range(c.length)])


def positions_through_the_batch(chunks):
    return _pack(chunks, positions=list(range(sum(c.length for c in chunks))))


def the_requests_first_tokens(chunks):
    return _pack(chunks, token_ids=[t for c in chunks for t in c.request.token_ids[: c.length]])


def keys_of_the_chunk_alone(chunks):
    return _pack(chunks, seq_lens_k=[c.length for c in chunks])


def keys_of_the_history_alone(chunks):
    return _pack(chunks, seq_lens_k=[c.start for c in chunks])


def no_leading_zero(chunks):
    return _pack(chunks, cu_seqlens_q=_pack(chunks)[2][1:])


def lengths_instead_of_sums(chunks):
    return _pack(chunks, cu_seqlens_q=[0] + [c.length for c in chunks])


def a_row_for_every_chunk(chunks):
    return _pack(chunks, logits_rows=[end - 1 for end in _pack(chunks)[2][1:]])


def row_behind_the_chunk(chunks):
    ends = _pack(chunks)[2][1:]
    return _pack(chunks, logits_rows=[end for c, end in zip(chunks, ends) if c.is_last])


def row_behind_every_chunk(chunks):
    return _pack(chunks, logits_rows=_pack(chunks)[2][1:])


def _attend(q, k, v, mask, scale=True):
    scores = torch.einsum("ihd,jhd->hij", q, k) / (math.sqrt(q.shape[-1]) if scale else 1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def _each(q, ks, vs, cu_q, repeat=torch.repeat_interleave, diagonal=lambda rows, keys: keys - rows, scale=True):
    out = []
    for n, (k, v) in enumerate(zip(ks, vs)):
        mine = q[cu_q[n] : cu_q[n + 1]]
        group = q.shape[1] // k.shape[1]
        k, v = repeat(k, group, dim=1), repeat(v, group, dim=1)
        mask = torch.ones(len(mine), len(k), dtype=torch.bool)
        out.append(_attend(mine, k, v, mask.tril(diagonal(len(mine), len(k))), scale))
    return torch.cat(out)


def cu_q_for_the_keys(q, ks, vs, cu_q):
    k, v = torch.cat(ks), torch.cat(vs)
    cut = [slice(a, b) for a, b in zip(cu_q, cu_q[1:])]
    return _each(q, [k[s] for s in cut], [v[s] for s in cut], cu_q)


def keys_of_the_new_tokens_alone(q, ks, vs, cu_q):
    new = [b - a for a, b in zip(cu_q, cu_q[1:])]
    return _each(q, [k[-n:] for k, n in zip(ks, new)], [v[-n:] for v, n in zip(vs, new)], cu_q)


def tril_without_offset(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, diagonal=lambda rows, keys: 0)


def repeat_for_repeat_interleave(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, repeat=lambda x, group, dim: x.repeat(1, group, 1))


def no_mask(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, diagonal=lambda rows, keys: keys)


def no_scale(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, scale=False)


WRONG = [
    ("50.1", "rope_restart", positions_from_zero),
    ("50.1", "one_sequence", positions_through_the_batch),
    ("50.1", "first_tokens", the_requests_first_tokens),
    ("50.1", "history_lost", keys_of_the_chunk_alone),
    ("50.1", "new_lost", keys_of_the_history_alone),
    ("50.1", "no_zero", no_leading_zero),
    ("50.1", "lengths", lengths_instead_of_sums),
    ("50.1", "sampled_partial", a_row_for_every_chunk),
    ("50.1", "row_off_by_one", row_behind_the_chunk),
    ("50.1", "row_off_by_one", row_behind_every_chunk),
    ("50.2", "decode_equals_own_v", cu_q_for_the_keys),
    ("50.2", "decode_equals_own_v", keys_of_the_new_tokens_alone),
    ("50.2", "top_left", tril_without_offset),
    ("50.2", "heads_interleaved", repeat_for_repeat_interleave),
    ("50.2", "sees_future", no_mask),
    ("50.2", "no_scale", no_scale),
]
