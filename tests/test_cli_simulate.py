"""The two commands: what they print, what they refuse."""

import json

import pytest
import typer
from typer.testing import CliRunner

from minichunk.cli_simulate import simulate_command, workloads_command
from minichunk.record import Run
from minichunk.simulator import replay

runner = CliRunner()


def call(function, *arguments):
    app = typer.Typer()
    app.command()(function)
    return runner.invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


SMALL = ["--requests", 20, "--model", "llama-3-8b", "--gpu", "h200"]


def test_simulate_prints_one_json_object_and_saves_a_run(tmp_path):
    path = tmp_path / "runs" / "a.json.gz"
    found = call(simulate_command, *SMALL, "--rate", 20, "--slo-tbt", 0.05, "--budget", 256, "--save", path, "--json")
    assert found.exit_code == 0, found.output
    body = json.loads(found.stdout)
    run = Run.load(path)
    assert body["summary"] == run.summary() and body["max_batch_tokens"] == 256
    assert body["stalls"] == run.stalls(0.05) and body["gaps"] == len(run.tbts)
    assert replay(run) is None
    again = call(simulate_command, *SMALL, "--rate", 20, "--slo-tbt", 0.05, "--budget", 256, "--json")
    assert again.stdout == found.stdout


def test_simulate_in_words():
    found = call(simulate_command, *SMALL, "--policy", "prefill_first", "--slo-tbt", 0.05, "--rate", 5)
    assert found.exit_code == 0 and "SIMULATED" in found.stdout and "gaps above 50.0 ms" in found.stdout
    assert "budget" in found.stdout and "TTFT" in found.stdout


def test_simulate_searches_the_capacity():
    found = call(simulate_command, *SMALL, "--slo-tbt", 0.015, "--workers", 1, "--json")
    body = json.loads(found.stdout)
    passed = [p["rate"] for p in body["probes"] if p["passed"]]
    assert body["capacity"] == max(passed) > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpu", "abacus"], "GPU 'abacus' is unknown"),
        (["--model", "llama-9"], "unknown model shape"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--policy", "fast"], "unknown policy 'fast'"),
        (["--model", "llama-2-70b"], "raise tp"),
        (["--slo-tbt", 0.1, "--save", "x.json.gz"], "give --rate"),
        (["--policy", "whole_prompt", "--chunk-size", 4], "leave out chunk_size"),
    ],
)
def test_simulate_refuses_in_one_line(arguments, message):
    found = call(simulate_command, *SMALL, *arguments)
    assert found.exit_code == 1 and "Traceback" not in found.output
    assert message in " ".join(found.stderr.split())


def test_efficiency_comes_from_a_file(tmp_path):
    path = tmp_path / "e.json"
    path.write_text('{"linear_compute": 0.5, "overhead": 0.1}')
    slow = json.loads(call(simulate_command, *SMALL, "--efficiency", path, "--json").stdout)
    roof = json.loads(call(simulate_command, *SMALL, "--efficiency", "roof", "--json").stdout)
    assert slow["summary"]["tbt"]["p50"] > 0.1 > roof["summary"]["tbt"]["p50"]
    path.write_text("[1]")
    found = call(simulate_command, *SMALL, "--efficiency", path)
    assert found.exit_code == 1 and "no JSON object" in found.stderr


def test_workloads_lists_and_reads(tmp_path):
    found = call(workloads_command)
    assert found.exit_code == 0 and "19,366" in found.stdout and "CC-BY-4.0" in found.stdout
    rows = json.loads(call(workloads_command, "--json").stdout)
    assert {r["name"]: r["count"] for r in rows}["azure-code"] == 8819
    path = tmp_path / "mine.json"
    path.write_text("[[0, 10, 3], [1, 30, 5]]")
    row = json.loads(call(workloads_command, "--summarise", path, "--json").stdout)[0]
    assert (row["count"], row["prompt_p50"], row["rate"]) == (2, 20, 1.0)
    path.write_text("[[0, 10]]")
    assert call(workloads_command, "--summarise", path).exit_code == 1
    assert call(workloads_command, "--download", "bing").exit_code == 1
