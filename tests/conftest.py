"""What all tests share. Markers are explained in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test never waits for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

if not torch.cuda.is_available():  # read when triton is imported, which transformers does
    os.environ["TRITON_INTERPRET"] = "1"

import notebook_runs  # noqa: E402

from minichunk.threads import num_threads  # noqa: E402

torch.set_num_threads(num_threads())
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def run_python():
    """run_python(code, **environment) runs `code` in a fresh interpreter and returns what it printed."""

    def run(code: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# Rooms whose tests take tens of seconds each: `make test-fast` leaves them out, `make test` runs them.
SLOW = {
    "test_bug_table", "test_claims", "test_cli_simulate", "test_engine", "test_equality", "test_families", "test_graphs", "test_lab_blocks",
    "test_models", "test_overlap", "test_scrubber", "test_simulator", "test_setup", "test_triton", "test_tuning", "test_wrong",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    """`-m "not notebook"`, `-m "not gpu"` and `-m "not slow"` work without a mark on each test."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")
        if getattr(item, "nbmake", False):
            item.add_marker("notebook")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


notebook_runs.watch_notebooks()
