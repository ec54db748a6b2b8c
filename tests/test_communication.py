"""In bfloat16 a gradient is rounded by the backward pass that makes it, and by nothing after it."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import make_model
from tests.torchrun import torchrun

STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """By number of ranks."""
    folder = tmp_path_factory.mktemp("gradients")
    model = make_model(folder / "model", tied=False)  # a tied head is rounded once more where backward adds it up
    wide = [f"{stage}/float32" for stage in STAGES]
    narrow = [f"{stage}/bfloat16" for stage in STAGES]
    for ranks, cases in ((1, wide), (2, [*wide, *narrow])):
        torchrun(ranks, "tests.programs.communication_program", model, folder / f"{ranks}.pt", *cases)
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in (1, 2)}


def distance(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up_in_float32(gradients, stage):
    """Bfloat16 keeps 8 bits, so a sum in it would be up to 1/512 off, entry by entry."""
    of_one = gradients[1]
    assert of_one[f"{stage}/float32"].dtype == torch.float32
    assert distance(of_one[f"{stage}/float32"], of_one["first"] + of_one["second"]) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_add_up_to_what_one_does_unless_they_are_told_to_send_bfloat16(gradients, stage):
    expected = gradients[1][f"{stage}/float32"]
    assert distance(gradients[2][f"{stage}/float32"], expected) < 1e-6
    assert 5e-4 < distance(gradients[2][f"{stage}/bfloat16"], expected) < 5e-3
