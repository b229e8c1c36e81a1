"""The command line: help without torch, and the demo from prompts file to saved run."""

import json
import re
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from minichunk import cli, demo
from minichunk.paths import data_path
from minichunk.record import Run

LINES = [
    {"id": "short", "arrival": 0.0, "prompt": "the time of day", "max_tokens": 12},
    {"id": "long", "arrival": 0.01, "prompt": "which of them was there before the other one " * 4, "max_tokens": 6},
    {"id": "first", "arrival": 0.0, "prompt": "where", "max_tokens": 1},
]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def run_demo(prompts, tmp_path, monkeypatch):
    """Calls `minichunk demo` with the tiny model; returns click's result."""
    monkeypatch.chdir(tmp_path)

    def run(*options):
        return CliRunner().invoke(cli.app, ["demo", "--model", "tiny", "--prompts", str(prompts), *options])

    return run


def plain(text):
    """Without rich's boxes, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", text).split())


def test_help_names_every_command_and_needs_no_torch(run_python):
    code = """
import sys
from minichunk import cli
sys.argv = ["minichunk", "--help"]
try:
    cli.main()
except SystemExit as end:
    print("exit", end.code)
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    said = run_python(code)
    for command in ("doctor", "demo", "lab", "progress"):
        assert f" {command} " in said
    assert said.splitlines()[-2:] == ["exit 0", "[]"]


def test_every_command_has_a_help_page():
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        result = CliRunner().invoke(cli.app, [name, "--help"])
        assert result.exit_code == 0, (name, result.output)
        assert "Usage:" in result.output and name in result.output


def test_attached_functions_and_apps_get_their_options(monkeypatch):
    got = []
    app = typer.Typer()

    @app.command()
    def first(size: int = 1):
        got.append(("first", size))

    @app.command()
    def second(name: str):
        got.append(("second", name))

    def single(size: int, deep: bool = False):
        got.append(("single", size, deep))
        raise typer.Exit(3)

    monkeypatch.setattr(cli, "app", typer.Typer())
    monkeypatch.setattr(demo, "room", app, raising=False)
    monkeypatch.setattr(demo, "single", single, raising=False)
    cli.attach("many", "minichunk.demo:room", "Two.")
    cli.attach("one", "minichunk.demo:single", "One.")
    call = CliRunner().invoke
    assert call(cli.app, ["many", "second", "x"]).exit_code == 0
    assert call(cli.app, ["many", "first", "--size", "4"]).exit_code == 0
    assert call(cli.app, ["one", "7", "--deep"]).exit_code == 3
    assert got == [("second", "x"), ("first", 4), ("single", 7, True)]
    assert call(cli.app, ["one", "seven"]).exit_code == 2


def test_version():
    from minichunk import __version__

    assert CliRunner().invoke(cli.app, ["--version"]).stdout.strip() == __version__


# --- demo ----------------------------------------------------------------------------------------------------------


def test_demo_json_is_all_that_stdout_gets_and_agrees_with_the_saved_run(run_demo, tmp_path):
    result = run_demo(
        "--json", "--budget", "16", "--block-size", "4", "--policy", "share(0.5)", "--save", "there/a.json.gz"
    )
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert "short" in result.stderr  # the table and the answers
    assert [a["id"] for a in body["answers"]] == [line["id"] for line in LINES]
    run = Run.load(tmp_path / "there/a.json.gz")
    assert body["summary"] == run.summary()
    meta = body["meta"]
    assert (meta["max_batch_tokens"], meta["block_size"], meta["policy"]) == (16, 4, "share(0.5)")
    ids = {name: id for id, name in run.meta["names"]}
    for line, answer in zip(LINES, body["answers"]):
        record = run.requests[ids[line["id"]]]
        assert answer["token_ids"] == record.output_ids
        assert 1 <= len(record.output_ids) <= line["max_tokens"]
        assert answer["ttft"] == pytest.approx(record.ttft) and len(answer["tbt"]) == len(record.output_ids) - 1
    assert max(step.num_tokens for step in run.steps) <= 16


def test_demo_shows_steps_answers_and_figures(run_demo):
    result = run_demo("--budget", "16")
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "TBT", "P50", "P99", "tokens/s", "mixed", "waste", "prompt chunks", "decodes", "long"):
        assert word in result.output, word
    assert Run.load("runs/demo.json.gz").steps


@pytest.mark.parametrize("policy", ["whole_prompt", "prefill_first"])
def test_demo_gives_a_policy_that_never_cuts_a_budget_that_holds_the_longest(run_demo, policy):
    result = run_demo("--budget", "16", "--policy", policy, "--json")
    assert result.exit_code == 0, result.output
    run = Run.load("runs/demo.json.gz")
    longest = max(len(r.prompt_ids) + LINES[i]["max_tokens"] for i, r in zip((0, 2, 1), run.requests.values()))
    assert run.meta["max_batch_tokens"] == longest > 16
    assert f"the budget is {longest}" in plain(result.stderr)
    whole = {id: len(r.prompt_ids) for id, r in run.requests.items()}
    assert all(n == whole[id] - start for step in run.steps for id, start, n, _, decode in step.chunks if not decode)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--policy", "fastest"], "unknown policy 'fastest'"),
        (["--policy", "share(2)"], "share(x) needs 0 < x < 1"),
        (["--model", "tiny:none"], "tiny:none"),
        (["--budget", "0"], "--budget"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_demo_refuses_a_wrong_option_in_one_message(run_demo, options, message):
    result = run_demo(*options)
    assert result.exit_code == 2
    assert message in plain(result.output) and "Traceback" not in result.output


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2"),
        ('{"id": "a", "arrival": 0}', "line 2: .*max_tokens"),
        (json.dumps(LINES[0]), "'short' is there already"),
    ],
)
def test_demo_names_the_line_of_a_bad_prompts_file(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        demo.load_prompts(path)


def test_demo_refuses_a_prompt_that_can_never_run_before_the_first_step(run_demo, prompts):
    prompts.write_text(json.dumps({**LINES[0], "max_tokens": 10**6}), encoding="utf-8")
    result = run_demo()
    assert result.exit_code == 2 and "1000000" in plain(result.output)


def test_demo_fails_when_an_answer_failed(run_demo, monkeypatch):
    replay = demo.replay

    def replay_with_a_fault(engine, *arguments):
        def broken(batch):
            raise RuntimeError("the card fell out")

        engine.runner.run = broken
        return replay(engine, *arguments)

    monkeypatch.setattr(demo, "replay", replay_with_a_fault)
    result = run_demo()
    assert result.exit_code == 1 and "failed: RuntimeError: the card fell out" in plain(result.output)


def test_demo_table_rests_on_the_step_that_mixed_most(run_demo):
    assert run_demo("--budget", "16").exit_code == 0
    run = Run.load("runs/demo.json.gz")
    names = {id: str(id) for id in run.requests}
    table = demo.StepTable("t")
    for _ in range(3):  # enough rows that not all are shown
        for step in run.steps:
            table.add(step, names)
    table.rest()
    shown = [record for record, _ in table.rows[table.end - demo.SHOWN_STEPS : table.end]]
    best = max(s.num_decodes for s in run.steps if s.is_mixed)
    assert any(s.is_mixed and s.num_decodes == best for s in shown)


# --- data/prompts.jsonl --------------------------------------------------------------------------------------------


def test_our_prompts_are_many_and_documents_arrive_while_others_decode():
    prompts = demo.load_prompts(data_path("prompts.jsonl"))
    documents = [p for p in prompts if len(p.prompt.split()) > 800]
    assert len(prompts) >= 16 and len(documents) >= 3
    assert len({p.prompt for p in prompts}) == len(prompts)
    assert all(a.arrival <= b.arrival for a, b in pairwise(prompts))
    assert all(p.arrival > prompts[0].arrival for p in documents)
    assert all(p.prompt.rstrip().endswith("?") for p in documents)
    assert all(1 <= p.max_tokens <= 128 for p in prompts)


@pytest.mark.smollm2
def test_our_documents_are_above_1000_tokens_and_below_1900():
    from transformers import AutoTokenizer

    from minichunk import smollm2

    tokenizer = AutoTokenizer.from_pretrained(smollm2.ensure())
    lengths = [len(tokenizer(p.prompt)["input_ids"]) for p in demo.load_prompts(data_path("prompts.jsonl"))]
    assert sum(1000 < n < 1900 for n in lengths) >= 3
    assert all(n < 64 or 1000 < n < 1900 for n in lengths)
