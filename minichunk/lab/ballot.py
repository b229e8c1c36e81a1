"""Notebook 95: the learner votes on twelve claims, then sees each one's evidence, and at last the others in a table.

A vote is a prediction with four options (predictions.py): the first one counts, it is kept in my/predictions.jsonl, and
lab.score() counts it beside chance. A claim's evidence shows once its vote is locked or skipped.
"""

from __future__ import annotations

import html
import re
from collections import Counter

from minichunk import claims
from minichunk.lab.predictions import Prediction, Reveal
from minichunk.lab.widgets import Panel

# In the notebook's order. Their verdicts are mixed about as in all 66: a test holds them to that.
WORKED = (22, 24, 32, 48, 46, 47, 34, 61, 5, 15, 16, 11)
OPTIONS = {
    "T": "holds",
    "C": "holds under conditions",
    "M": "misleading or wrong",
    "W": "misleading or wrong",
    "U": "cannot be told",
}
CHOICES = tuple(dict.fromkeys(OPTIONS.values()))
SLOW = {"capacity_gain"}  # a minute: the tests compute it again


class Vote(Prediction):
    """The vote on one claim."""

    def __init__(self, claim: int, ballot: Ballot):
        self.claim, self.ballot = claim, ballot
        self.heading = f"Claim {claim} ({WORKED.index(claim) + 1} of {len(WORKED)})"
        super().__init__(f"95-{claim}", claims.find(claim)["claim"], "", CHOICES)

    def _widgets(self):
        """The question, and everything to click in one row: twelve votes are long enough."""
        import ipywidgets as w

        question, choices, buttons = super()._widgets()
        return [question, w.HBox([*choices.children, *buttons.children], layout=w.Layout(flex_flow="row wrap"))]

    def _settle(self) -> None:
        super()._settle()
        self.ballot.refresh()


class Ballot(Panel):
    """Twelve votes. state: {claim: the option that was locked, or None}."""

    def __init__(self):
        self.votes = {claim: Vote(claim, self) for claim in WORKED}
        super().__init__()

    @property
    def state(self) -> dict[int, str | None]:
        return {claim: vote.guess for claim, vote in self.votes.items()}

    def vote(self, claim: int, option: str) -> None:
        """What a click on the option and on Lock does. KeyError for a claim that is not among the twelve."""
        if claim not in self.votes:
            raise KeyError(f"claim {claim!r} is not among the twelve: {', '.join(map(str, self.votes))}")
        self.votes[claim].lock(option)

    def _status(self) -> str:
        done = sum(vote.state != "open" for vote in self.votes.values())
        return f"{done} of {len(self.votes)} claims voted on or skipped."

    def __str__(self) -> str:
        lines = [f"{claim:>3}  {vote.question}\n     {vote._status()}" for claim, vote in self.votes.items()]
        options = ", ".join(f'"{choice}"' for choice in CHOICES)
        return "\n".join([*lines, self._status(), f'Where no buttons show: lab.lock("95-22", one of {options})'])

    def _widgets(self):
        return [vote.show() for vote in self.votes.values()]

    def _redraw(self) -> None:
        for vote in self.votes.values():
            vote.refresh()


def vote() -> Ballot:
    """The twelve claims, to vote on. Show it as a cell's last line."""
    return Ballot()


def verdict(claim: int) -> Reveal:
    """What became of one of the twelve claims: verdict, reason, figure, and whether its evidence is still the same.

    Computes the evidence now (a capacity, which takes a minute, is left to the tests). Shows after the vote, or lab.skip.
    """
    from minichunk.lab.views_claims import figure

    if claim not in WORKED:
        raise KeyError(f"claim {claim!r} is not among the twelve: {', '.join(map(str, WORKED))}")
    entry = claims.find(claim)
    name = entry["evidence"]
    checked = f"kept in data/claims.json; the tests compute {name} again"
    if name not in SLOW:
        moved = claims.moved(entry["expect"], claims.evidence(claim), entry.get("tolerance", 1e-3))
        checked = f"{name} computed just now: " + ("as expected" if not moved else "; ".join(moved))
    # A reason's first sentence decides: it stands beside the verdict, and the numbers below it.
    decides, numbers = re.split(r"(?<=\.) (?=[A-Z0-9])", claims.reason(claim), maxsplit=1)
    text = (
        f"Claim {claim}: {entry['claim']}\nVerdict: {claims.VERDICTS[entry['verdict']]}. {decides}\n{numbers}\n"
        f"Sources: {entry['source']} ({checked})."
    )
    return Reveal(f"95-{claim}", OPTIONS[entry["verdict"]], figure(claim), None, None, text)


class OtherClaims:
    """The claims that were not voted on, as folded tables, one a part, below a count of all; print it for the text."""

    def __init__(self):
        self.claims = [c for c in claims.load().values() if c["id"] not in WORKED]

    @property
    def tally(self) -> str:
        """All claims by verdict: "66 claims: 13 true, …"."""
        counts = Counter(c["verdict"] for c in claims.load().values())
        return f"{counts.total()} claims: {', '.join(f'{counts[v]} {name}' for v, name in claims.VERDICTS.items())}."

    def __str__(self) -> str:
        lines = [f"{c['id']:>3} {c['verdict']}  {c['claim']}\n       {claims.reason(c['id'])}" for c in self.claims]
        return "\n".join([self.tally, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        out = [f"<p>{html.escape(self.tally)}</p>"]
        for part in dict.fromkeys(c["part"] for c in self.claims):
            rows = [
                [c["id"], c["claim"], claims.VERDICTS[c["verdict"]], claims.reason(c["id"]), c["source"]]
                for c in self.claims
                if c["part"] == part
            ]
            body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)  # fmt: skip
            head = "".join(f"<th style='text-align:left'>{h}</th>" for h in ("#", "claim", "verdict", "why", "sources"))
            out.append(f"<details><summary>{part}: {len(rows)} more claims</summary><table><tr>{head}</tr>{body}</table></details>")  # fmt: skip
        return "".join(out)


def other_claims() -> OtherClaims:
    """All claims but the twelve, with verdicts and reasons."""
    return OtherClaims()
