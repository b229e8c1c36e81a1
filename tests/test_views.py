"""The figures' data on hand-made runs; blame sums to the gap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toyrun import toy_run

from minichunk.lab import colors, gaps, views
from minichunk.record import RequestRecord, Run, StepRecord


def hand_made() -> Run:
    """A decodes; K's prompt of 30 comes in two chunks; B arrives late. Times are sums of powers of two, so exact.

    step 0 [0, 1/4]      A prompt 4          A's token 0 at 1/4
    step 1 [1/4, 1/2]    A decode            token 1 at 1/2        an ordinary step of decodes: 1/4 s
    step 2 [1/2, 3/2]    A decode, K[0:15]   token 2 at 3/2        gap 1 s: 1/4 decodes, 3/4 K
    step 3 [2, 3]        K[15:30]            K's token 0 at 3      A left out, after a pause of 1/2 s
    step 4 [3, 13/4]     A, K decode         A's token 3 at 13/4   gap 7/4: pause 1/2, K 1, decodes 1/4
    """
    meta = {
        "block_size": 16,
        "num_blocks": 8,
        "max_batch_tokens": 16,
        "source": "LIVE cpu",
        "mode": "eager",
        "threads": 2,
    }
    run = Run(meta={**meta, "policy": "mixed", "code": "YOUR", "noisy": True})
    run.requests = {
        "A": RequestRecord("A", [1] * 4, [1] * 4, 0.0, 0.0, [0.25, 0.5, 1.5, 3.25]),
        "K": RequestRecord("K", [1] * 30, [1] * 2, 0.25, 0.5, [3.0, 3.25]),
        "B": RequestRecord("B", [1] * 5, [], 3.0),
    }
    a, k = ("A", 4, 1, True, True), ("K", 30, 1, True, True)
    run.steps = [
        StepRecord(0, 0.0, 0.25, 16, [("A", 0, 4, True, False)], arrived=["A"], admitted=["A"], grown={"A": [0]}),
        StepRecord(1, 0.25, 0.5, 16, [a], arrived=["K"]),
        StepRecord(
            2, 0.5, 1.5, 16, [("A", 5, 1, True, True), ("K", 0, 15, False, False)], admitted=["K"], grown={"K": [1]}
        ),
        StepRecord(3, 2.0, 3.0, 16, [("K", 15, 15, True, False)], grown={"K": [2]}, arrived=["B"]),
        StepRecord(4, 3.0, 3.25, 16, [("A", 6, 1, True, True), k]),
    ]
    return run


# --- blame -----------------------------------------------------------------------------------------------------------
def test_blame_on_the_hand_made_run():
    run = hand_made()
    assert views.blame(run, "A", 0) == {"decodes": 0.25, "between steps": 0.0}
    assert views.blame(run, "A", 1) == {"decodes": 0.25, "prompt K": 0.75, "between steps": 0.0}
    assert views.blame(run, "A", 2) == {"prompt K": 1.0, "decodes": 0.25, "between steps": 0.5}
    assert [s.index for s in gaps.steps_of_gap(run, "A", 2)] == [3, 4]  # not step 2, which gave the token before


def test_culprit_is_the_chunk_inside_the_gap():
    run = hand_made()
    assert views.culprit(run, "A", 1) == {"request": "K", "step": 2, "start": 0, "length": 15, "seconds": 0.75}
    assert views.culprit(run, "A", 2) == {"request": "K", "step": 3, "start": 15, "length": 15, "seconds": 1.0}
    assert views.culprit(run, "A", 0) is None
    assert views.explain(run, "A", 2).startswith(
        "A waited 1750 ms for its token 3 (steps 3…4): K's chunk 15…29 in step 3, 1000 ms"
    )


def test_blame_says_which_gaps_there_are():
    with pytest.raises(KeyError, match="no request 'Z'"):
        views.blame(hand_made(), "Z", 0)
    with pytest.raises(IndexError, match="4 tokens, so gaps 0…2; got 3"):
        views.blame(hand_made(), "A", 3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    policy=st.sampled_from(["mixed", "prefill_first"]),
    blocks=st.integers(14, 60),
)
def test_blame_sums_to_the_gap(seed, prompts, policy, blocks):
    """On generated runs, some with preemption, moved to times that are not round."""
    run = toy_run(prompts=prompts, outputs=6, policy=policy, num_blocks=blocks, seed=seed, base=0.0137 + seed * 1e-9)
    for r in run.requests.values():
        for k, gap in enumerate(r.tbt):
            parts = views.blame(run, r.id, k)
            assert sum(parts.values()) == gap
            assert all(seconds > -1e-12 for seconds in parts.values()), parts


def test_long_gaps_are_those_above_the_slo():
    run = hand_made()
    assert gaps.long_gaps(run, 0.25) == [("A", 2, 1.75), ("A", 1, 1.0)]
    assert gaps.slo_of(run) == 3 * 0.625  # gaps 1/4, 1/4, 1, 7/4
    assert gaps.long_gaps(run) == []


# --- figures ---------------------------------------------------------------------------------------------------------
def by_name(figure):
    return {trace.name: trace for trace in figure.data}


def test_step_strip_draws_the_packed_order():
    run = hand_made()
    traces = by_name(views.step_strip(run))
    assert traces["A"].x == (0, 1, 2, 4) and traces["A"].y == (4, 1, 1, 1) and traces["A"].base == (0, 0, 0, 0)
    assert traces["K"].x == (2, 3, 4) and traces["K"].y == (15, 15, 1) and traces["K"].base == (1, 0, 1)
    assert "B" not in traces
    assert traces["mixed step"].x == (2,) and traces["decodes step"].x == (1, 4) and traces["prompts step"].x == (0, 3)
    assert set(traces["budget"].y) == {16}
    assert "5 steps: 1 mixed, 2 decodes only, 2 prompts only; 38 of 80 budgeted tokens used (48%)" in views.text(
        views.step_strip(run)
    )
    assert by_name(views.step_strip(run, first=2, last=4))["K"].x == (2, 3)


def columns(figure):
    """{step: [(request, from, to), …] from the bottom up} as a step strip draws them."""
    found = {}
    for trace in figure.data:
        for x, y, base in zip(trace.x, trace.y, trace.base) if trace.type == "bar" else ():
            found.setdefault(x, []).append((trace.name, base, base + y))
    return {x: sorted(chunks, key=lambda c: c[1]) for x, chunks in found.items()}


@pytest.mark.parametrize("budget, prompt", [(16, 12), (64, 58), (512, 506), (1024, 571), (1024, 1018), (8192, 40)])
def test_a_decode_can_be_seen_beside_any_prompt(budget, prompt):
    """Six decodes, then they and a prompt: each at least 1/80 of the axis high, in packed order without holes; the column
    with the prompt is as high as its tokens, so that it ends below the budget where the step does."""
    run = hand_made()
    decodes = [(id, 5, 1, True, True) for id in "ABCDEF"]
    run.requests = {id: RequestRecord(id, [1], [1], 0.0) for id in "ABCDEFG"}
    run.steps = [StepRecord(0, 0.0, 1.0, budget, decodes)]
    run.steps.append(StepRecord(1, 1.0, 2.0, budget, [*decodes[:3], ("G", 0, prompt, True, False), *decodes[3:]]))
    figure = views.step_strip(run)
    top, drawn = figure.layout.yaxis.range[1], columns(figure)
    assert all(to - low >= top / 80 for chunks in drawn.values() for _, low, to in chunks)
    assert [id for id, _, _ in drawn[1]] == list("ABCGDEF")
    for chunks in drawn.values():
        assert [low for _, low, _ in chunks] == pytest.approx([0, *(to for _, _, to in chunks[:-1])])
    assert drawn[1][-1][2] == pytest.approx(prompt + 6) and top > drawn[0][-1][2]
    assert "decode 5…5, step 1: 1 token" in by_name(figure)["A"].customdata
    assert f"prompt chunk 0…{prompt - 1}, step 1: {prompt} tokens" in by_name(figure)["G"].customdata


def test_a_budget_far_above_the_largest_step_is_said_and_not_drawn():
    run = hand_made()
    for budget, shown in ((16, True), (32, True), (33, False), (1024, False)):
        for step in run.steps:
            step.budget = budget
        figure = views.step_strip(run)
        assert ("budget" in by_name(figure)) is shown
        assert (figure.layout.yaxis.range[1] > budget) is shown
        assert (f"(budget {budget:,}, above the picture)" in views.text(figure)) is not shown


def test_as_many_chunks_as_the_budget_holds_stay_inside_the_picture():
    run = hand_made()
    run.requests = {n: RequestRecord(n, [1], [1], 0.0) for n in range(100)}
    run.steps = [StepRecord(0, 0.0, 1.0, 128, [(n, 5, 1, True, True) for n in range(100)])]
    assert columns(views.step_strip(run))[0][-1][2] == 100


def test_timeline_rows():
    run = hand_made()
    traces = by_name(views.timeline(run))
    assert traces["waiting"].base == (0.0, 0.25, 3.0) and traces["waiting"].x == (0.0, 0.25, 0.25)
    assert traces["K"].base == (0.5, 2.0, 3.0) and traces["K"].x == (1.0, 1.0, 0.25) and set(traces["K"].y) == {1}
    assert sorted(zip(traces["token"].x, traces["token"].y)) == [
        (0.25, 0),
        (0.5, 0),
        (1.5, 0),
        (3.0, 1),
        (3.25, 0),
        (3.25, 1),
    ]
    assert (
        "K: 30 prompt tokens, arrived at 0.250 s, first token after 2750 ms (of that 250 ms in the queue)"
        in views.text(views.timeline(run))
    )
    assert "B: 5 prompt tokens, arrived at 3.000 s, no token" in views.text(views.timeline(run))


def test_ttft_and_tbt():
    run = hand_made()
    data = views.ttft_tbt(run).data
    assert data[0].y == (250.0, 2750.0) and data[0].customdata == ("A", "K")
    assert data[2].y == (250.0, 1000.0, 1750.0, 250.0)
    assert data[3].x == (250.0, 250.0, 1000.0, 1750.0) and data[3].y == (0.25, 0.5, 0.75, 1.0)
    assert "A: TTFT 250 ms, TBT median 1000 ms, longest 1750 ms" in views.text(views.ttft_tbt(run))


def test_two_runs_have_their_own_names_and_dashes():
    a, b = hand_made(), hand_made()
    b.meta["policy"] = "prefill_first"
    figure = views.ttft_tbt([a, b])
    lines = [t for t in figure.data if t.mode == "lines" and t.showlegend]
    assert [t.name for t in lines] == ["mixed", "prefill_first"]
    assert lines[0].line.dash != lines[1].line.dash
    assert "policy mixed" in figure.layout.title.text and "policy prefill_first" in figure.layout.title.text


def test_names_of_runs_say_whose_scheduler_and_what_differs():
    """As notebook 40 has them: the learner's plan_step with 64, prefill_first with 1024; no two names are alike."""
    mine, frozen, whole = hand_made(), hand_made(), hand_made()
    mine.meta |= {"policy": "plan_step", "max_batch_tokens": 64, "chunk_size": 64}
    frozen.meta |= {"policy": "prefill_first", "max_batch_tokens": 1024, "chunk_size": None, "code": None}
    whole.meta |= {"policy": "whole_prompt", "max_batch_tokens": 1024, "chunk_size": None, "code": None}

    def shown(runs):
        return [t.name for t in views.ttft_tbt(runs).data if t.mode == "lines" and t.showlegend]

    assert shown([mine, frozen]) == ["YOUR scheduler, budget 64", "prefill_first, budget 1024"]
    assert shown([frozen, whole]) == ["prefill_first", "whole_prompt"]
    assert shown([mine, mine]) == ["plan_step (1)", "plan_step (2)"]
    mine.meta["chunk_size"] = 16
    assert shown([mine, frozen])[0] == "YOUR scheduler, budget 64, chunks of 16"
    assert "YOUR scheduler, budget 64, chunks of 16: TTFT" in views.text(views.ttft_tbt([mine, frozen]))


@pytest.mark.parametrize("code, said", [
    ("YOUR", "YOUR scheduler"), ("REFERENCE", "REFERENCE scheduler (yours not finished)"),
    ("REFERENCE packer", "REFERENCE packer (yours not finished)"), ("YOUR packer", "YOUR packer"),
])  # fmt: skip
def test_a_title_says_whose_code_ran(code, said):
    run = hand_made()
    run.meta["code"] = code
    assert f"policy mixed · {said} · NOISY" in views.timeline(run).layout.title.text


def test_stalls_are_cut_into_their_causes():
    run = hand_made()
    figure = views.stalls(run, slo=0.3)
    traces = by_name(figure)
    assert dict(zip(traces["prompt K"].y, traces["prompt K"].x)) == {
        "A, before token 3": 1000.0,
        "A, before token 2": 750.0,
    }
    assert dict(zip(traces["between steps"].y, traces["between steps"].x)) == {"A, before token 3": 500.0}
    for n, gap in enumerate(figure.layout.yaxis.categoryarray):
        assert sum(x for t in figure.data for y, x in zip(t.y, t.x) if y == gap) == [1750.0, 1000.0][n]
    assert "2 of 4 gaps are longer than 300 ms" in views.text(figure)


def test_no_stall_is_a_sentence_and_no_axis():
    figure = views.stalls(hand_made(), slo=2.0)
    assert "none of 4 gaps is longer than 2000 ms" in views.text(figure)
    assert [a.text for a in figure.layout.annotations] == ["none of 4 gaps is longer than 2000 ms"]
    assert not (figure.data or figure.layout.shapes or figure.layout.xaxis.visible or figure.layout.yaxis.visible)
    shown = views.stalls(hand_made(), slo=0.3).layout
    assert shown.xaxis.visible is not False and shown.yaxis.visible is not False


def test_budget_against_latency_is_sorted_by_budget():
    runs = [toy_run(budget=b, prompts=(20, 90, 60), outputs=5) for b in (256, 32, 128)]
    figure = views.budget_latency(runs)
    assert all(t.x == (32, 128, 256) for t in figure.data)
    by_budget = sorted(runs, key=lambda r: r.meta["max_batch_tokens"])
    assert figure.data[0].y == tuple(r.summary()["ttft"]["p50"] * 1e3 for r in by_budget)
    assert figure.data[3].y == tuple(r.summary()["tbt"]["p99"] * 1e3 for r in by_budget)
    assert "budget 32: TTFT P50" in views.text(figure)


def contrast(a, b):
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of the relative luminances of two #rrggbb."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", ["#ffffff", "#111111"])  # a cell of JupyterLab Light, of JupyterLab Dark
def test_the_words_of_a_figure_read_on_light_and_dark(paper):
    for figure in (views.timeline(hand_made()), views.stalls(hand_made(), 0.3), views.ttft_tbt(hand_made())):
        layout = figure.layout
        assert layout.paper_bgcolor == layout.plot_bgcolor == layout.modebar.bgcolor == "rgba(0,0,0,0)"
        inks = [layout.font.color, layout.modebar.color, *(a.font.color for a in layout.annotations)]
        assert "font-size:14px;color:#" in layout.title.text
        inks += [layout.title.text.split("color:")[1][:7], *(s.line.color for s in layout.shapes)]
        assert min(contrast(ink, paper) for ink in inks) > 4


def test_ttft_and_tbt_are_spelled_out():
    run = hand_made()
    for figure in (views.ttft_tbt(run), views.budget_latency([run])):
        drawn = " ".join(a.text for a in figure.layout.annotations)
        for words in (drawn, views.text(figure)):
            assert words.index("TTFT") == words.index("TTFT, time to first token")
            assert words.index("TBT") == words.index("TBT, time between tokens")


@pytest.mark.parametrize("theme", ["both", "light", "dark"])
def test_a_request_looks_the_same_in_every_view(theme):
    """Colour and hatch of K in each figure that draws it; the title says the source; the text twin is there."""
    run, look = hand_made(), colors.palette(theme)
    figures = [f(run, theme=theme) for f in (views.step_strip, views.timeline, views.ttft_tbt)]
    figures.append(views.stalls(run, slo=0.3, theme=theme))
    for figure in figures:
        assert "LIVE cpu · eager · 2 threads · policy mixed · YOUR scheduler · NOISY" in figure.layout.title.text
        assert "LIVE cpu" in views.text(figure) and len(views.text(figure).splitlines()) > 2
        assert figure.layout.paper_bgcolor == look["paper"]
        for trace in figure.data:
            if trace.name in ("K", "prompt K"):
                assert (trace.marker.color, trace.marker.pattern.shape) == (look["colors"][1], "/")
    assert figures[2].data[0].marker.color == look["colors"][:2]
    with pytest.raises(ValueError, match="light or dark, got 'blue'"):
        views.timeline(run, theme="blue")


def test_56_requests_look_different():
    looks = {(colors.color(n), colors.hatch(n)) for n in range(56)}
    assert len(looks) == 56


def test_letters():
    assert [colors.letter(n) for n in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
    assert list(colors.letters(hand_made()).values()) == ["A", "K", "B"]
    assert list(colors.letters(toy_run()).values()) == list("ABCDEFGH")


def test_a_run_that_does_not_say_where_it_comes_from():
    run = hand_made()
    run.meta = {"block_size": 16, "num_blocks": 8}
    assert "source unknown" in views.timeline(run).layout.title.text
