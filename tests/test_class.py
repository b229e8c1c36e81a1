"""A room of learners on one machine: turns on a shared card, the NOISY stamp, what a class needs."""

import subprocess
import sys
import threading
import time

import pytest

from minichunk import classroom
from minichunk.lab import turns

WAITER = """
import sys, time
from minichunk.lab.turns import gpu_turn
with gpu_turn(poll=0.02, say=lambda line: print("say", line, flush=True)):
    print("in", time.time(), flush=True)
    time.sleep(0.3)
print("out", time.time(), flush=True)
"""


@pytest.fixture(autouse=True)
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("MINICHUNK_TURNS", str(tmp_path / "turns"))
    return tmp_path / "turns"


def start(code: str = WAITER) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_kernels_measure_one_after_the_other_in_the_order_they_came(queue):
    said = []
    with turns.gpu_turn(say=said.append):
        first = start()
        while len(list(queue.iterdir())) < 2:
            time.sleep(0.02)
        second = start()
        while len(list(queue.iterdir())) < 3:
            time.sleep(0.02)
        time.sleep(0.2)
    lines = [p.communicate(timeout=60)[0].splitlines() for p in (first, second)]
    times = [{k: float(v) for k, v in (line.split() for line in out if line[:3] in ("in ", "out"))} for out in lines]
    assert said == []  # nobody was before us
    assert lines[0][0] == "say GPU 0: 1 before you" and lines[1][0] == "say GPU 0: 2 before you"
    assert "say GPU 0: your turn" in lines[0] and "say GPU 0: your turn" in lines[1]
    assert times[0]["in"] < times[1]["in"] and times[0]["in"] + 0.3 <= times[1]["in"]
    assert list(queue.iterdir()) == []


def test_cards_have_queues_of_their_own():
    with turns.gpu_turn(0), turns.gpu_turn(1, say=pytest.fail):
        pass


def test_a_kernel_that_dies_loses_its_place(queue):
    dead = start(
        "import time\nfrom minichunk.lab.turns import gpu_turn\nwith gpu_turn():\n    print('in', flush=True)\n    time.sleep(60)"
    )
    assert dead.stdout.readline() == "in\n"
    dead.kill()
    dead.wait()
    assert len(list(queue.iterdir())) == 1  # it could not take its ticket along
    entered = threading.Event()

    def enter():
        with turns.gpu_turn(poll=0.02):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(20)


def test_an_error_inside_gives_the_turn_back(queue):
    with pytest.raises(KeyError), turns.gpu_turn():
        raise KeyError("measured nothing")
    assert list(queue.iterdir()) == []


def test_noisy_by_spread():
    assert turns.noisy([10.0, 10.1, 9.9, 10.0]) is None
    assert turns.noisy([10.0, 10.1, 9.9, 14.0]).startswith("spread ")
    assert turns.noisy([10.0]) is None  # one reading has no spread


@pytest.mark.parametrize(
    "listing, others",
    [
        ("", 0),
        ("41, GPU-aa\n", 0),  # us
        ("41, GPU-aa\n77, GPU-aa\n", 1),
        ("41, GPU-aa\n77, GPU-bb\n", 0),  # another card
        ("900, GPU-aa\n", 0),  # a container: the driver knows us as 900
        ("900, GPU-aa\n901, GPU-aa\n902, GPU-aa\n", 2),
    ],
)
def test_other_processes_on_the_card(listing, others):
    assert turns._others("GPU-aa", 41, listing) == others


def test_what_a_class_needs(monkeypatch):
    monkeypatch.setattr(classroom, "memory_available", lambda: 10 * 2**30)
    monkeypatch.setattr(classroom, "cores", lambda: 8)
    monkeypatch.setattr(classroom, "num_threads", lambda: 2)
    memory, cores, _ = classroom.checks(4, one=2 * 2**30)
    assert (memory.state, cores.state) == ("ok", "ok") and "= 8.0 GiB; 10.0 GiB are free" in memory.found
    memory, cores, _ = classroom.checks(30, one=2 * 2**30)
    assert (memory.state, cores.state) == ("bad", "bad")
    assert "this machine holds 5 kernels" in memory.fix and "let 6 learners share a notebook" in memory.fix
    with pytest.raises(ValueError, match="at least 1 learner, got 0"):
        classroom.checks(0)


@pytest.mark.smollm2
def test_a_kernel_is_measured_with_the_model_in_a_folder_it_cannot_write(tmp_path, monkeypatch):
    """The shared copy of a class: other owner, no write bits, no network."""
    from minichunk import smollm2

    home = tmp_path / "home"
    home.mkdir()
    (home / "smollm2").symlink_to(smollm2.ensure())
    home.chmod(0o555)
    monkeypatch.setenv("MINICHUNK_HOME", str(home))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    assert 300 * 2**20 < classroom.kernel_bytes() < 3 * 2**30  # at least the engine's half gigabyte of weights
