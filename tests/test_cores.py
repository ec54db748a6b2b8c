"""Threads that compute by turns keep no helpers waiting, and none holds up others on a core of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  brings its OpenMP along

from rollout.cores import Usage, _gnu_openmp, busy_ticks, fitting_threads
from tests.tiny import make_model

gnu_openmp = pytest.mark.skipif(
    not (sys.platform == "linux" and _gnu_openmp()), reason="looks at the helpers of GNU OpenMP in /proc"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
several_cores = pytest.mark.skipif(
    not (sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1), reason="a thread alone holds up nobody"
)

# Programs, each in a process of its own, whose threads are all known. Every product needs two threads.
HELPERS = """
import os, threading, time
import torch

def num_helpers(wanted=None):
    # A thread that starts or ends may be a moment late.
    end = time.monotonic() + 20
    while True:
        number = len(os.listdir("/proc/self/task")) - threading.active_count()
        if wanted in (None, number) or time.monotonic() > end:
            return number
        time.sleep(0.01)

def compute():
    return (MATRIX @ MATRIX).sum().item()

torch.set_num_threads(2)
MATRIX = torch.eye(1000)
results = [compute()]
alone = num_helpers()  # one, and what other libraries started
"""
ENGINE = """
import asyncio
from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine

class Engine:
    def enter_thread(self):
        torch.set_num_threads(2)
    def add(self, key, request):
        self.key = key
    def step(self):
        seen()
        return [(self.key, Sampled((1,), (0.0,), "stop"))]

shared = SharedEngine(Engine())
request = SampleRequest((1,), 1, 1.0, 0)
"""
BY_TURNS = """
from grpo.background import LoopThread

def seen():
    results.append(compute())
    counts.append(num_helpers(alone))

counts = []
asyncio.run(shared.sample(request))
with LoopThread() as loop:
    for _ in range(2):
        results.append(compute())
        counts.append(num_helpers(alone))
        loop.run(shared.sample(request))
assert counts == [alone] * 5, (alone, counts)
assert results == [1000.0] * 6 and torch.get_num_threads() == 2
"""
BESIDE = """
import subprocess, sys
from rollout.cores import mind_neighbours, take_cores

take_cores()
assert torch.get_num_threads() == 2
mind_neighbours()
mind_neighbours()
assert [thread.name for thread in threading.enumerate()].count("neighbours") == 1
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
seen = lambda: results.append(torch.get_num_threads())
try:
    end = time.monotonic() + 20
    while torch.get_num_threads() > 1 and time.monotonic() < end:
        time.sleep(0.1)
        take_cores()
    assert torch.get_num_threads() == 1
    asyncio.run(shared.sample(request))
    assert results.pop() == 1  # in the engine's thread
finally:
    for process in others:
        process.kill()
assert compute() == 1000.0
"""
NAMES = "print(*[thread.name for thread in threading.enumerate()])"
CHAT = "import sys, threading\nfrom pathlib import Path\nfrom launch.chat import Model\nModel(Path(sys.argv[1]), ())\n"
MIND = "from rollout.cores import mind_neighbours\nmind_neighbours()\n"


def run(program: str, *arguments: object, **environment: str) -> str:
    """What it writes. Its OpenMP has threads, and they spin, as they come."""
    chosen = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in chosen} | environment
    environment |= {"PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@gnu_openmp
def test_a_thread_that_waits_keeps_no_helpers():
    # Of those that compute (the engine's, and the one that made it), only the one whose turn it is has a helper.
    run(HELPERS + ENGINE + BY_TURNS)


@several_cores
def test_cores_are_left_to_other_processes_that_want_them():
    run(HELPERS + ENGINE + BESIDE)


@linux
def test_nobody_is_minded_where_the_user_says_how_many_threads_there_are_or_one_is_alone():
    assert run(HELPERS + MIND + NAMES, OMP_NUM_THREADS="2").split() == ["MainThread"]
    one_thread = HELPERS.replace("set_num_threads(2)", "set_num_threads(1)")
    assert run(one_thread + MIND + NAMES).split() == ["MainThread"]


@several_cores
def test_a_chat_minds_its_neighbours(tmp_path: Path):
    assert "neighbours" in run(CHAT + NAMES, make_model(tmp_path)).split()


def test_cores_that_others_use_are_those_of_all_less_our_own():
    # In 2 s all processes took 3 core-seconds, of which 1 was ours.
    assert Usage(7.0, 13.0, 5.0).others_since(Usage(5.0, 10.0, 4.0)) == 1.0


@linux
def test_what_another_process_computes_is_not_taken_for_our_own():
    before = Usage.now(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    now = Usage.now(os.sched_getaffinity(0))
    assert now.others_since(before) * (now.at - before.at) > 0.4  # the kernel counts in ticks
    assert now.own_s - before.own_s < 0.4


def test_only_our_cores_count_and_processes_that_give_way_to_us_do_not():
    #       user nice system idle iowait irq softirq steal guest guest_nice
    stat = """\
cpu  1111 222 333 444 55 66 77 88 0 0
cpu0 1000 200 30 400 50 6 7 80 0 0
cpu1 100 20 300 40 4 50 60 7 0 0
cpu10 11 2 3 4 1 10 10 1 0 0
intr 123
"""
    assert busy_ticks(stat, {1}, with_nice=True) == 100 + 20 + 300 + 50 + 60
    assert busy_ticks(stat, {1}, with_nice=False) == 100 + 300 + 50 + 60
    assert busy_ticks(stat, {0, 10}, with_nice=False) == 1043 + 34


@pytest.mark.parametrize(
    ("present", "free", "expected"),
    [
        (2, 1.9, 2),  # a desktop at rest
        (2, 1.76, 2),
        (2, 1.74, 1),
        (1, 1.84, 1),  # what was left is taken back a little later
        (1, 1.86, 2),
        (1, 0.2, 1),  # one remains, whatever others want
        (4, 16.0, 8),  # and never more than there are
        (8, 5.5, 5),
        (5, 6.9, 7),
    ],
)
def test_threads_fit_on_the_cores_that_others_leave(present, free, expected):
    assert fitting_threads(8, present, free) == expected
