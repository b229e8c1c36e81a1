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


def row_is_the_position(chunks):
    return _pack(chunks, logits_rows=[c.start + c.length - 1 for c in chunks if c.is_last])


def row_within_the_chunk(chunks):
    return _pack(chunks, logits_rows=[c.length - 1 for c in chunks if c.is_last])


def decodes_not_sampled(chunks):
    ends = _pack(chunks)[2][1:]
    return _pack(chunks, logits_rows=[end - 1 for c, end in zip(chunks, ends) if c.is_last and not c.is_decode])


def append_for_extend(chunks):
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = [], [], [0], [], []
    for chunk in chunks:
        token_ids.append(chunk.token_ids)
        positions.append(list(range(chunk.start, chunk.end)))
        cu_seqlens_q.append(cu_seqlens_q[-1] + chunk.length)
        seq_lens_k.append(chunk.end)
        if chunk.is_last:
            logits_rows.append(cu_seqlens_q[-1] - 1)
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows


def appends_ranges(chunks):
    return _pack(chunks, positions=[range(c.start, c.end) for c in chunks])


def four_lists(chunks):
    return _pack(chunks)[:4]


def a_dict(chunks):
    return dict(zip(("token_ids", "positions", "cu_seqlens_q", "seq_lens_k", "logits_rows"), _pack(chunks)))


def returns_in_the_loop(chunks):
    for chunk in chunks:
        return _pack([chunk])


def lengths_changed_places(chunks):
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = _pack(chunks)
    return token_ids, positions, seq_lens_k, cu_seqlens_q, logits_rows


def tensors(chunks):
    return tuple(torch.tensor(values) for values in _pack(chunks))


def numbers_of_a_tensor(chunks):
    return _pack(chunks, seq_lens_k=list(torch.tensor(_pack(chunks)[3])))


def packs_and_returns_nothing(chunks):
    _pack(chunks)


def _attend(q, k, v, mask, scale=math.sqrt):
    scores = torch.einsum("ihd,jhd->hij", q, k) / scale(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def _each(q, ks, vs, cu_q, repeat=torch.repeat_interleave, diagonal=lambda rows, keys: keys - rows, scale=math.sqrt, attend=_attend):  # fmt: skip
    out = []
    for n, (k, v) in enumerate(zip(ks, vs)):
        mine = q[cu_q[n] : cu_q[n + 1]]
        group = q.shape[1] // k.shape[1]
        k, v = repeat(k, group, dim=1), repeat(v, group, dim=1)
        mask = torch.ones(len(mine), len(k), dtype=torch.bool)
        out.append(attend(mine, k, v, mask.tril(diagonal(len(mine), len(k))), scale))
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
    return _each(q, ks, vs, cu_q, scale=lambda d: 1)


def scale_without_root(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, scale=lambda d: d)


def tril_one_too_far(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, diagonal=lambda rows, keys: keys - rows + 1)


def tril_one_short(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, diagonal=lambda rows, keys: keys - rows - 1)


def mask_upside_down(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, attend=lambda q, k, v, mask, scale: _attend(q, k, v, ~mask))


def tril_of_the_scores(q, ks, vs, cu_q):
    def attend(q, k, v, mask, scale):
        scores = torch.einsum("ihd,jhd->hij", q, k) / scale(q.shape[-1])
        return torch.einsum("hij,jhd->ihd", scores.tril(len(k) - len(q)).softmax(-1), v)

    return _each(q, ks, vs, cu_q, attend=attend)


def masked_after_the_softmax(q, ks, vs, cu_q):
    def attend(q, k, v, mask, scale):
        weights = (torch.einsum("ihd,jhd->hij", q, k) / scale(q.shape[-1])).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights * mask, v)

    return _each(q, ks, vs, cu_q, attend=attend)


def _softmax_over(axis):
    def attend(q, k, v, mask, scale):
        scores = (torch.einsum("ihd,jhd->hij", q, k) / scale(q.shape[-1])).masked_fill(~mask, float("-inf"))
        return torch.einsum("hij,jhd->ihd", scores.softmax(axis).nan_to_num(), v)

    return attend


def softmax_over_the_rows(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, attend=_softmax_over(1))


def softmax_over_the_heads(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q, attend=_softmax_over(0))


def writes_into_q(q, ks, vs, cu_q):
    q[:] = _each(q, ks, vs, cu_q)
    return q


def writes_into_the_keys(q, ks, vs, cu_q):
    out = _each(q, ks, vs, cu_q)
    for k, v in zip(ks, vs):
        k *= 0
        v += 1
    return out


def replaces_the_keys(q, ks, vs, cu_q):
    for n, k in enumerate(ks):
        ks[n] = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return _each(q, ks, [v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) for v in vs], cu_q)


def a_numpy_array(q, ks, vs, cu_q):
    return _each(q, ks, vs, cu_q).numpy()


def a_list_of_parts(q, ks, vs, cu_q):
    return list(_each(q, ks, vs, cu_q))


def attends_and_returns_nothing(q, ks, vs, cu_q):
    _each(q, ks, vs, cu_q)


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
    ("50.1", "row_not_packed", row_is_the_position),
    ("50.1", "row_not_packed", row_within_the_chunk),
    ("50.1", "decode_left_out", decodes_not_sampled),
    ("50.1", "nested", append_for_extend),
    ("50.1", "nested", appends_ranges),
    ("50.1", "not_five", four_lists),
    ("50.1", "dict", a_dict),
    ("50.1", "early_return", returns_in_the_loop),
    ("50.1", "order", lengths_changed_places),
    ("50.1", "no_lists", tensors),
    ("50.1", "no_lists", numbers_of_a_tensor),
    ("50.1", "no_return", packs_and_returns_nothing),
    ("50.2", "decode_equals_own_v", cu_q_for_the_keys),
    ("50.2", "decode_equals_own_v", keys_of_the_new_tokens_alone),
    ("50.2", "top_left", tril_without_offset),
    ("50.2", "heads_interleaved", repeat_for_repeat_interleave),
    ("50.2", "sees_future", no_mask),
    ("50.2", "no_scale", no_scale),
    ("50.2", "scale_d", scale_without_root),
    ("50.2", "one_too_wide", tril_one_too_far),
    ("50.2", "sees_nothing", tril_one_short),
    ("50.2", "sees_nothing", mask_upside_down),
    ("50.2", "score_zero", tril_of_the_scores),
    ("50.2", "masked_after", masked_after_the_softmax),
    ("50.2", "softmax_axis", softmax_over_the_rows),
    ("50.2", "softmax_axis", softmax_over_the_heads),
    ("50.2", "changed_inputs", writes_into_q),
    ("50.2", "changed_inputs", writes_into_the_keys),
    ("50.2", "changed_inputs", replaces_the_keys),
    ("50.2", "no_tensor", a_numpy_array),
    ("50.2", "no_tensor", a_list_of_parts),
    ("50.2", "no_return", attends_and_returns_nothing),
]
