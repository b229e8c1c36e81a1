"""The packer's integers, its check and its runs, without a browser; tests/browser/test_browser_packer.py has the rest."""

import base64
import json
import random
import shutil
import subprocess

import pytest
from test_packer_batch import CASES, EXAMPLE, wrong_rows

from minichunk import lab
from minichunk.lab import kit, packer_widget
from minichunk.lab import packer_batch as packer
from minichunk.packing import PackedBatch


@pytest.fixture
def w():
    return lab.packer()


def broken(w, **edits):
    """Runs the example with one integer changed: broken(w, **{"seq_lens_k[1]": 12}) → (errors, report, status)."""
    w.state = {"edits": edits}
    return w.run(), w.report, w.status


# --- the running example ---------------------------------------------------------------------------------------------
def test_the_running_example(w):
    assert w.right == w.integers == EXAMPLE
    assert [(c["id"], c["start"], c["length"]) for c in w.state["chunks"]] == [("A", 7, 1), ("B", 9, 12), ("C", 0, 3)]
    assert w.check() == "Every integer is right."
    for size in (1, 3, 16):
        assert lab.packer(block_size=size).right["seq_lens_k"] == [8, 21, 3]


@pytest.mark.parametrize("budget, lengths, last", [(14, [1, 12, 1], False), (13, [1, 12], True), (5, [1, 4], False), (1, [1], True)])  # fmt: skip
def test_a_smaller_budget_cuts_the_last_chunk(budget, lengths, last):
    chunks = lab.packer(budget).state["chunks"]
    assert [c["length"] for c in chunks] == lengths and chunks[-1]["is_last"] is last


def test_right_integers_give_the_dense_result_in_both_forms(w):
    errors = w.run()
    assert max(errors["flash_attention"] + errors["flashinfer"] + errors["sampled"]) < 2e-6
    assert len(errors["flash_attention"]) == 16 and w.report == "Every integer is right."
    assert "all 16 rows agree" in w.status and w.state["errors"] == errors


# --- one wrong integer -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("edit", CASES)
def test_a_wrong_integer_is_named_and_found(w, edit):
    """The rows of each are in test_packer_batch.py; the sampled ones are picked by logits_rows."""
    key, value = edit.split("=")
    errors, report, status = broken(w, **{key: int(value)})
    assert report.startswith(f"{key} is {value}: ") and "\n" not in report and not status.startswith("error")
    flash_attention = CASES[edit][0]
    assert wrong_rows(errors["flash_attention"]) == flash_attention
    picked = [1] if key == "logits_rows[1]" else [j for j, row in enumerate((0, 12, 15)) if row in flash_attention]
    assert wrong_rows(errors["sampled"]) == picked


def test_every_wrong_integer_is_named(w):
    """Each integer of the example, one more than it should be: the check names it and nothing else; a run never raises."""
    for name, values in EXAMPLE.items():
        flat = {f"{name}[{i}]": v for i, v in enumerate(values) if not isinstance(v, list)}
        flat |= {f"{name}[{i}][{k}]": x for i, v in enumerate(values) if isinstance(v, list) for k, x in enumerate(v)}
        for key, value in flat.items():
            w.state = {"edits": {key: value + 1}}
            assert w.check().startswith(f"{key} is {value + 1}: ") and "\n" not in w.check()
        errors = w.run()  # the last of each list
        assert (None in (errors["flash_attention"], errors["flashinfer"])) == w.status.startswith("error: ")


# --- Python and JavaScript -------------------------------------------------------------------------------------------
NODE = """
import { withBlocks, integers, edited, code, shape, sees } from "MODULE";
import { readFileSync } from "node:fs";
const { setup, cases } = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ chunks, edits, size }) => {
  const with_ = withBlocks(chunks, { ...setup, block_size: size }), right = integers(with_, size), ints = edited(right, edits);
  const masks = ["flash_attention", "flashinfer"].flatMap((form) => ["bottom-right", "top-left"].map((align) => sees(...shape(ints, form, size), align, ints.positions.length)));
  return { chunks: with_, right, edited: ints, code: code(with_, edits, size), masks };
})));
"""
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed; the browser test covers it")


def random_cases(count=200, seed=7):
    rng, cases = random.Random(seed), [{"chunks": [], "edits": {}, "size": 4}]
    for _ in range(count):
        size, chunks = rng.choice([1, 2, 4, 5, 16]), []
        for letter in rng.sample("ABCDEFGH", rng.randint(1, 8)):
            decode = rng.random() < 0.4
            start = rng.randint(1 if decode else 0, 50)
            length = 1 if decode else rng.randint(1, 8)
            chunks.append({"id": letter, "start": start, "length": length, "is_last": decode or rng.random() < 0.5, "is_decode": decode})  # fmt: skip
        if rng.random() < 0.5:  # blocks that a former state left, too many or too few
            blocks = rng.sample(range(packer.num_blocks(size)), 2 * len(chunks))
            chunks = [{**c, "blocks": blocks[2 * n : 2 * n + 2]} for n, c in enumerate(chunks)]
        right = packer.integers(packer.with_blocks(chunks, size), size)
        name = rng.choice([n for n in right if right[n]])
        key = f"{name}[{rng.randrange(len(right[name]))}]" + "[0]" * (name == "block_tables")
        cases.append({"chunks": chunks, "edits": {key: rng.randint(0, 40)}, "size": size})
    return cases


@pytest.fixture(scope="module")
def in_javascript():
    cases = random_cases()
    module = "data:text/javascript;base64," + base64.b64encode(kit.module("packer").encode()).decode()
    done = subprocess.run(
        ["node", "--input-type=module", "-e", NODE.replace("MODULE", module)],
        input=json.dumps({"setup": {"scatter": packer.SCATTER}, "cases": cases}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(zip(cases, json.loads(done.stdout)))


@needs_node
def test_javascript_computes_the_same_integers(in_javascript):
    for case, got in in_javascript:
        chunks = packer.with_blocks(case["chunks"], case["size"])
        assert got["chunks"] == chunks
        assert got["right"] == packer.integers(chunks, case["size"])
        assert got["edited"] == packer.edited(got["right"], case["edits"])
        assert len({b for c in chunks for b in c["blocks"]}) == sum(len(c["blocks"]) for c in chunks)


@needs_node
def test_the_copied_code_builds_the_same_batch(in_javascript):
    for case, got in in_javascript[1:]:
        names: dict = {}
        exec(got["code"], names)
        assert {name: names[name] for name in got["edited"]} == got["edited"]
        assert isinstance(names["batch"], PackedBatch)
        chunks = [(c.id, c.start, c.length, c.is_last, c.is_decode) for c in names["chunks"]]
        assert chunks == [tuple(c[k] for k in ("id", "start", "length", "is_last", "is_decode")) for c in got["chunks"]]


@needs_node
def test_the_mask_is_the_one_the_attention_uses(in_javascript):
    """Bottom-right: a row sees the keys up to its position, whatever the form says it with. Top-left: from key 0 on."""
    for case, got in in_javascript:
        if any(not key.startswith(("slot_mapping", "positions", "logits_rows")) for key in case["edits"]):
            continue
        right, rows = got["right"], len(got["right"]["positions"])
        n = [i for i, c in enumerate(got["chunks"]) for _ in range(c["length"])]
        first = [row - right["cu_seqlens_q"][n[row]] for row in range(rows)]
        flash_attention, top_left, flashinfer, _ = got["masks"]
        assert flash_attention == flashinfer == [[n[row], right["positions"][row] + 1] for row in range(rows)]
        assert top_left == [[n[row], first[row] + 1] for row in range(rows)]


def test_size():
    assert (kit.STATIC / "packer.mjs").stat().st_size < 40_000


# --- state, text, errors ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "state, why",
    [
        ({"chunk": []}, "state has chunks, edits, align, errors, not chunk"),
        ({"align": "middle"}, "bottom-right, top-left, got 'middle'"),
        ({"edits": {"seq_lens_k[3]": 1}}, r"no integer 'seq_lens_k\[3\]'"),
        ({"edits": {"block_tables[0]": 1}}, r"no integer 'block_tables\[0\]'"),
        ({"edits": {"seq_lens_k[0]": 1.5}}, "whole number of at most four digits, got 1.5"),
        ({"chunks": [{"id": "A", "start": 0, "length": 17}]}, "17 new tokens are more than the budget of 16"),
        ({"chunks": [{"id": "A", "start": 60, "length": 5}]}, "both together at most 64; got 60, 5"),
        ({"chunks": [{"id": "A", "start": 0, "length": 1, "is_decode": True}]}, "a decode has one new token"),
        ({"chunks": [{"id": "A", "start": 0, "length": 1}] * 2}, "a letter of its own"),
        ({"chunks": [{"id": "A", "start": 0, "length": 1, "blocks": [130]}]}, r"0…129, got \[130\]"),
        ({"errors": {"flash_attention": [0.0]}}, "let run\\(\\) find them"),
    ],
)
def test_state_is_checked_and_a_refused_one_leaves_the_old(w, state, why):
    before = dict(w.state)
    with pytest.raises(Exception, match=why):
        w.state = state
    assert w.state == before


def test_state_is_plain_and_may_be_short(w):
    w.state = {
        "chunks": [{"id": "C", "start": 5, "length": 2}, {"id": "A", "start": 3, "length": 1, "is_decode": True}]
    }
    assert json.loads(json.dumps(w.state)) == w.state
    assert w.right["seq_lens_k"] == [7, 4] and w.right["logits_rows"] == [1, 2]
    w.state = {**w.state, "edits": {"seq_lens_k[0]": 7, "seq_lens_k[1]": 3}}
    assert w.state["edits"] == {"seq_lens_k[1]": 3}  # the other one is no edit
    w.reset()
    assert w.right == EXAMPLE and w.state["errors"] is None


def test_an_empty_batch(w):
    w.state = {"chunks": []}
    assert w.run() is None and "empty" in w.status
    assert w.right["cu_seqlens_q"] == [0] and "0 of 16 tokens" in str(w)


def test_text_twin(w):
    assert "16 of 16 tokens" in str(w) and "cu_seqlens_q 0 1 13 16 · seq_lens_k 8 21 3" in str(w)
    assert "kv_indptr 0 2 8 9" in str(w) and "kv_last_page_len 4 1 3" in str(w)
    broken(w, **{"seq_lens_k[1]": 12})
    assert "seq_lens_k 8 12* 3" in str(w)
    assert "FlashAttention: A right, largest 3e-07 · B 12 of 12 rows wrong" in str(w)
    assert "check    seq_lens_k[1] is 12: B has 9 tokens" in str(w)
    bundle = w._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/plain"] == str(w) and "cu_seqlens_q 0 1 13 16" in data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_button_runs_what_the_browser_sends_and_always_answers(w, monkeypatch):
    sent = []
    monkeypatch.setattr(type(w), "send", lambda self, content, buffers=None: sent.append(content))
    w.set_state({"state": {**w.state, "edits": {"seq_lens_k[1]": 12}}, "asked": 1})
    assert sent == [{"done": 1}] and w.report.startswith("seq_lens_k[1] is 12")
    with pytest.raises(Exception, match="no integer"):
        w.set_state({"state": {"edits": {"nothing[0]": 1}}, "asked": 2})
    assert sent == [{"done": 1}, {"done": 2}] and w.status.startswith("error: this batch has no integer")
    assert w.state["edits"] == {"seq_lens_k[1]": 12}  # the old state is back


def test_lab_packer_stays_a_function():
    assert callable(lab.packer) and lab.packer is packer_widget.packer
    for bad in (0, 65, 16.0):
        with pytest.raises(ValueError, match=r"budget must be a whole number in 1…64"):
            lab.packer(bad)
    with pytest.raises(ValueError, match="device must be one of auto, cpu, got 'cuda'"):
        lab.packer(device="cuda")


def test_it_says_where_run_computes(monkeypatch):
    monkeypatch.setattr(packer_widget.torch.cuda, "is_available", lambda: True)
    assert [lab.packer(device=d).setup["where"] for d in ("auto", "cpu")] == ["GPU", "CPU"]
    w = lab.packer(device="cpu")
    w.run()
    assert w.status.endswith(" · torch on the CPU, float32")


def test_what_computes_needs_no_widget(run_python):
    code = "import sys, minichunk.lab.packer_batch; print([m for m in ('anywidget', 'ipywidgets', 'plotly') if m in sys.modules])"
    assert run_python(code).strip() == "[]"
