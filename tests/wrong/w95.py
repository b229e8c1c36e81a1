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


WRONG = [
    ("95.1", "one_chunk", counts_one_chunk),
    ("95.1", "one_chunk", counts_the_longest_chunk),
    ("95.1", "history_counted", counts_the_history),
    ("95.1", "empty_batch", divides_by_nothing),
    ("95.1", "empty_batch", one_for_nothing),
    ("95.1", "empty_batch", none_for_nothing),
    ("95.1", "tokens_for_pairs", token_counts),
    ("95.1", "over_the_smaller", over_the_smaller),
    ("95.2", "last_block_lost", rounds_down),
    ("95.2", "block_too_many", one_block_more),
    ("95.2", "mean_of_shares", mean_of_shares),
    ("95.2", "share_of_tokens", share_of_tokens),
    ("95.2", "slots_not_share", number_of_slots),
    ("95.3", "neighbours_only", neighbours),
    ("95.3", "listed_again", every_repetition),
    ("95.3", "yes_or_no", whether),
    ("95.3", "not_sorted", as_they_come),
]
