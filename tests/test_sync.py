"""The engine always samples the policy: log-prob parity, and pushes that prove themselves."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.tiny import make_model
from tests.torchrun import torchrun

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("engine", "tied", "num_ranks", "stage"),
    [
        ("transformers", True, 1, 0),
        pytest.param("vllm", True, 1, 0, marks=needs_vllm),
        pytest.param("vllm", False, 2, 3, marks=needs_vllm),
    ],
)
def test_the_engine_follows_the_policy(tmp_path, engine, tied, num_ranks, stage):
    model = make_model(tmp_path / "model", tied=tied)
    torchrun(num_ranks, "tests.programs.sync_program", model, stage, engine, tmp_path / "results.json")
    for results in json.loads((tmp_path / "results.json").read_text()):
        assert results["engine"] == engine and results["same_seed_same_text"]
        assert results["gap_before"] < 1e-4
        assert results["gap_without_push"] > 1e-3
        assert results["gap_after"] < 1e-4
        assert "model.layers.1.mlp.down_proj.weight" in results["forgot model.layers.1.mlp.down_proj.weight"]
        if engine == "vllm":  # the transformers engine has one copy of a tied head, so nothing can be forgotten
            assert "would sample an old policy" in results["forgot lm_head.weight"]
