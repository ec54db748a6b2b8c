"""A model folder becomes the module that is trained, or its frozen reference."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo.config import ModelSettings
from grpo.model import zero
from grpo.model.attention import PackedAttention, choose_attention
from grpo.model.constants import Constants, plain_constants
from rollout.model_folder import read_model


def load(
    model: ModelSettings, config: dict[str, Any], stage: int, device: torch.device
) -> tuple[torch.nn.Module, PackedAttention, Constants]:
    """The model of this rank, its shard at stage 3; how it attends; and the constants that it must end up with."""
    zero.join_group()
    architecture = AutoConfig.from_pretrained(model.path)
    for name, value in architecture.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "_pdrop")):
            setattr(architecture, name, 0.0)  # the sampler has none, so the ratios must not either
    attention = choose_attention(architecture, device, model.attention)
    dtype = getattr(torch, model.dtype)
    plain = plain_constants(architecture, dtype, model.path)
    sharding = zero.sharding(plain, config) if stage == 3 else None
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=architecture,
        dtype=dtype,
        attn_implementation=attention.implementation,
    )
    causal_lm.generation_config = GenerationConfig()  # nothing generates with it, and it need not be fit to be saved
    if sharding:  # transformers then keeps all conversions for saving, not those alone that this checkpoint needed
        del sharding
        causal_lm._weight_conversions = read_model(model.path).model._weight_conversions
    return causal_lm, attention, plain
