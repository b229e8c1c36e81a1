"""Wrong answers to 95.1, 95.2 and 95.3, as learners write them: (exercise, key, function)."""

import math


def _ratio(p, d):
    return (p + d) / max(p, d) if p or d else None


def counts_one_chunk(chunks, cached):
    tokens = (chunks[0] if chunks else 0) + len(cached)
    return tokens, _ratio(sum(n * n for n in chunks), sum(cached))


def counts_the_longest_chunk(chunks, cached):
    return max(chunks, default=0) + len(cached), _ratio(sum(n * n for n in chunks), sum(cached))


def counts_the_history(chunks, cached):
    return sum(chunks) + sum(cached), _ratio(sum(n * n for n in chunks), sum(cached))


def divides_by_nothing(chunks, cached):
    p, d = sum(n * n for n in chunks), sum(cached)
    return sum(chunks) + len(cached), (p + d) / max(p, d)


def one_for_nothing(chunks, cached):
    p, d = sum(n * n for n in chunks), sum(cached)
    return sum(chunks) + len(cached), (p + d) / max(p, d, 1)


def none_for_nothing(chunks, cached):
    if not chunks and not cached:
        return None
    return sum(chunks) + len(cached), _ratio(sum(n * n for n in chunks), sum(cached))


def token_counts(chunks, cached):
    p, d = sum(chunks), len(cached)
    return p + d, _ratio(p, d)


def over_the_smaller(chunks, cached):
    p, d = sum(n * n for n in chunks), sum(cached)
    tokens = sum(chunks) + len(cached)
    return tokens, (p + d) / min(p, d) if p and d else 1.0 if tokens else None


def _right(chunks, cached):
    return sum(chunks) + len(cached), _ratio(sum(n * n for n in chunks), sum(cached))


def ratio_alone(chunks, cached):
    return _right(chunks, cached)[1]


def swapped(chunks, cached):
    return _right(chunks, cached)[::-1]


def square_of_the_sum(chunks, cached):
    return _right(chunks, cached)[0], _ratio(sum(chunks) ** 2, sum(cached))


def squares_the_cached(chunks, cached):
    return _right(chunks, cached)[0], _ratio(sum(n * n for n in chunks), sum(n**2 for n in cached))


def upside_down(chunks, cached):
    tokens, ratio = _right(chunks, cached)
    return tokens, ratio and 1 / ratio


def counts_chunks(chunks, cached):
    return len(chunks) + len(cached), _right(chunks, cached)[1]


def chunks_for_tokens(chunks, cached):
    return len(chunks) or len(cached), _right(chunks, cached)[1]


def forgets_the_decodes(chunks, cached):
    return sum(chunks), _right(chunks, cached)[1]


def none_without_chunks(chunks, cached):
    if not chunks or not cached:
        return sum(chunks) + len(cached), None
    return _right(chunks, cached)


def divides_by_the_smaller(chunks, cached):
    if not chunks and not cached:
        return 0, None
    p, d = sum(n * n for n in chunks), sum(cached)
    return sum(chunks) + len(cached), (p + d) / min(p, d)


def divides_before_it_looks(chunks, cached):
    tokens, ratio = sum(chunks) + len(cached), 1 / (len(chunks) + len(cached))
    return (0, None) if not tokens else (tokens, ratio and _right(chunks, cached)[1])


def blocks_for_slots(lengths, block_size):
    return 1 - sum(lengths) / sum(math.ceil(n / block_size) for n in lengths)


def filled_part(lengths, block_size):
    held = sum(math.ceil(n / block_size) * block_size for n in lengths)
    return sum(n % block_size for n in lengths) / held


def full_share(lengths, block_size):
    return sum(lengths) / sum(math.ceil(n / block_size) * block_size for n in lengths)


def in_percent(lengths, block_size):
    return 100 * (1 - full_share(lengths, block_size))


def shared_blocks(lengths, block_size):
    return 1 - sum(lengths) / (math.ceil(sum(lengths) / block_size) * block_size)


def rounds_down(lengths, block_size):
    held = sum(n // block_size * block_size for n in lengths)
    return 1 - sum(lengths) / held if held else 1.0


def one_block_more(lengths, block_size):
    held = sum((n // block_size + 1) * block_size for n in lengths)
    return 1 - sum(lengths) / held


def mean_of_shares(lengths, block_size):
    shares = [1 - n / (math.ceil(n / block_size) * block_size) for n in lengths]
    return sum(shares) / len(shares)


def share_of_tokens(lengths, block_size):
    held = sum(math.ceil(n / block_size) * block_size for n in lengths)
    return (held - sum(lengths)) / sum(lengths)


def number_of_slots(lengths, block_size):
    return sum(-n % block_size for n in lengths)


def neighbours(slots):
    return sorted({a for a, b in zip(slots, slots[1:]) if a == b})


def every_repetition(slots):
    seen, again = set(), []
    for slot in slots:
        if slot in seen:
            again.append(slot)
        seen.add(slot)
    return sorted(again)


def whether(slots):
    return len(set(slots)) < len(slots)


def as_they_come(slots):
    return [s for s in dict.fromkeys(slots) if slots.count(s) > 1]


def as_set(slots):
    return {s for s in slots if slots.count(s) > 1}


def as_dict(slots):
    return {s: slots.count(s) for s in sorted(slots) if slots.count(s) > 1}


def exactly_twice(slots):
    return sorted({s for s in slots if slots.count(s) == 2})


def every_writing(slots):
    return [s for s in slots if slots.count(s) > 1]


def every_writing_sorted(slots):
    return sorted(s for s in slots if slots.count(s) > 1)


def places(slots):
    return [i for i, s in enumerate(slots) if s in slots[:i]]


def all_places(slots):
    return [i for i, s in enumerate(slots) if slots.count(s) > 1]


def sorts_in_place(slots):
    slots.sort()
    return sorted({a for a, b in zip(slots, slots[1:]) if a == b})


def returns_what_sort_returns(slots):
    return [s for s in dict.fromkeys(slots) if slots.count(s) > 1].sort()


WRONG = [
    ("95.1", "one_chunk", counts_one_chunk),
    ("95.1", "one_chunk", counts_the_longest_chunk),
    ("95.1", "history_counted", counts_the_history),
    ("95.1", "empty_batch", divides_by_nothing),
    ("95.1", "empty_batch", one_for_nothing),
    ("95.1", "empty_batch", none_for_nothing),
    ("95.1", "tokens_for_pairs", token_counts),
    ("95.1", "over_the_smaller", over_the_smaller),
    ("95.1", "over_the_smaller", divides_by_the_smaller),
    ("95.1", "empty_batch", divides_before_it_looks),
    ("95.1", "no_pair", ratio_alone),
    ("95.1", "swapped", swapped),
    ("95.1", "square_of_sum", square_of_the_sum),
    ("95.1", "cached_squared", squares_the_cached),
    ("95.1", "inverted", upside_down),
    ("95.1", "chunks_counted", counts_chunks),
    ("95.1", "chunks_counted", chunks_for_tokens),
    ("95.1", "decodes_lost", forgets_the_decodes),
    ("95.1", "none_too_often", none_without_chunks),
    ("95.2", "blocks_not_slots", blocks_for_slots),
    ("95.2", "filled_part", filled_part),
    ("95.2", "full_share", full_share),
    ("95.2", "percent", in_percent),
    ("95.2", "shared_blocks", shared_blocks),
    ("95.2", "last_block_lost", rounds_down),
    ("95.2", "block_too_many", one_block_more),
    ("95.2", "mean_of_shares", mean_of_shares),
    ("95.2", "share_of_tokens", share_of_tokens),
    ("95.2", "slots_not_share", number_of_slots),
    ("95.3", "neighbours_only", neighbours),
    ("95.3", "listed_again", every_repetition),
    ("95.3", "yes_or_no", whether),
    ("95.3", "not_sorted", as_they_come),
    ("95.3", "no_list", as_set),
    ("95.3", "no_list", as_dict),
    ("95.3", "twice_only", exactly_twice),
    ("95.3", "every_writing", every_writing),
    ("95.3", "every_writing", every_writing_sorted),
    ("95.3", "places", places),
    ("95.3", "places", all_places),
    ("95.3", "changed_inputs", sorts_in_place),
    ("95.3", "no_return", returns_what_sort_returns),
]
