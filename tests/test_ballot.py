"""Notebook 95's ballot: votes first, evidence after, the others in a table; and its figures say what was computed."""

import re
from collections import Counter

import pytest

from minichunk import claims, lab
from minichunk.lab import ballot, predictions, views, views_claims


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    monkeypatch.setenv("MINICHUNK_MY", str(tmp_path / "my"))
    monkeypatch.delenv("MINICHUNK_REVEAL", raising=False)
    predictions._open.clear()
    predictions._waiting.clear()


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(views_claims, "figure", lambda claim, theme="light": None)


def test_evidence_waits_for_the_vote(no_figures):
    votes = lab.vote()
    found = lab.verdict(22)
    assert not found.shown and "1,054" not in str(found)
    votes.vote(22, "misleading or wrong")
    assert found.shown and "1,054" in str(found) and "right" in str(found)
    assert votes.state[22] == "misleading or wrong" and votes.state[24] is None
    assert "1 of 12 claims" in str(votes)


def test_votes_are_kept_and_scored_beside_chance(no_figures):
    votes = lab.vote()
    votes.vote(22, "misleading or wrong")
    lab.lock("95-34", "holds")
    for claim in (22, 34):
        lab.verdict(claim)
    assert "Choices: 1 of 2 right; guessing would get 0.5 right on average." in lab.score()
    assert lab.vote().state[34] == "holds", "a second run of the cell finds the votes"
    with pytest.raises(ValueError, match="the first answer counts"):
        votes.vote(22, "holds")


def test_a_skip_shows_without_a_score(no_figures):
    votes = lab.vote()
    lab.skip("95-24")
    assert lab.verdict(24).shown and "1 of 12" in str(votes) and "Choices" not in lab.score()


def test_a_number_that_moved_is_said(no_figures, monkeypatch):
    lab.vote().vote(22, "holds")
    assert "computed just now: as expected" in str(lab.verdict(22))
    monkeypatch.setitem(claims.EVIDENCE, "count_tokens", lambda: {"tokens": 1000, "one_chunk_and_decodes": 542, "smallest_usual_budget": 1024})  # fmt: skip
    assert "tokens: was 1054, is 1000" in str(lab.verdict(22))


def test_the_deciding_sentence_stands_beside_the_verdict(no_figures):
    votes = lab.vote()
    for claim in ballot.WORKED:
        votes.vote(claim, "holds")
        verdict, numbers = str(lab.verdict(claim)).splitlines()[3:5]
        assert verdict.startswith("Verdict: ") and len(verdict.split()) <= 40, claim
        assert f"{verdict.split('. ', 1)[1]} {numbers}" == claims.reason(claim)
    assert "Verdict: unsupported. No model, load or promise is named, and the gain hangs on the promise.\n" in str(
        lab.verdict(11)
    )


def test_only_the_twelve_can_be_voted_on():
    with pytest.raises(KeyError, match="not among the twelve"):
        lab.vote().vote(1, "holds")
    with pytest.raises(KeyError, match="not among the twelve"):
        lab.verdict(1)


def test_every_verdict_is_an_option_of_its_vote():
    assert set(ballot.OPTIONS) == set(claims.VERDICTS) and len(ballot.CHOICES) == 4


def test_the_twelve_are_mixed_like_all():
    """Each option is right as often among the twelve as among the 66, to within one: no option wins by itself."""
    right = lambda found: Counter(ballot.OPTIONS[c["verdict"]] for c in found)  # noqa: E731
    twelve, everything = right(claims.find(n) for n in ballot.WORKED), right(claims.load().values())
    assert all(abs(twelve[choice] - 12 * everything[choice] / 66) <= 1 for choice in ballot.CHOICES)
    assert all(twelve[choice] >= 2 for choice in ballot.CHOICES)


@pytest.mark.parametrize("claim", ballot.WORKED)
def test_a_vote_can_be_read_alone(claim):
    """Before the vote nothing else is seen: no claim may lean on one that stands before it in the article."""
    said = claims.find(claim)["claim"]
    assert not re.match(r"(They|It|This|That|Its|And) ", said) and "such a" not in said and ", this " not in said


def test_the_others_stand_in_the_table():
    table = lab.other_claims()
    ids = {c["id"] for c in table.claims}
    assert ids | set(ballot.WORKED) == set(range(1, 67)) and not ids & set(ballot.WORKED) and len(ids) == 54
    page = table._repr_html_()
    tally = "66 claims: 13 true, 12 true under conditions, 12 misleading, 17 wrong, 12 unsupported."
    assert tally in page and str(table).startswith(tally)
    assert all(f"<td style='text-align:left'>{id}</td>" in page for id in ids) and "{" not in str(table)


def test_widgets_are_made_and_redrawn():
    votes = lab.vote()
    assert len(votes.show().children) == 13  # twelve and the status line
    question, row, _ = votes.show().children[0].children
    assert "Claim 22 (1 of 12)" in question.value and (type(row).__name__, row.layout.flex_flow) == ("HBox", "row wrap")
    assert [b.description for b in row.children] == [*(f"○ {choice}" for choice in ballot.CHOICES), "Lock", "Skip"]
    row.children[0].click()
    row.children[4].click()
    assert votes.state[22] == "holds" and row.children[0].description == "● holds" and row.children[0].disabled
    assert "1 of 12" in votes._line.value
    found = lab.verdict(22)
    found.show()
    assert found._output.outputs


@pytest.mark.parametrize("claim", ballot.WORKED)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_claim_has_a_figure_with_its_words(claim, theme):
    figure = views_claims.figure(claim, theme)
    assert figure.data and len(views.text(figure).splitlines()) >= 3


def test_figures_show_the_evidence():
    words = {claim: views.text(views_claims.figure(claim)) for claim in (5, 11, 15, 16, 22, 24, 32, 46, 48, 61)}
    assert "1,054" in words[22] and "the article's batch: ratio 1.0586, balance 2.30" in words[24]
    assert "C, rows 13…15: largest error 1.0e-07" in words[32] and "A, rows 0…0: largest error 1.9e+00" in words[32]
    assert "blocks of 16: 0.3 % wasted" in words[48]
    assert "weights, 30 decodes at 1,024: 13.2" in words[5] and "keys and values, 30 decodes at 1,024: 16.1" in words[5]
    assert "all of the step, chunk 1: 11.7" in words[15] and "attention alone, chunk 8: 23.4" in words[15]
    assert "prompts first, simulated: 0.358" in words[16] and "found at their slots: 1,054" in words[46]
    peak = claims.find(61)["expect"]["tokens_s_at_peak"]
    assert f"100 tokens a request: at most {peak / 100:,.1f}" in words[61]
    assert f"simulated, P99 TBT ≤ 100 ms: {claims.find(11)['expect']['gain_100_ms']:.3g}" in words[11]
