"""Threads that compute by turns do not keep each other's helpers waiting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch  # noqa: F401  brings its OpenMP along

from rollout.cores import _gnu_pause

# In a process of its own, whose threads are all known. Every product needs two threads.
PROGRAM = """
import os, time
import torch
from grpo.background import LoopThread
from rollout.engine import Sampled, SampleRequest, SharedEngine

def num_threads(most=999):
    # A thread that ends may be a moment late.
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > most and time.monotonic() < end:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))

def compute():
    return (MATRIX @ MATRIX).sum().item()

class Engine:
    def enter_thread(self):
        torch.set_num_threads(2)
    def add(self, key, request):
        self.key = key
    def step(self):
        results.append(compute())
        counts.append(num_threads(counts[0] + 2))
        return [(self.key, Sampled((1,), (0.0,), "stop"))]

torch.set_num_threads(2)
MATRIX = torch.eye(1000)
results, counts = [compute()], [num_threads()]
shared = SharedEngine(Engine())
with LoopThread() as loop:
    for _ in range(2):
        loop.run(shared.sample(SampleRequest((1,), 1, 1.0, 0)))
        results.append(compute())
        counts.append(num_threads(counts[0] + 2))
print(*counts)
assert results == [1000.0] * 5 and torch.get_num_threads() == 2
"""


@pytest.mark.skipif(
    not (sys.platform.startswith("linux") and _gnu_pause()), reason="counts the helpers of GNU OpenMP in /proc"
)
def test_a_thread_that_waits_keeps_no_helpers():
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    alone, *shared = map(int, done.stdout.split())
    # The loop's thread and the engine's came, but of all that compute only the one whose turn it is has a helper.
    assert shared == [alone + 2] * 4
