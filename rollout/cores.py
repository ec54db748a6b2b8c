"""The cores of a machine without a GPU, between the threads of one process that compute on them by turns."""

from __future__ import annotations

import ctypes

_OMP_PAUSE_SOFT = 1


def leave_cores() -> None:
    """Ends the helpers that OpenMP keeps for the calling thread; its next parallel region starts new ones.

    For a thread that computes to call before it waits for another that computes. GNU OpenMP counts the helpers of
    all threads: once there are more than cores, they go to sleep at the end of every region instead of looking out
    for the next, and both threads take a fifth longer (tests/bench/bench_update.py, the whole step). Where another
    OpenMP is loaded, or none, nothing happens.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause:
        pause(_OMP_PAUSE_SOFT)
