"""`minichunk lab` as a real process: however it ends, JupyterLab ends with it. tests/browser starts the real JupyterLab."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = """
import pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
def stop(number, frame):
    time.sleep(0.5)  # as JupyterLab, which stops its kernels first
    (here / "stopped").write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, lambda *_: None)  # JupyterLab asks before it ends
(here / "started").write_text(str(__import__("os").getpid()))
if "--port=7" in sys.argv:
    sys.exit(7)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """start(*arguments) → `minichunk lab` with a stand-in for JupyterLab, once that runs; its folder has `started` and `stopped`."""
    folder = tmp_path / "jupyterlab"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "MINICHUNK_MY": str(tmp_path / "my")}
    processes = []

    def run(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "minichunk.cli", "lab", "--no-browser", *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        wait_for(lambda: (folder / "started").exists() and (folder / "started").read_text())
        return process, folder

    yield run
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_for(check, seconds=60):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 0)])
def test_a_signal_to_minichunk_lab_stops_jupyterlab_first(start, name, code):
    process, folder = start()
    process.send_signal(getattr(signal, name))  # to `minichunk lab` alone, as `kill` and a container do
    assert process.wait(30) == code
    assert (folder / "stopped").read_text() == "SIGTERM"  # it had the time to stop its kernels
    assert not is_alive(int((folder / "started").read_text()))


def test_its_exit_code_is_jupyterlabs(start):
    process, folder = start("--port", "7")
    assert process.wait(30) == 7 and not (folder / "stopped").exists()
