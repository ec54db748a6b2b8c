"""`launch.train` whose rank 1 is killed while the others wait for it in a collective.

torchrun --nproc_per_node 2 -m tests.programs.killed_program RUN_FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from grpo.run.folder import RunFolder
from launch import train


def be_killed(config, inputs, ranks, signals):
    ranks.gather(None)  # by now each of them takes a signal
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(None)


def check_inputs(config):
    folder = RunFolder(Path(sys.argv[1]))
    if train.is_main():
        folder.take()
    return SimpleNamespace(folder=folder)


if __name__ == "__main__":
    train.check_inputs, train._train = check_inputs, be_killed
    train.run(lambda: None)
