"""Seconds and memory of a step's phases; the GPU's, where there is one, from the driver."""

from __future__ import annotations

import time

import pytest
import torch

from grpo.run.phases import Phases


def test_a_phase_entered_twice_adds_its_seconds(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases.phase("update"):
            pass
    assert phases.seconds == {"update": 2.5}


def test_a_phase_tells_its_own_peak_and_not_that_of_the_one_before():
    phases = Phases(torch.device("cpu"))
    with phases.phase("rollout"):
        block = torch.ones(2**28, dtype=torch.uint8)  # 0.25 GiB, given back to the system when it goes
        del block
    with phases.phase("update"):
        pass
    assert phases.peak_gib["rollout"] - phases.peak_gib["update"] > 0.2
    before = phases.peak_gib["rollout"]
    with phases.phase("rollout"):
        pass
    assert phases.peak_gib["rollout"] == before  # of both times, the higher


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_phase_counts_what_was_given_back_within_it():
    device = torch.device("cuda", 0)
    phases = Phases(device)
    with phases.phase("rollout"):
        block = torch.ones(2**30, dtype=torch.uint8, device=device)
        del block
        torch.cuda.empty_cache()
    with phases.phase("update"):
        pass
    assert phases.peak_gib["rollout"] - phases.peak_gib["update"] == pytest.approx(1.0, abs=0.05)
