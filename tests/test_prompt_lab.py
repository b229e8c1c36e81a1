"""Notebooks 10 and 30: counted models, costs of chunks, the fitted knee, their figures and the two widgets."""

import json
import math

import numpy as np
import pytest
import torch

from minichunk import costmodel, lab
from minichunk.costmodel import GPU, ModelShape
from minichunk.lab import scenes_prompt, views, views_cost
from minichunk.lab.checks import c10, c30
from minichunk.lab.scenes_prompt import Lunch, knee

TOY = ModelShape("toy", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=32, dtype_bytes=4)
MACHINE = GPU("toy machine", 1e9, 1e8, math.inf, 1, math.inf)  # ridge at 10 FLOP per byte


# --- the plain model -------------------------------------------------------------------------------------------------
def test_counted_model_counts_what_it_is_fed_under_both_names_of_the_cache():
    model, _ = lab.plain_model("tiny")
    first = model(torch.tensor([[5, 6, 7]]))
    second = model(torch.tensor([[8]]), cache=first.cache)
    third = model(torch.tensor([[9, 10]]), past_key_values=second.past_key_values)
    assert [(call.new, call.cached) for call in model.calls] == [(3, 0), (1, 3), (2, 4)] and model.tokens_fed == 6
    whole = scenes_prompt._plain("tiny")(torch.tensor([[5, 6, 7, 8, 9, 10]])).logits
    assert torch.allclose(third.logits, whole[:, 4:], atol=1e-5)
    with pytest.raises(ValueError, match=r"\[1, new tokens\].*got list"):
        model([5, 6])


def test_transformers_answer_is_the_greedy_loop_without_a_cache():
    text = lab.chat_ids("Why?", "tiny")
    answer, model = [], scenes_prompt._plain("tiny")
    for _ in range(6):
        answer.append(int(model(torch.tensor([text + answer])).logits[0, -1].argmax()))
    assert lab.transformers_answer(text, 6, "tiny") == answer


def test_chunks_under_the_right_mask_answer_as_the_whole_and_under_top_left_they_do_not():
    whole = lab.answer_in_chunks(c30.chunk_mask, "Why?", 1000, 8, "tiny")
    assert whole == lab.transformers_answer(lab.chat_ids("Why?", "tiny"), 8, "tiny")
    assert all(lab.answer_in_chunks(c30.chunk_mask, "Why?", chunk, 8, "tiny") == whole for chunk in (1, 3, 16))
    assert lab.answer_in_chunks(lambda start, n: np.tri(n, start + n, dtype=bool), "Why?", 3, 8, "tiny") != whole


def test_attention_of_the_check_against_torch():
    q, k, v = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = c30.chunk_mask(2, 4)
    wanted = torch.nn.functional.scaled_dot_product_attention(q[2:], k, v, attn_mask=mask)
    assert np.allclose(c30.attention(q[2:].numpy(), k.numpy(), v.numpy(), mask.numpy()), wanted)
    nothing = c30.attention(q.numpy(), k.numpy(), v.numpy(), np.zeros((6, 6), dtype=bool))
    assert np.isnan(nothing).all()


def test_counted_product():
    assert c10.count_product(3, 4, 5) == (2 * 3 * 4 * 5, 20)


# --- cost of chunks --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt, chunk", [(1, 1), (5, 2), (12, 5), (64, 64), (571, 64), (9, 100)])
def test_split_cost_against_counting(prompt, chunk):
    cost = scenes_prompt.split_cost(prompt, chunk, TOY)
    tokens = [range(a, min(a + chunk, prompt)) for a in range(0, prompt, chunk)]
    assert cost["pairs"] == [sum(t + 1 for t in part) for part in tokens]
    assert cost["keys"] == [part[-1] + 1 for part in tokens]
    assert cost["totals"]["pairs"] == (prompt * (prompt + 1) // 2,) * 2
    assert cost["totals"]["FLOPs"][0] == cost["totals"]["FLOPs"][1]
    assert cost["totals"]["keys read"] == (sum(cost["keys"]), prompt)
    weights = 4 * (2 * (8 * 16 + 8 * 8 + 3 * 8 * 16) + 8 * 32)  # bytes: two layers of qkv, o and the MLP, and the head
    assert cost["totals"]["weights read"] == (len(tokens) * weights, weights)


@pytest.mark.parametrize("prompt, chunk", [(0, 4), (4, 0), (4, -1), (4, 2.0), (4, True)])
def test_split_cost_refuses(prompt, chunk):
    with pytest.raises(ValueError, match="whole numbers of at least 1"):
        scenes_prompt.split_cost(prompt, chunk, TOY)


# --- the knee --------------------------------------------------------------------------------------------------------
def made_up(bend, sharp, decodes=0, noise=0.02, source="MADE UP", label="live"):
    rng, sizes = np.random.default_rng(3), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    times = [7 * (1 + ((n + decodes) / bend) ** sharp) ** (1 / sharp) * (1 + noise * rng.normal(size=9)) for n in sizes]
    return Lunch(label, sizes, [list(t) for t in times], [1.0] * len(sizes), decodes, {"source": source})


@pytest.mark.parametrize("bend, sharp, decodes", [(12, 1, 0), (200, 10, 0), (60, 3, 0), (220, 3, 128)])
def test_knee_is_found_and_its_interval_holds_it(bend, sharp, decodes):
    found = knee(made_up(bend, sharp, decodes))
    assert found.found and abs(found.tokens + decodes - bend) < 0.1 * bend
    assert found.low * 0.97 <= bend - decodes <= found.high * 1.03
    assert abs(found.floor - 7) < 0.2


def test_no_knee_in_a_flat_curve_and_a_wider_interval_with_more_noise():
    assert not knee(made_up(1e9, 3)).found and "no knee" in str(knee(made_up(1e9, 3)))
    quiet, loud = knee(made_up(60, 3, noise=0.01)), knee(made_up(60, 3, noise=0.3))
    assert loud.high - loud.low > 2 * (quiet.high - quiet.low)


def test_lunch_between_two_sizes_and_outside():
    curve = Lunch("live", [1, 3], [[1.0, 1.0, 9.0], [2.0]], [0, 0])
    assert (curve.at(1), curve.at(2), curve.at(4)) == (1.0, 1.5, None)


def test_measured_curve_is_of_the_sizes_asked_for_and_above_nothing():
    machine = lab.roof(0.05)
    assert machine.peak > 1e8 and machine.bandwidth > 1e8
    curve = lab.measure_lunch(machine, (1, 6), 2, "tiny")
    assert curve.sizes == [1, 6] and [len(t) for t in curve.times] == [2, 2] and curve.meta["source"] == "LIVE cpu"
    assert curve.roof == [costmodel.serial_roof(lab.model_shape("tiny"), [(0, n)], machine) * 1e3 for n in (1, 6)]


def test_recorded_curves_are_read_as_the_bench_writes_them(tmp_path, monkeypatch):
    row = {"p5": 1.0, "p50": 2.0, "p95": 3.0}
    points = [
        {"decodes": d, "chunk": n, "roof_ms": 0.5, "graph": {**row, "repeats": [1.0 + n, 2.0 + n]}, "eager": {**row, "repeats": [9.0]}}
        for d in (0, 32) for n in (0, 1, 4) if d + n
    ]  # fmt: skip
    file = tmp_path / "free_lunch.json"
    file.write_text(json.dumps({"date": "2026-01-02", "model": "llama-3-8b", "points": points}))
    monkeypatch.setattr(scenes_prompt, "data_path", lambda name: file)
    curves = lab.recorded_lunch()
    assert [(c.label, c.decodes, c.sizes) for c in curves] == [("eager", 0, [1, 4]), ("graph", 0, [1, 4]), ("graph", 32, [1, 4])]  # fmt: skip
    assert curves[2].times == [[2.0, 3.0], [5.0, 6.0]] and curves[0].meta["source"] == "RECORDED h200 2026-01-02 · llama-3-8b"  # fmt: skip


def test_times_of_a_split_prompt_have_a_step_for_each_chunk():
    times = lab.split_times([8, 20], 20, 2, "tiny")
    assert {chunk: [len(steps) for steps in repeats] for chunk, repeats in times.items()} == {8: [3, 3], 20: [1, 1]}


def test_flips_say_where_answers_part():
    flips = scenes_prompt.Flips("bfloat16", (16, 512), 20, [None, 7, None])
    assert flips.differ == 1 and "1 of 3 answers differ: from token 7 on" in str(flips)
    assert "0 of 1 answers differ in 20 tokens each" in str(scenes_prompt.Flips("float32", (16, 512), 20, [None]))


# --- figures ---------------------------------------------------------------------------------------------------------
def test_tokens_fed():
    figure = lab.tokens_fed(37, 3)
    assert [list(bar.y) for bar in figure.data] == [[37, 38, 39], [37, 1, 1]]
    assert "114 in all" in views.text(figure) and "39 in all" in views.text(figure)


def test_roofline_puts_the_bound_on_the_roof_and_the_measurement_below():
    chunks = {"one": [(0, 1)], "many": [(0, 2000)]}
    flops, nbytes = ({k: f(TOY, c)["total"] for k, c in chunks.items()} for f in (costmodel.flops, costmodel.traffic))
    figure = lab.roofline(TOY, MACHINE, chunks, {"one": 1.0})
    one, many = figure.data[1:]
    assert one.x[0] == flops["one"] / nbytes["one"] < 10 < many.x[0] == flops["many"] / nbytes["many"]
    assert one.y[0] == pytest.approx(1e8 * one.x[0]) and one.y[1] == pytest.approx(flops["one"] / 1e-3)
    assert list(many.y) == [1e9]
    said = views.text(figure)
    assert "one: " in said and "bound by memory" in said and "measured 1 ms" in said and "many: " in said
    assert max(figure.data[0].y) == 1e9


def test_chunk_plan_draws_what_split_cost_says():
    figure, cost = lab.chunk_plan(20, 8, TOY), scenes_prompt.split_cost(20, 8, TOY)
    history, own, linear, attention, ratios = figure.data
    assert list(history.y) == [0, 8, 16] and list(own.y) == [8, 8, 4]
    assert [a + b for a, b in zip(history.y, own.y)] == cost["keys"]
    total = 1e9 * (sum(linear.y) + sum(attention.y))
    assert total == pytest.approx(costmodel.flops(TOY, [(0, 20)])["total"])
    assert list(ratios.x) == [1, 1, 44 / 20, 3]
    assert "210 in pieces, 210 at once; chunk 0 has 36, the last 74" in views.text(figure)


def test_chunk_time_marks_launches_and_weight_rereads():
    figure = lab.chunk_time({8: [[3.0, 3.0, 2.0], [4.0, 3.0, 3.0]], 20: [[5.0], [7.0]]}, 20, TOY, MACHINE, {"source": "LIVE toy"})  # fmt: skip
    total, reread, work = figure.data
    assert list(total.y) == [9.0, 6.0] and list(total.text) == ["3 launches", "1 launch"]
    weights = costmodel.traffic(TOY, [(0, 1)])["weights"] / 1e8 * 1e3
    assert list(reread.y) == pytest.approx([3 * weights, weights])
    assert set(work.y) == {costmodel.flops(TOY, [(0, 20)])["total"] / 1e9 * 1e3}
    assert "LIVE toy" in views.text(figure) and "chunks of 8: 3 launches, 9 ms" in views.text(figure)


def test_lunch_has_a_panel_a_machine_and_no_band_for_the_eager_curve():
    curves = [made_up(200, 10, label="eager"), made_up(60, 3), made_up(12, 1, source="LIVE cpu")]
    figure = views_cost.lunch(curves, [knee(c) for c in curves], at=50)
    assert [a.text for a in figure.layout.annotations] == ["MADE UP", "LIVE cpu"]
    lines = [s for s in figure.layout.shapes if s.name == "at"]
    bands = [s for s in figure.layout.shapes if s.type == "rect"]
    assert len(lines) == 2 and {s.x0 for s in lines} == {50} and len(bands) == 2
    assert "launch-bound: flat for another reason" in views.text(figure)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_has_a_text_twin_and_readable_type(theme):
    curve = made_up(60, 3)
    figures = [
        views_cost.tokens_fed(5, 3, theme), views_cost.chunk_plan(20, 8, TOY, theme),
        views_cost.roofline(TOY, MACHINE, {"one": [(0, 1)]}, None, theme),
        views_cost.chunk_time({8: [[1.0]]}, 8, TOY, MACHINE, None, theme), views_cost.lunch([curve], [knee(curve)], None, theme),
    ]  # fmt: skip
    for figure in figures:
        assert len(views.text(figure).splitlines()) >= 3 and figure.layout.font.size >= 14


# --- widgets ---------------------------------------------------------------------------------------------------------
def same(shown, figure):
    """The widget's figure shows what a new one would."""
    for a, b in zip(shown.data, figure.data, strict=True):
        assert list(a.x) == list(b.x) and list(a.y) == list(b.y)
    assert shown.layout.title == figure.layout.title and shown.layout.meta == figure.layout.meta
    assert [s.x0 for s in shown.layout.shapes] == [s.x0 for s in figure.layout.shapes]


def test_splitter_changes_one_figure_in_place():
    widget = lab.split_prompt(571, 64)
    widget.show()
    shown = widget._figure
    widget._slider.value = 128  # what a mouse or an arrow key does
    assert widget.state["chunk"] == 128 and widget.state["lengths"] == [128] * 4 + [59]
    assert widget._figure is shown
    same(shown, lab.chunk_plan(571, 128))
    widget.choose(100)
    same(shown, lab.chunk_plan(571, 100))
    assert widget._slider.value == 100 and "571 tokens in 6 chunks" in str(widget)
    assert (
        "lab.split_prompt(571, 100)" in widget._line.value
        and "Keys are read 3.63 times, the weights 6 times." in str(widget)
    )
    widget.choose(571)
    assert "Keys are read once, the weights once." in str(widget)
    widget.reset()
    assert widget.state["chunk"] == 64


def test_splitter_refuses_and_keeps_its_state():
    widget = lab.split_prompt(571, 64)
    with pytest.raises(ValueError, match="at least 1, got 571 and 0"):
        widget.choose(0)
    assert widget.state["chunk"] == 64 and 0 not in widget.choices
    with pytest.raises(ValueError, match="unknown model shape"):
        lab.split_prompt(571, 64, "llama-9")
    assert lab.split_prompt(16384, 512, "llama-3-8b").code() == "lab.split_prompt(16384, 512, shape='llama-3-8b')"
    assert lab.split_prompt(20, 8, TOY).code() == "lab.split_prompt(20, 8, shape)"


def test_numbers_that_notebook_30_says_about_the_last_chunk():
    for prompt, chunk, shape, said in ((16384, 512, "llama-3-8b", "1.59"), (512, 64, "smollm2-135m", "1.15")):
        cost = scenes_prompt.split_cost(prompt, chunk, shape)
        first, *_, last = (a + b for a, b in zip(cost["linear"], cost["attention"]))
        assert f"{last / first:.3g}" == said


def test_the_shape_of_a_lab_model_names_no_folder_and_has_four_bytes_a_value():
    shape = lab.model_shape("tiny")
    assert (shape.name, shape.dtype_bytes) == ("tiny", 4)
    assert "COUNTED · tiny, 4 bytes a value" in lab.chunk_plan(20, 8, shape).layout.title.text


def test_the_check_of_10_1_goes_past_the_end_token():
    """The case that catches an answer cut short: its end token is not the last of the n."""
    model, tokenizer = c10._tiny()
    text, n = c10.TEXTS[-1]
    assert tokenizer.eos_token_id in c10.transformers_answer(model, tokenizer(text)["input_ids"], n)[:-1]


def test_meter_says_what_a_chunk_costs():
    curve = made_up(60, 10, noise=0)
    widget = lab.free_lunch(curve, made_up(12, 1, source="LIVE cpu"), tokens=64)
    widget.show()
    shown = widget._figure
    same(shown, widget.figure())
    widget._slider.value = 512
    assert widget.state["tokens"] == 512 and widget.state["curves"][0]["ms"] == pytest.approx(curve.times[9][0])
    same(shown, widget.figure())
    assert f"512 tokens: {curve.times[9][0]:.3g} ms, {curve.times[9][0] / curve.times[0][0]:.2f} times" in str(widget)
    with pytest.raises(ValueError, match="from 1 to 1024, got 4096"):
        widget.choose(4096)
    assert widget.state["tokens"] == 512
    with pytest.raises(ValueError, match="at least one curve"):
        lab.free_lunch()
