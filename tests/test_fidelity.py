"""The policy and the reference are the model of the folder, to the last position, however they are loaded."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GPTJConfig

from grpo.model.constants import check_constants, constants, persistent_buffers, plain_constants
from tests.torchrun import torchrun

EVERY = [f"{stage}/{dtype}" for stage in range(4) for dtype in ("float32", "bfloat16")] + ["3/bfloat16/checkpointed"]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "llama3", "yarn"]
"""Each is loaded in every case. The last two have scaled frequencies."""
NARROW = "3/bfloat16/narrow"
NARROWED = ["llama", "qwen2", "qwen3", "mistral"]
"""Scaled frequencies are computed from integers, which DeepSpeed leaves alone."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    asked = [f"{family}={','.join([*EVERY, *([NARROW] if family in NARROWED else [])])}" for family in FAMILIES]
    torchrun(1, "tests.programs.fidelity_program", folder, *asked)
    return json.loads((folder / "results.json").read_text())


def parts(case):
    return ["policy", "reference"] if case[0] in "03" else ["policy"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_buffer_and_constant_is_that_of_from_pretrained(results, family):
    for case in EVERY:
        for part in parts(case):
            result = results[f"{family}/{case}/{part}"]
            assert "model.rotary_emb.inv_freq" in result["compared"]
            assert "model.rotary_emb.attention_scaling" in result["compared"]
            assert result["differ"] == [], (case, part)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_from_pretrained_up_to_4096_tokens(results, family):
    """In bfloat16 within what its rounding alone makes of this model: the plain model's own distance from float32, in
    the same stretch of tokens. The two share most of their roundings, so they should be nearer than that.
    """
    rounding = results[f"{family}/bfloat16/rounding"]
    for case in EVERY:
        for part in parts(case):
            for gap, bound in zip(results[f"{family}/{case}/{part}"]["gaps"], rounding, strict=True):
                assert gap < (1e-4 if "float32" in case else bound), (case, part)


@pytest.mark.parametrize("family", NARROWED)
def test_frequencies_in_bfloat16_would_be_another_model_and_are_refused_by_name(results, family):
    narrow, rounding = results[f"{family}/{NARROW}/policy"], results[f"{family}/bfloat16/rounding"]
    assert narrow["differ"] == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert narrow["gaps"][-1] > 2 * rounding[-1]
    refusal = results[f"{family}/{NARROW}/refusal"]
    assert refusal.startswith("model.rotary_emb.inv_freq is bfloat16 [8], first [1.0, ")
    assert "and float32 [8], first [1.0, " in refusal and "deepspeed.stage" in refusal


EXPERTS = Glm4MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
    first_k_dense_replace=1,
)  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""A buffer of the checkpoint, float32 whatever the weights are."""


def saved(folder, config):
    """The model of `config` as from_pretrained loads it, with a routing bias that no initialization gives."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for buffer in persistent_buffers(model).values():
        buffer.uniform_()
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_what_from_pretrained_would_give_is_known_without_loading_the_weights(tmp_path):
    """Buffers of the checkpoint are read from it. GPT-J's sines are computed twice, the second time with divisions in
    float32.
    """
    sines = GPTJConfig(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=128, rotary_dim=16)
    for name, config in (("experts", EXPERTS), ("sines", sines)):
        loaded = saved(tmp_path / name, config)
        plain = plain_constants(config, torch.bfloat16, tmp_path / name)
        assert plain.keys() == constants(loaded).keys()
        check_constants(loaded, plain)
    assert plain["transformer.h.0.attn.embed_positions"].dtype == torch.float32
    assert plain_constants(EXPERTS, torch.bfloat16, tmp_path / "experts")[BIAS].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.model.rotary_emb.inv_freq.mul_(1.001), "model.rotary_emb.inv_freq is float32 [2], first [1.001"),
        (lambda model: model.get_buffer(BIAS).zero_(), f"{BIAS} is float32 [4], first [0.0, 0.0, 0.0] in the model"),
        (lambda model: model.get_submodule(BIAS.rpartition(".")[0])._buffers.pop(BIAS.rpartition(".")[2]), "is missing"),
        (lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5), "attention_scaling is 1.5 in the"),
        (lambda model: model.to(torch.bfloat16), "is bfloat16 [4], first"),
    ],
)
def test_the_first_constant_that_differs_is_named(tmp_path, change, told):
    model = saved(tmp_path, EXPERTS)
    plain = plain_constants(EXPERTS, torch.bfloat16, tmp_path)
    check_constants(model, plain)
    change(model)
    with pytest.raises(RuntimeError) as refusal:
        check_constants(model, plain)
    assert told in str(refusal.value)
