"""Which backend runs, why, and what is said when one cannot: on a CPU, with packages that are made up.

tests/test_gpu_backends.py runs the real ones on a card.
"""

import logging
import re
import sys
from dataclasses import replace

import fake_flashinfer
import pytest
import torch

from minichunk import Engine, SamplingParams
from minichunk.attention import LayerSpec, StepMeta, Unsupported, auto, flashinfer_backend, make_backend, trial
from minichunk.attention.auto import AutoAttention, kind_of
from minichunk.attention.flash_attn_backend import FlashAttention
from minichunk.attention.flashinfer_backend import obstacle
from minichunk.attention.torch_backend import TorchAttention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def spec(heads=4, kv_heads=2, head_dim=64, **more):
    return LayerSpec(**{**dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, scale=head_dim**-0.5), **more})  # fmt: skip


# --- FlashInfer ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(capability=(7, 0)), "compute capability 7.5 or above, this card has 7.0"),
        (dict(capability=(7, 5)), None),
        (dict(version=None), "flashinfer is not installed: pip install flashinfer-python"),
        (dict(version="0.2.5"), "flashinfer 0.2.5 is too old, at least 0.6.13 is needed"),
        (dict(version="0.6.12+cu130"), "flashinfer 0.6.12+cu130 is too old"),
        (dict(version="0.6.13+cu130"), None),
        (dict(version="0.7.0rc1"), None),
        (dict(module=None), "does not load beside torch"),
        (dict(tools=()), "no nvcc is here"),
        (dict(compiles=(13, 0)), "compile with CUDA 13.0 (nvcc), and the driver runs only up to 12.4"),
        (dict(tools=("nvcc",)), "no ninja is here: pip install ninja"),
        (dict(), None),
    ],
)
def test_what_keeps_flashinfer_from_running_is_said(monkeypatch, change, said):
    given = (
        dict(
            capability=(9, 0),
            version="0.6.14.post1",
            module=fake_flashinfer.module,
            tools=("nvcc", "ninja"),
            compiles=(12, 9),
        )
        | change
    )

    def version(name):
        if given["version"] is None:
            raise flashinfer_backend.PackageNotFoundError
        return given["version"]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: given["capability"])
    monkeypatch.setattr(flashinfer_backend, "version", version)
    monkeypatch.setattr(flashinfer_backend, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(flashinfer_backend, "nvcc_cuda", lambda path: given["compiles"])
    monkeypatch.setitem(sys.modules, "flashinfer", given["module"])  # None: the import fails
    monkeypatch.setattr(
        flashinfer_backend.shutil, "which", lambda name, path=None: name if name in given["tools"] else None
    )
    found = obstacle("split", CUDA)
    assert said in found if said else found is None


def test_fa3_is_for_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 9.0 (Hopper), this card has 8.0" in obstacle("split_fa3", CUDA)


# --- flash-attn ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block_size, dtype, layer, capability, said",
    [
        (16, torch.bfloat16, spec(), (9, 0), "multiples of 256 slots, not of 16: give the engine block_size=256"),
        (300, torch.bfloat16, spec(), (9, 0), "block_size=512"),
        (256, torch.float16, spec(), (9, 0), "tested here in bfloat16, not torch.float16"),
        (256, torch.bfloat16, spec(head_dim=96), (9, 0), r"layer 0.*\(64, 128\).*96"),
        (256, torch.bfloat16, spec(has_sinks=True), (9, 0), "flash_attn takes no sinks"),
        (256, torch.bfloat16, spec(), (7, 5), "8.0 or above, this card has 7.5"),
        (256, torch.bfloat16, spec(), (9, 0), "flash_attn is not installed"),
    ],
)
def test_flash_attn_refuses_by_name(monkeypatch, block_size, dtype, layer, capability, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(Unsupported, match=said):
        FlashAttention().check([layer], block_size, dtype, CUDA)


def test_cuda_backends_refuse_a_cpu():
    for name in ("flash_attn", "flashinfer", "flashinfer:batch"):
        with pytest.raises(Unsupported, match="CUDA device, not on cpu: use attention='torch'"):
            make_backend(name, CPU).check([spec()], 256, torch.bfloat16, CPU)


def test_names_of_backends():
    assert make_backend("auto", CPU).name == "torch" and make_backend("flashinfer:fa3", CPU).path == "fa3"
    for name in ("flash", "torch:x", "auto:split", "flashinfer:x", ""):
        with pytest.raises(ValueError, match="got|one of"):
            make_backend(name, CPU)


# --- the trial --------------------------------------------------------------------------------------------------------------


class Odd(TorchAttention):
    """The reference with a fault in one kind of batch."""

    name = "odd"

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def attend(self, query, key_cache, value_cache, meta, layer, sinks=None):
        return self.fault(super().attend(query, key_cache, value_cache, meta, layer, sinks), meta)


def test_a_trial_passes_what_is_right_and_names_what_is_not():
    device, layers = CPU, [spec(), spec(sliding_window=7), spec(has_sinks=True)]
    trial.trial(TorchAttention(), layers, 16, torch.float32, device)
    trial.trial(TorchAttention(), layers, 256, torch.bfloat16, device)

    class Seen(TorchAttention):
        layers = []

        def attend(self, query, key_cache, value_cache, meta, layer, sinks=None):
            self.layers.append((layer, kind_of(meta)))
            return super().attend(query, key_cache, value_cache, meta, layer, sinks)

    seen = Seen()
    trial.trial(seen, layers * 2, 16, torch.float32, device)  # each distinct layer, each kind of batch, once
    assert sorted(map(str, seen.layers)) == sorted(str((layer, kind)) for layer in layers for kind in auto.KINDS)

    def fails(out, meta):
        raise RuntimeError("\n\nNinja build failed\nmore")

    def last_row_wrong(out, meta):
        out[-1] += 0.2 * (meta.max_seqlen_q == 1)
        return out

    def nothing(out, meta):
        return out * torch.nan

    class Forgetful(TorchAttention):
        name = "forgetful"

        def append_kv(self, key, value, key_cache, value_cache, meta):
            pass

    for dtype in (torch.float32, torch.float16):  # what the reference stored is not what the backend reads
        with pytest.raises(Unsupported, match="forgetful is wrong on a small batch"):
            trial.trial(Forgetful(), [spec()], 16, dtype, device)

    for fault, said in [
        (fails, r"odd failed on a small batch \(decodes\): RuntimeError: Ninja build failed$"),
        (last_row_wrong, r"odd is wrong on a small batch \(decodes, head size 64\): it differs .* by 0.2"),
        (nothing, "by inf"),
    ]:
        with pytest.raises(Unsupported, match=said):
            trial.trial(Odd(fault), [spec()], 16, torch.float32, device)


# --- auto -------------------------------------------------------------------------------------------------------------------


class Kernel(TorchAttention):
    """A backend by another name, which may refuse, or fail in a plan."""

    def __init__(self, name, refuses=None, graph_safe=False):
        super().__init__()
        self.name, self.refuses, self.graph_safe, self.breaks, self.asked = name, refuses, graph_safe, False, 0

    def check(self, layers, block_size, dtype, device):
        self.asked += 1
        if self.refuses:
            raise Unsupported(self.refuses)

    def plan(self, meta):
        if self.breaks:
            raise RuntimeError("no kernel image\nfor this device")
        super().plan(meta)

    def explain(self):
        return f"{self.name} ran"


TABLE = {
    "decodes": {"triton": 0.9, "flash_attn": 1.0, "flashinfer:batch": 0.8},
    "prompts": {"triton": 0.5, "flashinfer:fa3": 0.6},
    "mixed": {"triton": 0.5, "flashinfer:batch": 0.7, "flash_attn": 0.2},
}


@pytest.fixture
def kernels(monkeypatch):
    """name → Kernel, which auto gets when it asks for that name; all serve until a test says otherwise."""
    made = {name: Kernel(name, graph_safe=name == "triton") for name in ("triton", "flash_attn", "flashinfer:batch", "flashinfer:fa3", "torch")}  # fmt: skip
    monkeypatch.setattr(auto, "make_backend", lambda name, device: made[name])
    monkeypatch.setattr(auto, "table", lambda card: (TABLE, "measured on a card, 2026-01-01"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    return made


def ask(backend):
    backend.check([spec()], 16, torch.float32, CPU)
    return backend


def meta_of(*sizes):
    return StepMeta.of(trial.scattered(list(sizes), 16)[0], CPU)


DECODES, PROMPTS, MIXED = meta_of((5, 1), (7, 1)), meta_of((0, 4), (0, 7)), meta_of((5, 1), (0, 7))


def test_the_kind_of_a_batch():
    assert [kind_of(m) for m in (DECODES, PROMPTS, MIXED)] == ["decodes", "prompts", "mixed"]
    captured = StepMeta(*[torch.zeros(1)] * 4, 64, 64)
    assert kind_of(captured) == "mixed" and kind_of(replace(captured, max_seqlen_q=1)) == "decodes"


def test_with_graphs_auto_takes_the_one_that_a_graph_can_replay(kernels):
    chosen = ask(AutoAttention(graphs=True))
    assert chosen.name == "triton" and chosen.graph_safe
    assert "auto took triton, the only one that a CUDA graph can replay" in chosen.explain()
    assert sum(k.asked for k in kernels.values()) == 1  # nothing else was compiled or tried


def test_without_graphs_auto_takes_the_best_of_the_table_for_each_kind(kernels):
    chosen = ask(AutoAttention(graphs=False))
    assert not chosen.graph_safe and chosen.name == "auto(flash_attn, flashinfer:fa3, flashinfer:batch)"
    for meta, name in ((DECODES, "flash_attn"), (PROMPTS, "flashinfer:fa3"), (MIXED, "flashinfer:batch")):
        chosen.plan(meta)
        assert f"{name} ran" in chosen.explain() and "measured on a card" in chosen.explain()


def test_what_refuses_is_passed_over_and_said_once(kernels, caplog):
    kernels["flash_attn"].refuses = "blocks of 256"
    kernels["flashinfer:batch"].refuses = "no nvcc"
    with caplog.at_level(logging.WARNING):
        chosen = ask(AutoAttention(graphs=False))
    assert chosen.explain().startswith(
        "auto took triton for decodes and mixed, flashinfer:fa3 for prompts, the fastest that"
    )
    assert "left out flash_attn: blocks of 256; left out flashinfer:batch: no nvcc" in chosen.explain()
    assert [r.getMessage() for r in caplog.records] == ["attention: flash_attn left out: blocks of 256", "attention: flashinfer:batch left out: no nvcc"]  # fmt: skip
    for kernel in kernels.values():
        kernel.refuses = "not here" if kernel.name != "torch" else None
    assert ask(AutoAttention(graphs=True)).name == "torch"  # it never refuses


def test_asked_the_same_again_auto_stays_with_its_choice(kernels, caplog):
    kernels["triton"].refuses = "no such card"
    chosen = AutoAttention(graphs=True)
    with caplog.at_level(logging.WARNING):
        assert [ask(chosen).name for _ in range(2)] == ["auto(flash_attn, flashinfer:fa3, flashinfer:batch)"] * 2
    assert len(caplog.records) == 1 and kernels["flash_attn"].asked == kernels["triton"].asked == 1
    chosen.check([spec(head_dim=128)], 16, torch.float32, CPU)  # another model
    assert kernels["flash_attn"].asked == 2

    def stopped(layers, block_size, dtype, device):
        raise KeyboardInterrupt

    check, kernels["flash_attn"].check = kernels["flash_attn"].check, stopped
    with pytest.raises(KeyboardInterrupt):
        ask(chosen)
    kernels["flash_attn"].check = check
    assert ask(chosen).name == "auto(flash_attn, flashinfer:fa3, flashinfer:batch)"  # a choice broken off is no choice


@pytest.mark.parametrize(
    "fault, said",
    [
        (
            RuntimeError("out of resource: shared memory"),
            "triton failed on a small batch .decodes.: RuntimeError: out of",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "no memory to try it: OutOfMemoryError: CUDA out of"),
    ],
)
def test_where_our_own_kernels_do_not_run_auto_takes_the_next(kernels, monkeypatch, fault, said):
    """Triton's check reads numbers alone; that a kernel cannot be launched on this card shows when it is tried."""

    def attend(*_):
        raise fault

    monkeypatch.setattr(kernels["triton"], "attend", attend)
    chosen = ask(AutoAttention(graphs=True))
    assert chosen.name == "auto(flash_attn, flashinfer:fa3, flashinfer:batch)" and not chosen.graph_safe
    assert re.search(f"left out triton: {said}", chosen.explain())


def test_a_plan_that_fails_in_a_run_gives_way_to_the_next(kernels, caplog):
    chosen = ask(AutoAttention(graphs=False))
    kernels["flashinfer:batch"].breaks = True
    chosen.plan(MIXED)
    assert "triton ran" in chosen.explain()
    assert "left out flashinfer:batch: its plan failed: RuntimeError: no kernel image" in chosen.explain()
    chosen.plan(PROMPTS)
    assert "flashinfer:fa3 ran" in chosen.explain()
    kernels["triton"].breaks = kernels["flash_attn"].breaks = kernels["torch"].breaks = True
    with pytest.raises(RuntimeError, match="no kernel image"):  # the reference itself
        chosen.plan(MIXED)


def test_a_plan_without_memory_fails_its_step_alone(kernels, monkeypatch):
    """Another kernel would not have more; the next step may."""
    chosen, plan = ask(AutoAttention(graphs=False)), kernels["flashinfer:batch"].plan

    def full(meta):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels["flashinfer:batch"], "plan", full)
    with pytest.raises(torch.OutOfMemoryError):
        chosen.plan(MIXED)
    monkeypatch.setattr(kernels["flashinfer:batch"], "plan", plan)
    chosen.plan(MIXED)
    assert "flashinfer:batch ran" in chosen.explain() and "left out" not in chosen.explain()


def test_a_plan_in_a_capture_does_not_change_kernels(kernels):
    chosen = ask(AutoAttention(graphs=True))
    kernels["triton"].breaks = True
    with pytest.raises(RuntimeError, match="no kernel image"):
        chosen.plan(replace(MIXED, host=None))
    assert chosen.name == "triton"


def test_what_failed_for_one_kind_of_batch_is_left_out_for_all(kernels):
    kernels["flash_attn"].refuses = "blocks of 256"
    kernels["triton"].refuses = "no compiler"
    chosen = ask(AutoAttention(graphs=False))
    kernels["flashinfer:batch"].breaks = True
    chosen.plan(MIXED)
    kernels["flashinfer:batch"].breaks = False
    chosen.plan(DECODES)
    assert chosen.explain().startswith("auto took torch for decodes and mixed, flashinfer:fa3 for prompts")
    assert "torch ran" in chosen.explain()


def test_an_engine_lives_through_a_kernel_that_breaks(kernels, monkeypatch):
    """The tokens are those of the reference, whatever auto had to leave out in between."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 40, [5, 6]]
    with Engine("tiny", device="cpu", max_batch_tokens=16, max_requests=4) as engine:
        wanted = [c.token_ids for c in engine.generate(prompts, params)]
    chosen = AutoAttention(graphs=False)
    with Engine("tiny", device="cpu", max_batch_tokens=16, max_requests=4, attention=chosen) as engine:
        engine.generate([7], replace(params, max_tokens=2))
        kernels["flashinfer:batch"].breaks = True
        assert [c.token_ids for c in engine.generate(prompts, params)] == wanted
        assert "left out flashinfer:batch" in engine.explain() and "left out" in engine.attention.explain()


def test_the_table_names_kinds_and_backends_that_there_are():
    shares, source = auto.table("a card that nobody measured")
    assert "no figures for a card that nobody measured" in source
    for kind in auto.KINDS:
        assert "triton" in shares[kind] and all(0 < share < 1.2 for share in shares[kind].values())
        for name in shares[kind]:
            assert make_backend(name, CPU).name in (name, "torch")


def test_what_is_not_on_this_machine_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "minichunk.attention.triton_backend", None)
    with pytest.raises(
        Unsupported, match="attention='triton' needs the triton package .*: pip install triton, or use 'torch'"
    ):
        make_backend("triton", CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no usable CUDA device here; `minichunk doctor` says why"):
        Engine("tiny", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match="device cuda:1: .* CUDA_VISIBLE_DEVICES=1 and device='cuda'"):
        Engine("tiny", device="cuda:1")
