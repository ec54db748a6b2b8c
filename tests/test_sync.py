"""The engine always samples the policy: log-prob parity, and pushes that prove themselves."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest
import torch

from grpo.model.sync import EngineDrift, check_gap, max_gap, push_weights
from grpo.model.weight_buckets import weight_buckets
from tests.small_run import SmallRun, prepare
from tests.tiny import make_model
from tests.torchrun import torchrun


def weights():
    yield "model.a.weight", torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield "model.b.weight", torch.tensor([5.0, 6.0])


class Holding:
    """An engine that says what it holds."""

    name = "test"

    def __init__(self, *fingerprint):
        self._fingerprint = fingerprint

    def push_weights(self, weights):
        list(weights)

    def fingerprint(self):
        return self._fingerprint


def test_a_mark_is_the_first_columns_sum_and_a_fused_weight_is_the_sum_of_its_parts():
    push_weights(weights(), Holding((("model.a.weight",), 4.0), (("model.b.weight",), 11.0)))
    push_weights(weights(), Holding((("model.a.weight", "model.b.weight"), 15.0)))
    with pytest.raises(RuntimeError, match="1 differ, the first is model.b.weight"):
        push_weights(weights(), Holding((("model.a.weight",), 4.0), (("model.b.weight",), 11.5)))


def test_a_weight_in_a_kernels_own_layout_is_known_and_not_compared():
    push_weights(weights(), Holding((("model.a.weight",), None), (("model.b.weight",), 11.0)))
    with pytest.raises(RuntimeError, match="1 differ, the first is model.a.weight"):
        push_weights(weights(), Holding((("model.a.weight",), math.nan), (("model.b.weight",), 11.0)))


def test_an_engine_whose_weights_have_other_names_proves_nothing():
    with pytest.raises(RuntimeError, match="knows 0 of the 2 weights"):
        push_weights(weights(), Holding((("language_model.a.weight",), 4.0)))


@pytest.mark.parametrize("gap", [0.002, math.nan, math.inf])
def test_a_gap_that_is_too_wide_or_unknown_stops_the_run(gap):
    limit = max_gap(torch.float32, torch.device("cpu"))
    check_gap(0.0009, limit)
    with pytest.raises(EngineDrift, match="nats from the trainer's"):
        check_gap(gap, limit)


def test_the_run_stops_where_its_own_limit_is_lower(tmp_path):
    config = prepare(tmp_path, run__steps=1, update__max_logp_gap=1e-12)
    with SmallRun(config) as run:
        assert run.wait() == 1, run.output
    assert "nats from the trainer's on average (update.max_logp_gap: 1e-12)" in run.output
    assert not (run.folder / "metrics.jsonl").exists()  # no step was done


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def test_weights_are_gathered_in_bounded_buckets():
    units = [[(name, torch.nn.Parameter(torch.zeros(10))) for name in unit] for unit in ("a", "b", "c", "d", "ef", "g")]
    units[3] = [("d", torch.nn.Parameter(torch.zeros(100)))]  # larger than a bucket of 100 bytes, so alone in one
    buckets = weight_buckets(units, limit=100)
    assert ["".join(name for name, _ in bucket) for bucket in buckets] == ["ab", "c", "d", "ef", "g"]


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
    (model / "generation_config.json").unlink()  # config.json alone says that token 7 ends replies too
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 7]}))
    torchrun(num_ranks, "tests.programs.sync_program", model, stage, engine, tmp_path / "results.json")
    for results in json.loads((tmp_path / "results.json").read_text()):
        assert results["engine"] == engine and results["same_seed_same_text"]
        assert results["past_the_end"] == [] and results["ends"] == [1, 7]
        assert results["gap_before"] < 1e-4
        assert results["gap_without_push"] > 1e-3
        assert results["gap_after"] < 1e-4
        assert "model.layers.1.mlp.down_proj.weight" in results["forgot model.layers.1.mlp.down_proj.weight"]
        if engine == "vllm":  # the transformers engine has one copy of a tied head, so nothing can be forgotten
            assert "would sample an old policy" in results["forgot lm_head.weight"]
