"""The fact check: every claim's evidence is computed again, and the document is what the file gives."""

import importlib.util
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from minichunk import claims
from minichunk.costmodel import flops
from minichunk.scheduler import POLICIES, RequestView

ALL = list(claims.load().values())
# what the course works out in notebook 95: these may not be opinions
WORKED = (5, 11, 15, 16, 22, 24, 32, 34, 46, 47, 48, 61)


@pytest.mark.timeout(900)  # the searches for a capacity take a minute or two on a busy core
@pytest.mark.parametrize("claim", ALL, ids=lambda c: f"{c['id']}-{c['evidence']}")
def test_evidence_is_what_the_verdict_was_written_for(claim):
    found = claims.evidence(claim["id"])
    assert claims.moved(claim["expect"], found, claim.get("tolerance", 1e-3)) == []


def test_the_file_is_complete():
    assert [c["id"] for c in ALL] == list(range(1, 67))
    for c in ALL:
        wanted = {"id", "part", "claim", "verdict", "kind", "evidence", "reason", "source", "expect"}
        assert wanted <= set(c) <= wanted | {"tolerance"}, c["id"]
        assert c["verdict"] in claims.VERDICTS and c["kind"] in claims.KINDS
        assert c["claim"] and c["source"] and 0 < c.get("tolerance", 1e-3) <= 0.1
    assert {c["evidence"] for c in ALL} == set(claims.EVIDENCE), "no function without a claim, no claim without one"


@pytest.mark.parametrize("claim", ALL, ids=lambda c: str(c["id"]))
def test_reasons_take_their_numbers_from_the_evidence(claim):
    names = set(re.findall(r"\{(\w+)", claim["reason"]))
    assert names <= set(claim["expect"])
    assert bool(names) == (claim["kind"] != "opinion")
    assert "{" not in claims.reason(claim["id"])
    assert "*" not in claims.reason(claim["id"]) + claim["claim"], "no markup: a widget shows it as it stands"
    if claim["kind"] == "published":
        assert all(name.startswith("published") for name in claim["expect"])
    if claim["kind"] in ("computed", "simulated"):
        assert any(not name.startswith("published") for name in claim["expect"])


def test_the_twelve_are_worked_out():
    assert all(claims.find(n)["kind"] in ("computed", "simulated") for n in WORKED)


def test_a_moved_number_is_found():
    was = {"a": 100.0, "n": 3, "word": "x"}
    assert claims.moved(was, {"a": 100.05, "n": 3, "word": "x"}) == []
    assert claims.moved(was, {"a": 100.2, "n": 3, "word": "x"}) == ["a: was 100.0, is 100.2"]
    assert claims.moved(was, {"a": 100.2, "n": 3, "word": "x"}, tolerance=0.01) == []
    assert claims.moved(was, {"a": 100.0, "n": 4, "word": "y"}) == ["n: was 3, is 4", "word: was 'x', is 'y'"]
    assert claims.moved(was, {"a": 100.0, "n": 3}) == ["word: expected, not computed"]
    assert claims.moved({"a": 1.0}, {"a": True}) == ["a: was 1.0, is True"]


def test_unknown_claim():
    with pytest.raises(KeyError, match="1 to 66"):
        claims.find(67)


def test_document_is_what_the_file_gives(root):
    spec = importlib.util.spec_from_file_location("fact_check", root / "tools" / "fact_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (root / "docs" / "fact-check.md").read_text(encoding="utf-8")
    assert text == module.document(), "stale: run python tools/fact_check.py"
    assert len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) == 66


# --- some of it again, another way ---------------------------------------------------------------------------------------
def test_qkvpacked_against_torch():
    """The call's own definition: causal attention of each sequence's new rows over themselves."""
    rng, rows = np.random.default_rng(0), claims.qkvpacked_rows()
    for name, start, length in (("A", 7, 1), ("B", 9, 12), ("C", 0, 3)):
        q, k, v = torch.from_numpy(rng.standard_normal((3, 1, start + length, 64)))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        truth = sdpa(q, k, v, is_causal=True)[0, start:]
        packed = sdpa(q[:, start:], k[:, start:], v[:, start:], is_causal=True)[0]
        errors = (packed - truth).norm(dim=1) / truth.norm(dim=1)
        assert [r[1] for r in rows if r[0] == name] == pytest.approx(errors.tolist(), abs=1e-9)


def test_ratio_lies_between_one_and_two_and_knows_no_bytes():
    assert claims.density_ratio(*claims.pair_counts(claims.BATCH)) == pytest.approx(1 + 30 * 1024 / (2 * 512**2))
    ratios, balances = zip(*claims.random_batches())
    assert len(ratios) == 500 and all(1 <= r <= 2 for r in ratios)
    assert min(balances) < 0.1 and max(balances) > 3
    # the same ratio with another model, whose balance is another
    assert claims.balance([(1024, 1)] * 64, model="llama-3-8b") > 1.5 * claims.balance([(1024, 1)] * 64)


def test_balance_is_time_over_time():
    cost = claims.CostModel(claims.SEVEN, claims.A100)
    compute, memory, _ = (sum(s) for s in zip(*(cost.sides(op) for op in claims.operators(claims.SEVEN, claims.BATCH))))
    assert claims.balance(claims.BATCH) == pytest.approx(compute / memory)


def test_chunk_shares_add_up():
    each = [flops(claims.SEVEN, [chunk])["linear"] for chunk in claims.split(4096, 512)]
    assert sum(each) == flops(claims.SEVEN, [(0, 4096)])["linear"]
    # attention of chunk k of n: its pairs over all pairs, n² / 2 and a little
    expect = claims.find(15)["expect"]
    assert expect["attention_first"] == pytest.approx(1 / 64, rel=0.01)
    assert expect["attention_last"] == pytest.approx(15 / 64, rel=0.01)


def test_pcie_from_the_lane():
    assert claims.pcie_bandwidth("4.0", 1) == pytest.approx(1.969e9, rel=1e-3)  # a lane, as PCI-SIG rounds it
    assert claims.pcie_bandwidth("5.0") == 2 * claims.pcie_bandwidth("4.0")


def test_least_length_for_three_percent():
    for size, name in ((16, "length_for_3_percent_b16"), (256, "length_for_3_percent_b256")):
        length, waste = claims.find(48)["expect"][name], (size - 1) / 2
        assert waste / (length + waste) <= 0.03 < waste / (length - 1 + waste)


def test_overlap_bounds_both_sides_of_the_85_60_question():
    for chunk, *shares in claims.both_sides():
        serial, overlapped = shares[:2], shares[2:]
        assert all(s <= o + 1e-12 for s, o in zip(serial, overlapped)), chunk
        assert math.isclose(max(overlapped), 1.0), "perfect overlap: one side is full"


def test_a_plan_of_the_leftover_policy_leaves_decodes_out():
    decodes = [RequestView(n, 11, 10, 5, float(n)) for n in range(4)]
    prompt = RequestView("P", 100, 0, 100, 9.0)
    plan = POLICIES["leftover"].plan_step([*decodes, prompt], [], 16, None)
    assert [r.id for r, _ in plan] == ["P"]


def test_tally():
    counts = Counter(c["verdict"] for c in ALL[:65])
    assert claims.find(66)["expect"]["wrong"] == counts["W"]
