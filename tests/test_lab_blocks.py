"""Notebooks 50 and 60: the running example, a learner's parts in the engine, the block explorer, waste, and the figures."""

import numpy as np
import pytest

from minichunk import SamplingParams, lab
from minichunk.blocks import BlockPool, BlockTable, OutOfBlocks
from minichunk.engine import Engine
from minichunk.lab import scenes_blocks, views, views_blocks
from minichunk.lab.checks import c50, c60
from minichunk.lab.scrubber import Scrubber, frame
from minichunk.packing import PackedBatch, pack_tokens
from minichunk.record import RequestRecord, Run

OPERATIONS = [("grow", "A", 10), ("share", "A", "B"), ("grow", "B", 3), ("free", "A"), ("grow", "C", 13)]


def example():
    return [c50.chunk_of("A", 7, 1, 8, 6), c50.chunk_of("B", 9, 12, 21, 21), c50.chunk_of("C", 0, 3, 3, 3)]


# --- packing ---------------------------------------------------------------------------------------------------------
def test_running_example_has_the_integers_of_the_literature():
    chunks = lab.running_example(model="tiny")
    batch = PackedBatch.build(chunks, [scenes_blocks.BLOCKS[c.id] for c in chunks], 4)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 13, 16] and batch.seq_lens_k.tolist() == [8, 21, 3]
    assert batch.kv_indptr.tolist() == [0, 2, 8, 9] and batch.kv_last_page_len.tolist() == [4, 1, 3]
    assert batch.logits_rows.tolist() == [0, 12, 15] and chunks[0].is_decode and not chunks[1].is_decode
    cut = lab.running_example(14, model="tiny")
    assert [c.length for c in cut] == [1, 12, 1] and not cut[2].is_last
    assert [c.id for c in lab.running_example(13, model="tiny")] == ["A", "B"]


def test_row_errors_are_small_and_show_a_wrong_integer():
    chunks = lab.running_example(model="tiny")
    assert lab.row_errors(pack_tokens, chunks, "tiny").max() < 1e-4
    errors = lab.row_errors(c50.prompt_positions_from_zero, chunks, "tiny")
    assert errors[1:13].min() > 1e-3 and errors[0] < 1e-4 and errors[13:].max() < 1e-4  # B alone was cut


def test_the_engine_runs_on_a_learners_packer_and_says_whose_it_is():
    prompts = [[5, 6, 7] * 9, [8, 9], list(range(5, 45))]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with lab.engine("tiny", max_batch_tokens=16, num_blocks=32) as plain:
        wanted = [c.token_ids for c in plain.generate(prompts, params)]
    with lab.engine_packing(c50.pack_tokens, "tiny", max_batch_tokens=16, num_blocks=32) as mine:
        assert [c.token_ids for c in mine.generate(prompts, params)] == wanted
        assert mine.run.meta["code"] == "REFERENCE packer"
    with lab.engine_packing(lab.broken("50.3"), "tiny", max_batch_tokens=16, num_blocks=32) as theirs:
        got = [c.token_ids for c in theirs.generate(prompts, params)]
        assert got[1] == wanted[1] and got[2] != wanted[2] and "code" not in theirs.run.meta


# --- a learner's pool ------------------------------------------------------------------------------------------------
def serve(pool, **options):
    head = list(range(4, 17))
    prompts = [head + [n] * n for n in (20, 1, 9)] + [[30, 31], [40] * 30]
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    with Engine("tiny", pool=pool, num_blocks=18, block_size=4, max_model_len=64, max_batch_tokens=16, max_requests=5, device="cpu", check=True, **options) as engine:  # fmt: skip
        return [c.token_ids for c in engine.generate(prompts, params)], engine.run


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_your_pool_does_what_the_block_pool_does(prefix_cache):
    """Same blocks in the same steps, with preemption, and with shared prefixes where there is an index."""
    tokens, run = serve(BlockPool(18, 4, prefix_cache))
    mine, of_mine = serve(lab.your_pool(c60.grow, c60.release, 18, 4, prefix_cache=prefix_cache))
    assert mine == tokens and sum(len(s.preempted) for s in run.steps) > 0
    assert (sum(sum(s.hits.values()) for s in run.steps) > 0) == prefix_cache
    assert [(s.grown, s.block_states, s.used) for s in of_mine.steps] == [(s.grown, s.block_states, s.used) for s in run.steps]  # fmt: skip


def test_shuffled_blocks_give_the_same_answers_through_the_learners_slots():
    tokens, run = serve(BlockPool(18, 4, False))
    pool = lab.your_pool(c60.grow, c60.release, 18, 4, shuffle=3)
    mine, of_mine = serve(pool, place=scenes_blocks.placing(c60.slots))
    assert mine == tokens and of_mine.tables_at(0) != run.tables_at(0)
    assert pool.free == list(range(18))


def test_engine_on_says_whose_functions_run():
    run = lab.ask(lab.engine_on(lab.your_pool(c60.grow, c60.release, 24), c60.slots, "tiny"), max_tokens=2)
    assert run.meta["code"] == "REFERENCE blocks" and run.meta["num_blocks"] == 24 and len(run.requests) == 3
    run = lab.ask(lab.engine_on(lab.your_pool(lab.broken("60.4"), c60.release, 24), model="tiny"), max_tokens=2)
    assert "code" not in run.meta


def test_take_and_give_back():
    pool = lab.your_pool(c60.grow, c60.release, 2, 4)
    assert [pool.take(), pool.take()] == [0, 1] and pool.ref_counts == [1, 1]
    with pytest.raises(OutOfBlocks, match="none of 2 blocks is free"):
        pool.take()
    pool.ref_counts[1] = 0
    pool.give_back(1)
    assert pool.free == [1] and pool.given_up == {1: "empty"}


def test_hidden_bug_of_60_wastes_a_block_only_where_blocks_are_full():
    for before in range(9):
        pool, table = lab.your_pool(lab.broken("60.4"), c60.release, 8, 4), BlockTable(4)
        pool.grow(table, before)
        assert len(table) == -(-before // 4) + (before % 4 == 0)


def scene_of_60_4(grow):
    """Notebook 60's own scene without SmolLM2: the schedule hangs on the lengths alone."""
    with lab.engine_on(lab.your_pool(grow, c60.release, 64, 4), model="tiny", chunk_size=8) as engine:
        engine.generate([[5 + n] * 37 for n in range(3)], SamplingParams(max_tokens=24, ignore_eos=True))
        return engine.run


def test_the_hidden_bug_of_60_shows_in_the_notebooks_own_scene(root):
    source = (root / "notebooks/source/60_blocks.py").read_text(encoding="utf-8")
    assert "lab.ask(lab.engine_on(lab.your_pool(grow, release, 64, 4), chunk_size=8))" in source
    right, theirs = scene_of_60_4(c60.grow), scene_of_60_4(lab.broken("60.4"))
    wasted = [[step.wasted_slots for step in run.steps[:5]] for run in (right, theirs)]
    assert wasted == [[0, 0, 0, 0, 9], [12, 12, 12, 12, 9]]  # a block of 4 too many for each of the three
    assert [step.grown for step in right.steps] != [step.grown for step in theirs.steps]
    assert lab.same_answers([right, theirs]).startswith("answers identical: yes")
    said = lab.compare_waste(theirs, right, steps=5).splitlines()
    assert [line.split() for line in said[1:4]] == ["step 0 1 2 3 4".split(), "right 0 0 0 0 9".split(), "theirs 12 12 12 12 9".split()]  # fmt: skip
    assert said[4] == "blocks in use when all is done: right 0, theirs 0"


@pytest.mark.smollm2
def test_the_hidden_bug_of_50_shows_in_the_notebooks_own_scene():
    """The prompts that were cut get other answers, and those alone; the scrubber says whose integers it shows."""

    def serve(pack):
        return lab.rush_hour(lab.engine_packing(pack, max_batch_tokens=64), documents=0, max_tokens=16)

    right, theirs = serve(c50.pack_tokens), serve(lab.broken("50.3"))
    cut = {c[0] for step in theirs.steps for c in step.chunks if not c[4] and (c[1] or not c[3])}
    other = {id for id, r in theirs.requests.items() if r.output_ids != right.requests[id].output_ids}
    assert other == cut and 0 < len(cut) < 6
    assert "(columns: the plan's, not what this packer sent)" in str(lab.scrub(theirs))
    assert "columns:" not in str(lab.scrub(right))


def test_thrown_out_says_what_was_lost():
    pool = lab.your_pool(c60.grow, c60.release, 10)
    with lab.engine_on(pool, c60.slots, "tiny") as engine:
        engine.generate([[5 + n] * 37 for n in range(3)], SamplingParams(max_tokens=24, ignore_eos=True))
        run = engine.run
    computed = sum(step.num_tokens for step in run.steps)
    assert (
        lab.thrown_out(run)
        == "step 12: C was thrown out with 48 tokens computed, 37 of its prompt and 11 of its answer"
    )
    assert computed - 3 * (37 + 24 - 1) == 48  # each token but an answer's last is computed once, C's 48 twice
    assert lab.thrown_out(scene_of_60_4(c60.grow)) == "nobody was thrown out"


# --- the checks ---------------------------------------------------------------------------------------------------------
def test_the_float64_attention_of_the_check_is_torchs_own():
    import torch

    for q, ks, vs, cu in c50.problems():
        wanted = []
        for n, (k, v) in enumerate(zip(ks, vs)):
            mine = q[cu[n] : cu[n + 1]]
            sees = torch.tensor([[j <= len(k) - len(mine) + i for j in range(len(k))] for i in range(len(mine))])
            query, key, value = (x.double().transpose(0, 1) for x in (mine, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, sees, enable_gqa=True)
            wanted.append(out.transpose(0, 1))
        torch.testing.assert_close(c50.dense(q, ks, vs, cu), torch.cat(wanted))


def test_an_error_in_50_2_shows_the_batch_in_words_and_a_foreign_type_is_named():
    result = lab.check("50.2", lambda q, ks, vs, cu_q: q @ ks)
    assert "Smallest input found:  A: 1 new, 1 key; heads 1, kv heads 1, head size 2; cu_q [0, 1]" in result.message
    assert "tensor(" not in result.message
    result = lab.check("50.2", lambda q, ks, vs, cu_q: q.numpy())
    assert "got an array of 2 numbers (numpy's), expected a tensor of shape (1, 1, 2)" in result.message


# --- the explorer ----------------------------------------------------------------------------------------------------
def test_operations_become_steps_on_a_real_pool():
    run = lab.replay_blocks(OPERATIONS, num_blocks=10, block_size=4)
    assert run.tables_at(1) == {"A": [0, 1, 2], "B": [0, 1, 3]} and run.steps[1].hits == {"B": 8}
    assert run.pool_at(1)[:4] == [["A", "B"], ["A", "B"], ["A"], ["B"]]
    assert run.steps[1].chunks == [("B", 8, 3, False, False)]  # the tail and one more: nobody writes into block 0 or 1
    assert run.tables_at(3) == {"B": [0, 1, 3, 4]} and run.pool_at(3)[2] == "empty"
    assert [(s.used, s.cached, s.empty, s.wasted_slots) for s in run.steps] == [
        (3, 0, 7, 2), (4, 0, 6, 3), (5, 0, 5, 4), (4, 0, 6, 2), (8, 0, 2, 5),
    ]  # fmt: skip
    for i in range(len(run.steps)):
        f = frame(run, i)
        assert (f["used"], f["empty"], f["wasted"]) == (
            run.steps[i].used,
            run.steps[i].empty,
            run.steps[i].wasted_slots,
        )
        assert -1 not in f["slots"]


def test_freed_whole_blocks_stay_cached_until_they_are_needed():
    run = lab.replay_blocks([("grow", "A", 9), ("free", "A"), ("grow", "B", 17)], num_blocks=6, block_size=4)
    assert [(s.cached, s.empty) for s in run.steps] == [(0, 3), (2, 4), (1, 0)]


def test_a_freed_request_is_called_freed_and_its_blocks_are_gone_in_that_step():
    """StepRecord.aborted: finished without a chunk. The picture of the step is the one after it left."""
    shown = lab.explore_blocks(
        [("grow", "A", 9), ("free", "A"), ("grow", "B", 2), ("free", "B")], num_blocks=6, block_size=4
    )
    run = shown.runs[0]
    for i, (step, gone) in enumerate(zip(run.steps, [[], ["A"], [], ["B"]])):
        f = frame(run, i)
        assert (
            f["aborted"] == step.aborted == [r for r in step.finished if r not in [c[0] for c in step.chunks]] == gone
        )
        assert not {*f["tables"], *f["filled"], *(r for r, *_ in f["running"])} & {*gone}
        shown.state = {"step": i}
        assert ("freed" in str(shown)) == bool(gone) and "aborted" not in str(shown) and "finished" not in str(shown)
    f = frame(run, 1)
    assert (
        f["kind"] == "empty"
        and f["pool"] == ["cached", "cached"] + ["empty"] * 4
        and (f["used"], f["wasted"]) == (0, 0)
    )
    shown.state = {"step": 1}
    assert "step 1 of 0…3 · empty · no chunks" in str(shown) and "freed A" in str(shown)


def test_explorer_is_the_scrubber():
    shown = lab.explore_blocks(OPERATIONS, num_blocks=10, block_size=4)
    shown.state = {"step": 2, "selection": {"request": "B", "position": 12}}
    assert isinstance(shown, Scrubber) and "slot 16 = block 4 · 4 + 0" in str(shown) and "' B12'" in str(shown)
    shown.state = {"step": 1, "selection": {"request": "B", "position": 3}}
    assert "' A3'" in str(shown) and "slot 3 = block 0 · 4 + 3" in str(shown)


@pytest.mark.parametrize(
    "operations, why",
    [
        ([("grow", "A", 50)], r"operation 0, .*13 blocks wanted, 12 of 12 free"),
        ([("grow", "A", 0)], "at least 1, got 0"),
        ([("grow", "A", 2), ("free", "B")], r"operation 1, .*'B' holds no blocks; A does"),
        ([("grow", "A", 2), ("free", "A"), ("grow", "A", 2)], "A was freed already"),
        ([("grow", "A", 2), ("grow", "B", 2), ("share", "A", "B")], "B is there already"),
        ([("shrink", "A", 2)], 'use \\("grow", "A", 5\\)'),
        ([("grow", "A")], 'use \\("grow", "A", 5\\)'),
        ([("grow", "Alice", 3)], "one letter or two"),
    ],
)  # fmt: skip
def test_operations_that_cannot_be_done(operations, why):
    with pytest.raises(ValueError, match=why):
        lab.explore_blocks(operations)


# --- waste -----------------------------------------------------------------------------------------------------------
def test_waste_against_what_can_be_said_without_drawing():
    """Blocks of B waste (B − 1) / 2 a request; the longest is 8,192; the exact length lacks half an answer."""
    from minichunk.workloads import summaries

    trace = summaries()["sharegpt-8k"]
    found = {way: float(np.mean(v)) for way, v in lab.waste("sharegpt-8k", 8192, n=400, seeds=10).items()}
    live = trace["prompt_mean"] + trace["output_mean"] / 2
    assert found["blocks of 1"] == 0
    for size in (4, 16, 64, 256):
        expected = 100 * (size - 1) / 2 / (live + (size - 1) / 2)
        assert found[f"blocks of {size}"] == pytest.approx(expected, rel=0.1)
    assert found["contiguous: longest (8,192)"] == pytest.approx(100 * (1 - live / 8192), abs=1)
    half = trace["output_mean"] / 2
    assert found["contiguous: exact length"] == pytest.approx(100 * half / (live + half), rel=0.05)
    assert 25 < found["contiguous: a power of two"] < 45


# --- figures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_mask_is_the_rule(align):
    chunks = example()
    z = views_blocks.packed_mask(chunks, align=align).data[0].z
    assert z.shape == (16, 32)
    row = left = 0
    for n, chunk in enumerate(chunks):
        for i in range(chunk.length):
            for key in range(32):
                mine = left <= key < left + chunk.end
                last = chunk.start + i if align == "bottom-right" else i
                assert z[row, key] == (0 if not mine else n + 2 if key - left <= last else 1)
            row += 1
        left += chunk.end


def test_mask_shows_the_learners_integers_and_says_them():
    chunks, packed = example(), list(pack_tokens(example()))
    said = views.text(views_blocks.packed_mask(chunks))
    assert "16 packed rows, 32 keys; 200 of 512 pairs are computed" in said
    assert "cu_seqlens_q 0 1 13 16; seq_lens_k 8 21 3; logits_rows 0 12 15" in said
    assert "row 12: B, position 20, sees keys 0…20 of 21" in said
    packed[3] = [1, 12, 3]  # histories forgotten
    wrong = views_blocks.packed_mask(chunks, tuple(packed))
    assert wrong.data[0].z.shape == (16, 16) and "row 0: A, position 7, sees keys 0…0 of 1" in views.text(wrong)
    with pytest.raises(ValueError, match="bottom-right, top-left, got 'middle'"):
        views_blocks.packed_mask(chunks, align="middle")


def test_row_error_bars():
    figure = views_blocks.row_error_bars(example(), [0.5] + [0.1] * 12 + [0.0] * 3, "the other one")
    assert [t.name for t in figure.data] == ["A", "B", "C"] and list(figure.data[1].x) == list(range(1, 13))
    assert "B, rows 1…12: largest error 1.0e-01" in views.text(figure) and figure.data[2].y[0] == 1e-7


def test_block_map_shows_tables_memory_and_waste():
    run = lab.replay_blocks(OPERATIONS, num_blocks=10, block_size=4)
    figure = views_blocks.block_map(run, 2)
    tables, memory = figure.data
    assert tables.text.tolist() == [["0", "1", "2 (2 ×)", ""], ["0", "1", "3", "4 (2 ×)"]]
    assert memory.text[2].tolist() == ["A8", "A9", "×", "×"] and memory.text[4].tolist() == ["B12", "B13", "×", "×"]
    assert memory.text[0].tolist() == ["A&B0", "A&B1", "A&B2", "A&B3"]
    assert (memory.z[2] == [2, 2, 1, 1]).all() and (memory.z[9] == 0).all()
    assert "5 blocks used, 0 cached, 5 empty; 4 slots wasted" in views.text(figure)
    assert "B: 14 tokens in blocks 0 1 3 4, 2 slots wasted" in views.text(figure)
    cached = lab.replay_blocks([("grow", "A", 9), ("free", "A")], num_blocks=6, block_size=4)
    assert views_blocks.block_map(cached, 1).data[1].text[0].tolist() == ["~"] * 4


def test_waste_bars_say_where_the_lengths_come_from():
    figure = views_blocks.waste_by_policy({"contiguous: x": [10.0, 20.0, 30.0], "blocks of 4": [1.0]}, "azure-conv", "dark")  # fmt: skip
    assert list(figure.data[0].x) == [20.0] and list(figure.data[1].y) == ["blocks of 4"]
    assert "SIMULATED, 3 draws of lengths like azure-conv's (CC-BY-4.0)" in views.text(figure)
    assert "contiguous: x: 20.0 % wasted (P5 11.0, P95 29.0)" in views.text(figure)


def test_compare_answers():
    runs = [Run(vocab={1: " yes", 2: "<|im_end|>", 3: " no"}) for _ in range(2)]
    for run, second in zip(runs, (3, 1)):
        run.requests = {0: RequestRecord(0, [9], [1, 2, 3], 0.0), 1: RequestRecord(1, [9], [second], 0.0)}
    assert lab.compare_answers(*runs) == "A  same   yes …\nB  OTHER  no …\n   right  yes …"
