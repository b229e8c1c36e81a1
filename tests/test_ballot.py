"""Notebook 95's ballot: votes first, evidence after, the others in a table; and its figures say what was computed."""

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
    votes.vote(22, "it is misleading or wrong")
    assert found.shown and "1,054" in str(found) and "right" in str(found)
    assert votes.state[22] == "it is misleading or wrong" and votes.state[24] is None
    assert "1 of 12 claims" in str(votes)


def test_votes_are_kept_and_scored_beside_chance(no_figures):
    votes = lab.vote()
    votes.vote(22, "it is misleading or wrong")
    lab.lock("95-34", "it holds")
    for claim in (22, 34):
        lab.verdict(claim)
    assert "Choices: 1 of 2 right; guessing would get 0.5 right on average." in lab.score()
    assert lab.vote().state[34] == "it holds", "a second run of the cell finds the votes"
    with pytest.raises(ValueError, match="the first answer counts"):
        votes.vote(22, "it holds")


def test_a_skip_shows_without_a_score(no_figures):
    votes = lab.vote()
    lab.skip("95-24")
    assert lab.verdict(24).shown and "1 of 12" in str(votes) and "Choices" not in lab.score()


def test_a_number_that_moved_is_said(no_figures, monkeypatch):
    lab.vote().vote(22, "it holds")
    assert "computed just now: as expected" in str(lab.verdict(22))
    monkeypatch.setitem(claims.EVIDENCE, "count_tokens", lambda: {"tokens": 1000, "one_chunk_and_decodes": 542, "smallest_usual_budget": 1024})  # fmt: skip
    assert "tokens: was 1054, is 1000" in str(lab.verdict(22))


def test_only_the_twelve_can_be_voted_on():
    with pytest.raises(KeyError, match="not among the twelve"):
        lab.vote().vote(1, "it holds")
    with pytest.raises(KeyError, match="not among the twelve"):
        lab.verdict(1)


def test_every_verdict_is_an_option_of_its_vote():
    assert set(ballot.OPTIONS) == set(claims.VERDICTS) and len(ballot.CHOICES) == 4


def test_the_others_stand_in_the_table():
    table = lab.other_claims()
    ids = {c["id"] for c in table.claims}
    assert ids | set(ballot.WORKED) == set(range(1, 67)) and not ids & set(ballot.WORKED) and len(ids) == 54
    page = table._repr_html_()
    assert all(f"<td style='text-align:left'>{id}</td>" in page for id in ids) and "{" not in str(table)


def test_widgets_are_made_and_redrawn():
    votes = lab.vote()
    assert len(votes.show().children) == 13  # twelve and the status line
    votes.vote(22, "it holds")
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
    words = {claim: views.text(views_claims.figure(claim)) for claim in (11, 22, 24, 32, 48, 55, 61)}
    assert "1,054" in words[22] and "the article's batch: ratio 1.0586, balance 2.30" in words[24]
    assert "C, rows 13…15: largest error 1.0e-07" in words[32] and "A, rows 0…0: largest error 1.9e+00" in words[32]
    assert "blocks of 16: 0.3 % wasted" in words[48] and "A40, 1 GPU: -8.9" in words[55]
    peak = claims.find(61)["expect"]["tokens_s_at_peak"]
    assert f"100 tokens a request: at most {peak / 100:,.1f}" in words[61]
    assert f"simulated, P99 TBT ≤ 100 ms: {claims.find(11)['expect']['gain_100_ms']:.3g}" in words[11]
