"""Modules that keep less for backward compute what the originals do."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo.model.recompute import keep_less

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]


def pair(config_class, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SMALL)).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    lean = deepcopy(model)
    keep_less(lean)
    return model, lean


def outcome(model, ids):
    logits = model(ids).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config_class", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logits_and_gradients_are_those_of_the_originals(config_class, dtype, tolerance):
    model, lean = pair(config_class, dtype)
    ids = torch.randint(0, 64, (3, 20))
    (logits, gradients), (lean_logits, lean_gradients) = outcome(model, ids), outcome(lean, ids)
    assert (logits - lean_logits).norm() <= tolerance * logits.norm()
    for name, gradient in gradients.items():
        assert (gradient - lean_gradients[name]).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("config_class", CONFIGS)
def test_in_bfloat16_a_norm_rounds_where_the_original_does_at_every_position_of_a_long_row(config_class):
    """In the same order: the mean in float32, then bfloat16, then the weight. What is left are means whose last bit
    differs, and which now and then fall on the other side of a rounding.
    """
    model, lean = pair(config_class, torch.bfloat16)
    sizes = torch.linspace(0.1, 300, 4096)[:, None]  # from embeddings to the last layers' residual stream
    states = (torch.randn(4096, 32) * sizes).to(torch.bfloat16)
    found, expected = (each.model.layers[1].input_layernorm(states) for each in (lean, model))
    assert found.dtype == expected.dtype == torch.bfloat16
    differ = found != expected
    assert differ.float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)  # one step of bfloat16


def kept_of_width(module, states, width):
    """How many tensors of 60 tokens and that width autograd keeps for the module's backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(states)
    return len({tensor.data_ptr() for tensor in kept if tensor.numel() == 60 * width})


def test_a_norm_keeps_its_input_alone_and_an_mlp_nothing_but_its_projections():
    model, lean = pair(LlamaConfig, torch.bfloat16)
    states = torch.randn(3, 20, 32, dtype=torch.bfloat16, requires_grad=True)
    norms = [each.model.layers[0].input_layernorm for each in (model, lean)]
    assert [kept_of_width(norm, states, 32) for norm in norms] == [2, 1]  # of the first, one in float32
    mlps = [each.model.layers[0].mlp for each in (model, lean)]
    assert [kept_of_width(mlp, states, 96) for mlp in mlps] == [4, 2]


def test_modules_that_are_not_known_stay_as_they_are():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.RMSNorm(3))
    keep_less(module)
    assert all("forward" not in vars(part) for part in module.modules())
