"""A rank that the system kills is named by one of those that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.run.peers import Peers
from tests.torchrun import QUIET


@pytest.fixture
def others():
    """Two processes that stand for ranks 1 and 2."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_who_is_gone_without_a_mark_was_killed_whether_or_not_anybody_has_looked(others, capfd):
    marks = bytearray(3)
    processes = {0: os.getpid(), 1: others[0].pid, 2: others[1].pid}
    first, second = Peers(0, processes, marks), Peers(1, processes, marks)
    assert not first.any_gone() and not first.tell_killed(Path("runs/x"))
    others[1].send_signal(signal.SIGKILL)
    assert first.tell_killed(Path("runs/x"), patience_s=60) and first.any_gone()
    others[1].wait()  # until now it was a zombie
    assert first.killed() == second.killed() == {2: others[1].pid}
    assert first.tell_killed(Path("runs/x")) and second.tell_killed(Path("runs/x"))
    told = capfd.readouterr().err
    assert told.count("error: ") == 1 and f"rank 2 (process {others[1].pid}) on " in told
    assert "dmesg" in told and "python -m launch.report runs/x" in told


def test_who_ended_by_itself_was_not_killed(others, capfd):
    marks = bytearray(2)
    processes = {0: os.getpid(), 1: others[0].pid}
    Peers(1, processes, marks).leave()
    others[0].kill()
    others[0].wait()
    peers = Peers(0, processes, marks)
    assert peers.any_gone() and not peers.tell_killed(Path("runs/x")) and not capfd.readouterr().err


def test_a_rank_whose_partner_is_killed_within_a_collective_names_it_instead_of_its_broken_connection(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.programs.killed_program", str(tmp_path / "run")]
    done = subprocess.run(
        command, env=os.environ | QUIET | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=400
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1 and told.count("ended without a word: killed by the system") == 1, told
    assert "error: rank 1 (process " in told
    assert "closed by peer" not in told and "RuntimeError" not in told
    assert not (tmp_path / "run").exists()  # nothing had been put in
