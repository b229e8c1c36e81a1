"""Sampling against transformers' own processors, and against the arithmetic of probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minichunk import Request, SamplingParams, sampling
from minichunk.sampling import choose, request_seed, sample, uniform

V = 40


def logits(rows=1, seed=0, scale=3.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def request(seed=0, output=0, prompt=(1, 2, 3), **params):
    return Request(0, [*prompt, *[5] * output], len(prompt), SamplingParams(**params), seed=seed)


def warped(row, prompt=(1, 2, 3), **p):
    """Probabilities [V] as transformers' generate has them."""
    scores, ids = row[None].clone(), torch.tensor([list(prompt)])
    if p.get("repetition_penalty", 1.0) != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(p["repetition_penalty"])(ids, scores)
    if p.get("temperature", 1.0) != 1.0:
        scores = TemperatureLogitsWarper(p["temperature"])(ids, scores)
    if p.get("top_k"):
        scores = TopKLogitsWarper(p["top_k"])(ids, scores)
    if p.get("top_p", 1.0) < 1:
        scores = TopPLogitsWarper(p["top_p"])(ids, scores)
    return scores[0].double().softmax(-1)


def shares(row, monkeypatch, points=4000, **params):
    """The share of each token when u runs evenly over [0, 1)."""
    us = iter(np.arange(points) / points)
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: float(next(us)))
    chosen = choose(row[None].expand(points, -1), [request(**params)] * points)
    return torch.bincount(chosen, minlength=V) / points


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0), dict(temperature=0.5), dict(temperature=2.5), dict(temperature=1.0, top_k=1),
        dict(temperature=1.0, top_k=5), dict(temperature=1.0, top_k=V), dict(temperature=1.0, top_k=10 * V),
        dict(temperature=1.0, top_p=0.5), dict(temperature=0.7, top_p=0.9), dict(temperature=1.5, top_p=0.01),
        dict(temperature=0.8, top_k=7, top_p=0.8), dict(temperature=1.2, repetition_penalty=1.7),
        dict(temperature=0.9, repetition_penalty=0.6, top_k=12, top_p=0.95),
    ],
    ids=str,
)  # fmt: skip
def test_the_distribution_is_that_of_transformers_warpers(params, monkeypatch):
    for seed in range(3):
        row = logits(seed=seed)[0]
        want = warped(row, **params)
        got = shares(row, monkeypatch, **params)
        # Evenly spaced u hit each token's interval to within one point.
        assert (got - want).abs().max() <= 1.01 / 4000
        assert set(got.nonzero()[:, 0].tolist()) <= set(want.nonzero()[:, 0].tolist())


def test_many_seeds_draw_from_the_distribution():
    row, n = logits(seed=3, scale=1.0)[0], 6000
    chosen = choose(row[None].expand(n, -1), [request(seed=request_seed(0, i), temperature=1.0) for i in range(n)])
    want = row.double().softmax(-1) * n
    chi_square = float(((torch.bincount(chosen, minlength=V) - want) ** 2 / want).sum())
    assert chi_square < 80, "39 degrees of freedom: 80 is passed once in ten thousand"


def test_uniform_is_even_within_a_seed_and_across_seeds_and_index():
    values = np.array([[uniform(seed, i) for i in range(100)] for seed in range(100)])
    assert ((0 <= values) & (values < 1)).all() and len(np.unique(values)) == values.size
    for column in (values.ravel(), values[0], values[:, 0]):
        counts = np.histogram(column, 10, (0, 1))[0]
        assert ((counts - len(column) / 10) ** 2 / (len(column) / 10)).sum() < 34  # 9 degrees of freedom
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.05
    assert uniform(2**70, 0) == uniform(2**70, 0) and 0 <= uniform(-1, 10**9) < 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 200), st.sampled_from([0.0, 0.3, 1.0, 1e-3, 1e-30, 1e3]), st.integers(0, 50),
    st.floats(1e-9, 1.0), st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]),
)  # fmt: skip
def test_any_u_and_any_parameters_give_a_token_that_the_warpers_keep(seed, temperature, top_k, top_p, u):
    row = logits(seed=seed, scale=8.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniform", lambda *_: u)
        token = int(choose(row, [request(temperature=temperature, top_k=top_k, top_p=top_p)])[0])
    if temperature in (0.3, 1.0):
        kept = warped(row[0], temperature=temperature, top_k=top_k, top_p=min(top_p + 1e-6, 1.0))
        assert kept[token] > 0 or row[0, token] == row[0].max()
    else:
        assert 0 <= token < V
    if temperature == 0 or top_k == 1:
        assert token == int(row.argmax())


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch):
    row = torch.full((V,), float("-inf"))
    row[[7, 20]] = torch.tensor([1.0, 1.0])
    assert shares(row, monkeypatch, temperature=1.0, points=100).nonzero()[:, 0].tolist() == [7, 20]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 99), st.lists(st.integers(0, V - 1), min_size=1, max_size=30), st.sampled_from([0.3, 0.9, 1.1, 5.0])
)
def test_repetition_penalty_is_that_of_transformers(seed, prompt, penalty):
    row = logits(seed=seed)
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt]), row.clone()).argmax()
    before = row.clone()
    assert int(choose(row, [request(prompt=prompt, repetition_penalty=penalty)])[0]) == int(want)
    assert torch.equal(row, before), "logits must not change"


def test_rows_do_not_see_each_other():
    rows = logits(6, seed=4)
    requests = [
        request(seed=1, temperature=1.0), request(), request(seed=2, temperature=0.7, top_k=3),
        request(repetition_penalty=2.0), request(seed=9, temperature=1.0, top_p=0.3), request(seed=1, temperature=1.0),
    ]  # fmt: skip
    alone = [int(choose(rows[i : i + 1], [r])[0]) for i, r in enumerate(requests)]
    assert choose(rows, requests).tolist() == alone
    backwards = choose(rows.flip(0), requests[::-1]).tolist()
    assert backwards[::-1] == alone


def test_u_hangs_on_the_seed_and_the_number_of_the_token_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: asked.append((seed, index)) or 0.5)
    choose(logits(2), [request(seed=11, output=4, temperature=1.0), request(seed=12, output=0, temperature=1.0)])
    assert asked == [(11, 4), (12, 0)]


BAD = {
    "a NaN": lambda row: row.__setitem__(3, float("nan")),
    "nothing but NaN": lambda row: row.fill_(float("nan")),
    "nothing but -inf": lambda row: row.fill_(float("-inf")),
    "an infinite score": lambda row: row.__setitem__(3, float("inf")),
}


@pytest.mark.parametrize(
    "params",
    [
        dict(), dict(temperature=1.0), dict(temperature=0.5, top_k=4), dict(temperature=1.0, top_p=0.5),
        dict(repetition_penalty=1.5), dict(logprobs=3), dict(temperature=1.0, logprobs=0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_is_not_finite_fails_alone(bad, params):
    rows = logits(3, seed=5)
    requests = [request(seed=i, **params) for i in range(3)]
    want, _ = sample(rows, requests)
    BAD[bad](rows[1])
    tokens, logprobs = sample(rows, requests)
    assert tokens == [want[0], None, want[2]] and logprobs[1] is None


@pytest.mark.parametrize("params", [dict(temperature=1e-310), dict(temperature=5e-324), dict(repetition_penalty=1e-42)])
def test_extreme_but_allowed_values_still_give_a_token(params):
    params = {"temperature": 1.0, **params}
    tokens, _ = sample(logits(2, seed=6), [request(**params), request(seed=3, temperature=1.0)])
    assert tokens[0] in range(V) and tokens[1] in range(V)
    if "repetition_penalty" not in params:
        assert tokens[0] == int(logits(2, seed=6)[0].argmax())


def test_logprobs_are_raw_whatever_the_parameters():
    rows = logits(3, seed=7)
    requests = [
        request(logprobs=0),
        request(seed=1, temperature=5.0, top_k=3, repetition_penalty=3.0, logprobs=4),
        request(),
    ]
    tokens, logprobs = sample(rows, requests)
    want = rows.double().log_softmax(-1)
    assert logprobs[2] is None and logprobs[0].top == {}
    for i in (0, 1):
        assert logprobs[i].token_id == tokens[i]
        assert logprobs[i].logprob == pytest.approx(float(want[i, tokens[i]]), abs=1e-5)
    assert list(logprobs[1].top) == want[1].topk(4).indices.tolist()
    assert list(logprobs[1].top.values()) == pytest.approx(want[1].topk(4).values.tolist(), abs=1e-5)
    assert len(sample(rows[:1], [request(logprobs=1000)])[1][0].top) == V
