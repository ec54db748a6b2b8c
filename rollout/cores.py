"""The cores of a machine without a GPU: between threads of one process that compute on them by turns, and between
that process and others.

Both are about threads that compute one product together. They wait for each other thousands of times a second, and
those of GNU OpenMP, which torch's builds for a CPU bring along, spin meanwhile, for milliseconds. That saves a seventh
of a training run as long as nobody else wants the cores.
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

import torch

_OMP_PAUSE_SOFT = 1
_LOOK_EVERY_S = 0.5
_STAT = Path("/proc/stat")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IS_FIXED = "OMP_NUM_THREADS" in os.environ  # now: the vLLM engine sets it too, later
MUST_LEAVE, MAY_LEAVE = 0.25, 0.15
"""Of a core: what others may use of ours before we leave it to them, and before we take it back. A desktop at rest
needs a tenth; two limits, so that threads do not come and go."""


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
def mind_neighbours() -> None:
    """From now on, `take_cores` leaves the cores to other processes that want them, but for one.

    A thread that has lost its core holds up all that compute with it: two threads beside one busy loop on two cores
    take three times as long for a training step, one thread less than twice (tests/bench/bench_neighbour.py measures
    it). All of torch's threads are used while nobody else wants the cores. Nothing happens where there is nothing to
    mend: one thread alone, no /proc, or OMP_NUM_THREADS set by the user, which says how many there are.
    """
    num_threads = torch.get_num_threads()
    if num_threads > 1 and not _IS_FIXED and sys.platform == "linux" and _STAT.exists():
        _fitting.number = num_threads
        threading.Thread(target=_mind, args=(num_threads,), name="neighbours", daemon=True).start()


def take_cores() -> None:
    """Gives the calling thread as many threads to compute with as fit. To call often; it costs microseconds."""
    if _fitting.number and _fitting.number != torch.get_num_threads():
        torch.set_num_threads(_fitting.number)  # of the calling thread alone, in OpenMP


def _mind(num_threads: int) -> None:
    cores = os.sched_getaffinity(0)
    before = Usage.now(cores)
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = Usage.now(cores)
        others, before = now.others_since(before), now
        _fitting.number = fitting_threads(num_threads, _fitting.number, len(cores) - others)


def fitting_threads(most: int, present: int, free: float) -> int:
    """How many threads fit on `free` cores, of 1 to `most`."""
    if free + MUST_LEAVE < present:
        present = int(free + MUST_LEAVE)
    else:
        present = max(present, int(free + MAY_LEAVE))
    return min(max(present, 1), most)


@dataclass(slots=True)
class _Fitting:
    number: int = 0
    """Threads; 0 where nobody minds the neighbours."""


_fitting = _Fitting()


@dataclass(frozen=True, slots=True)
class Usage:
    """What some cores have done so far."""

    at: float
    """Seconds."""
    all_s: float
    """Core-seconds of all processes on these cores, but for those that give way to this one, by their niceness."""
    own_s: float
    """Core-seconds of this process."""

    @classmethod
    def now(cls, cores: AbstractSet[int]) -> Usage:
        ticks = busy_ticks(_STAT.read_text(), cores, with_nice=os.nice(0) > 0)
        return cls(time.monotonic(), ticks / _TICKS_PER_S, time.process_time())

    def others_since(self, before: Usage) -> float:
        """Cores that other processes kept busy, on average."""
        return (self.all_s - before.all_s - (self.own_s - before.own_s)) / (self.at - before.at)


def busy_ticks(stat: str, cores: AbstractSet[int], with_nice: bool) -> int:
    """What these cores have computed, by the text of /proc/stat; `with_nice`, for processes of niceness above 0 too."""
    names, ticks = {f"cpu{core}" for core in cores}, 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            ticks += user + system + irq + softirq + (nice if with_nice else 0)
    return ticks


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    process = ctypes.CDLL(None)
    is_llvm = hasattr(process, "__kmpc_fork_call")  # Intel's too
    return process if hasattr(process, "omp_pause_resource_all") and not is_llvm else None
