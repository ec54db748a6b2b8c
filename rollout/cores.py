"""The cores of a machine without a GPU, between the threads of one process that compute on them by turns."""

from __future__ import annotations

import ctypes
from functools import cache

_OMP_PAUSE_SOFT = 1


def leave_cores() -> None:
    """Ends the helpers that OpenMP keeps for the calling thread; its next parallel region starts new ones.

    For a thread that computes to call before it waits for another that computes. GNU OpenMP counts the helpers of
    all threads: once there are more than cores, they go to sleep at the end of every region instead of looking out
    for the next, and both threads take a fifth longer (tests/bench/bench_update.py, the whole step). Other OpenMP
    libraries do not do so, and with them nothing happens here.
    """
    pause = _gnu_pause()
    if pause:
        pause(_OMP_PAUSE_SOFT)


@cache
def _gnu_pause() -> ctypes._CFuncPtr | None:
    """Not before torch is imported, which brings its OpenMP along."""
    process = ctypes.CDLL(None)
    is_llvm = hasattr(process, "__kmpc_fork_call")  # Intel's too
    return None if is_llvm else getattr(process, "omp_pause_resource_all", None)
