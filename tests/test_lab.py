"""The lab's machinery: exercises and their three states, the watchdog, predictions, copies, commands."""

import json
import threading
import time

import pytest
from toyrun import toy_run
from typer.testing import CliRunner

from minichunk import cli, lab
from minichunk.lab import checks, command, controls, copies, exercises, predictions
from minichunk.lab.watchdog import Raised, TooSlow, limited


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    """A learner's folder of its own for every test, and a kernel without a past."""
    monkeypatch.setenv("MINICHUNK_MY", str(tmp_path / "my"))
    for name in ("MINICHUNK_REVEAL", "MINICHUNK_REQUIRE_SOLVED"):
        monkeypatch.delenv(name, raising=False)
    exercises._passed.clear()
    predictions._open.clear()
    predictions._waiting.clear()
    return tmp_path / "my"


# --- exercises -----------------------------------------------------------------------------------------------------
def right(chunks):
    kinds = [start >= prompt for _id, prompt, start, _length in chunks]
    return len(set(kinds)) == 2


def unfinished(chunks):
    raise NotImplementedError("00.1")


def test_import_of_the_lab_needs_neither_plotly_nor_widgets(run_python):
    code = "import sys, minichunk.lab; print([m for m in ('plotly', 'ipywidgets', 'anywidget', 'torch') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_every_public_name_is_there():
    for name in lab.__all__:
        assert getattr(lab, name) is not None
    with pytest.raises(AttributeError, match="no 'excercise'"):
        lab.excercise


def test_passed_goes_on_and_is_kept(my, capsys):
    assert lab.exercise("00.1", right) is right
    assert exercises.code_of(right) == "YOUR"
    assert "00.1 passed" in capsys.readouterr().out
    assert (my / "solved" / "00.1.py").read_text().startswith("def right(chunks):")


def test_not_started_uses_the_reference(my, capsys):
    used = lab.exercise("00.1", unfinished)
    assert used is checks.find("00.1", checks.Exercise).reference and exercises.code_of(used) == "REFERENCE"
    said = capsys.readouterr().out
    assert "not started" in said and "figures" not in said
    assert not (my / "solved").exists()


def test_the_way_out_when_stuck_works(capsys):
    """What the message and notebook 00 promise: the bare statement, in the place of the learner's lines."""

    def is_mixed(chunks):
        raise NotImplementedError

    assert exercises.code_of(lab.exercise("00.1", is_mixed)) == "REFERENCE"


def test_running_the_check_again_does_not_pass_with_the_reference(my, capsys):
    used = lab.exercise("00.1", lab.exercise("00.1", unfinished))
    assert exercises.code_of(used) == "REFERENCE" and not (my / "solved").exists()
    assert capsys.readouterr().out.count("not started") == 2


def test_not_started_is_an_error_where_solutions_are_required(monkeypatch):
    monkeypatch.setenv("MINICHUNK_REQUIRE_SOLVED", "1")
    with pytest.raises(lab.WrongAnswer, match="not started"):
        lab.exercise("00.1", unfinished)


def test_wrong_stops_the_cell_with_the_explanation_alone():
    """As IPython shows it: no traceback, and the cell has failed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    with capture_output() as shown:
        outcome = shell.run_cell('from minichunk import lab\nlab.exercise("00.1", lambda chunks: True)')
    assert isinstance(outcome.error_in_exec, lab.WrongAnswer) and not outcome.success
    said = shown.stdout + shown.stderr
    assert "00.1 is_mixed is not right yet" in said and "Likely cause" in said
    assert "Stuck? With `raise NotImplementedError` in the place of your lines" in said
    assert "Traceback" not in said and "File " not in said


def test_wrong_after_passed_is_not_yours_any_more():
    lab.exercise("00.1", right)
    with pytest.raises(lab.WrongAnswer):
        lab.exercise("00.1", lambda chunks: True)
    assert exercises.code_of(right) is None


def test_an_error_in_the_learners_code_names_its_line():
    def is_mixed(chunks):
        return chunks[0].stat >= 0

    result = lab.check("00.1", is_mixed)
    assert (result.ok, result.key) == (False, "raised")
    assert "AttributeError" in result.message and "return chunks[0].stat >= 0" in result.message
    assert "Piece(id='A'" in result.message


def test_solved_loads_what_was_kept_and_checks_it_again(my, capsys):
    (my / "solved").mkdir(parents=True)
    kept = my / "solved" / "00.1.py"
    kept.write_text("def is_mixed(chunks):\n    return len({c.start >= c.num_prompt_tokens for c in chunks}) == 2\n")
    assert exercises.code_of(lab.solved("00.1")) == "YOUR"
    kept.write_text("def is_mixed(chunks):\n    return True\n")
    assert exercises.code_of(lab.solved("00.1")) == "REFERENCE"
    assert "does not pass any more" in capsys.readouterr().out


def test_an_endless_loop_is_a_result_and_ends():
    from wrong.w40 import budget_never_falls

    before = threading.active_count()
    result = exercises.check("40.1", budget_never_falls, seconds=0.3)
    assert (result.ok, result.key) == (False, "too_slow")
    assert "the budget never fell" in result.message and "still runs" not in result.message
    assert threading.active_count() == before


def test_watchdog_stops_a_loop_that_swallows_exceptions_and_reports_one_it_cannot_stop():
    def stubborn():
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    with pytest.raises(TooSlow) as slow:
        limited(stubborn, 0.2)()
    assert slow.value.args[3] is True
    with pytest.raises(TooSlow) as slow:
        limited(lambda: time.sleep(3), 0.1)()
    assert slow.value.args[3] is False


def test_watchdog_hands_on_answers_and_errors_and_guards_lists():
    mine = [1, 2]
    assert limited(lambda xs: xs.pop())(mine) == 2 and mine == [1, 2]
    with pytest.raises(Raised) as raised:
        limited(lambda: 1 / 0)()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(NotImplementedError):
        limited(unfinished)([])
    with pytest.raises(Raised):
        limited(lambda: exit())()


@pytest.mark.parametrize(
    "answer",
    [None, 3, "x", [], [(1, 2)], (), {}, [None], [("A", "B")], float("nan"), (None, None), (1, {"A": None}), [([], 1)]],
)
def test_any_answer_of_any_type_is_a_result(answer):
    """A check explains nonsense; it does not break on it."""
    for id, entry in checks.exercises().items():
        if isinstance(entry, checks.Exercise):
            result = lab.check(id, lambda *args: answer)
            assert not result.ok and result.message, (id, answer)


@pytest.mark.parametrize(
    "name, make",
    {
        "tensor": lambda t: t.tensor([1, 2, 3]),
        "one": lambda t: t.tensor([1]),
        "scalar": lambda t: t.tensor(2.0),
        "bools": lambda t: t.ones(2, 2, dtype=t.bool),
        "list of tensors": lambda t: [t.arange(5), t.arange(5)],
        "pair with a tensor": lambda t: (t.tensor([1, 2]), 3),
        "pair of tensors": lambda t: (t.zeros(2), t.zeros(2)),
        "five tensors": lambda t: [t.arange(3)] * 5,
        "nested": lambda t: [[t.arange(3), 1], [(t.zeros(2), t.zeros(2))]],
        "dict": lambda t: ("A", {"A": t.arange(3)}),
        "array": lambda t: t.arange(4).numpy(),
        "pair with an array": lambda t: (3, t.arange(4).numpy()),
        "words": lambda t: t.arange(2).numpy().astype(str),
        "complex": lambda t: (1j, 2j),
        "object": lambda t: object(),
        "function": lambda t: print,
        "deep": lambda t: [(object(), [None, t.zeros(3)])],
        "huge": lambda t: (10**400, 10**400),
    }.items(),
)  # fmt: skip
def test_an_answer_with_arrays_or_objects_in_it_is_a_result(name, make):
    import torch

    for id, entry in checks.exercises().items():
        if isinstance(entry, checks.Exercise):
            result = lab.check(id, lambda *args: make(torch))
            assert not result.ok and result.message and "Your answer" in result.message, (id, result)


def answering_exercises():
    return [i for i, e in checks.exercises().items() if isinstance(e, checks.Exercise) and not e.in_place]


@pytest.mark.parametrize("id", [id for id in answering_exercises() if id != "95.1"])  # None has its own cause there
def test_none_and_a_generator_are_named(id):
    entry = checks.find(id, checks.Exercise)
    result = lab.check(id, lambda *args: None)
    assert result.key == "no_return" and "eturn" in result.message.split("Likely cause")[1]
    result = lab.check(id, lambda *args: (x for x in [entry.reference(*args)]))
    assert result.key == "generator" and "got a generator" in result.message and "square brackets" in result.message


def spoil(value):
    """Changes the first list, array or record that it finds; True if it found one."""
    if isinstance(value, list):
        if value and any(spoil(v) for v in value):
            return True
        return value.append(value[-1] if value else 0) is None
    if checks.shared.is_array(value):
        value += 1
        return True
    return hasattr(value, "steps") and value.steps.pop() is not None


@pytest.mark.parametrize("id", answering_exercises())
def test_every_check_notices_that_its_inputs_were_changed(id):
    """Right answers of a function that spoils its arguments afterwards, each one that can be spoiled."""
    reference = checks.find(id, checks.Exercise).reference
    spoiled = 0
    for n in range(4):

        def learner(*args):
            nonlocal spoiled
            answer = reference(*args)
            spoiled_now = len(args) > n and spoil(args[n])
            spoiled += spoiled_now
            return answer

        before = spoiled
        result = lab.check(id, learner)
        if spoiled == before:
            assert result.ok, result.message
        else:
            assert not result.ok and result.key in ("changed_inputs", "emptied", "changed_lists"), (n, result)
            assert "opy" in result.message.split("Likely cause")[1]
    assert lab.check(id, reference).ok, "the check's own data is whole"
    assert spoiled or id in ("10.2", "30.1", "30.2"), "numbers alone cannot be changed"


def test_changed_inputs_are_named_with_the_copy_that_helps():
    def generate_cached(model, ids, n):
        start = len(ids)
        cache, new = None, list(ids)
        for _ in range(n):
            import torch

            result = model(torch.tensor([new]), cache=cache)
            cache, new = result.cache, [int(result.logits[0, -1].argmax())]
            ids.append(new[0])
        return ids[start:]

    result = lab.check("10.1", generate_cached)
    assert (
        result.key == "changed_inputs"
        and "you changed the list ids" in result.message
        and "list(ids)" in result.message
    )
    assert lab.check("50.2", lambda q, ks, vs, cu_q: q.mul_(2) * 0).key != "passed"


def test_a_check_that_breaks_by_itself_is_no_wrong_answer(monkeypatch):
    """Only an answer that a check cannot read is a result; the check's own fault is shown as what it is."""
    import dataclasses

    entry = dataclasses.replace(checks.find("00.1", checks.Exercise), check=lambda fn: 1 / 0)
    monkeypatch.setattr(exercises, "find", lambda id, kind: entry)
    with pytest.raises(ZeroDivisionError):
        lab.check("00.1", right)


@pytest.mark.parametrize("nothing", [None, 3, "is_mixed"])
def test_no_function_is_said(nothing):
    with pytest.raises(lab.WrongAnswer, match="00.1 checks a function, and got .*Run the cell"):
        lab.exercise("00.1", nothing)


def test_a_callable_without_a_name_is_checked_like_a_function(capsys):
    import functools

    assert lab.check("00.1", functools.partial(right)).ok
    assert "ZeroDivisionError" in lab.check("00.1", functools.partial(lambda zero, chunks: 1 / zero, 0)).message


@pytest.mark.parametrize(
    "id, shown",
    [("10.1", "ids [67], n = 1\n"), ("10.2", "N = 5, W = 6, b = 4\n"), ("30.1", "start 0, length 1\n"), ("30.2", "prompt 1, chunk 1\n")],
)  # fmt: skip
def test_an_error_shows_the_arguments_by_name(id, shown):
    assert f"Smallest input found:  {shown}" in lab.check(id, lambda *args: 1 / 0).message


def test_values_in_words():
    import numpy as np
    import torch

    from minichunk.lab.checks import shared

    words = {shared.kind(v): v for v in (None, 3, [1, 2], torch.zeros(2, 3), torch.zeros(1), np.zeros(4))}
    assert list(words) == ["None", "3", "a list of 2", "a tensor of 6 numbers", "a tensor of shape [1]", "an array of 4 numbers"]  # fmt: skip
    said = "entry 1 is a tensor of 512 numbers; each must be one number"
    assert shared.odd_entry([torch.tensor(1), torch.zeros(512)]) == said and shared.odd_entry([1, np.int64(3)]) == ""
    assert [shared.number(v) for v in (1, 2.5, np.int32(3), torch.tensor(4), True, torch.tensor([4]), torch.tensor(True), None, "1", 1j)] == [True] * 4 + [False] * 6  # fmt: skip
    assert (shared.plural(1, "token"), shared.plural(0, "token")) == ("1 token", "0 tokens")


def test_the_scheduler_check_notices_what_the_small_queues_do_not():
    """A plan that keeps every rule on generated queues but fails in the engine's Scheduler is still refused."""
    reference = checks.find("40.1", checks.Exercise).reference

    def stops_after_a_while(running, waiting, budget, chunk_size, calls=[0]):
        calls[0] += 1
        return reference(running, waiting, budget, chunk_size) if calls[0] <= 305 else []

    result = lab.check("40.1", stops_after_a_while)
    assert not result.ok and "refused a plan" in result.message


def test_which_bug_shows_its_symptom():
    """40.3: budget stays unused exactly by the number of decodes, and only while a prompt has tokens left."""
    from minichunk.blocks import BlockPool
    from minichunk.request import Request, SamplingParams
    from minichunk.scheduler import Scheduler

    scheduler = Scheduler(BlockPool(64, 4), lab.broken("40.3"), 16, 16, 8, 4)
    for n, prompt in enumerate([2, 3, 100]):
        scheduler.add(Request(n, list(range(prompt)), prompt, SamplingParams(max_tokens=50), arrival=float(n)))
    unused = []
    for _ in range(8):
        plan = scheduler.plan()
        scheduler.commit(plan.chunks)
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.token_ids.append(1)
        decodes = sum(c.is_decode for c in plan.chunks)
        if any(c.id == 2 and not c.is_last for c in plan.chunks):
            unused.append((16 - sum(c.length for c in plan.chunks), decodes))
    assert (2, 2) in unused and all(left == decodes for left, decodes in unused)


# --- predictions ---------------------------------------------------------------------------------------------------
def stored(my):
    return [json.loads(line) for line in (my / "predictions.jsonl").read_text().splitlines()]


def test_reveal_waits_for_the_lock(my):
    asked = lab.predict("00a", "How many?", "steps")
    shown = lab.reveal("00a", 8)
    assert not shown.shown and "8" not in str(shown).replace("00a", "")
    assert lab.lock("00a", 16) is asked
    assert shown.shown and str(shown).splitlines() == ["8 steps", "You said: 16 steps, a factor of 2.0 off."]
    assert [(e["event"], e.get("guess"), e.get("truth"), e.get("factor")) for e in stored(my)] == [
        ("lock", 16.0, None, None),
        ("truth", None, 8.0, 2.0),
    ]


def test_the_first_lock_counts_across_kernels(my):
    lab.predict("00a", "How many?", "steps").lock(9)
    again = lab.predict("00a", "How many?", "steps")
    assert (again.state, again.guess) == ("locked", 9.0)
    with pytest.raises(ValueError, match="first answer counts"):
        again.lock(8)


def test_after_seeing_is_kept_and_never_scored(my):
    asked = lab.predict("00a", "How many?", "steps")
    shown = lab.reveal("00a", 8)
    lab.skip("00a")
    assert shown.shown and shown.factor is None
    asked.lock(8)
    assert asked.state == "late" and shown.factor is None and "not scored" in str(shown)
    assert [e["event"] for e in stored(my)] == ["skip", "truth", "late"]
    assert "after seeing" in lab.score() and "factor" not in lab.score()


def test_ci_shows_everything_and_stores_nothing(my, monkeypatch):
    monkeypatch.setenv("MINICHUNK_REVEAL", "1")
    lab.predict("00a", "How many?", "steps")
    assert "8 steps" in str(lab.reveal("00a", 8)) and not my.exists()


@pytest.mark.parametrize("guess, wanted", [(8, 1.0), (16, 2.0), (4, 2.0), (1, 8.0)])
def test_factor_is_symmetric(guess, wanted):
    assert predictions.factor(guess, 8) == wanted


def test_inside_p5_to_p95_of_a_timing_is_exact():
    lab.predict("40d", "How long?", "ms").lock(98)
    shown = lab.reveal("40d", list(range(50, 151)))
    assert (shown.truth, shown.low, shown.high, shown.factor) == (100, 55, 145, 1.0)
    lab.predict("40e", "How long?", "ms").lock(50)
    assert lab.reveal("40e", list(range(50, 151))).factor == 2.0


def test_score_shows_choices_beside_guessing_and_a_trend_only_from_ten_on():
    for n in range(9):
        lab.predict(f"9{n}", "?", "x").lock(2)
        lab.reveal(f"9{n}", 1)
    lab.predict("c1", "?", options=["a", "b"]).lock("a")
    lab.reveal("c1", "a")
    lab.predict("c2", "?", options=["a", "b", "c", "d"]).lock("d")
    lab.reveal("c2", "a")
    assert "median of 9) a factor of 2.0 off" in lab.score()
    assert "Choices: 1 of 2 right; guessing would get 0.8 right on average." in lab.score()
    assert "half" not in lab.score()
    lab.predict("99", "?", "x").lock(1)
    lab.reveal("99", 1)
    assert "First half a factor of 2.0 off, second half a factor of 2.0 off." in lab.score()


@pytest.mark.parametrize("guess", [0, -3, float("nan"), float("inf"), "abc"])
def test_a_guess_that_is_none_is_refused(my, guess):
    asked = lab.predict("00a", "How many?", "steps")
    with pytest.raises(ValueError):
        asked.lock(guess)
    assert asked.state == "open" and not my.exists()


def test_widgets_follow_the_state_and_show_errors():
    asked = lab.predict("00a", "How many?", "steps")
    shown = lab.reveal("00a", 8, toy_figure())
    asked.show(), shown.show()
    field, lock = asked._field, asked._lock
    lock.click()
    assert "first give an answer" in asked._line.value and 'role="alert"' in asked._line.value
    assert shown._output.outputs == ()
    field.value = "7,5"
    lock.click()
    assert asked.guess == 7.5 and lock.disabled and "Locked: 7.5 steps" in asked._line.value
    assert "application/vnd.plotly.v1+json" in shown._output.outputs[0]["data"]
    assert "8 steps" in shown._line.value


@pytest.mark.parametrize(
    "text, wanted",
    {"7,5": 7.5, "7.5": 7.5, " 1164 ": 1164, "1.164": 1.164, "0,164": 0.164, "1,16": 1.16, "1,1645": 1.1645, "1,164,000": 1164000, "1,164.5": 1164.5, "1e3": 1000}.items(),
)  # fmt: skip
def test_numbers_as_people_write_them(text, wanted):
    for lock_it in (lambda asked: lab.lock(asked.id, text), typed(text)):
        asked = lab.predict(f"00{len(predictions._open)}", "How many?", "steps")
        lock_it(asked)
        assert (asked.state, asked.guess) == ("locked", wanted)


def typed(text):
    def lock_it(asked):
        asked.show()
        asked._field.value = text
        asked._lock.click()

    return lock_it


def test_a_number_that_can_be_read_in_two_ways_is_refused(my):
    asked = lab.predict("00a", "How many?", "tokens")
    said = "1,164 can be read in two ways: write 1164 or 1.164"
    with pytest.raises(ValueError, match=said):
        lab.lock("00a", "1,164")
    typed("1,164")(asked)
    assert said in asked._line.value and asked.state == "open" and not my.exists()
    for text in ("1,2,3", "1.164,5", "1 164", "12,34,567", ",", "ten"):
        typed(text)(asked)
        assert "a number, please" in asked._line.value and asked.state == "open", text
    typed("1164")(asked)
    assert asked.guess == 1164


def test_a_half_typed_number_cannot_be_locked():
    """With continuous_update a key press at a time is sent, and a click on Lock may come before the last one."""
    asked = lab.predict("00a", "How many?", "tokens")
    asked.show()
    assert asked._field.continuous_update is False


def test_a_guess_within_the_repeats_is_not_called_exact():
    lab.predict("40d", "How long?", "ms").lock(98)
    shown = str(lab.reveal("40d", list(range(50, 151))))
    assert (
        "100 ms (the repeats lie from 55 to 145, P5 to P95)" in shown
        and "within the spread of the measurement" in shown
    )
    assert "within the spread of the measurement" in lab.score() and "exact" not in lab.score().splitlines()[1]


def test_choices_are_buttons_that_say_which_is_chosen():
    asked = lab.predict("00b", "Which?", options=["this", "that"])
    asked.show()
    asked._choices[1].click()
    asked._choices[0].click()
    assert [b.description for b in asked._choices] == ["● this", "○ that"] and asked.state == "open"
    asked._lock.click()
    assert asked.guess == "this" and all(b.disabled for b in asked._choices)
    again = lab.predict("00b", "Which?", options=["this", "that"])
    again.show()
    assert [b.description for b in again._choices] == ["● this", "○ that"]


def toy_figure():
    return lab.timeline(toy_run(prompts=(5, 9), outputs=3))


def test_which_bug_says_why():
    asked = lab.which_bug("40.3")
    assert asked.right is None
    with pytest.raises(ValueError, match="no option 'no_such_bug'; there are .*whole_only"):
        asked.choose("no_such_bug")
    asked.choose("whole_only")
    assert (
        asked.right is False and "Look for the long prompt" in str(asked) and "charges every decode twice" in str(asked)
    )
    assert "Choices: 0 of 1 right; guessing would get 0.2 right on average." in lab.score()
    assert lab.which_bug("40.3").right is False


def test_options_lock_by_number_as_they_are_shown():
    asked = lab.predict("00b", "Which?", options=["this", "that"])
    assert "1 ○ this" in str(asked) and "2 ○ that" in str(asked) and 'lab.lock("00b", n), n from 1 to 2' in str(asked)
    for guess in (0, 3, True, "neither", None, 1.5):
        with pytest.raises(ValueError, match="by its number or in its words"):
            lab.lock("00b", guess)
    assert lab.lock("00b", 2).guess == "that"
    bug = lab.which_bug("40.3")
    assert lab.lock("40.3", 1 + list(bug.bug.options).index(bug.bug.right)) is bug and bug.right


def test_a_refused_lock_shows_its_sentence_alone():
    """As IPython shows it: no traceback, and the cell has failed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    lab.predict("00c", "How many?", "times")
    lab.predict("00d", "How many?", "times").lock(1)
    shell = InteractiveShell()
    for cell, sentence in {
        'lab.lock("00c", "ten")': 'a number, please: lab.lock("00c", 10)',
        'lab.lock("00d", 2)': "00d is locked already: the first answer counts",
        'lab.lock("77a", 2)': "prediction '77a' was not asked in this kernel yet: run its cell first",
    }.items():
        with capture_output() as shown:
            outcome = shell.run_cell("from minichunk import lab\n" + cell)
        assert isinstance(outcome.error_in_exec, ValueError) and not outcome.success
        assert (shown.stdout + shown.stderr).strip() == sentence


@pytest.mark.parametrize(
    "guess, truth, said",
    [
        (29, 30, ["30 steps", "You said: 29 steps, within 5%."]),
        (30, 30, ["30 steps", "You said: 30 steps, exact."]),
        (4, 5.36976, ["5.37 steps", "You said: 4 steps, a factor of 1.3 off."]),
        (9216, 18432, ["18432 steps", "You said: 9216 steps, a factor of 2.0 off."]),
    ],
)
def test_exact_is_exact_and_reveal_and_score_round_alike(guess, truth, said):
    lab.predict("20a", "How many?", "steps").lock(guess)
    assert str(lab.reveal("20a", truth)).splitlines() == said
    assert f"truth {said[0]}:" in lab.score()


def test_a_choice_is_right_or_no():
    for id, answer in {"00b": "this", "00e": "that"}.items():
        lab.predict(id, "Which?", options=["this", "that"]).lock(answer)
        assert str(lab.reveal(id, "this")).endswith(": right." if answer == "this" else ": no.")


# --- the selector --------------------------------------------------------------------------------------------------
def test_selector_switches_and_runs():
    runs = {b: toy_run(budget=b) for b in (64, 256)}
    selector = lab.budget_selector(runs, lab.step_strip, lambda b: toy_run(budget=b))
    selector.show()
    assert selector.state["budget"] == 64 and selector.state["steps"] == str(len(runs[64].steps))
    selector._slider.value = 256  # what the mouse and the arrow keys do
    assert (
        selector.state["steps"] == str(len(runs[256].steps))
        and f"<b>{len(runs[256].steps)}</b>" in selector._table.value
    )
    first = selector._output.outputs
    selector._field.value = 128
    selector._button.click()
    assert selector.budget == 128 and list(selector.runs) == [64, 128, 256] and selector._slider.value == 128
    assert selector._output.outputs != first
    assert "128" in str(selector).splitlines()[0]


def test_selector_shows_the_error_of_a_run():
    def fails(budget):
        raise RuntimeError("no memory")

    selector = lab.budget_selector({64: toy_run()}, lab.step_strip, fails)
    selector.show()
    selector._button.click()
    assert "no memory" in selector._line.value and not selector._button.disabled and selector.budget == 64


def test_steps_table_says_all_steps():
    run = toy_run(prompts=(5, 9), outputs=3)
    table = controls.steps_table(run)
    assert table._repr_html_().count("<tr>") == 1 + len(run.steps) and str(table).count("\n") == len(run.steps) - 1


# --- copies and commands ---------------------------------------------------------------------------------------------
@pytest.fixture
def course(tmp_path, monkeypatch):
    """A small course beside which my/ comes to lie."""
    notebooks = tmp_path / "course" / "notebooks"
    (notebooks / "source").mkdir(parents=True)
    for name in ("00_start", "40_mixed"):
        (notebooks / f"{name}.ipynb").write_text(json.dumps({"cells": [], "name": name}))
    monkeypatch.delenv("MINICHUNK_MY")
    monkeypatch.chdir(notebooks)
    return notebooks.parent


def test_copies_once_and_never_over_a_learners_work(course):
    assert copies.make_copies() == []
    mine = course / "my" / "40_mixed.ipynb"
    mine.write_text("my work")
    assert copies.make_copies() == [] and mine.read_text() == "my work"
    (course / "notebooks" / "40_mixed.ipynb").write_text("new edition")
    (line,) = copies.make_copies()
    assert "40_mixed.ipynb has changed" in line and "--fresh 40" in line and mine.read_text() == "my work"
    copy, kept = copies.fresh("40")
    assert copy.read_text() == "new edition" and kept.read_text() == "my work"
    assert copies.make_copies() == []
    _, kept_too = copies.fresh("40")
    assert kept_too != kept and kept_too.exists() and kept.exists()


def test_my_lies_beside_notebooks_from_wherever_one_starts(course, monkeypatch):
    from minichunk.lab.places import my_dir

    (course / "my").mkdir()
    for folder in (course, course / "notebooks", course / "my"):
        monkeypatch.chdir(folder)
        assert my_dir() == course / "my"


def test_lab_command_opens_the_copy(course, monkeypatch):
    called = []
    monkeypatch.setattr(command, "run_until_told", lambda args, env: called.append(args) or 0)
    runner = CliRunner()
    assert runner.invoke(cli.app, ["lab", "40", "--port", "9999", "--no-browser"]).exit_code == 0
    assert (
        str(course / "my" / "40_mixed.ipynb") in called[0]
        and "--port=9999" in called[0]
        and "--no-browser" in called[0]
    )
    (course / "my" / "40_mixed.ipynb").write_text("my work")
    fresh = runner.invoke(cli.app, ["lab", "--fresh", "40"])
    assert fresh.exit_code == 0 and "40_mixed.ipynb is new; your old one is 40_mixed.until-" in fresh.output
    wrong = runner.invoke(cli.app, ["lab", "77"])
    assert wrong.exit_code == 1 and "there are 00, 40" in wrong.output and len(called) == 2


def test_progress_command_lists_exercises_and_score(my):
    lab.exercise("00.1", right)
    lab.predict("00a", "?", "steps").lock(4)
    lab.reveal("00a", 8)
    said = CliRunner().invoke(cli.app, ["progress"]).output
    assert "✔ 00.1 is_mixed" in said and "○ 40.1 plan_step" in said and "○ 40.3 which bug?" in said
    assert "Exercises: 1 of" in said and "00a    you 4, truth 8 steps: a factor of 2.0 off" in said


def test_progress_marks_a_wrong_choice(my):
    bug = lab.which_bug("40.3")
    bug.choose("whole_only")
    assert "✘ 40.3 which bug? (answered wrong)" in CliRunner().invoke(cli.app, ["progress"]).output
    (my / "predictions.jsonl").unlink()
    lab.which_bug("40.3").choose(bug.bug.right)
    assert "✔ 40.3 which bug? (answered right)" in CliRunner().invoke(cli.app, ["progress"]).output
    (my / "predictions.jsonl").unlink()
    lab.which_bug("40.3").skip()
    assert "○ 40.3 which bug?\n" in CliRunner().invoke(cli.app, ["progress"]).output


def test_progress_is_by_notebook_and_only_of_notebooks_that_are_there(course):
    said = CliRunner().invoke(cli.app, ["progress"]).output.splitlines()
    ids = [id for id in checks.exercises() if id[:2] in ("00", "40")]
    assert said[0] == f"Exercises: 0 of {len(ids)} done"
    assert [line.split()[1] for line in said if line.startswith("  ○")] == ids and len(ids) < len(checks.exercises())
    assert said.index("00 start") < said.index("40 mixed") < next(n for n, line in enumerate(said) if "40.1" in line)


# --- engines of the classroom -----------------------------------------------------------------------------------------
def test_engine_carries_whose_code_it_runs(capsys):
    plan_step = lab.exercise("40.1", lambda *args: (_ for _ in ()).throw(NotImplementedError()))
    assert "figures say REFERENCE scheduler" in capsys.readouterr().out
    with lab.engine("tiny", policy=plan_step, max_batch_tokens=24, num_blocks=16) as engine:
        engine.generate([[5, 6, 7] * 12])
        assert engine.run.meta["code"] == "REFERENCE" and engine.run.meta["model"] == "tiny"
        assert max(s.num_tokens for s in engine.run.steps) == 24
    with lab.engine("tiny", num_blocks=16) as engine:
        assert "code" not in engine.run.meta and engine.num_blocks == 16
    with pytest.raises(ValueError, match="needs max_batch_tokens"):
        lab.engine("tiny", policy=plan_step)


def test_rush_hour_and_sameness():
    runs = [
        lab.rush_hour(lab.engine("tiny", max_batch_tokens=b, num_blocks=400, max_model_len=2048), max_tokens=4)
        for b in (256, 512)
    ]
    assert lab.same_answers(runs) == "answers identical: yes, 7 token lists compared with the first run's"
    assert len(runs[0].requests) == 7 and runs[0].stalls(0) == 7 * 3
    runs[1].requests[3].output_ids[2] += 1
    assert lab.same_answers(runs) == "answers identical: no, 1 of 7 token lists differ: request 3"


def test_of_all_plans_the_check_accepts_one_and_it_is_the_references():
    """Every assignment of lengths to small generated queues is tried: the rules leave one plan, in any order of pairs."""
    import itertools
    import random

    from minichunk.lab.checks import c40

    rng, tried = random.Random(1), 0
    while tried < 60:
        running, waiting, budget, chunk_size = case = c40.queues(rng, 2)
        requests = [*running, *waiting]
        if not requests:
            continue
        tried += 1
        accepted = []
        for lengths in itertools.product(*(range(r.num_left + 2) for r in requests)):
            plan = [(r, n) for r, n in zip(requests, lengths) if n]
            if c40.problem(*case, plan) is None:
                accepted.append({r.id: n for r, n in plan})
        assert accepted == [{r.id: n for r, n in c40.plan_step(*case)}], c40.draw(*case)


def test_scrubber_opens_at_a_requests_first_chunk():
    run = toy_run(prompts=(50, 9), outputs=3, budget=16)
    last = next(s.index for s in run.steps if any(c[0] == 1 for c in s.chunks))
    assert lab.scrub_at(1, run).state["step"] == last > 0
    two = lab.scrub_at(1, run, run)
    assert all(any(c[0] == 1 for c in frame["chunks"]) for frame in two.run())
    with pytest.raises(ValueError, match="request 9 has no chunk"):
        lab.scrub_at(9, run)


def test_a_refused_plan_ends_the_cell_with_the_refusal_alone():
    def greedy(running, waiting, budget, chunk_size):
        return [(request, request.num_left) for request in [*running, *waiting]]

    with pytest.raises(lab.WrongAnswer, match="PlanRefused: .*budget"):
        lab.rush_hour(lab.engine("tiny", policy=greedy, max_batch_tokens=64, chunk_size=1000, num_blocks=400))


@pytest.mark.parametrize(
    "value, said",
    [
        ([1, 2], "list(x)"),
        ([(1, 2)], "list(x)"),
        ([(1, [2])], "copy.deepcopy(x)"),
        ([[1]], "copy.deepcopy(x)"),
        ({1}, "set(x)"),
    ],
)
def test_the_copy_that_a_learner_is_told_to_make_is_deep_enough(value, said):
    from minichunk.lab.checks.shared import copy_of

    assert copy_of("x", value) == said
