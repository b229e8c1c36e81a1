"""Wrong answers to 00.1 and 00.2, as learners write them: (exercise, key, function)."""


def several_tokens_mean_prompt(chunks):
    tokens = sum(length for _id, _prompt, _start, length in chunks)
    return tokens > 1 and any(start >= prompt for _id, prompt, start, _length in chunks)


def several_requests(chunks):
    return len(chunks) > 1


def by_length(chunks):
    kinds = {"decode" if length == 1 else "prompt" for _id, _prompt, _start, length in chunks}
    return len(kinds) == 2


def any_for_both(chunks):
    return any(c.start >= c.num_prompt_tokens for c in chunks) or any(c.start < c.num_prompt_tokens for c in chunks)


def from_first_schedule(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return times[0] - scheduled, (sum(gaps) / len(gaps) if gaps else None)


def ttft_among_gaps(arrival, scheduled, times):
    gaps = [b - a for a, b in zip([arrival] + times, times)]
    return gaps[0], sum(gaps) / len(gaps)


def divides_by_n(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return times[0] - arrival, (sum(gaps) / len(times) if gaps else None)


WRONG = [
    ("00.1", "two_decodes", several_tokens_mean_prompt),
    ("00.1", "two_decodes", several_requests),
    ("00.1", "one_token_prompt_chunk", by_length),
    ("00.1", "prompt_only", any_for_both),
    ("00.2", "queue_lost", from_first_schedule),
    ("00.2", "gap_has_ttft", ttft_among_gaps),
    ("00.2", "n_minus_1", divides_by_n),
]
