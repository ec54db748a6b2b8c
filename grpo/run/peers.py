"""The ranks of one machine look after each other: which of them is gone, and whether it said why.

A process that the system kills says nothing, and what the others notice of it (a broken connection, torchrun's
SIGTERM) tells nobody the cause. So a rank that ends by itself leaves a mark in memory that all of them share. Who is
gone without one was killed, or crashed.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Mapping, MutableSequence
from pathlib import Path

from grpo.ranks import Ranks

SHARED_MEMORY = "/dev/shm"
"""Never full, as /tmp may be."""


class Peers:
    def __init__(self, rank: int, processes: Mapping[int, int], marks: MutableSequence[int]):
        """`processes`: rank → process id on this machine, our own included. `marks`: one per rank, 0 while it has not
        ended by itself, shared by all of them.
        """
        self._rank, self._processes, self._marks = rank, processes, marks
        self._has_told = False

    @classmethod
    def meet(cls, ranks: Ranks) -> Peers:
        """Collective."""
        host = socket.gethostname()
        met = ranks.gather((host, os.getpid()))
        processes = {rank: process for rank, (its_host, process) in enumerate(met) if its_host == host}
        first = min(processes)
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None) as own:
            own.truncate(ranks.world_size)
            with open(ranks.gather(own.name)[first], "r+b") as shared:
                marks = mmap.mmap(shared.fileno(), ranks.world_size)
            ranks.gather(None)  # all have it before its name goes
        return cls(ranks.rank, processes, marks)

    def leave(self) -> None:
        """This rank ends by itself, and has said why or will."""
        self._marks[self._rank] = 1

    def any_gone(self) -> bool:
        return not all(map(_runs, self._processes.values()))

    def killed(self) -> dict[int, int]:
        """rank → process id of those that are gone without a mark."""
        return {rank: pid for rank, pid in self._processes.items() if not self._marks[rank] and not _runs(pid)}

    def tell_killed(self, folder: Path, patience_s: float = 0.0) -> bool:
        """Whether there are any, within so many seconds. The first rank that is left says which, once."""
        end = time.monotonic() + patience_s
        while not (killed := self.killed()) and time.monotonic() < end:
            time.sleep(0.05)
        if killed and not self._has_told and self._rank == min(self._processes.keys() - killed.keys()):
            self._has_told = True
            which = " and ".join(f"rank {rank} (process {pid})" for rank, pid in killed.items())
            text = (
                f"error: {which} on {socket.gethostname()} ended without a word: killed by the system or a person, or "
                "crashed. Most often memory ran out: look for 'Out of memory', 'oom-kill' or 'segfault' in `dmesg -T`, "
                f"and at the memory limit of the container or job. What was saved: python -m launch.report {folder}"
            )
            os.write(2, f"\n{text}\n".encode())
        return bool(killed)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # on other systems there is no more to ask
    return state not in (b"Z", b"X")  # a process that has ended stays until who started it has looked
