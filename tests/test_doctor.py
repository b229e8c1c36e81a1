"""The doctor finds each fault, names one command for it, and tells a broken CPU path from what is merely not there."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from minichunk import cli, cuda_tools, doctor, paths
from minichunk.doctor import Check, Report, works


def by_name(found):
    return {check.name: check for check in found}


def fake_torch(version="2.13.0+cu130", cuda="13.0", capability=(9, 0), arches=("sm_80", "sm_90")):
    """What the doctor reads of a torch on a CUDA machine."""
    device = SimpleNamespace(
        get_device_name=lambda: "Card",
        get_device_capability=lambda: capability,
        mem_get_info=lambda: (70 << 30, 80 << 30),
        get_arch_list=lambda: list(arches),
    )
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda), cuda=device)


@pytest.fixture(scope="module")
def found():
    return doctor.checks()


def test_this_machine_can_run_on_the_cpu_and_every_bad_line_has_a_command(found):
    assert works(found)
    assert all(check.fix for check in found if check.state == "bad")
    assert len({check.name for check in found}) == len(found)
    here = by_name(found)
    assert here["engine"].found == "tiny model: 6 tokens, 1 mixed steps on the CPU"
    wanted = "Python torch transformers threads SmolLM2 widgets GPU Triton flash-attn FlashInfer nvcc backend"
    assert set(wanted.split()) <= set(here)


def test_checks_change_nothing(found, monkeypatch):
    import os

    import torch

    before = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()
    assert doctor.checks() == found
    assert (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()) == before


# --- each fault ----------------------------------------------------------------------------------------------------


def test_old_python(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 14))
    check = doctor._python()
    assert check.state == "bad" and check.needed and "PYTHON=" in check.fix


@pytest.mark.parametrize(
    "has, state", [("2.10.0", "bad"), ("2.11", "ok"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0", "ok")]
)
def test_torch_version(has, state):
    assert doctor._torch(fake_torch(has, cuda=None), None).state == state


def test_a_torch_that_another_install_moved_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "pinned_torch", lambda: "2.13.0")
    assert (
        "make setup had installed 2.13.0: another install changed it"
        in doctor._torch(fake_torch("2.11.0+cu130"), None).found
    )
    assert "another install" not in doctor._torch(fake_torch("2.13.0+cpu", cuda=None), None).found


def test_the_pin_counts_in_the_checkouts_own_environment_only(monkeypatch):
    monkeypatch.setattr(paths.sys, "prefix", str(paths._PACKAGE.parent / ".venv"))
    assert paths.pinned_torch() == "2.13.0"
    monkeypatch.setattr(paths.sys, "prefix", "/elsewhere")
    assert paths.pinned_torch() is None


def test_torch_that_does_not_import():
    check = doctor._torch(None, "does not import: libc10.so is missing")
    assert check.state == "bad" and check.needed and "libc10.so" in check.found and "torch>=2.11" in check.fix


@pytest.mark.parametrize(
    "has, state",
    [("5.17.0", "ok"), ("5.24.1", "ok"), ("5.16.9", "bad"), ("6.0.0", "bad"), ("6.0rc1", "bad"), (None, "bad")],
)
def test_transformers_version(monkeypatch, has, state):
    monkeypatch.setattr(doctor, "_version", lambda package: has)
    check = doctor._packages("transformers", ["transformers"])
    assert check.state == state and check.needed
    assert state == "ok" or check.fix == 'python -m pip install "transformers>=5.17,<6"'


def test_only_the_packages_at_fault_are_in_the_command(monkeypatch):
    monkeypatch.setattr(
        doctor, "_version", lambda package: {"plotly": "5.24.0", "anywidget": None}.get(package, "99.0")
    )
    check = doctor._packages("widgets", list(doctor.WIDGETS), needed=False)
    assert check.found == "plotly 5.24.0, anywidget missing"
    assert check.fix == 'python -m pip install "plotly>=6.1" "anywidget>=0.9.18"'


def test_missing_widgets_do_not_break_the_cpu_path():
    assert works([Check("widgets", "plotly missing", "bad", "pip", needed=False)])
    assert not works([Check("torch", "missing", "bad", "pip", needed=True)])


def test_bad_number_of_threads(monkeypatch):
    monkeypatch.setenv("MINICHUNK_THREADS", "many")
    check = doctor._threads()
    assert check.state == "bad" and "'many'" in check.found and check.fix == "unset MINICHUNK_THREADS"


def test_an_engine_that_fails_is_reported_and_not_raised(monkeypatch):
    from minichunk.runner import ModelRunner

    def broken(self, *args):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(ModelRunner, "run", broken)
    check = doctor._engine()
    assert check.state == "bad" and check.needed and check.fix


def test_missing_model_is_no_fault_and_says_how_to_fetch_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MINICHUNK_HOME", str(tmp_path))
    check = doctor._model()
    assert check.state == "off" and str(tmp_path) in check.found and "smollm2.ensure()" in check.fix
    assert list(tmp_path.iterdir()) == []


# --- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "driver, torch_cuda, usable, state, words",
    [
        (None, None, False, "off", "runs on the CPU"),
        ((13, 0), "13.0", True, "ok", "torch uses 13.0"),
        ((12, 4), "12.6", True, "ok", "torch uses 12.6"),  # minor versions of one major version go together
        ((12, 4), "13.0", False, "bad", "supports CUDA 12.4, torch needs 13.0"),
        ((13, 0), None, False, "bad", "CPU build"),
        ((13, 0), "13.0", False, "bad", "no usable device"),
    ],
)
def test_torchs_cuda_against_the_driver(monkeypatch, driver, torch_cuda, usable, state, words):
    monkeypatch.setattr(doctor, "driver_cuda", lambda: driver)
    check = doctor._driver(fake_torch(cuda=torch_cuda), usable)
    assert check.state == state and words in check.found and not check.needed
    assert bool(check.fix) == (state == "bad")


@pytest.mark.parametrize("driver, build", [((12, 4), "cu126"), ((13, 1), "cu130")])
def test_the_command_takes_a_torch_that_the_driver_can_run(driver, build):
    assert doctor._cuda_torch(driver).endswith(f"/whl/{build}")


@pytest.mark.parametrize(
    "capability, state", [((8, 0), "ok"), ((8, 9), "ok"), ((9, 0), "ok"), ((7, 0), "bad"), ((12, 0), "bad")]
)
def test_compute_capability_against_what_torch_was_built_for(monkeypatch, capability, state):
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (13, 0))
    check = doctor._gpu(fake_torch(capability=capability), cuda=True)
    assert check.state == state
    assert "compute capability {}.{}".format(*capability) in check.found and "70 of 80 GiB" in check.found


def test_a_kernel_package_built_for_another_torch(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: "2.8.3")
    monkeypatch.setattr(doctor, "_import", lambda module: (None, "does not import: undefined symbol: _ZN3c10"))
    check = doctor._kernels("flash-attn", "flash-attn", "flash_attn", True, fake_torch(), "--no-build-isolation ")
    assert check.state == "bad" and "undefined symbol" in check.found and "--no-deps" in check.fix


def test_a_kernel_package_that_is_too_old(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: "0.5.1")
    check = doctor._kernels("FlashInfer", "flashinfer-python", "flashinfer", True, fake_torch())
    assert check.state == "bad" and check.found == "0.5.1, at least 0.6.13 needed"
    assert '"flashinfer-python>=0.6.13" torch==' in check.fix


def test_kernel_packages_are_not_asked_for_on_a_cpu(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    check = doctor._kernels("FlashInfer", "flashinfer-python", "flashinfer", False, fake_torch())
    assert check.state == "off" and check.fix == ""


def test_nvcc_is_found_in_cuda_home(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.1\n")
    nvcc.chmod(0o755)
    real = cuda_tools.shutil.which
    only = lambda name, path=None: real(name, path=path) if path == str(tmp_path / "bin") else None  # noqa: E731
    monkeypatch.setattr(cuda_tools.shutil, "which", only)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (12, 4))
    assert doctor._nvcc(True) == Check("nvcc", f"12.9 ({nvcc})", "ok")
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (11, 8))
    assert doctor._nvcc(True).state == "bad" and "newer than the driver's CUDA 11.8" in doctor._nvcc(True).found
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert doctor._nvcc(True).fix and not doctor._nvcc(False).fix


# --- how it is shown -----------------------------------------------------------------------------------------------


def test_summary_is_one_line_and_names_the_faults(found):
    assert len(str(Report(found)).splitlines()) == 1
    assert str(Report(found)).endswith("all well") == (not any(c.state == "bad" for c in found))
    fault = Check("widgets", "plotly missing", "bad", "pip install plotly")
    line = str(Report([c for c in found if c.name != "widgets"] + [fault]))
    assert line.endswith("widgets: plotly missing → pip install plotly")


def test_html_shows_every_line_and_escapes(found):
    table = Report([*found, Check("x", "<b> & more", "bad", "fix <this>")])._repr_html_()
    assert table.count("<tr>") == len(found) + 2
    assert "&lt;b&gt; &amp; more" in table and "fix &lt;this&gt;" in table


@pytest.mark.parametrize("needed, code", [(True, 1), (False, 0)])
def test_command_ends_with_1_only_if_the_cpu_path_is_broken(monkeypatch, needed, code):
    lines = [
        Check("Python", "3.12", "ok", needed=True),
        Check("torch [cpu]", "missing", "bad", "pip install torch", needed),
    ]
    monkeypatch.setattr(doctor, "checks", lambda: lines)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert "torch [cpu]" in result.output and "→ pip install torch" in result.output
