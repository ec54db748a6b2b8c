"""Runs a test's program under torchrun, as a training launch would be."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""For processes that share the cores."""


def torchrun(num_ranks: int, module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Raises AssertionError with the program's output where it fails."""
    # Two ranks cannot share a GPU.
    devices = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() < num_ranks else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command += ["-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | QUIET | devices, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done
