"""What goes wrong in engines of this kind, each with its smallest input, and what is right instead.

Most run on the memory of tokens, which sees a wrong slot at once; where the arithmetic counts, on a tiny model against
transformers' generate.
"""

import numpy as np
import pytest
import torch
from test_equality import NEVER, generated, model
from token_memory import VOCAB, expected, memory_engine, newest_first

from minichunk import BlockPool, BlockTable, Engine, PackedBatch, Request, SamplingParams
from minichunk.blocks import num_blocks_needed


def run(prompts, new, **options):
    """Completions on the memory, and the run."""
    engine = memory_engine(**options)
    new = [new] * len(prompts) if isinstance(new, int) else new
    done = engine.generate(prompts, [SamplingParams(n, ignore_eos=True) for n in new])
    assert [c.token_ids for c in done] == [expected(p, n, True) for p, n in zip(prompts, new)]
    assert engine.pool.num_free == engine.num_blocks
    return done, engine.run


def text(length, first=0):
    return [(first + i) % (VOCAB - 1) for i in range(length)]


@pytest.mark.parametrize("running", [1, 15, 16, 17, 20])
def test_a_number_of_decodes_between_two_sizes_of_graph_has_nowhere_to_run(running):
    _, record = run([text(3, i) for i in range(running)], 4, max_requests=20, num_blocks=60, block_size=4)
    assert max(s.num_decodes for s in record.steps) == running


def test_admission_counts_tokens_where_the_pool_gives_blocks():
    """Two blocks of 8, three requests of one token: three tokens fit, three blocks do not."""
    _, record = run([[1], [2], [3]], 1, num_blocks=2, block_size=8)
    assert [s.admitted for s in record.steps] == [[0, 1], [2]]


def test_a_preempted_request_is_lost_from_every_queue():
    done, record = run([text(4), text(4, 5), text(8, 9)], [8, 8, 4], num_blocks=4, block_size=4)
    assert sum(len(s.preempted) for s in record.steps) > 0 and [c.finish_reason for c in done] == ["length"] * 3


def test_a_prompt_longer_than_a_block_writes_into_blocks_of_others():
    slots = []
    engine = memory_engine(num_blocks=8, block_size=4)
    engine.runner.on_run = lambda batch: slots.append(batch.slot_mapping.tolist())
    ids = [engine.add(text(10), SamplingParams(3)), engine.add(text(3, 7), SamplingParams(3))]
    engine.step()
    assert len(set(slots[0])) == 13
    for request, (a, b) in zip(engine.scheduler.running, ((0, 10), (10, 13))):
        assert {s // 4 for s in slots[0][a:b]} == set(request.table.block_ids[: num_blocks_needed(b - a, 4)])
    while engine.has_work:
        engine.step()
    assert [engine.result(i).token_ids for i in ids] == [expected(text(10), 3), expected(text(3, 7), 3)]


def test_only_the_first_prompt_of_a_step_may_be_cut_and_budget_is_left_unused():
    _, record = run([text(4), text(5, 4)], 2, max_batch_tokens=8, num_blocks=8, block_size=4)
    assert record.steps[0].num_tokens == 8 and [c[2] for c in record.steps[0].chunks] == [4, 4]


def test_decodes_stall_while_a_long_prompt_is_computed():
    engine = memory_engine(max_batch_tokens=8, max_requests=4, num_blocks=30, block_size=4)
    first = engine.add([1], SamplingParams(12, ignore_eos=True))
    engine.step()
    engine.add(text(40), SamplingParams(2, ignore_eos=True))
    for step in range(6):  # 40 prompt tokens at 7 a step
        assert [c[0] for c in engine.step().chunks if c[4]] == [first], step


@pytest.mark.parametrize("prompt", [8, 12])
def test_a_full_pool_ends_in_an_assertion(prompt):
    """Two blocks of 4. What can never fit is refused in words; what fits alone waits for the other to end."""
    engine = memory_engine(num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match=f"needs {prompt + 3} cache slots, the pool has 8"):
        engine.add(text(prompt), SamplingParams(4))
    run([text(8), text(8, 3)], 1, num_blocks=2, block_size=4)
    run([text(4), text(4, 4), text(5, 8)], [5, 5, 4], num_blocks=2, block_size=4)


@pytest.mark.parametrize("budget", [1, 3, 5, 8])
def test_a_chunk_attends_to_keys_that_are_not_written_yet(budget):
    """The memory raises when a slot is read that this text has not written."""
    run([text(21), text(13, 3)], 3, max_batch_tokens=budget, max_requests=1, num_blocks=12, block_size=4)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prompt_found_whole_in_the_cache_leaves_nothing_to_compute(blocks):
    prompt = text(4 * blocks)
    engine = memory_engine(num_blocks=12, block_size=4)
    for turn in range(3):
        done = engine.generate([prompt, prompt], SamplingParams(3))
        assert [c.token_ids for c in done] == [expected(prompt, 3)] * 2
        assert done[0].metrics.cached_tokens == (4 * (blocks - 1) if turn else 0)
    assert all(c[2] > 0 for s in engine.run.steps for c in s.chunks)


def test_the_index_keeps_a_block_that_was_given_to_another_text():
    x, y = text(4), text(4, 7)
    engine = memory_engine(num_blocks=1, block_size=4)
    for prompt in (x, y, x, y):
        assert engine.generate([prompt], SamplingParams(1))[0].token_ids == expected(prompt, 1)
    engine = memory_engine(num_blocks=3, block_size=4)
    for prompt in (x + [1], y + [1] * 5, x + [1]):
        assert engine.generate([prompt], SamplingParams(2))[0].token_ids == expected(prompt, 2)


def test_a_preempted_request_starts_over_without_its_output():
    done, record = run([text(9), text(9, 4)], 10, num_blocks=6, block_size=4, max_batch_tokens=16, prefix_cache=False)
    again = [c for s in record.steps for c in s.chunks if c[0] == 1 and c[1] == 0]
    assert done[1].metrics.preemptions > 0 and len(again) == 1 + done[1].metrics.preemptions
    assert done[1].metrics.token_times == sorted(done[1].metrics.token_times) and len(done[1].token_ids) == 10


def test_a_preempted_request_gets_more_than_its_max_tokens():
    done, record = run([text(5), text(5, 3), text(5, 6)], 6, num_blocks=5, block_size=4)
    assert sum(len(s.preempted) for s in record.steps) > 0 and [len(c.token_ids) for c in done] == [6] * 3


def test_a_decode_is_put_at_the_position_after_its_own():
    positions = []
    engine = memory_engine(num_blocks=4, block_size=4)
    engine.runner.on_run = lambda batch: positions.append(batch.positions.tolist())
    engine.generate([text(5)], SamplingParams(4, ignore_eos=True))
    assert positions == [[0, 1, 2, 3, 4], [5], [6], [7]]
    prompt = [5, 6, 7]
    with Engine(model("llama"), num_blocks=8, check=True) as tiny:
        done = tiny.generate([prompt], SamplingParams(2, ignore_eos=True))[0]
    assert done.token_ids == generated(model("llama"), prompt, 2, eos_token_id=NEVER)


def test_a_draw_of_exactly_zero_divides_by_zero(monkeypatch):
    from minichunk import sampling

    rows = torch.randn(4, 1000)
    requests = [Request(i, [1], 1, SamplingParams(temperature=1.0, top_k=k)) for i, k in enumerate((0, 1, 5, 1000))]
    for u in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(sampling, "uniform", lambda *_, u=u: u)
        tokens, _ = sampling.sample(rows, requests)
        assert all(t in range(1000) for t in tokens) and tokens[1] == int(rows[1].argmax())


def test_a_block_is_taken_one_token_too_early_or_too_late():
    pool, table = BlockPool(4, 4), BlockTable(4)
    assert [len(pool.grow(table, n)) for n in range(1, 10)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    engine = memory_engine(num_blocks=4, block_size=4)
    engine.add(text(3), SamplingParams(4, ignore_eos=True))
    held = []
    while engine.has_work:
        engine.runner.on_run = lambda batch: held.append(len(engine.scheduler.running[0].table))
        engine.step()
    assert held == [1, 1, 2, 2]  # 3, 4, 5, 6 tokens


def test_one_request_larger_than_the_pool_is_preempted_for_ever():
    engine = memory_engine(num_blocks=3, block_size=4)
    with pytest.raises(ValueError, match="num_blocks=4"):
        engine.add(text(10), SamplingParams(4))
    run([text(10)], 3, num_blocks=3, block_size=4)  # exactly 12 slots


def test_blocks_of_a_second_equal_prompt_are_freed_while_its_table_names_them():
    engine = memory_engine(num_blocks=6, block_size=4)
    ids = [engine.add(text(4), SamplingParams(n, ignore_eos=True)) for n in (2, 9)]
    while engine.has_work:
        engine.step()
        free = {b for b in range(6) if engine.pool.ref_counts[b] == 0}
        assert not free & {b for r in engine.scheduler.running for b in r.table.block_ids}
    assert [engine.result(i).token_ids for i in ids] == [expected(text(4), n, True) for n in (2, 9)]


def test_evicting_gives_back_single_slots_or_overlapping_blocks():
    pool = BlockPool(4, 4)
    for first in range(4):
        request = Request(first, text(4, first), 4, table=BlockTable(4), num_computed=4)
        pool.grow(request.table, 4)
        pool.index(request.table, request, 0)
        pool.release(request.table)
    assert pool.num_cached == 4
    table = BlockTable(4)
    pool.grow(table, 9)
    assert len(set(table.block_ids)) == 3 and (pool.num_cached, pool.num_empty) == (1, 0)
    pool.check([table])


def test_the_prefix_index_holds_a_view_of_a_table_that_is_used_again():
    engine = memory_engine(num_blocks=8, block_size=4)
    engine.generate([text(8)], SamplingParams(1))
    engine.generate([text(8, 5)], SamplingParams(1))
    assert engine.generate([text(9)], SamplingParams(2))[0].token_ids == expected(text(9), 2)


def test_three_prompts_of_the_whole_budget_overrun_it_or_never_end():
    _, record = run([text(8, i) for i in range(3)], 2, max_batch_tokens=8, num_blocks=20, block_size=4)
    assert max(s.num_tokens for s in record.steps) == 8


def test_a_request_above_the_pool_but_under_max_model_len_hangs_all_behind_it():
    engine = memory_engine(num_blocks=5, block_size=4)  # 20 slots of max_model_len 64
    first = engine.add(text(5), SamplingParams(3))
    with pytest.raises(ValueError, match="cache slots, the pool has 20"):
        engine.add(text(22), SamplingParams(3))
    second = engine.add(text(6), SamplingParams(3))
    for _ in range(10):
        engine.step()
    assert engine.result(first) and engine.result(second)


def test_a_request_preempts_itself_for_ever_with_nobody_else_running():
    for policy in ("mixed", newest_first):
        _, record = run([text(6), text(6, 3)], 7, policy=policy, num_blocks=3, block_size=4)
        assert len(record.steps) < 60


def test_more_is_computed_than_there_are_tokens_when_the_pool_is_nearly_full():
    engine = memory_engine(num_blocks=7, block_size=2, max_batch_tokens=9)
    for first in range(3):
        engine.add(text(4, first), SamplingParams(8, ignore_eos=True))
    fullest = 0
    while engine.has_work:
        engine.step()
        fullest = max(fullest, engine.pool.num_used)
        assert all(0 <= r.num_computed <= r.num_tokens for r in engine.scheduler.running)
    assert fullest == 7


def test_a_second_chunk_that_begins_inside_a_block_is_written_to_the_wrong_slots():
    slots = []
    engine = memory_engine(num_blocks=4, block_size=4, max_batch_tokens=3, max_requests=1)
    engine.runner.on_run = lambda batch: slots.extend(batch.slot_mapping.tolist())
    engine.add(text(9), SamplingParams(1))
    engine.step()
    engine.step()
    table = list(engine.scheduler.running[0].table.block_ids)
    assert slots == [table[p // 4] * 4 + p % 4 for p in range(6)]


@pytest.mark.parametrize("a, b", [([1] * 4, [2] * 4), ([0, 1], [1, 0]), ([3, 3], [3, 3, 3])])
def test_texts_that_collide_in_a_hash_share_keys(a, b):
    run([a + [5], b + [5], a + b, b + a], 3, num_blocks=20, block_size=2, max_requests=1)


def test_two_tokens_that_are_equal_in_their_low_byte_or_in_a_chain_of_hashes_are_mixed_up():
    engine_pool = BlockPool(12, 1)
    for i, tokens in enumerate(([65, 1], [321, 2], [1, 65])):
        request = Request(i, tokens, 2, table=BlockTable(1), num_computed=2)
        engine_pool.grow(request.table, 2)
        engine_pool.index(request.table, request, 0)
    found = [engine_pool.find(Request(9, [*t, 0], 3)) for t in ([65, 2], [321, 1], [321, 2], [1, 1], [65, 1])]
    assert [len(f) for f in found] == [1, 1, 2, 1, 2] and found[2] == [2, 3]


def test_the_penalty_for_repetition_counts_the_dropped_token_of_a_partial_chunk_or_forgets_at_preemption():
    params = SamplingParams(8, ignore_eos=True, repetition_penalty=1.9)
    prompts = [text(5), text(5, 4)]
    want = [memory_engine(num_blocks=20).generate([p], params)[0].token_ids for p in prompts]
    assert want != [expected(p, 8, True) for p in prompts]
    engine = memory_engine(num_blocks=8, block_size=2, max_batch_tokens=7, max_requests=2)
    assert [c.token_ids for c in engine.generate(prompts, params)] == want
    assert [c[2] for c in engine.run.steps[0].chunks] == [5, 2]
    assert sum(len(s.preempted) for s in engine.run.steps) > 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16, None])
def test_smaller_chunks_change_the_answers(chunk):
    prompts = [list(range(3, 20)), list(range(100, 133))]
    with Engine(model("gpt_oss"), chunk_size=chunk, max_batch_tokens=24, num_blocks=20, check=True) as engine:
        done = engine.generate(prompts, SamplingParams(5, ignore_eos=True))
    assert [c.token_ids for c in done] == [generated(model("gpt_oss"), p, 5, eos_token_id=NEVER) for p in prompts]


@pytest.mark.parametrize("variant", ["mistral", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 6, 7, 11])
def test_a_window_is_one_key_too_wide_or_too_narrow_at_the_border_of_a_chunk(variant, chunk):
    """Window 6, 11 prompt tokens: each row has its own window, whichever chunk it is in."""
    prompt = [(37 * i) % 500 + 3 for i in range(11)]
    with Engine(
        model(variant), chunk_size=chunk, num_blocks=8, block_size=4, max_batch_tokens=32, check=True
    ) as engine:
        done = engine.generate([prompt], SamplingParams(9, ignore_eos=True, logprobs=0))[0]
    assert done.token_ids == generated(model(variant), prompt, 9, eos_token_id=NEVER)
    with torch.inference_mode():
        rows = model(variant)(torch.tensor([prompt + done.token_ids])).logits[0, 10:-1].log_softmax(-1)
    got = [x.logprob for x in done.logprobs]
    assert got == pytest.approx([float(row[t]) for row, t in zip(rows, done.token_ids)], abs=2e-4)


def test_new_prompts_starve_the_decodes():
    """prefill_first does, which is what it is there to show; mixed gives every decode a token in every step."""
    longest = {}
    for policy in ("prefill_first", "mixed"):
        engine = memory_engine(policy=policy, max_batch_tokens=24, max_requests=12, num_blocks=80, block_size=4)
        first = engine.add([1], SamplingParams(20, ignore_eos=True))
        waits, since = [], 0
        for i in range(18):
            if i < 8:
                engine.add(text(20, i), SamplingParams(2, ignore_eos=True))
            record = engine.step()
            since = 0 if first in [c[0] for c in record.chunks] else since + 1
            waits.append(since)
        longest[policy] = max(waits)
    assert longest == {"prefill_first": 7, "mixed": 0}


def test_a_sequence_without_rows_or_with_one_breaks_the_shape_of_the_attention():
    """One row a sequence, with and without grouped heads: [n, heads, d] comes out."""
    for variant in ("llama", "mha"):
        with Engine(model(variant), num_blocks=8, check=True) as engine:
            done = engine.generate([[5], [6], [7]], SamplingParams(3, ignore_eos=True))
        assert [c.token_ids for c in done] == [generated(model(variant), [i], 3, eos_token_id=NEVER) for i in (5, 6, 7)]


def test_the_users_own_forward_changes_after_an_engine_was_attached():
    own, ids = model("qwen3"), torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        before = own(ids).logits
        engine = Engine(own, num_blocks=8)
        engine.generate([[5, 6, 7]], SamplingParams(3))
        assert torch.equal(own(ids).logits, before)
        engine.close()
        assert torch.equal(own(ids).logits, before)


def test_a_second_generate_loses_the_results_of_the_first():
    engine = memory_engine(num_blocks=20, block_size=4)
    first = engine.generate([text(5), text(6)], SamplingParams(3))
    second = engine.generate([text(5), text(6)], SamplingParams(3))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert [c.id for c in (*first, *second)] == [0, 1, 2, 3]
    assert [engine.result(c.id) for c in (*first, *second)] == [*first, *second]


def test_arrays_of_a_batch_are_written_over_by_the_next_one():
    from minichunk import Chunk

    chunks = [Chunk.of(Request(i, text(5, i), 5), 5) for i in range(2)]
    a = PackedBatch.build(chunks[:1], [[0, 1]], 4)
    kept = [np.array(x) for x in (a.token_ids, a.positions, a.slot_mapping, a.block_tables)]
    PackedBatch.build(chunks[1:], [[2, 3]], 4)
    assert all((x == y).all() for x, y in zip(kept, (a.token_ids, a.positions, a.slot_mapping, a.block_tables)))
