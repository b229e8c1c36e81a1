"""Every typical wrong answer gets its own key, and an explanation with the input and the first difference."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from minichunk import lab
from minichunk.lab.checks import Exercise, exercises, find, shared

MODULES = sorted(p.stem for p in (Path(__file__).parent / "wrong").glob("w[0-9]*.py"))
WRONG = [case for name in MODULES for case in importlib.import_module(f"wrong.{name}").WRONG]
# The keys that the course promises. A key without a wrong answer here would be an untested promise.
TABLE = {
    "00.1": {"two_decodes", "one_token_prompt_chunk", "prompt_only"},
    "00.2": {"queue_lost", "gap_has_ttft", "n_minus_1"},
    "10.1": {"tokens_refed", "wrong_row", "length"},
    "10.2": {"mul_add", "weights_reread", "bytes_per_value"},
    "20.1": {"static", "idle_slot", "mean", "emptied", "dealt", "extra_step", "no_return"},
    "20.2": {"skipped_steps", "outside_gap", "off_by_one", "step_end", "equal_split", "wrong_gap", "no_step", "tuple"},
    "30.1": {"top_left", "no_self", "sees_future"},
    "30.2": {"equal_parts", "no_causal_half", "lost_tokens"},
    "40.1": {
        "decode_missing",
        "over_budget",
        "budget_left",
        "not_cut",
        "one_left",
        "answer_left_out",
        "one_prompt",
        "one_token",
        "not_the_request",
    },
    "40.2": {"decodes_free", "median_slo", "one_too_far", "stopped_early", "rounded_down", "no_room", "no_size"},
    "50.1": {"rope_restart", "history_lost", "sampled_partial", "row_off_by_one"},
    "50.2": {"decode_equals_own_v", "top_left", "heads_interleaved"},
    "60.1": {"block_ids_skipped", "chunk_relative", "div_mod"},
    "60.2": {"multi_block_chunk", "over_allocated"},
    "60.3": {"refcount"},
    "90.1": {"either", "mean_gap", "one_token"},
    "90.2": {"dominated_kept", "corners_alone", "tie_kept"},
    "95.1": {"one_chunk", "history_counted", "empty_batch"},
    "95.2": {"last_block_lost", "block_too_many", "mean_of_shares"},
    "95.3": {"neighbours_only", "listed_again"},
}


@pytest.mark.parametrize("id, key, fn", WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_answer_gets_its_key(id, key, fn):
    result = lab.check(id, fn)
    assert (result.ok, result.key) == (False, key), result.message
    cause = find(id, Exercise).causes.get(key) or shared.CAUSES[key].split("{")[0].split(":")[0]
    assert f"Likely cause:  {cause}" in result.message
    assert result.first_difference and result.first_difference in result.message
    assert "Smallest input found" in result.message
    ugly = re.search(r"object at 0x|(?<!\S)1 (tokens|chunks|weights|bytes|calls|numbers|keys|times)\b", result.message)
    ugly = ugly if id[:2] in ("10", "30") else None  # "0 of 1 tokens" in 40 is right
    assert not ugly, result.message


def test_every_promised_key_is_tried():
    tried = {}
    for id, key, _ in WRONG:
        tried.setdefault(id, set()).add(key)
    for id, keys in TABLE.items():
        assert keys <= tried[id], id
    for id, entry in exercises().items():
        if isinstance(entry, Exercise):
            assert set(entry.causes) == tried[id] - (set(shared.CAUSES) - set(entry.causes)), (
                f"{id}: every cause needs a wrong answer that gets it"
            )


@pytest.mark.parametrize("id", [i for i, e in exercises().items() if not isinstance(e, Exercise)])
def test_a_hidden_bug_does_not_tell_its_name(id):
    """The engine writes a policy's name into the run, and figures show it."""
    fn = lab.broken(id)
    assert fn.__name__ == fn.__qualname__ == "a classmate's" and not fn.__doc__


def test_a_type_that_is_wrong_is_decoded():
    halves = lab.check(
        "30.2", lambda prompt, chunk: [2 * n / 2 for n in find("30.2", Exercise).reference(prompt, chunk)]
    )
    assert "chunk 0: you have 1.0, counted 1" in halves.message
    said = {
        "3 dimensions [1, 1, 1], expected 2": lambda start, length: torch.ones(1, length, start + length),
        "1 dimension [1], expected 2": lambda start, length: torch.ones(length),
        "with other values than True and False": lambda start, length: 2 * torch.ones(length, start + length),
        "got 'mask', expected an array of True and False": lambda start, length: "mask",
    }
    for words, fn in said.items():
        assert words in lab.check("30.1", fn).message


def test_an_error_shows_the_input_as_a_table():
    result = lab.check("20.2", lambda run, request, gap: max([]))
    assert result.key == "no_step" and "step 1  0.25     to 0.5   A[3:4]" in result.message
    result = lab.check("40.1", lambda running, waiting, budget, chunk_size: 1 / 0)
    assert result.key == "raised" and "chunk_size" in result.message and "RequestView(" not in result.message


def test_the_bound_of_20_1_is_the_longest_answer_where_that_is_more():
    assert (
        "3 tokens on 2 slots, 3 of them in one answer, need at least 3 steps"
        in lab.check("20.1", lambda lens, slots: -(-sum(lens) // slots)).message
    )


def test_the_smallest_queue_holds_nobody_thrown_out():
    assert "thrown out" not in lab.check("40.1", lambda *state: []).message


@pytest.mark.parametrize("id", [i for i, e in exercises().items() if isinstance(e, Exercise)])
def test_reference_passes(id):
    result = lab.check(id, find(id, Exercise).reference)
    assert result.ok and result.key == "passed", result.message
