"""The processes of one run, and the few things they must agree on."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

MOST_FROM_THE_HEAP = 32 * 2**20
"""Bytes of one block; glibc takes no more for this threshold."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def join(cls) -> Ranks:
        """Joins the ranks torchrun started, or makes a group of one where it did not."""
        if "RANK" not in os.environ:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            alone = {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            os.environ.update(alone)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            # Objects go over gloo, tensors over NCCL.
            backend = "cpu:gloo,cuda:nccl"
        else:
            device, backend = torch.device("cpu"), "gloo"
            _keep_freed_memory()
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(hours=2))
        return cls(rank, world_size, device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks, number by number, in float64."""
        return [sum(column) for column in zip(*self.gather(list(numbers)), strict=True)]

    def leave(self) -> None:
        if dist.is_initialized():  # an engine that closes may have taken the group down already
            dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Lets this process reuse the memory of large tensors instead of asking the system for it each time.

    The system hands out pages one by one, zeroed: without this a forward and backward pass on a CPU takes a fifth
    longer (tests/bench/bench_update.py). Glibc's own knobs (mallopt(3)); other C libraries have none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_trim_threshold, -1)  # never give back the end of the heap
        # Nor serve large blocks from outside of it, but for the largest: they would leave holes, up to 0.6 GiB of them.
        mallopt(m_mmap_threshold, MOST_FROM_THE_HEAP)


def end_process(code: int = 0) -> NoReturn:
    """Ends a process that was a rank, without taking the interpreter down first.

    Gloo's worker threads outlive `leave` wherever a library holds its group, as DeepSpeed does. One that lets go
    of a tensor while the interpreter shuts down aborts the process, after a run that succeeded
    (pytorch/pytorch#179291); and after a fault, the threads of an engine would keep it from ending at all.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
