"""The scrubber's data, its state and its saved page, without a browser; tests/browser has the rest."""

import base64
import gzip
import json
import re
import shutil
import subprocess

import pytest
import traitlets
from toyrun import toy_run

from minichunk import lab
from minichunk.lab import kit, scrubber
from minichunk.lab.html import to_html
from minichunk.packing import PackedBatch
from minichunk.record import RequestRecord, Run, StepRecord
from minichunk.request import Chunk, Request

CASES = {
    "plain": {},
    "small pool": {"num_blocks": 32},
    "shared prefix": {"shared": 40, "prompts": (64, 50, 20)},
    "prefill first": {"policy": "prefill_first", "budget": 512},
    "long": {"prompts": tuple(range(1, 36)), "outputs": 32, "max_requests": 8},
}


def engine_run():
    """A real run: shared prefixes, preemption on a small pool, an abort."""
    from minichunk import Engine, SamplingParams

    head = list(range(40))
    with Engine("tiny", max_batch_tokens=64, num_blocks=17, check=True) as engine:
        ids = [
            engine.add(p, SamplingParams(max_tokens=40, ignore_eos=True))
            for p in ([1] * 5, [2] * 80, [3] * 90, head + [1, 2])
        ]
        for n in range(200):
            if n == 6:
                ids.append(engine.add(head + [3], SamplingParams(max_tokens=40, ignore_eos=True)))
            if n == 12:
                engine.abort(ids[0])
            if engine.step() is None:
                return engine.run


@pytest.fixture(scope="module")
def runs():
    return {name: toy_run(**kw) for name, kw in CASES.items()} | {"engine": engine_run()}


def test_the_toy_covers_what_it_is_for(runs):
    assert any(s.preempted for s in runs["small pool"].steps)
    assert any(s.hits for s in runs["shared prefix"].steps)
    for event in ("preempted", "hits", "aborted"):
        assert any(getattr(s, event) for s in runs["engine"].steps), event
    assert len(runs["long"].steps) > 130  # more than two checkpoints


@pytest.mark.parametrize("name", [*CASES, "engine"])
def test_frame_packs_what_the_engine_packs(runs, name):
    """cu_seqlens_q, seq_lens_k, positions, slots and rows against PackedBatch, built from Requests."""
    run = runs[name]
    for i, step in enumerate(run.steps):
        chunks, tables = [], run.tables_at(i)
        for id, start, length, last, decode in step.chunks:
            tokens = run.requests[id].prompt_ids + run.requests[id].output_ids
            request = Request(id, tokens[: start + length] + [0] * (not last), len(run.requests[id].prompt_ids))
            request.num_computed = start
            chunks.append(Chunk.of(request, length))
            assert (chunks[-1].is_last, chunks[-1].is_decode) == (last, decode)
        batch = PackedBatch.build(chunks, [tables[c.id] for c in chunks], run.meta["block_size"])
        f = scrubber.frame(run, i)
        for ours, theirs in {
            "cu_seqlens_q": batch.cu_seqlens_q, "seq_lens_k": batch.seq_lens_k, "positions": batch.positions,
            "token_ids": batch.token_ids, "slots": batch.slot_mapping, "logits_rows": batch.logits_rows,
        }.items():  # fmt: skip
            assert f[ours] == theirs.tolist(), (ours, i)


@pytest.mark.parametrize("name", [*CASES, "engine"])
def test_frame_counts_agree_with_the_record(runs, name):
    run = runs[name]
    for i, step in enumerate(run.steps):
        f = scrubber.frame(run, i)
        assert f["used"] + f["cached"] + f["empty"] == run.meta["num_blocks"]
        if not step.finished and not step.preempted:  # else the record counts after they left, the picture before
            assert (f["used"], f["wasted"]) == (step.used, step.wasted_slots), i
        assert {r for r, *_ in f["waiting"]} == set(run.queue_at(i)["waiting"])


def test_sampled_tokens_are_the_outputs(runs):
    for run in runs.values():
        said = {id: [] for id in run.requests}
        for i in range(len(run.steps)):
            f = scrubber.frame(run, i)
            for (id, *_), token in zip([c for c in f["chunks"] if c[3]], f["sampled"]):
                said[id].append(token)
        assert said == {id: r.output_ids for id, r in run.requests.items()}


def test_frame_says_which_steps_there_are(runs):
    with pytest.raises(IndexError, match=r"0…22; got step 23"):
        scrubber.frame(runs["plain"], 23)


# --- Python and JavaScript -------------------------------------------------------------------------------------------
NODE = """
import { unpack, Player, positions } from "MODULE";
import { readFileSync } from "node:fs";
const { data, order } = JSON.parse(readFileSync(0, "utf8"));
const players = (await unpack(data)).runs.map((run) => new Player(run));
const plain = (f) => ({ ...f, tables: [...f.tables], filled: [...f.filled], shared: [...f.shared], pool: [...f.pool] });
// a frame's tables are the player's own: each becomes text before the next one is computed
const frames = order.map((i) => JSON.stringify(plain(players[0].frame(i))));
const pairs = ["time", "step"].map((sync) => [sync, positions(players, sync)]);
console.log(`{"frames":[${frames}],"positions":${JSON.stringify(Object.fromEntries(pairs))}}`);
"""
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed; the browser test covers it")


def in_node(runs, order):
    """What the module computes: frames of the first run in this order, and the positions of all."""
    module = "data:text/javascript;base64," + base64.b64encode(kit.module("scrubber").encode()).decode()
    done = subprocess.run(
        ["node", "--input-type=module", "-e", NODE.replace("MODULE", module)],
        input=json.dumps({"data": scrubber.encoded(runs), "order": order}),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_index(run, f):
    """A Python frame in the form of a JavaScript one."""
    index = {id: n for n, id in enumerate(run.requests)}
    pool, shared = [], []
    for b, state in enumerate(f["pool"]):
        pool.append({"empty": -1, "cached": -2}[state] if isinstance(state, str) else index[state[0]])
        if isinstance(state, list) and len(state) > 1:
            shared.append([b, [index[r] for r in state]])
    return {
        **{k: f[k] for k in ("step", "kind", "budget", "tokens", "positions", "slots", "token_ids", "sampled")},
        **{k: f[k] for k in ("used", "cached", "empty", "wasted")},
        **{k: [index[r] for r in f[k]] for k in ("arrived", "admitted", "preempted", "aborted", "finished")},
        **{k: [[index[r], total, done] for r, total, done in f[k]] for k in ("waiting", "running")},
        "cu": f["cu_seqlens_q"], "lens": f["seq_lens_k"], "rows": f["logits_rows"], "pool": pool,
        "tables": [[index[r], t] for r, t in f["tables"].items()], "hits": [[index[r], n] for r, n in f["hits"].items()],
        "filled": sorted([index[r], n] for r, n in f["filled"].items()),
        "chunks": [[index[r], start, length, last + 2 * decode] for r, start, length, last, decode in f["chunks"]],
        "shared": sorted(shared),
    }  # fmt: skip


@needs_node
@pytest.mark.parametrize("name", [*CASES, "engine"])
def test_javascript_computes_the_same_frames(runs, name):
    run = runs[name]
    n = len(run.steps)
    order = [*range(n), *range(n - 1, -1, -7), 0, n - 1, n // 2, n // 2 - 1]  # forward, backward, jumps
    for i, got in zip(order, in_node((run,), order)["frames"]):
        f = scrubber.frame(run, i)
        want = by_index(run, f)
        got["chunks"] = [[c["r"], c["start"], c["length"], c["flags"]] for c in got["chunks"]]
        got["filled"], got["shared"] = sorted(got["filled"]), sorted(got["shared"])
        for key, value in want.items():
            assert got[key] == value, (key, i)
        assert got["start"] == pytest.approx(f["start"], abs=2e-6)
        assert got["end"] == pytest.approx(f["end"], abs=2e-6)


@needs_node
def test_javascript_pairs_two_runs_in_the_same_way(runs):
    pair = (runs["plain"], runs["prefill first"])
    got = in_node(pair, [])["positions"]
    for sync in scrubber.SYNCS:
        assert got[sync] == [list(p) for p in scrubber.positions(pair, sync)]


def test_two_runs_by_time_show_what_ran_at_that_moment(runs):
    a, b = runs["plain"], runs["prefill first"]
    ends = sorted({round((s.end - r.steps[0].start) * 1e6) for r in (a, b) for s in r.steps})
    pairs = scrubber.positions((a, b), "time")
    assert len(pairs) == len(ends)
    for moment, pair in zip(ends, pairs):
        for run, i in zip((a, b), pair):
            end = round((run.steps[i].end - run.steps[0].start) * 1e6)
            assert end >= moment or i == len(run.steps) - 1
            assert i == 0 or round((run.steps[i - 1].end - run.steps[0].start) * 1e6) < moment
    assert pairs[-1] == (len(a.steps) - 1, len(b.steps) - 1)


# --- size ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def big():
    """1,000 steps of 512 tokens of a vocabulary of 50,000: as bad as it gets."""
    import random

    rng = random.Random(0)
    run = Run(meta={"block_size": 16, "num_blocks": 4096, "source": "SIMULATED"}, vocab={})
    taken = 0
    for i in range(1000):
        chunks, step = [], StepRecord(i, i * 0.1, i * 0.1 + 0.09, 512, [])
        for k in range(12):
            id = i * 12 + k
            length = 42 if k < 11 else 50
            run.requests[id] = RequestRecord(
                id, [rng.randrange(50_000) for _ in range(length)], [rng.randrange(50_000)], i * 0.1
            )
            run.requests[id].token_times = [step.end]
            blocks = [(taken + n) % 4096 for n in range(-(-length // 16))]
            taken += len(blocks)
            chunks.append((id, 0, length, True, False))
            step.grown[id] = blocks
            step.block_states |= {b: "cached" for b in blocks}
        step.chunks, step.arrived, step.admitted = chunks, [c[0] for c in chunks], [c[0] for c in chunks]
        step.finished = list(step.admitted)
        assert step.num_tokens == 512
        run.steps.append(step)
    run.vocab = {t: f" word{t}" for r in run.requests.values() for t in r.prompt_ids + r.output_ids}
    return run


def test_sizes(big, tmp_path):
    assert len(kit.module("scrubber")) < 60_000
    assert len(scrubber.pack((big,))) < 3_000_000
    page = to_html(big, tmp_path / "big.html")
    assert page.stat().st_size <= 5_000_000


def test_the_page_reaches_for_nothing(runs, tmp_path):
    page = to_html((runs["plain"], runs["prefill first"]), tmp_path / "run.html").read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'`)]*""", page))
    assert not addresses, addresses
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)=""", page)
    assert "step 0 of 0…22" in page and "step 0 of 0…19" in page  # the text twin stands there without JavaScript
    data = re.search(r'id="data">([^<]+)<', page)[1]
    body = json.loads(gzip.decompress(base64.b64decode(data)))
    assert [len(r["steps"]) for r in body["runs"]] == [23, 20]
    assert page.count("<script") == page.count("</script>") == 2


# --- text twin and state ---------------------------------------------------------------------------------------------
def test_text_twin_says_what_the_panes_show(runs):
    said = scrubber.text(runs["plain"], 4, {"request": 4, "position": 130})
    assert "step 4 of 0…22 · mixed · 1 prompt chunk + 4 decodes · 128 of 128 tokens · 97 ms · SIMULATED toy" in said
    assert "running  A, B, C, D, E 124/300" in said
    assert "A B C D E[124…247]" in said and "cu_seqlens_q 0 1 2 3 4 128" in said
    f = scrubber.frame(runs["plain"], 4)
    row = 4 + 130 - 124
    assert f"packed row {row}" in said and f"slot {f['slots'][row]} " in said


def test_columns_that_are_not_what_ran_say_so():
    run, said = toy_run(), "columns: the plan's, not what this packer sent"
    assert "columns:" not in scrubber.text(run, 4) and scrubber.encode(run)["integers"] == ""
    run.meta["integers"] = "the plan's, not what this packer sent"
    assert f"({said})" in scrubber.text(run, 4) and scrubber.encode(run)["integers"] == said


def test_state_is_plain_and_checked(runs):
    w = scrubber.scrub(runs["plain"])
    assert w.state == {"step": 0, "selection": None, "sync": "time"}
    w.state = {"step": 4}
    assert w.run() == scrubber.frame(runs["plain"], 4)
    assert str(w) == scrubber.text(runs["plain"], 4)
    w.state = {"step": 4, "selection": {"request": 4, "position": 130}}
    assert "E's token 130" in str(w)
    for bad, why in BAD:
        with pytest.raises(traitlets.TraitError, match=why):
            w.state = bad
    assert w.state["step"] == 4  # a refused state leaves the old one
    w.reset()
    assert w.state["step"] == 0


BAD = [  # what a browser may send: JSON of any shape
    ({"step": 23}, r"step must be a whole number in 0…22, got 23"), ({"step": -1}, "got -1"), ({"step": True}, "got True"), ({"step": "4"}, "got '4'"),
    ({"steps": 3}, "state has step, selection and sync, not steps"), ({"sync": "clock"}, "sync must be one of time, step, got 'clock'"), ({"sync": []}, "time, step, got"),
    ({"selection": {"request": 99, "position": 0}}, r"no request 99 in this run; it has \[0, 1"), ({"selection": {"request": [0], "position": 0}}, r"no request \[0\]"),
    ({"selection": {"request": 0, "position": 25}}, r"request 0 has 25 tokens, so positions 0…24; got 25"), ({"selection": {"request": 0, "position": None}}, "got None"),
    ({"selection": {"gap": [0, 15]}}, r"gaps 0…14; got 15"), ({"selection": {"gap": [99, 0]}}, "no request 99"), ({"selection": {"gap": 5}}, "gap must be .request, index of the token before it., got 5"),
    ({"selection": {"gap": [[0], 0]}}, "gap must be"), ({"selection": {"gap": [0, 0], "run": 1}}, r"run must lie in 0…0, got 1"), ({"selection": {"gap": [0, 0], "run": {}}}, "run must lie"),
    ({"selection": "A"}, "selection must be None"), ({"selection": [["gap", 1]]}, "selection must be None"), ({"selection": {}}, "selection must be None"),
]  # fmt: skip


@pytest.mark.parametrize("bad, why", BAD)
def test_a_bad_state_from_the_browser_is_a_clear_error_and_the_old_one_is_back(runs, bad, why):
    w = scrubber.scrub(runs["plain"])
    w.set_state({"state": {"step": 4}})
    for _ in range(2):  # a second time it is said again
        said = []
        w.observe(lambda change: said.append(change.new), "status")
        with pytest.raises(traitlets.TraitError, match=why):
            w.set_state({"state": bad})
        assert re.search(why, w.status) and w.status.startswith("error: ") and said[-1] == w.status
        assert w.state == {"step": 4, "selection": None, "sync": "time"} and w.run()["step"] == 4
    w.set_state({"state": {"step": 5}})
    assert w.state["step"] == 5 and w.status == ""


def test_two_runs_share_what_a_long_gap_is(runs):
    """Three times the median of all gaps of both, so that the same wait is long in both or in neither."""
    pair = runs["plain"], toy_run(base=0.08)
    alone = [scrubber.encode(run)["slo"] for run in pair]
    waits = sorted(
        b - a for run in pair for r in run.requests.values() for a, b in zip(r.token_times, r.token_times[1:])
    )
    limit = 3 * (waits[(len(waits) - 1) // 2] + waits[len(waits) // 2]) / 2
    body = json.loads(gzip.decompress(scrubber.pack(pair)))
    assert alone[0] != alone[1] and [r["slo"] for r in body["runs"]] == [pytest.approx(limit)] * 2
    for run, shown in zip(pair, body["runs"]):
        assert len(shown["gaps"]) == sum(gap > limit for gap in run.tbts)
    given = json.loads(gzip.decompress(scrubber.pack(pair, 0.3)))
    assert [r["slo"] for r in given["runs"]] == [0.3, 0.3]


def test_two_runs_give_two_frames(runs):
    w = scrubber.scrub(runs["plain"], runs["prefill first"])
    w.state = {"step": 5, "sync": "step"}
    assert w.run() == [scrubber.frame(r, 5) for r in (runs["plain"], runs["prefill first"])]
    assert str(w).count("step 5 of 0…") == 2
    w.state = {"selection": {"gap": [0, 0], "run": 1}}
    assert str(w).count("A waited 503 ms for its token 1") == 1  # in prefill_first only
    w.state = {"selection": {"request": 0, "position": 3}}
    assert str(w).count("selected A's token 3") == 2
    with pytest.raises(Exception, match=r"run must lie in 0…1, got 2"):
        w.state = {"selection": {"gap": [0, 0], "run": 2}}
    with pytest.raises(ValueError, match="one run or two, got 3"):
        scrubber.scrub(*[runs["plain"]] * 3)


def test_an_observers_error_is_shown_in_the_widget(runs):
    w = scrubber.scrub(runs["plain"])
    w.observe(lambda change: 1 / 0, "state")
    with pytest.raises(ZeroDivisionError):
        w.set_state({"state": {"step": 2}})  # what a message from the browser calls
    assert w.status == "error: ZeroDivisionError: division by zero"


def test_where_no_front_end_answers_the_text_stands_there(runs):
    w = scrubber.scrub(runs["plain"])
    bundle = w._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/plain"] == str(w) and "cu_seqlens_q" in data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_a_run_that_cannot_be_shown_says_why(runs):
    with pytest.raises(ValueError, match="no steps"):
        scrubber.scrub(Run(meta={"block_size": 16, "num_blocks": 4}))
    with pytest.raises(ValueError, match=r"meta lacks \['block_size', 'num_blocks'\]"):
        scrubber.scrub(Run(steps=runs["plain"].steps))


def test_on_a_gpu_the_wait_for_the_kernels_is_not_called_sampling():
    run = lab.recorded_run("prefill_first 8192")
    assert {"forward", "wait + sample"} <= set(scrubber.frame(run, 2084)["times"])
    assert "wait + sample 193 ms" in scrubber.text(run, 2084)
