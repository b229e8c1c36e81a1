"""Requests, chunks and their vocabulary."""

import pytest

from minichunk import Chunk, Request, SamplingParams
from minichunk.request import Metrics


def request(prompt=5, output=0, computed=0, **params):
    tokens = list(range(prompt + output))
    return Request("A", tokens, prompt, SamplingParams(**params), num_computed=computed)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_tokens=0), dict(max_tokens=1.5), dict(max_tokens=True), dict(temperature=-1.0),
        dict(temperature=float("nan")), dict(temperature=float("inf")), dict(temperature=None), dict(top_k=-1),
        dict(top_p=0.0), dict(top_p=1.1), dict(top_p=float("nan")), dict(repetition_penalty=0.0), dict(seed=-1),
        dict(stop=""), dict(stop=("a", "")), dict(stop=(1,)), dict(stop_token_ids=-5), dict(stop_token_ids=("a",)), dict(top_p="x"),
        dict(logprobs=-1), dict(logprobs=2.0),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_params_take_one_stop_string_or_many_and_do_not_change():
    assert SamplingParams(stop="END").stop == ("END",)
    many = SamplingParams(stop=["a", "b"], stop_token_ids=[3])
    assert (many.stop, many.stop_token_ids, SamplingParams(stop_token_ids=3).stop_token_ids) == (("a", "b"), (3,), (3,))
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3


@pytest.mark.parametrize(
    "prompt, output, computed, length, is_last, is_decode",
    [
        (5, 0, 0, 5, True, False),  # a whole prompt
        (5, 0, 0, 4, False, False),  # its first part
        (5, 0, 4, 1, True, False),  # its last token is a prompt chunk, though of length 1
        (1, 0, 0, 1, True, False),  # so is a prompt of one token
        (5, 1, 5, 1, True, True),
        (5, 3, 7, 1, True, True),
        (5, 3, 0, 8, True, False),  # computed again after a preemption
        (5, 3, 5, 3, True, False),
        (5, 3, 6, 1, False, False),  # a part of that
        (5, 3, 4, 1, False, False),
    ],
)
def test_a_decode_is_one_last_token_at_or_after_the_end_of_the_prompt(
    prompt, output, computed, length, is_last, is_decode
):
    chunk = Chunk.of(request(prompt, output, computed), length)
    assert (chunk.is_last, chunk.is_decode) == (is_last, is_decode)
    assert (chunk.start, chunk.end, chunk.id) == (computed, computed + length, "A")
    assert chunk.token_ids == list(range(computed, computed + length))


def test_lengths_of_a_request():
    r = request(prompt=5, output=2, computed=4, max_tokens=10)
    assert (r.num_tokens, r.num_left, r.prompt_ids, r.output_ids) == (7, 3, [0, 1, 2, 3, 4], [5, 6])
    assert r.max_slots == 14  # the 15th token is sampled but never computed


def test_metrics_are_differences_on_one_clock_and_none_where_nothing_happened():
    m = Metrics(arrival=1.0, first_scheduled=1.5, token_times=[2.0, 2.25, 3.0], finished=3.5)
    assert (m.queue_time, m.ttft, m.tbt, m.e2e) == (0.5, 1.0, [0.25, 0.75], 2.5)
    never = Metrics(1.0, None, [], None)
    assert (never.queue_time, never.ttft, never.tbt, never.e2e) == (None, None, [], None)
