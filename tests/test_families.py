"""Families of models, each a tiny random one: sampler, trainer and saved folder agree before and after a step."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.families import FAMILIES
from tests.torchrun import torchrun

OWN_ROWS = {"Mistral windowed", "Gemma3", "Bloom", "Qwen3.5", "Qwen3-Next", "LFM2", "GPT-OSS", "Jamba"}
"""One sequence per row: windows, recurrent layers, ALiBi."""
VLLM = ["Qwen2", "Qwen3", "Mistral", "Mistral windowed", "Gemma", "Gemma3", "Phi-3", "GLM-4", "Granite"]
"""Llama runs there in most other tests; for the rest, vLLM on a CPU has no classes, or none that take new weights."""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("families")
    torchrun(1, "tests.programs.families_program", out, "transformers", 0, *FAMILIES)
    return json.loads((out / "results.json").read_text())


def assert_trains(result: dict[str, Any]) -> None:
    assert isinstance(result, dict), result
    assert max(result["gap"], result["gap_after"], result["gap_saved"]) < 1e-4, result  # the limit of a run is 1e-3
    assert result["gap_without_push"] > 1e-3, result
    assert result["same_names"] and result["handed_names"] and result["same_ends"], result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_the_transformers_engine(family, results):
    assert_trains(results[family])
    assert (results[family]["rows"] == "own") == (family in OWN_ROWS)


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("families")
    torchrun(1, "tests.programs.families_program", out, "vllm", 0, *VLLM)
    return json.loads((out / "results.json").read_text())


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("family", VLLM)
def test_a_family_trains_on_the_vllm_engine(family, on_vllm):
    assert_trains(on_vllm[family])


def test_experts_train_sharded_over_two_ranks(tmp_path):
    torchrun(2, "tests.programs.families_program", tmp_path, "transformers", 3, "Mixtral")
    assert_trains(json.loads((tmp_path / "results.json").read_text())["Mixtral"])
