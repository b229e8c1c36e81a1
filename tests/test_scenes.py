"""What the notebooks run, on made-up engines."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from minichunk.lab import scenes


def test_step_sweep_takes_turns_and_does_not_count_the_warm_up(monkeypatch):
    """An engine whose first step takes 9 s, and from then on a millisecond a token, its 7th step twice that."""
    fed, steps = [], []

    def generate(prompt, params):
        fed.append(len(prompt))
        seconds = 9.0 if len(fed) == 1 else len(prompt) * (2e-3 if len(fed) == 7 else 1e-3)
        steps.append(SimpleNamespace(duration=seconds))

    @contextmanager
    def engine(max_batch_tokens):
        assert max_batch_tokens == 48
        yield SimpleNamespace(generate=generate, run=SimpleNamespace(steps=steps))

    monkeypatch.setattr(scenes, "engine", engine)
    found = scenes.step_sweep(sizes=(8, 16, 48), repeats=3)
    assert fed == [48] + [8, 16, 48] * 3
    assert [size for size, _, _ in found] == [8, 16, 48]
    assert [p50 for _, p50, _ in found] == pytest.approx([8, 16, 48])
    assert [p95 for _, _, p95 in found] == pytest.approx(
        [8, 16, 48 + 0.9 * 48]
    )  # of 48, 48, 96: P95 lies at 0.9 of the way
