"""What this machine has, what minichunk will use of it, and the one command that mends each fault."""

from __future__ import annotations

import html
import importlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from minichunk import smollm2
from minichunk.cuda_tools import driver_cuda, nvcc, nvcc_cuda
from minichunk.paths import pinned_torch
from minichunk.threads import cores, num_threads

PYTHON = (3, 11)
# Lowest versions, as in pyproject.toml (a test holds the two together).
CORE = {
    "torch": "2.11", "transformers": "5.17", "numpy": "2", "safetensors": "0.6", "tokenizers": "0.22", "gguf": "0.17",
    "typer": "0.16", "rich": "13.9", "filelock": "3.15", "platformdirs": "4.3", "tqdm": "4.66",
}  # fmt: skip
BELOW = {"transformers": "6"}
WIDGETS = {"jupyterlab": "4.4", "ipywidgets": "8.1.5", "plotly": "6.1", "anywidget": "0.9.18"}
KERNELS = {"triton": "3.6", "flash-attn": "2.8", "flashinfer-python": "0.6.13"}
PIP = "python -m pip install"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    state: "ok"; "off" is not here and not needed here; "bad" needs mending. fix: the one command that mends a bad line
    (or brings what is off). needed: without it the CPU path does not work.
    """

    name: str
    found: str
    state: Literal["ok", "off", "bad"]
    fix: str = ""
    needed: bool = False


def checks() -> list[Check]:
    """Looks at everything and changes nothing. Never raises because something is missing or broken."""
    torch, problem = _import("torch")
    cuda = torch is not None and torch.cuda.is_available()
    return [
        _python(),
        _torch(torch, problem),
        _packages("transformers", ["transformers"]),
        _packages("other packages", [name for name in CORE if name not in ("torch", "transformers")]),
        _threads(),
        _engine(),
        _model(),
        _packages("widgets", list(WIDGETS), needed=False),
        _driver(torch, cuda),
        _gpu(torch, cuda),
        _kernels("Triton", "triton", "triton", cuda, torch),
        _kernels("flash-attn", "flash-attn", "flash_attn", cuda, torch, "--no-build-isolation "),
        _kernels("FlashInfer", "flashinfer-python", "flashinfer", cuda, torch),
        _nvcc(cuda),
        _backend(torch, cuda),
    ]


def works(found: list[Check]) -> bool:
    """Whether the CPU path works: no bad line among the needed ones."""
    return not any(check.needed and check.state == "bad" for check in found)


class Report:
    """The checks as one line; in a notebook the line unfolds to the table."""

    def __init__(self, found: list[Check]):
        self.checks = found

    def __str__(self) -> str:
        by_name = {check.name: check for check in self.checks}
        bad = [check for check in self.checks if check.state == "bad"]
        parts = [f"{name} {by_name[name].found}" for name in ("Python", "torch", "threads", "backend")]
        parts.append("all well" if not bad else "; ".join(f"{c.name}: {c.found} → {c.fix}" for c in bad))
        return "minichunk doctor: " + " · ".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark = {"ok": "✓", "off": "–", "bad": "✗"}
        rows = "".join(
            f"<tr><td>{mark[c.state]} {c.state}</td><td>{html.escape(c.name)}</td><td>{html.escape(c.found)}</td>"
            f"<td><code>{html.escape(c.fix)}</code></td></tr>"
            for c in self.checks
        )
        head = "<tr><th></th><th></th><th>found</th><th>command</th></tr>"
        return f"<details><summary>{html.escape(str(self))}</summary><table>{head}{rows}</table></details>"


def summary() -> Report:
    """One line for a notebook's first cell."""
    return Report(checks())


# --- one function a line -------------------------------------------------------------------------------------------


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    ok = sys.version_info >= PYTHON
    return Check("Python", found, "ok" if ok else "bad", "" if ok else "make setup PYTHON=python3.12", needed=True)


def _torch(torch, problem: str | None) -> Check:
    fix = f'{PIP} "torch>={CORE["torch"]}"'
    if torch is None:
        return Check("torch", problem, "bad", fix, needed=True)
    found = str(torch.__version__)
    if not _at_least(found, CORE["torch"]):
        return Check("torch", f"{found}, at least {CORE['torch']} needed", "bad", fix, needed=True)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    pinned = pinned_torch()
    moved = (
        f"; make setup had installed {pinned}: another install changed it"
        if pinned and found.partition("+")[0] != pinned
        else ""
    )
    return Check("torch", f"{found}, {build}{moved}", "ok", needed=True)


def _packages(name: str, wanted: list[str], needed: bool = True) -> Check:
    """Installed and within the ranges of CORE, BELOW and WIDGETS."""
    ranges = {**CORE, **WIDGETS}
    here, wrong, asked = [], [], []
    for package in wanted:
        has, low, high = _version(package), ranges[package], BELOW.get(package)
        if has and _at_least(has, low) and not (high and _at_least(has, high)):
            here.append(f"{package} {has}")
        else:
            wrong.append(f"{package} {has or 'missing'}")
            asked.append(f'"{package}>={low}{f",<{high}" if high else ""}"')
    if wrong:
        return Check(name, ", ".join(wrong), "bad", f"{PIP} {' '.join(asked)}", needed)
    return Check(name, ", ".join(here), "ok", needed=needed)


def _threads() -> Check:
    try:
        return Check("threads", f"{num_threads()} of {cores()} cores", "ok", needed=True)
    except ValueError as error:
        return Check("threads", str(error), "bad", "unset MINICHUNK_THREADS", needed=True)


def _engine() -> Check:
    """The CPU path itself: two requests of the tiny model in mixed batches, with every check on."""
    fix = f'{PIP} --force-reinstall "torch>={CORE["torch"]}" "transformers>={CORE["transformers"]},<6"'
    try:
        from minichunk.engine import Engine
        from minichunk.request import SamplingParams

        params = SamplingParams(max_tokens=3, ignore_eos=True)
        with Engine("tiny", device="cpu", max_batch_tokens=4, max_requests=2, check=True) as engine:
            tokens = sum(len(c.token_ids) for c in engine.generate([[5, 6], [7, 8, 9, 10, 11]], params))
            mixed = sum(step.is_mixed for step in engine.run.steps)
    except Exception as error:  # whatever is wrong is what this line is there to say
        return Check("engine", f"{type(error).__name__}: {error}", "bad", fix, needed=True)
    return Check("engine", f"tiny model: {tokens} tokens, {mixed} mixed steps on the CPU", "ok", needed=True)


def _model() -> Check:
    where = smollm2.home() / "smollm2"
    if smollm2.is_ready():
        return Check("SmolLM2", str(where), "ok")
    command = 'python -c "from minichunk import smollm2; smollm2.ensure()"'
    return Check("SmolLM2", f"not in {where} yet: fetched at its first use (98 MB)", "off", command)


def _driver(torch, cuda: bool) -> Check:
    """torch's CUDA against the driver's. A driver runs every minor version of its own major version and all older."""
    driver = driver_cuda()
    if driver is None:
        return Check("NVIDIA driver", "none: minichunk runs on the CPU", "off")
    text = f"supports CUDA {driver[0]}.{driver[1]}"
    if torch is None:
        return Check("NVIDIA driver", text, "ok")
    if not torch.version.cuda:
        return Check("NVIDIA driver", f"{text}, but this torch is a CPU build", "bad", _cuda_torch(driver))
    if int(torch.version.cuda.split(".")[0]) > driver[0]:
        return Check("NVIDIA driver", f"{text}, torch needs {torch.version.cuda}", "bad", _cuda_torch(driver))
    if not cuda:
        return Check("NVIDIA driver", f"{text}, but torch finds no usable device", "bad", "nvidia-smi")
    return Check("NVIDIA driver", f"{text}, torch uses {torch.version.cuda}", "ok")


def _cuda_torch(driver: tuple[int, int]) -> str:
    """PyTorch's builds are named for their CUDA; one build of each major version is enough."""
    build = "cu130" if driver[0] >= 13 else "cu126"
    return f'{PIP} --force-reinstall "torch>={CORE["torch"]}" --index-url https://download.pytorch.org/whl/{build}'


def _gpu(torch, cuda: bool) -> Check:
    if not cuda:
        return Check("GPU", "none that torch can use", "off")
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    free, total = (n / 2**30 for n in torch.cuda.mem_get_info())
    found = f"{name}, compute capability {major}.{minor}, {free:.0f} of {total:.0f} GiB free"
    known = [int(arch[3:].rstrip("af")) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    if not any(arch // 10 == major and arch % 10 <= minor for arch in known):
        driver = driver_cuda() or (12, 0)
        # Cards that the newest builds dropped are served by the oldest one that PyTorch still makes.
        return Check("GPU", f"{found}, not served by this torch", "bad", _cuda_torch((min(driver[0], 12), 0)))
    return Check("GPU", found, "ok")


def _kernels(name: str, package: str, module: str, cuda: bool, torch, options: str = "") -> Check:
    """An optional package. Its command names the torch that is there, so that pip keeps it."""
    has = _version(package)
    keep = f" torch=={torch.__version__}" if torch is not None else ""
    fix = f'{PIP} {options}"{package}>={KERNELS[package]}"{keep}'
    if not has:
        return Check(name, "missing" if cuda else "not here; for CUDA machines", "off", fix if cuda else "")
    if not cuda:
        return Check(name, f"{has}, not used on a CPU", "off")
    if not _at_least(has, KERNELS[package]):
        return Check(name, f"{has}, at least {KERNELS[package]} needed", "bad", fix)
    loaded, problem = _import(module)
    if loaded is None:
        return Check(name, f"{has}, {problem}", "bad", f"{PIP} --force-reinstall --no-deps {options}{package}")
    return Check(name, has, "ok")


def _nvcc(cuda: bool) -> Check:
    found = nvcc()
    if not found:
        fix = (
            "conda install -c conda-forge cuda-nvcc"
            if "CONDA_PREFIX" in os.environ
            else "apt install nvidia-cuda-toolkit"
        )
        return Check("nvcc", "missing: FlashInfer compiles with it" if cuda else "not here", "off", fix if cuda else "")
    release = nvcc_cuda(found)
    if release is None:
        return Check("nvcc", f"{found} does not say its version", "bad", f"{found} --version")
    said = "{}.{}".format(*release)
    driver = driver_cuda()
    if driver and release[0] > driver[0]:
        return Check("nvcc", f"{said} ({found}), newer than the driver's CUDA {driver[0]}.{driver[1]}: what it compiles will not run", "bad", "nvidia-smi")  # fmt: skip
    return Check("nvcc", f"{said} ({found})", "ok")


def _backend(torch, cuda: bool) -> Check:
    """What Engine(attention="auto", device="auto") takes, said by the code that takes it."""
    if torch is None:
        return Check("backend", "none without torch", "bad", f'{PIP} "torch>={CORE["torch"]}"', needed=True)
    device = torch.device("cuda" if cuda else "cpu")
    try:
        from minichunk.attention import LayerSpec, make_backend
        from minichunk.options import resolve_dtype

        backend = make_backend("auto", device)
        backend.check([LayerSpec(32, 8, 128, 128, 128**-0.5)], 16, resolve_dtype("auto", device, ""), device)
        return Check("backend", f"{backend.name} on {device}", "ok", needed=not cuda)
    except Exception as error:
        return Check("backend", f"{type(error).__name__}: {error}", "bad", f"{PIP} triton", needed=not cuda)


# --- helpers -------------------------------------------------------------------------------------------------------


def _import(module: str):
    """(module, None) or (None, why not). A package built against another torch fails in any way it likes."""
    try:
        return importlib.import_module(module), None
    except Exception as error:
        return None, f"does not import: {error}".splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _at_least(has: str, low: str) -> bool:
    """Compares the numbers of the release, so 2.13.0+cpu ≥ 2.11 and 8.1.8 ≥ 8.1.5."""
    release = [int(n) for n in re.match(r"[\d.]*", has)[0].split(".") if n]
    return release >= [int(n) for n in low.split(".")]
