"""The set-up files agree with one another and with the code."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from notebook_runs import hidden_widget_error
from packaging.requirements import Requirement
from packaging.version import Version

from minichunk import doctor
from minichunk.attention import flashinfer_backend
from minichunk.paths import data_path
from minichunk.threads import cores, num_threads

ROOT = Path(__file__).resolve().parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: [Requirement(r) for r in lines] for name, lines in PROJECT["optional-dependencies"].items()}
CORE = [Requirement(r) for r in PROJECT["dependencies"]]
INSTALLED = [*CORE, *EXTRAS["notebooks"], *EXTRAS["test"]]
CUDA_ONLY = re.compile(r"^(torch|triton|nvidia-|cuda-)")


def ranges(requirements):
    return {r.name: r.specifier for r in requirements}


def locked():
    """{name: [(version, its hashes, marker or None)]} of requirements.lock."""
    found = {}
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            spec, *hashes = line.split("--hash=")
            requirement = Requirement(spec)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found.setdefault(requirement.name, []).append((pin.version, hashes, requirement.marker))
    return found


# --- environment.yml -----------------------------------------------------------------------------------------------


def environment_lines():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    return [line.strip() for line in text.split("dependencies:")[1].splitlines() if re.match(r"\s+(# )?- ", line)]


def test_environment_and_pyproject_ask_for_the_same_packages():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    asked = ranges(Requirement(line) for line in listed if isinstance(line, str))
    asked["torch"] = asked.pop("pytorch-cpu")
    assert asked.pop("python") == PROJECT["requires-python"]
    del asked["pip"]
    assert asked == ranges(INSTALLED)
    assert listed[-1] == {"pip": ["-e ."]}


def test_environment_says_what_each_line_is_for():
    for line in environment_lines():
        assert line == "- pip:" or re.search(r"\S  # \w.+", line), line


def test_environment_has_the_cuda_packages_commented_out():
    off = ranges(Requirement(line[4:].split("  #")[0]) for line in environment_lines() if line.startswith("# - "))
    assert off == ranges([*EXTRAS["flash-attn"], *EXTRAS["flashinfer"]])


# --- the lock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", [r for r in INSTALLED if r.name != "torch"], ids=lambda r: r.name)
def test_lock_satisfies_pyproject(requirement):
    for version, _hashes, _marker in locked()[requirement.name]:
        assert version in requirement.specifier


def test_lock_has_hashes_and_nothing_of_torchs_cuda_build():
    for name, pins in locked().items():
        assert not CUDA_ONLY.match(name), name
        assert all(hashes for _version, hashes, _marker in pins), name


@pytest.mark.parametrize("python", ["3.11.9", "3.12.9", "3.13.9"])
@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_lock_gives_each_python_and_system_one_version(python, system):
    here = {"python_full_version": python, "python_version": python[:4], "sys_platform": system, "os_name": "posix"}
    for name, pins in locked().items():
        fitting = [v for v, _hashes, marker in pins if marker is None or marker.evaluate(here)]
        assert len(fitting) <= 1, (name, fitting)
        if name in ranges(INSTALLED):
            assert len(fitting) == 1, name


def test_torch_is_pinned_within_the_range():
    lines = (ROOT / "requirements-torch.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]
    assert "2.13.0" in ranges(CORE)["torch"]


def test_extras_do_not_move_torch():
    """Neither an extra of ours nor a command of the doctor asks pip for another torch than the one that is there."""
    assert not any(r.name.startswith("torch") for requirements in EXTRAS.values() for r in requirements)
    import torch

    for package, module in [("flash-attn", "flash_attn"), ("flashinfer-python", "flashinfer"), ("triton", "triton")]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor, "_version", lambda name: None)
            assert doctor._kernels("X", package, module, True, torch).fix.endswith(f" torch=={torch.__version__}")


# --- code and packaging --------------------------------------------------------------------------------------------


def test_doctor_asks_for_what_pyproject_asks_for():
    for requirement in [*CORE, *EXTRAS["notebooks"]]:
        low = {**doctor.CORE, **doctor.WIDGETS}[requirement.name]
        assert requirement.specifier.contains(low)
        assert str(requirement.specifier).count(f">={low}") == 1
    assert {*doctor.CORE, *doctor.WIDGETS} == set(ranges([*CORE, *EXTRAS["notebooks"]]))
    assert Version(".".join(map(str, doctor.PYTHON))) in Requirement(f"x{PROJECT['requires-python']}").specifier
    for package, extra in (("triton", "triton"), ("flash-attn", "flash-attn"), ("flashinfer-python", "flashinfer")):
        assert f">={doctor.KERNELS[package]}" in str(ranges(EXTRAS[extra])[package])
    assert doctor.KERNELS["flashinfer-python"] == ".".join(map(str, flashinfer_backend.LOWEST))
    assert doctor.BELOW["transformers"] in str(ranges(CORE)["transformers"])


def test_every_import_is_declared():
    """What minichunk/ imports from outside the standard library is a dependency or an extra of its own."""
    own_name = {"flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
    # Parts that another package cannot be without:
    own_name |= {"IPython": "ipywidgets", "traitlets": "ipywidgets", "huggingface_hub": "transformers"}
    declared = set(ranges([*INSTALLED, *EXTRAS["triton"], *EXTRAS["flash-attn"], *EXTRAS["flashinfer"]]))
    for file in sorted((ROOT / "minichunk").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"minichunk"}:
                assert own_name.get(top, top) in declared, f"{file.name} imports {top}"


def test_data_path_finds_files_and_names_what_is_missing():
    assert data_path("prompts.jsonl").read_text(encoding="utf-8").startswith("{")
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        data_path("no-such-file")


def test_threads(monkeypatch):
    monkeypatch.delenv("MINICHUNK_THREADS", raising=False)
    assert num_threads() == min(4, cores())
    monkeypatch.setenv("MINICHUNK_THREADS", "7")
    assert num_threads() == 7
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("MINICHUNK_THREADS", wrong)
        with pytest.raises(ValueError, match=f"MINICHUNK_THREADS.*{re.escape(wrong)}"):
            num_threads()


# --- what git holds ------------------------------------------------------------------------------------------------


def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_large_file_is_tracked():
    assert [f.name for f in tracked() if f.stat().st_size > 1_500_000] == []


def test_no_path_or_package_index_of_one_machine_is_tracked():
    machine = re.compile(
        r"""(?<![\w.~}$)])/(?:work|root|farm|home|Users)/\w"""  # a folder of somebody's machine
        r"""|(?:index-url|find-links)[= ]+["']?(?:https?|file):(?!//download\.pytorch\.org/)"""
        r"""|file:/{2}/|https?://(?:pypi\.org|files\.pythonhosted\.org)"""
    )
    found = []
    for file in tracked():
        if file.suffix in (".gz", ".png", ".svg"):
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if machine.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


# --- make ----------------------------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def make(*arguments):
    """Runs make as from a shell, though these tests may themselves run under `make test`."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=own)


@needs_make
@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_make_without_a_fitting_python_says_so_in_one_line(tmp_path, python):
    done = make("setup", f"PYTHON={python}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stdout and len(done.stdout.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


@needs_make
def test_make_installs_again_only_when_a_file_changed(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    (venv / ".installed").touch()
    assert "pip install" not in make("--dry-run", "setup", f"VENV={venv}").stdout
    assert "pip install" in make("--dry-run", "--what-if=requirements.lock", "setup", f"VENV={venv}").stdout


@needs_make
def test_make_test_sets_up_and_runs_everything_else_than_the_browser(tmp_path):
    said = make("--dry-run", "test", f"VENV={tmp_path}").stdout
    assert "-m venv" in said and "requirements.lock" in said and "requirements-torch.txt" in said
    assert re.search(r'pytest .*-m "not browser".* tests notebooks', said)
    assert said.index("smollm2.ensure") < said.index("-m pytest")


def test_ci_is_a_bash_script_that_calls_make():
    script = ROOT / ".ci/run"
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash") and "set -euo pipefail" in text
    assert re.search(r"^make test$", text, re.M) and re.search(r"^make test-browser$", text, re.M)
    assert os.name == "nt" or os.access(script, os.X_OK)


# --- nbmake --------------------------------------------------------------------------------------------------------


def notebook_of(*cells):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def test_hidden_widget_error_reads_the_widgets_state():
    notebook = notebook_of("1")
    assert hidden_widget_error(notebook) is None
    output = {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": ["line 3"]}
    models = {"a": {"state": {}}, "b": {"state": {"outputs": [{"output_type": "stream"}, output]}}}
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": models}}
    assert hidden_widget_error(notebook) == "KeyError: 'x'\nline 3"


@pytest.mark.notebook
@pytest.mark.parametrize("body, error", [("1 / 0", "a widget hid ZeroDivisionError: division by zero"), ("1", None)])
def test_nbmake_sees_an_exception_that_a_widget_caught(tmp_path, body, error):
    nb_run = pytest.importorskip("nbmake.nb_run")
    import nbformat

    cell = f"import ipywidgets\nout = ipywidgets.Output()\ndisplay(out)\nwith out:\n    {body}"
    path = tmp_path / "widget.ipynb"
    nbformat.write(notebook_of(cell, "'the notebook goes on'"), path)
    result = nb_run.NotebookRun(path, 60).execute()
    assert (result.error and result.error.summary) == error
