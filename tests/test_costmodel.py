"""The cost model against a counted forward pass, a brute-force count, and published figures."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

from minichunk import costmodel as cm
from minichunk.costmodel import CostModel, Efficiency, ModelShape, work
from minichunk.request import Chunk, Request


def useful_only(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention that multiplies each query with the keys it may see and no others."""
    window = kwargs.get("sliding_window")
    groups, length, past = query.shape[1] // key.shape[1], query.shape[2], key.shape[2] - query.shape[2]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    rows = []
    for row in range(length):
        end = past + row + 1
        first = max(0, end - window) if window else 0
        scores = query[:, :, row : row + 1] @ key[:, :, first:end].transpose(-1, -2) * scaling
        rows.append(scores.softmax(-1) @ value[:, :, first:end])
    return torch.cat(rows, dim=2).transpose(1, 2), None


AttentionInterface.register("useful_only", useful_only)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "attn_implementation": "useful_only",
}
CONFIGS = {
    "llama": LlamaConfig(num_key_value_heads=2, intermediate_size=48, **SMALL),
    "llama, one KV head": LlamaConfig(num_key_value_heads=1, intermediate_size=40, tie_word_embeddings=True, **SMALL),
    "qwen3, wide heads": Qwen3Config(num_key_value_heads=2, intermediate_size=48, head_dim=16, **SMALL),
    "mistral, window 6": MistralConfig(num_key_value_heads=2, intermediate_size=48, sliding_window=6, **SMALL),
    "opt, not gated": OPTConfig(ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, **SMALL),
}
CHUNKS = [(0, 9, True), (9, 5, False), (20, 1, True), (3, 1, True), (0, 1, False)]


def counted(model, chunks) -> tuple[int, int]:
    """(FLOPs outside attention, FLOPs of attention) of one forward a chunk, each after its own history."""
    linear = attention = 0
    for start, length, samples in chunks:
        cache = DynamicCache(config=model.config)
        if start:
            model(torch.ones(1, start, dtype=torch.long), past_key_values=cache, use_cache=True)
        keep = torch.tensor([length - 1] if samples else [], dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True, logits_to_keep=keep)
        counts = counter.get_flop_counts()
        total = sum(counts["Global"].values())
        # RoPE's table of angles is an outer product, no product with weights or keys
        rope = sum(sum(c.values()) for name, c in counts.items() if name.endswith("rotary_emb"))
        bmm = sum(n for op, n in counts["Global"].items() if "bmm" in str(op)) - rope
        linear += total - rope - bmm
        attention += bmm
    return linear, attention


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_equal_a_counted_forward(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        linear, attention = counted(model, CHUNKS)
    shape = ModelShape.of(CONFIGS[name])
    got = cm.flops(shape, CHUNKS)
    assert got["attention"] == attention
    assert got["linear"] + got["logits"] == linear
    assert shape.params == sum(p.numel() for p in model.parameters())


def test_leaving_out_the_history_changes_the_count():
    shape = ModelShape.of(CONFIGS["llama"])
    without = [(0, n, s) for _, n, s in CHUNKS]
    assert cm.flops(shape, without)["attention"] < cm.flops(shape, CHUNKS)["attention"]


@pytest.mark.parametrize("window", [1, 4, 7, 100])
def test_window_sums_equal_a_count_of_pairs(window):
    for start, length in [(0, 1), (0, 9), (3, 2), (5, 8), (20, 3), (6, 1)]:
        seen = [range(max(0, p + 1 - window), p + 1) for p in range(start, start + length)]
        w = work([(start, length)], window)
        assert w.window_pairs == sum(len(r) for r in seen)
        assert w.window_keys == len(set().union(*seen))
        assert w.pairs == sum(p + 1 for p in range(start, start + length))


def test_work_reads_chunks_tuples_and_records_alike():
    first = Request(0, list(range(10)), 10)
    second = Request(1, list(range(8)), 6, num_computed=7)
    chunks = [Chunk.of(first, 4), Chunk.of(second, 1)]
    assert work(chunks) == work([(0, 4, False), (7, 1, True)]) == work([(0, 0, 4, False, False), (1, 7, 1, True, True)])
    assert work([(7, 1)]).samples == 1
    with pytest.raises(ValueError, match="a chunk is"):
        work([(1, 2, 3, 4)])


def test_keys_are_reread_by_row_tiles():
    assert work([(100, 130)], row_tile=64).keys == 3 * 230


# --- published figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, params",
    [("llama-2-7b", 6_738_415_616), ("llama-2-70b", 68_976_648_192), ("llama-3-8b", 8_030_261_248),
     ("llama-3-70b", 70_553_706_496), ("mistral-7b", 7_241_732_096), ("yi-34b", 34_388_917_248),
     ("qwen3-0.6b", 596_049_920), ("smollm2-135m", 134_515_008)],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name, params):
    assert cm.shape_named(name).params == params


def test_opt_13b_needs_800_kb_a_token():
    """Kwon et al., SOSP'23, section 3."""
    assert cm.kv_bytes_per_token("opt-13b") == 800 * 1024


MIXED = [(0, 512), (0, 512)] + [(1024, 1)] * 30


def test_worked_example_llama_2_7b():
    """2 x 512 new tokens and 30 decodes at 1,024: the terms worked out by hand from the shape."""
    w = work(MIXED)
    assert (w.tokens, w.pairs) == (1054, 2 * 512 * 513 // 2 + 30 * 1025)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert cm.flops("llama-2-7b", MIXED) == {
        "linear": 2 * 1054 * 32 * layer,
        "attention": 4 * 32 * 4096 * 293_406,
        "logits": 2 * 32 * 4096 * 32000,
        "total": 13_813_637_185_536,
    }
    bytes_ = cm.traffic("llama-2-7b", MIXED)
    assert bytes_["weights"] == 2 * (32 * layer + 4096 * 32000)
    assert bytes_["kv_read"] == 524_288 * 31_774 and bytes_["kv_write"] == 524_288 * 1054
    assert cm.arithmetic_intensity("llama-2-7b", MIXED) == pytest.approx(351, abs=0.5)


@pytest.mark.parametrize(
    "model, chunks, gpu, milliseconds",
    [("llama-2-7b", MIXED, "a100-80-sxm", 53.4), ("llama-2-7b", MIXED, "h200", 17.9),
     ("llama-2-7b", MIXED[2:], "a100-80-sxm", 14.5), ("llama-2-7b", MIXED[2:], "h200", 6.2),
     ("llama-2-7b", [(0, 4096)] + MIXED[2:], "a100-80-sxm", 190), ("llama-3-8b", MIXED, "h200", 16.5)],
)  # fmt: skip
def test_serial_roof_of_the_worked_example(model, chunks, gpu, milliseconds):
    assert cm.serial_roof(model, chunks, gpu) * 1e3 == pytest.approx(milliseconds, rel=0.01)


@pytest.mark.parametrize(
    "model, chunks, milliseconds",
    [("llama-3-8b", [(1023, 1)] * 256, 12.9), ("llama-3-8b", [(4096, 2048)] + [(1023, 1)] * 128, 46.9),
     ("qwen3-0.6b", [(1023, 1)] * 64, 2.03)],
)  # fmt: skip
def test_serial_roof_with_measured_ceilings(model, chunks, milliseconds):
    """Against roofs computed independently for an H200's measured 790 TFLOP/s and 4.3 TB/s."""
    measured = replace(cm.gpu_named("h200"), peak=790e12, bandwidth=4.3e12)
    assert cm.serial_roof(model, chunks, measured) * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_roofs_are_ordered_and_efficiency_divides():
    serial, ideal = (roof("llama-3-8b", MIXED, "h100-sxm") for roof in (cm.serial_roof, cm.overlapped_roof))
    assert ideal < serial
    half = Efficiency(0.5, 0.5, 0.5, 0.5, 0.5, overhead=0.003)
    assert CostModel("llama-3-8b", "h100-sxm", efficiency=half).seconds(MIXED) == pytest.approx(2 * serial + 0.003)
    assert CostModel("llama-3-8b", "h100-sxm", efficiency=half).seconds([]) == 0


def test_table_sums_to_the_step_and_names_the_bound():
    model = CostModel("llama-3-8b", "h200")
    table = model.table(MIXED)
    assert sum(row["seconds"] for row in table) == pytest.approx(model.seconds(MIXED))
    bound = {row["name"]: row["bound"] for row in table}
    assert bound["mlp"] == "compute" and bound["attention"] == "memory"
    assert {r["name"]: r["bound"] for r in model.table(MIXED[2:])}["mlp"] == "memory"


def test_ridge_is_where_a_linear_layer_turns():
    gpu = cm.gpu_named("a100-80-sxm")
    wide = ModelShape("wide", 1, 8192, 64, 64, 128, 8192 * 4, 2)  # so wide that activations do not matter

    def bound(tokens):
        return {r["name"]: r["bound"] for r in CostModel(wide, gpu).table([(0, tokens)])}["mlp"]

    assert cm.ridge(gpu) == pytest.approx(153, abs=0.5)
    assert bound(math.floor(gpu.ridge * 0.95)) == "memory" and bound(math.ceil(gpu.ridge * 1.05)) == "compute"


def test_decode_attention_intensity_is_the_group_size():
    """Two bytes an element: FLOP per byte of decode attention is H/K, whatever the context and the batch."""
    for name, groups in [("llama-2-7b", 1), ("llama-3-8b", 4), ("llama-3-70b", 8)]:
        op = next(o for o in cm.operators(name, [(8191, 1)] * 7) if o.name == "attention")
        assert op.intensity == pytest.approx(groups, rel=0.01)


def test_chunking_adds_key_reads_and_no_flops():
    whole, parts = [(0, 4096, True)], cm.split(4096, 512)
    assert cm.flops("llama-2-7b", parts) == cm.flops("llama-2-7b", whole)
    extra = sum(cm.traffic("llama-2-7b", [p])["kv_read"] for p in parts) - cm.traffic("llama-2-7b", whole)["kv_read"]
    assert extra == 524_288 * 14_336
    assert cm.split(1000, 512) == [(0, 512, False), (512, 488, True)]


def test_tensor_parallel_divides_the_work_and_adds_all_reduces():
    one, four = ({o.name: o for o in cm.operators("llama-2-70b", MIXED, tp)} for tp in (1, 4))
    for name in ("qkv", "attention", "o", "mlp", "logits"):
        assert one[name].flops == 4 * four[name].flops
    assert one["kv_write"].nbytes == 4 * four["kv_write"].nbytes
    assert four["all_reduce"].comm_bytes == 2 * 80 * 1054 * 8192 * 2
    gpu = replace(cm.gpu_named("a100-80-sxm"), link=1e9, link_latency=0.0)  # a link so slow that only it counts
    slow = CostModel("llama-2-70b", gpu, tp=4)
    assert slow.seconds(MIXED) == pytest.approx(1.5 * four["all_reduce"].comm_bytes / 1e9, rel=0.05)
    assert {o.name: o for o in cm.operators("llama-2-70b", MIXED, 16)}["kv_write"].nbytes * 8 == one["kv_write"].nbytes


def test_tiles_and_waves():
    assert [cm.padded(n, 256) for n in (1, 256, 257)] == [256, 256, 512]
    assert cm.waves(256, 12288, 108) == 2 and cm.waves(257, 12288, 108) == 3
    step = CostModel("llama-2-7b", "a100-80-sxm", efficiency=Efficiency(tile=256))
    assert step.seconds([(0, 257)]) > 1.3 * step.seconds([(0, 256)])
    assert step.seconds([(0, 257)]) == pytest.approx(step.seconds([(0, 512)]), rel=0.06)
    waved = CostModel("llama-2-7b", "a100-80-sxm", efficiency=Efficiency(tile=(128, 128)))
    assert waved.seconds([(0, 129)]) > waved.seconds([(0, 128)])
    assert cm.tiled_pairs(0, 128, 64, 64) == 64 * 64 + 64 * 128
    assert cm.tiled_pairs(100, 1, 64, 128) == 64 * 128


def test_largest_budget_is_the_largest():
    model = CostModel("llama-2-7b", "a100-80-sxm")
    budget = model.largest_budget(0.05, decodes=30, context=1024)
    decodes = [(1024, 1)] * 30
    assert (
        model.seconds(decodes + [(0, budget - 30, False)]) <= 0.05 < model.seconds(decodes + [(0, budget - 29, False)])
    )
    assert model.largest_budget(0.01, decodes=30, context=1024) == 0
    assert model.largest_budget(1e9, limit=2048) == 2048


def test_kv_tokens_that_fit():
    room = 0.9 * 80e9 - 2 * 6_738_415_616
    assert cm.kv_tokens_that_fit("llama-2-7b", "a100-80-sxm") == int(room // 524_288)
    assert cm.kv_tokens_that_fit("gpt-3-175b", "a100-40-sxm", tp=8) < 0
    assert cm.kv_tokens_that_fit("llama-2-70b", "a100-80-sxm", tp=16) == pytest.approx(
        (0.9 * 80e9 * 16 - 2 * 68_976_648_192) / (2 * 327_680), rel=1e-6
    )


# --- calibration -----------------------------------------------------------------------------------------------------------

TRUE = Efficiency(0.7, 0.6, 0.4, 0.8, overhead=0.002)


def steps():
    yield from ([(0, n)] for n in (16, 64, 256, 1024, 2048))
    yield from ([(4096, 512)] + [(1024, 1)] * n for n in (1, 16, 64))
    yield from ([(context, 1)] * 64 for context in (100, 1000, 4000))
    yield [(30000, 512)]


def test_fit_finds_the_efficiencies_that_made_the_times():
    model = CostModel("llama-3-8b", "h100-sxm")
    truth = replace(model, efficiency=TRUE)
    found = cm.fit(model, [(s, truth.seconds(s)) for s in steps()])
    assert found.max_error < 0.01
    for name in ("linear_compute", "linear_memory", "attention_compute", "attention_memory"):
        assert getattr(found.model.efficiency, name) == pytest.approx(getattr(TRUE, name), rel=0.05)


def test_fit_reports_the_error_it_could_not_remove():
    model = CostModel("llama-3-8b", "h100-sxm")
    truth = replace(model, efficiency=TRUE)
    noisy = [(s, truth.seconds(s) * (1.3 if i % 2 else 0.8)) for i, s in enumerate(steps())]
    found = cm.fit(model, noisy)
    assert 0.1 < found.mean_error < 0.4 and len(found.ratios) == len(noisy)
    predicted = [found.model.seconds(s) / t for s, t in noisy]
    assert found.ratios == pytest.approx(predicted)


def test_fit_says_what_it_could_not_learn():
    model = CostModel("llama-3-8b", "h100-sxm")
    decode_only = [([(1000, 1)] * n, model.seconds([(1000, 1)] * n) * 1.5) for n in (8, 16, 32)]
    found = cm.fit(model, decode_only)
    assert "attention_compute" not in found.learned and "linear_memory" in found.learned
    assert found.model.efficiency.attention_compute == 1.0
    with pytest.raises(ValueError, match="cannot learn speed"):
        cm.fit(model, decode_only, learn=["speed"])
    with pytest.raises(ValueError, match="above 0"):
        cm.fit(model, [([(0, 1)], 0.0)])


# --- refusals ------------------------------------------------------------------------------------------------------------------


def test_names_and_refusals():
    assert cm.gpu_named("A100 80 SXM").name == "A100-80-SXM"
    with pytest.raises(ValueError, match="not unique.*H100-PCIe, H100-SXM"):
        cm.gpu_named("h100")
    with pytest.raises(ValueError, match="unknown"):
        cm.gpu_named("tpu")
    with pytest.raises(ValueError, match="unknown model shape 'gpt-5'"):
        cm.shape_named("gpt-5")
    with pytest.raises(ValueError, match="do not divide into 3 GPUs"):
        CostModel("llama-3-8b", "h200", tp=3)
    with pytest.raises(ValueError, match="no cost formula for model type 'mamba'"):
        ModelShape.of(type("Config", (), {"model_type": "mamba"}))
    with pytest.raises(ValueError, match="above 0"):
        Efficiency(linear_compute=0)
    with pytest.raises(ValueError, match="unknown efficiencies speed"):
        cm.efficiency_from({"speed": 1})


def test_gpu_table_is_sane():
    for gpu in cm.gpus().values():
        assert 50 < gpu.ridge < 500 and 10e9 < gpu.memory < 300e9 and 30 < gpu.sms < 200


# --- published measurements ------------------------------------------------------------------------------------------------------


def check_simulator():
    path = Path(__file__).resolve().parent.parent / "tools" / "check_simulator.py"
    spec = importlib.util.spec_from_file_location("check_simulator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layer_times_within_a_quarter_of_vidurs():
    """Fitted on Llama-2-7B; Llama-2-70B, Llama-3-8B and other TP degrees are predicted. One miss is known."""
    published = check_simulator()
    for gpu in ("A100-80-SXM", "H100-SXM", "A40"):
        _, ratios = published.vidur_ratios(gpu)
        misses = [
            (key, n) for key, row in ratios.items() for n, r in zip(published.TOKENS, row) if not 0.75 <= r <= 1.25
        ]
        assert misses == ([(("llama-2-70b", 1), 256)] if gpu == "H100-SXM" else [])


def test_step_times_within_a_quarter_of_sarathi_serves():
    _, rows = check_simulator().yi_ratios()
    assert [name for name, _, ratio, _ in rows if not 0.75 <= ratio <= 1.25] == ["4 decodes (table 2)"]
    assert sum(how == "predicted" for *_, how in rows) == 18
