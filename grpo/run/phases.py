"""Seconds and peak memory of a step's phases.

On a GPU memory is what the driver says is in use on it, other processes included: torch's own count goes on holding
what a sleeping engine gave back. The driver keeps no peak, and torch gives nothing back within a phase unless memory
runs out, so the peak is what is in use at the end, and what torch gave back since the start. On a CPU it is the
process's own peak, which Linux lets it start anew.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

SELF = Path("/proc/self")


class Phases:
    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One that is entered again adds its seconds, and keeps the higher peak."""
        before, start = self._start_peak(), time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), before, self._peak())

    def _start_peak(self) -> float:
        """GiB in use at the start, where the peak does not hold it by itself."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self._in_use()
        with suppress(OSError):  # no Linux, or a container that forbids it: then the peak is that of the process's life
            (SELF / "clear_refs").write_text("5")
        return 0.0

    def _peak(self) -> float:
        if self._device.type == "cuda":
            given_back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
            return self._in_use() + given_back / 2**30
        with suppress(OSError):
            return int(re.search(r"VmHWM:\s+(\d+) kB", (SELF / "status").read_text())[1]) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def _in_use(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        return (total - free) / 2**30
