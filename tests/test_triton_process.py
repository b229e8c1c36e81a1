"""tests/test_triton.py in a process of its own, where Triton's interpreter is on before anything imports triton.

transformers imports triton, and triton decides at its import whether its own helpers are interpreted: in a session
that met transformers first, test_triton.py skips itself and this test runs it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device needs no interpreter")
def test_kernels_in_the_interpreter():
    triton = sys.modules.get("triton")
    if triton is not None and type(triton.language.cdiv).__name__.startswith("Interpreted"):
        pytest.skip("this session's triton is interpreted: test_triton.py ran in it")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "test_triton.py")],
        cwd=here.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
