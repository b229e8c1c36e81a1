"""The benches' arithmetic and files, on a CPU. What they measure on a GPU, only a GPU can show."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from minichunk import cli, workloads
from minichunk.bench import kernels, record, serve
from minichunk.bench.peer import write_json
from minichunk.record import RequestRecord, Run
from minichunk.workloads import BadTrace, TraceRequest

TRACE = [
    TraceRequest(0.0, 40, 5),
    TraceRequest(0.0, 7, 9),
    TraceRequest(0.0, 90, 3),
    TraceRequest(0.02, 1, 1),
]  # three at once: they mix


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(result, folder of Runs) of the trace under two policies on the tiny model."""
    folder = tmp_path_factory.mktemp("runs")
    trace = workloads.save(TRACE, folder / "trace.json")
    return serve.serve("tiny", str(trace), ["mixed", "prefill_first"], [16], None, 0.2, folder, max_requests=4), folder


def test_each_policy_gets_a_row_with_the_figures_of_its_run(served):
    result, folder = served
    assert [row["run"] for row in result["rows"]] == ["mixed 16", "prefill_first 93"]  # the longest: 90 + 3
    for row, name in zip(result["rows"], ("serve_mixed_16", "serve_prefill_first_93")):
        run = Run.load(folder / f"{name}.json.gz")
        records = run.requests.values()
        ttft = np.array([r.token_times[0] - r.arrival for r in records]) * 1e3
        gaps = np.concatenate([np.diff(r.token_times) for r in records]) * 1e3
        assert row["ttft_p50_ms"] == pytest.approx(np.percentile(ttft, 50), abs=0.01)
        assert row["tbt_p99_ms"] == pytest.approx(np.percentile(gaps, 99), abs=0.01)
        assert row["gaps"] == len(gaps) == 5 + 9 + 3 + 1 - 4 and row["requests"] == 4
        assert [len(r.output_ids) for r in records] == [5, 9, 3, 1]
        assert (row["mixed_share"] > 0) == (name == "serve_mixed_16")
        assert run.meta["overlap"] is False and "torch" in row["explain"]
        assert run.meta["max_requests"] == 4 and run.meta["prefix_cache"] is False


def test_a_trace_that_says_which_blocks_repeat_is_served_with_the_prefix_cache():
    trace = [TraceRequest(0.0, 513, 1, hashes) for hashes in ((1, 2), (1, 3), (4, 3))]
    run = serve.replay("tiny", trace, "mixed", 520, max_model_len=514, max_requests=1)
    assert run.meta["prefix_cache"] is True and [s.hits for s in run.steps if any(s.hits.values())] == [{1: 512}]


def test_a_saved_run_is_a_trace(served, tmp_path):
    again = workloads.load(served[1] / "serve_mixed_16.json.gz")
    assert [(r.prompt_tokens, r.output_tokens) for r in again] == [(r.prompt_tokens, r.output_tokens) for r in TRACE]
    assert [r.arrival for r in again] == pytest.approx([0.0, 0.0, 0.0, 0.02])
    (tmp_path / "broken.gz").write_bytes(b"no run")
    with pytest.raises(BadTrace, match="not a gzip JSON run"):
        workloads.read(tmp_path / "broken.gz")
    Run({}, {}).save(tmp_path / "empty.json.gz")
    with pytest.raises(BadTrace, match="holds no request"):
        workloads.read(tmp_path / "empty.json.gz")
    Run({}, {0: RequestRecord(0, [1], [], 0.0)}).save(tmp_path / "open.json.gz")
    with pytest.raises(BadTrace, match="a request without an answer"):
        workloads.read(tmp_path / "open.json.gz")


def test_a_row_counts_seconds_from_the_first_arrival_to_the_last_token():
    times = {0: (2.0, [2.5, 2.6, 3.0]), 1: (2.25, [2.75, 4.0])}
    run = Run(
        {}, {i: RequestRecord(i, [1], [0] * len(t), at, token_times=t, finished=t[-1]) for i, (at, t) in times.items()}
    )
    row = serve.row("two", run, slo=0.3)
    assert (row["seconds"], row["output_tokens_per_s"], row["stalls"], row["gaps"]) == (2.0, 2.5, 2, 3)
    assert (row["ttft_p50_ms"], row["tbt_max_ms"]) == (500.0, 1250.0)


def test_the_roof_counts_what_a_row_sees_and_what_must_move():
    seen = sum(range(513, 1025))  # 512 rows behind 512 keys of history
    assert kernels.roof_us([(512, 1024)]) == pytest.approx(4 * 32 * 128 * seen / 790e6)
    moved = 2 * (2 * 8 * 128 * 1000 + 2 * 32 * 128)  # bfloat16: 1,000 keys and values, a row of queries and of output
    assert kernels.roof_us([(1, 1000)]) == pytest.approx(moved / 4.3e6)


def test_the_table_of_auto_is_the_mean_share_of_each_kind(tmp_path):
    batch = lambda kind, **shares: {"kind": kind, "contenders": {n: {"of_roof": s} for n, s in shares.items()}}  # noqa: E731
    batches = {
        "a": batch("mixed", triton=0.9, other=0.4),
        "b": batch("mixed", triton=0.4, other=0.4),
        "c": batch("decodes", triton=0.95),
    }
    result = {"card": "a card", "date": "2026-01-02", "batches": batches}
    assert kernels.shares(result) == {"mixed": {"triton": 0.6, "other": 0.4}, "decodes": {"triton": 0.95}}
    path = tmp_path / "attention.json"
    path.write_text('{"old card": {"date": "2025-01-01"}}')
    kernels.write_table(result, path)
    assert json.loads(path.read_text()) == {
        "old card": {"date": "2025-01-01"},
        "a card": {"date": "2026-01-02", **kernels.shares(result)},
    }


def test_json_keeps_every_value_and_puts_plain_lists_on_one_line(tmp_path):
    value = {
        "text": "a [ b,  c ] {d}\n[ e ]",
        "times": [1.5, 2, None],
        "rows": [{"x": [1]}, [[], ["y, [z", 3]]],
        "µ": {},
    }
    write_json(value, tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == value and ' "times": [1.5, 2, null],' in text.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["bench steps", "bench kernels", "bench offline", "record new --only steps"])
def test_without_a_gpu_a_gpu_bench_says_so_in_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli.app, command.split())
    assert ran.exit_code == 1 and "needs a CUDA device; `minichunk doctor` says" in ran.output
    assert len(ran.output.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_recording_knows_its_parts_and_asks_for_a_trace(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no part 'speed'; there are kernels, steps"):
        record.record(tmp_path / "new", "x", ["kernels", "speed"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for only in ([], ["--only", "serve"]):
        ran = CliRunner().invoke(cli.app, ["record", str(tmp_path / "new"), *only])
        assert ran.exit_code and "the part serve needs a trace" in str(ran.output) + str(ran.exception)
    assert not list(tmp_path.iterdir())


def test_what_cannot_run_is_refused_before_anything_runs(tmp_path, monkeypatch):
    trace = str(workloads.save(TRACE, tmp_path / "trace.json"))
    monkeypatch.setattr(serve, "replay", lambda *_, **__: pytest.fail("a replay ran"))
    for policies, budgets, said in [
        (["mixed", "foo"], [256], "unknown policy 'foo'"),
        (["mixed"], [256, 100], "max_batch_tokens 100 is below max_requests 256"),
    ]:
        with pytest.raises(ValueError, match=said):
            serve.serve("tiny", trace, policies, budgets, None, 0.2, None)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        serve.serve("tiny", trace, ["mixed"], [256], None, 0.2, None, "transformers")


def test_recording_keeps_two_runs_and_touches_no_other_file(tmp_path, monkeypatch):
    def served(model, trace, policies, budgets, count, slo, keep, peer):
        for name in ("mixed_1024", "mixed_512", "mixed_8192", "prefill_first_9000"):
            Run({"date": "2026-01-02"}, {}).save(keep / f"serve_{name}.json.gz")
        return {"card": "a card", "trace": trace, "command": record.sys.argv[1:]}

    monkeypatch.setattr(serve, "serve", served)
    monkeypatch.setattr(record.sys, "argv", ["minichunk"])
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "serve_prefill_first_8192.json.gz").write_bytes(b"somebody's")
    (folder / "serve_mine.json.gz").write_bytes(b"mine")
    record._part("serve", folder, str(tmp_path / "a.json"))
    assert sorted(p.name for p in folder.iterdir()) == [
        "serve.json", "serve_mine.json.gz", "serve_mixed_1024.json.gz", "serve_prefill_first_8192.json.gz", "serve_prefill_first_9000.json.gz",
    ]  # fmt: skip
    assert (folder / "serve_prefill_first_8192.json.gz").read_bytes() == b"somebody's"
    for name in ("mixed_1024", "prefill_first_9000"):
        assert Run.load(folder / f"serve_{name}.json.gz").meta["source"] == "RECORDED a card 2026-01-02"
    command = json.loads((folder / "serve.json").read_text())["command"]
    assert command == ["record", "cards", "--trace", "a.json", "--only", "serve"]
    monkeypatch.setitem(record.PARTS, "kernels", lambda folder, trace: {"command": record.sys.argv[1:]})
    record._part("kernels", folder, "")
    assert json.loads((folder / "kernels.json").read_text())["command"] == ["record", "cards", "--only", "kernels"]


def test_serve_without_a_trace_or_peer_says_what_to_give():
    ran = CliRunner().invoke(cli.app, ["bench", "serve"])
    assert ran.exit_code and "give --peer transformers, or --trace" in ran.output + str(ran.exception)
