"""Threads that compute by turns keep no helpers waiting, and none spins for long while others want the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  brings its OpenMP along

from rollout.cores import Usage, _gnu_openmp, is_crowded
from tests.tiny import make_model

gnu_openmp = pytest.mark.skipif(
    not (sys.platform == "linux" and _gnu_openmp()), reason="looks at the helpers of GNU OpenMP in /proc"
)
two_cores = pytest.mark.skipif(os.cpu_count() == 1, reason="threads that share one core never spin")

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
BY_TURNS = """
import asyncio
from grpo.background import LoopThread
from rollout.engine import Sampled, SampleRequest, SharedEngine

class Engine:
    def enter_thread(self):
        torch.set_num_threads(2)
    def add(self, key, request):
        self.key = key
    def step(self):
        results.append(compute())
        counts.append(num_helpers(alone))
        return [(self.key, Sampled((1,), (0.0,), "stop"))]

counts = []
shared = SharedEngine(Engine())
request = SampleRequest((1,), 1, 1.0, 0)
asyncio.run(shared.sample(request))
with LoopThread() as loop:
    for _ in range(2):
        results.append(compute())
        counts.append(num_helpers(alone))
        loop.run(shared.sample(request))
assert counts == [alone] * 5, (alone, counts)
assert results == [1000.0] * 6 and torch.get_num_threads() == 2
"""
SPIN = """
from concurrent.futures import ThreadPoolExecutor
from rollout.cores import be_brief, leave_cores

def spin_s():
    # Core-seconds, not those of the clock, of a helper between 20 small regions.
    start = time.process_time()
    for _ in range(20):
        VECTOR.add_(1)
        time.sleep(0.03)
    return time.process_time() - start

VECTOR = torch.zeros(100_000)
with ThreadPoolExecutor(1) as other:
    long = spin_s()
    other.submit(be_brief).result()
    brief = spin_s()
    other.submit(leave_cores).result()
    again = spin_s()
assert brief < long / 3 and brief < again / 3, (long, brief, again)
"""
BESIDE = """
import subprocess, sys
from rollout.cores import mind_neighbours

mind_neighbours(2)
mind_neighbours(2)
assert [thread.name for thread in threading.enumerate()].count("neighbours") == 1
num_cores = len(os.sched_getaffinity(0))
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
try:
    beside = num_helpers(alone + num_cores - 1)
finally:
    for process in others:
        process.kill()
assert beside == alone + num_cores - 1, (alone, beside)
"""
NAMES = "print(*[thread.name for thread in threading.enumerate()])"
CHAT = "import sys, threading\nfrom pathlib import Path\nfrom launch.chat import Model\nModel(Path(sys.argv[1]), ())\n"
CHOICES = """
from rollout.cores import mind_neighbours

mind_neighbours(1)
for name, value in [("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "5")]:
    os.environ[name] = value
    mind_neighbours.__wrapped__(2)
    del os.environ[name]
"""


def run(program: str, *arguments: object) -> str:
    """What it writes. Its OpenMP spins as it comes."""
    spins = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in spins}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@gnu_openmp
def test_a_thread_that_waits_keeps_no_helpers():
    # Of those that compute (the engine's, and the one that made it), only the one whose turn it is has a helper.
    run(HELPERS + BY_TURNS)


@gnu_openmp
@two_cores
def test_helpers_spin_briefly_while_another_thread_says_so():
    run(HELPERS + SPIN)


@gnu_openmp
@two_cores
def test_other_processes_on_the_cores_are_minded():
    run(HELPERS + BESIDE)


@gnu_openmp
def test_nobody_is_minded_where_the_user_says_how_long_to_spin_or_a_thread_is_alone():
    assert run(HELPERS + CHOICES + NAMES).split() == ["MainThread"]


@gnu_openmp
def test_a_chat_minds_its_neighbours(tmp_path: Path):
    assert "neighbours" in run(CHAT + NAMES, make_model(tmp_path)).split()


def test_cores_that_others_use_are_those_of_all_less_our_own():
    # In 2 s all processes took 3 core-seconds, of which 1 was ours.
    assert Usage(7.0, 13.0, 5.0).others_since(Usage(5.0, 10.0, 4.0)) == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_another_process_computes_is_not_taken_for_our_own():
    before = Usage.now(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    now = Usage.now(os.sched_getaffinity(0))
    assert now.others_since(before) * (now.at - before.at) > 0.4  # the kernel counts in ticks
    assert now.own_s - before.own_s < 0.4


def test_others_crowd_the_cores_that_our_threads_need():
    assert not is_crowded(0.2, spare=0, was_crowded=False)
    assert is_crowded(0.3, spare=0, was_crowded=False)
    assert not is_crowded(1.2, spare=1, was_crowded=False)  # as one of three cores is left to them
    assert is_crowded(0.2, spare=0, was_crowded=True)  # goes on
    assert not is_crowded(0.1, spare=0, was_crowded=True)
