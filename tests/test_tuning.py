"""Notebook 90: the simulated server, the tuner, and the map of settings."""

import numpy as np
import pytest

from minichunk import lab
from minichunk.lab import exercises, scenes_tuning, views, views_tuning
from minichunk.lab.checks import c40
from minichunk.record import Run


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    monkeypatch.setenv("MINICHUNK_MY", str(tmp_path / "my"))
    exercises._passed.clear()


def served(policy="mixed", budget=512, **options):
    return lab.serve(policy, budget, n=40, **options)


def test_a_learners_scheduler_serves_like_the_builtin_and_is_named():
    mine = lab.exercise("40.1", lambda running, waiting, budget, chunk_size: c40.plan_step(running, waiting, budget, chunk_size))  # fmt: skip
    run, builtin = served(mine), served()
    assert [s.chunks for s in run.steps] == [s.chunks for s in builtin.steps]
    assert run.meta["code"] == "YOUR" and "code" not in builtin.meta
    drawn = lab.tuning_map([run, builtin])
    assert "YOUR scheduler, budget 512: P99 TBT" in views.text(drawn) and "plan_step" not in views.text(drawn)
    ring, mark = (next(t for t in drawn.data if t.name == name) for name in ("YOUR scheduler", "mixed"))
    assert (ring.x, ring.y) == (mark.x, mark.y), "on each other"
    assert ring.marker.symbol.endswith("-open") and ring.marker.size > mark.marker.size, "and both can be seen"


def test_waits_are_read_from_the_requests():
    run = served()
    gaps = [b - a for r in run.requests.values() for a, b in zip(r.token_times, r.token_times[1:])]
    firsts = sorted(r.token_times[0] - r.arrival for r in run.requests.values())
    assert lab.waits(run) == pytest.approx((np.percentile(gaps, 99), (firsts[19] + firsts[20]) / 2))
    pairs = lab.pairs(run)
    assert len(pairs) == 40 and sum(len(g) for _, g in pairs) == len(gaps)


def test_a_larger_budget_moves_the_waiting_from_newcomers_to_readers():
    small, large = (lab.waits(served(budget=b)) for b in (256, 2048))
    assert small[0] < large[0] / 3 and small[1] > large[1]


def test_policies_that_do_not_cut_need_no_budget():
    run = served("prefill_first", None)
    assert run.meta["max_batch_tokens"] > 2048 and not any(s.is_mixed for s in run.steps)


def test_tuner_keeps_tries_and_the_best_that_keeps_the_promise(monkeypatch):
    waits = {("mixed", 256): (0.03, 0.4), ("mixed", 1024): (0.09, 0.15), ("leftover", 512): (0.4, 0.1)}
    monkeypatch.setattr(scenes_tuning, "serve", lambda policy, budget: (policy, budget))
    monkeypatch.setattr(scenes_tuning, "waits", lambda run: waits[run])
    tuner = lab.tuner(0.1)
    assert tuner.best is None and tuner.summary() == "nothing tried yet"
    tuner.run("leftover", 512)
    assert tuner.summary() == "1 try, none keeps the promise"
    for policy, budget in [("leftover", 512), ("mixed", 256), ("mixed", 1024), ("mixed", 1024)]:
        tuner.run(policy, budget)
    assert len(tuner.tries) == 3 and tuner.best[:2] == ("mixed", 1024)
    assert "broken" in str(tuner) and "best of 3 tries: mixed, budget 1,024, P99 TBT 90 ms, median TTFT 150 ms." in str(
        tuner
    )


def test_tuner_runs_behind_its_button_and_says_what_is_wrong(monkeypatch):
    plain = scenes_tuning.serve
    monkeypatch.setattr(scenes_tuning, "serve", lambda policy, budget: plain(policy, budget, n=40))
    tuner = lab.tuner(0.1, ["mixed"])
    tuner.show()
    tuner._budget.value = 256
    tuner._button.click()
    assert [t[:2] for t in tuner.tries] == [("mixed", 256)] and "256" in tuner._table.value
    tries = len(tuner.tries)
    for policy, budget, words in [
        ("fifo", 512, "no policy 'fifo'; there are mixed"),
        ("mixed", 3, "at least 128, not 3"),
        ("mixed", "512", "a whole number of tokens, at least 128, not '512'"),
        ("mixed", 512.0, "not 512.0"),
    ]:
        with pytest.raises(ValueError, match=words) as refused:
            tuner.run(policy, budget)
        assert refused.value._render_traceback_() == [str(refused.value)], "a line, no traceback"
    assert len(tuner.tries) == tries
    with pytest.raises(ValueError, match="above 0 seconds"):
        lab.tuner(0)


def test_map_marks_the_front():
    runs = [served(p, b) for p in ("mixed", "leftover") for b in (256, 2048)]
    words = views.text(lab.tuning_map(runs, slo=0.1)).splitlines()
    beaten = lambda run: any(o is not run and all(a <= b for a, b in zip(lab.waits(o), lab.waits(run))) for o in runs)  # noqa: E731  # fmt: skip
    for run in runs:
        line = next(w for w in words if w.startswith(f"{run.meta['policy']}, budget {run.meta['max_batch_tokens']:,}:"))
        assert line.endswith("(on the front)") == (not beaten(run))
    assert words[-1] == "promise: P99 TBT at most 100 ms"


def test_map_labels_where_there_is_room(monkeypatch):
    """Those on the front always, of the others those that lie alone."""
    waits = {256: (0.03, 0.4), 512: (0.06, 0.2), 1024: (0.061, 0.21), 2048: (0.5, 0.5)}
    monkeypatch.setattr(views_tuning, "waits", lambda run: waits[run.meta["max_batch_tokens"]])
    runs = [Run(meta={"policy": "mixed", "max_batch_tokens": budget, "source": "x"}) for budget in waits]
    marks = next(trace for trace in lab.tuning_map(runs).data if trace.name == "mixed")
    assert list(marks.text) == ["256", "512", "", "2,048"] and list(marks.customdata) == [
        "256",
        "512",
        "1,024",
        "2,048",
    ]


def test_what_was_measured_is_what_the_kept_runs_hold():
    rows = {row["run"]: row for row in lab.measured()}
    for name in ("mixed 1024", "prefill_first 8192"):
        run, row = lab.recorded_run(name), rows[name]
        gaps = np.concatenate([np.diff(r.token_times) for r in run.requests.values()]) * 1e3
        assert (row["gaps"], row["steps"], row["requests"]) == (len(gaps), len(run.steps), len(run.requests))
        assert row["tbt_p99_ms"] == pytest.approx(np.percentile(gaps, 99), abs=0.01)
        assert row["stalls"] == (gaps > 200).sum()
        assert run.meta["source"].startswith("RECORDED NVIDIA H200")
        assert sum(s.num_tokens for s in run.steps) == sum(
            len(r.prompt_ids) + len(r.output_ids) - 1 for r in run.requests.values()
        )
    assert "transformers 1024" not in rows
    assert list(rows) == ["mixed 512", "mixed 1024", "mixed 8192", "prefill_first 8192"]


def test_prompts_in_the_longest_gap_are_those_of_the_steps_between_two_tokens():
    """The longest gap's own request ran in the step before those prompts, and again in the first step after them."""
    run = lab.recorded_run("prefill_first 8192")
    last = {}
    widest, between = 0.0, None
    for n, step in enumerate(run.steps):
        for id, _, _, samples, _ in step.chunks:
            if samples and id in last and step.end - run.steps[last[id]].end > widest:
                widest, between = step.end - run.steps[last[id]].end, run.steps[last[id] + 1 : n]
            if samples:
                last[id] = n
    assert widest == pytest.approx(max(run.tbts), abs=1e-3) and len(between) == 8
    assert {id for step in between for id, *_ in step.chunks} == set(range(449, 469))
    assert lab.prompts_in_longest_gap(run) == 20


def test_a_long_list_of_gaps_is_said_in_a_line():
    result = lab.check("90.1", lambda requests, ttft, tbt: sum(t <= ttft and (not g or np.percentile(g, 99) <= tbt) for t, g in requests) / len(requests))  # fmt: skip
    assert "requests [(0.5, [0.05] × 150 + [0.12] + [0.05] × 149)]" in result.message and len(result.message) < 600
