"""The cores of a machine without a GPU: between threads of one process that compute on them by turns, and between
that process and others.

Both are about GNU OpenMP, which torch's builds for a CPU bring along. Its threads spin while they wait for each other,
for milliseconds, which saves a seventh of a training run as long as nobody else wants the core. It knows how to be
brief: once it has more threads than there are cores, each of them spins for microseconds, then sleeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_OMP_PAUSE_SOFT = 1
_LOOK_EVERY_S = 0.5
_STAT = Path("/proc/stat")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def leave_cores() -> None:
    """Ends the helpers that OpenMP keeps for the calling thread; its next parallel region starts new ones.

    For a thread that computes to call before it waits for another that computes. GNU OpenMP counts the helpers of
    all threads: with those of both there are more than cores, none spins any more, and both threads take a fifth
    longer (tests/bench/bench_update.py, the whole step). Other OpenMP libraries do not do so, and with them nothing
    happens here.
    """
    openmp = _gnu_openmp()
    if openmp:
        openmp.omp_pause_resource_all(_OMP_PAUSE_SOFT)


@cache
def mind_neighbours(num_threads: int) -> None:
    """From now on, while other processes want the cores of this one's `num_threads` OpenMP threads, these spin briefly.

    Who spins for a thread that has lost its core keeps it from the core that is left: a training step beside one busy
    loop on two cores took three times as long (tests/bench/bench_neighbour.py measures it). Nothing happens where
    there is nothing to mend: one thread alone, another OpenMP, no /proc, or OMP_WAIT_POLICY or GOMP_SPINCOUNT set by
    the user, which say how long to spin.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if num_threads > 1 and not chosen and sys.platform == "linux" and _STAT.exists() and _gnu_openmp():
        threading.Thread(target=_mind, args=(num_threads,), name="neighbours", daemon=True).start()


def _mind(num_threads: int) -> None:
    cores = os.sched_getaffinity(0)
    crowded, before = False, Usage.now(cores)
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = Usage.now(cores)
        was_crowded, crowded = crowded, is_crowded(now.others_since(before), len(cores) - num_threads, crowded)
        before = now
        if crowded and not was_crowded:
            be_brief()
        elif was_crowded and not crowded:
            leave_cores()


def be_brief() -> None:
    """Lets no OpenMP thread of this process spin for long, until the calling thread ends or leaves the cores.

    Its helpers, one fewer than cores, are what makes more threads than cores wherever another thread has a helper.
    They do nothing: each frees a null pointer, then sleeps.
    """
    openmp = _gnu_openmp()
    if openmp:
        openmp.GOMP_parallel(ctypes.cast(openmp.free, ctypes.c_void_p), None, openmp.omp_get_num_procs(), 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """What some cores have done so far."""

    at: float
    """Seconds."""
    all_s: float
    """Core-seconds of all processes on these cores."""
    own_s: float
    """Core-seconds of this process."""

    @classmethod
    def now(cls, cores: AbstractSet[int]) -> Usage:
        names, ticks = {f"cpu{core}" for core in cores}, 0
        for line in _STAT.read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
                ticks += user + nice + system + irq + softirq
        return cls(time.monotonic(), ticks / _TICKS_PER_S, time.process_time())

    def others_since(self, before: Usage) -> float:
        """Cores that other processes kept busy, on average."""
        return (self.all_s - before.all_s - (self.own_s - before.own_s)) / (self.at - before.at)


def is_crowded(others: float, spare: int, was_crowded: bool) -> bool:
    """Whether `others`, cores that other processes use, are more than the `spare` ones that our threads leave them.

    A quarter of a core more: a desktop at rest needs a tenth. Less of it ends a crowd, so that it does not come and go.
    """
    return others > spare + (0.15 if was_crowded else 0.25)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """Not before torch is imported, which brings its OpenMP along."""
    process = ctypes.CDLL(None)
    is_llvm = hasattr(process, "__kmpc_fork_call")  # Intel's too
    return process if hasattr(process, "omp_pause_resource_all") and not is_llvm else None
