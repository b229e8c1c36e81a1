"""What a run tells: figures, files, and refusals of bad files. (The playback is tested on live traces in test_engine.)"""

import gzip
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_memory import memory_engine

from minichunk import Run, SamplingParams, StepRecord
from minichunk.record import BadRunFile, RequestRecord


def by_hand():
    """Two requests, three steps of one second; each figure below can be counted on fingers."""
    steps = [
        StepRecord(0, 10.0, 11.0, 8, [("A", 0, 4, True, False), ("B", 0, 4, False, False)], ["A", "B"], used=2, empty=2,
                   wasted_slots=0, arrived=["A", "B"], grown={"A": [0], "B": [1]}),
        StepRecord(1, 11.0, 12.5, 8, [("A", 4, 1, True, True), ("B", 4, 2, True, False)], used=4, empty=0, wasted_slots=5,
                   hits={"A": 4}, grown={"A": [2], "B": [3]}),
        StepRecord(2, 12.5, 13.0, 8, [("A", 5, 1, True, True)], preempted=["B"], finished=["A"], used=0, cached=3, empty=1,
                   block_states={0: "cached", 1: "cached", 2: "empty", 3: "cached"}),
    ]  # fmt: skip
    requests = {
        "A": RequestRecord("A", [1, 2, 3, 4], [5, 6, 7], 9.0, 10.0, [11.0, 12.5, 13.0], "length", 13.0),
        "B": RequestRecord("B", [1] * 6, [9], 9.5, 10.0, [12.5], None, None),
    }
    return Run({"block_size": 4, "num_blocks": 4, "source": "LIVE cpu"}, requests, steps, {1: "a", 5: "é€"})


def test_the_figures_of_a_run():
    run, summary = by_hand(), by_hand().summary()
    assert run.ttfts == [2.0, 3.0] and run.tbts == [1.5, 0.5] and run.duration == 3.0
    assert run.requests["A"].queue_time == 1.0 and run.requests["B"].queue_time == 0.5
    assert (run.stalls(1.0), run.stalls(1.5), run.stalls(0.1)) == (1, 0, 2)
    assert [s.kind for s in run.steps] == ["prompts", "mixed", "decodes"]
    assert [s.num_tokens for s in run.steps] == [8, 3, 1] and [s.num_decodes for s in run.steps] == [0, 1, 1]
    assert summary["output_tokens"] == 4 and summary["output_tokens_per_s"] == pytest.approx(4 / 3)
    assert summary["ttft"] == {"p50": 2.5, "p99": pytest.approx(2.99), "max": 3.0}
    assert summary["tbt"] == {"p50": 1.0, "p99": pytest.approx(1.49), "max": 1.5}
    assert summary["mixed_share"] == pytest.approx(1 / 3) and summary["budget_use"] == pytest.approx(12 / 24)
    assert summary["waste"] == pytest.approx(5 / 24)  # of the slots of 2, 4 and 0 blocks
    assert (summary["requests"], summary["steps"], summary["preemptions"], summary["hit_tokens"]) == (2, 3, 1, 4)


def test_an_empty_run_has_figures_too():
    summary = Run().summary()
    assert summary["steps"] == 0 and summary["mixed_share"] is None and summary["ttft"]["p99"] is None


def test_the_playback_of_a_run_made_by_hand():
    run = by_hand()
    assert run.tables_at(1) == {"A": [0, 2], "B": [1, 3]} and run.tables_at(2) == {"A": [0, 2]}
    assert run.queue_at(1) == {"waiting": [], "running": ["A", "B"]}
    assert run.queue_at(2) == {"waiting": ["B"], "running": ["A"]}
    assert run.pool_at(0) == [["A"], ["B"], "empty", "empty"]
    assert run.pool_at(2) == [["A"], "cached", ["A"], "cached"]


def test_a_step_can_be_read_in_one_line_and_as_a_table():
    step = by_hand().steps[1]
    assert "mixed, 3 of 8 tokens, 1500 ms" in str(step) and "chunks B[4:6]" in str(step) and "decodes A" in str(step)
    html = StepRecord(0, 0.0, 1.0, 8, [("<b>", 0, 4, True, False)])._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;" in html and "0…3" in html


def test_figures_of_a_request_come_from_the_engine_as_its_metrics_have_them():
    engine = memory_engine(num_blocks=16, block_size=4, max_batch_tokens=8)
    done = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(4, ignore_eos=True))
    for completion in done:
        record, metrics = engine.run.requests[completion.id], completion.metrics
        assert (record.ttft, record.tbt, record.queue_time) == (metrics.ttft, metrics.tbt, metrics.queue_time)
        assert record.output_ids == completion.token_ids and record.prompt_ids == completion.prompt_ids
        assert len(metrics.tbt) == 3 and metrics.e2e >= metrics.ttft >= metrics.queue_time >= 0
    for step in engine.run.steps:
        assert set(step.times) == {"plan", "pack", "forward", "sample", "commit"}
        assert sum(step.times.values()) == pytest.approx(step.duration) and min(step.times.values()) >= 0


def test_save_and_load_give_the_same_run(tmp_path):
    engine = memory_engine(num_blocks=12, block_size=2, max_batch_tokens=6, max_requests=3)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7, 8]):
        engine.add(prompt, SamplingParams(8, ignore_eos=True))
    while engine.has_work:
        engine.step()
    run = engine.run
    assert sum(len(s.preempted) for s in run.steps) and sum(len(s.hits) for s in run.steps)
    for kept in (run, by_hand()):
        path = kept.save(tmp_path / "run.json.gz")
        assert Run.load(path) == kept and list(tmp_path.iterdir()) == [path]
    assert json.loads(gzip.decompress(path.read_bytes()))["format"] == "minichunk-run"


def test_saving_twice_gives_the_same_bytes(tmp_path):
    a, b = by_hand().save(tmp_path / "a.json.gz"), by_hand().save(tmp_path / "b.json.gz")
    assert a.read_bytes() == b.read_bytes()


def test_a_run_that_cannot_be_written_leaves_the_old_file_and_no_part(tmp_path):
    path = by_hand().save(tmp_path / "run.json.gz")
    before = path.read_bytes()
    broken = by_hand()
    broken.steps[0].end = math.nan
    with pytest.raises(ValueError):
        broken.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def body():
    return json.loads(json.dumps(_body(by_hand())))


def _body(run):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return json.loads(gzip.decompress(run.save(Path(folder) / "x").read_bytes()))


def change(path, value):
    def apply(data):
        *way, last = path
        for key in way:
            data = data[key]
        if value is KeyError:
            del data[last]
        else:
            data[last] = value

    return apply


@pytest.mark.parametrize(
    "damage, says",
    [
        (change(["format"], "other"), "no minichunk-run file"),
        (change(["version"], 99), "version 99, this minichunk reads 1"),
        (change(["version"], KeyError), "version None"),
        (change(["steps"], KeyError), "KeyError"),
        (change(["requests"], 5), "TypeError"),
        (change(["requests"], [5]), "TypeError"),
        (change(["requests", 0, "id"], KeyError), "KeyError"),
        (change(["requests", 0, "colour"], "red"), "colour"),
        (change(["meta"], ["x"]), "wrong form"),
        (change(["meta"], None), "wrong form"),
        (change(["steps", 0], []), "missing|wrong form"),
        (change(["steps", 0], None), "missing|wrong form"),
        (change(["steps", 0, "chunks"], 3), "missing|wrong form"),
        (change(["steps", 0, "chunks", 0], ["A", 0]), "missing|wrong form"),
        (change(["steps", 0, "chunks", 0, 0], "nobody"), "nobody"),
        (change(["steps", 0, "chunks", 0, 2], 0), "chunk of 0 tokens"),
        (change(["steps", 0, "grown"], [["A", [17]]]), "17"),
        (change(["steps", 0, "grown"], [["nobody", [1]]]), "nobody"),
        (change(["steps", 1, "index"], 7), "index|step"),
        (change(["vocab"], [1]), "missing|wrong form"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(damage, says, tmp_path):
    data, path = body(), tmp_path / "bad.json.gz"
    damage(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(BadRunFile, match=says):
        Run.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", gzip.compress(b""), gzip.compress(b"not json"), gzip.compress(b"\xff\xfe"), gzip.compress(b"[1, 2]"),
        gzip.compress(b"null"), gzip.compress(b"[" * 100_000),
    ],
    ids=["empty", "plain", "nothing inside", "no json", "no utf-8", "a list", "null", "nested"],
)  # fmt: skip
def test_what_is_no_run_file_is_refused(content, tmp_path):
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    with pytest.raises(BadRunFile, match="x.json.gz"):
        Run.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Run.load(tmp_path / "nowhere.json.gz")


WHOLE = gzip.compress(json.dumps(_body(by_hand())).encode(), mtime=0)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_a_damaged_file_is_refused_wherever_the_damage_is(tmp_path_factory, at, flip, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.json.gz"
    path.write_bytes(WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :])
    try:
        run = Run.load(path)
    except BadRunFile as error:
        assert "damaged.json.gz" in str(error)
    else:
        assert run == by_hand()  # a flip in gzip's own header (time, system) changes nothing
