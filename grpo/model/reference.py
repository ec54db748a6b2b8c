"""The reference model of the KL penalty."""

from __future__ import annotations

import torch

from grpo.config import DeepSpeedSettings, ModelSettings
from grpo.model import zero
from grpo.model.constants import check_constants
from grpo.model.loading import load
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import PackedBatch
from grpo.ranks import Ranks


class Reference:
    """The frozen model that the KL penalty pulls towards; tempered and sharded like the policy."""

    def __init__(self, model: ModelSettings, deepspeed: DeepSpeedSettings, *, temperature: float, ranks: Ranks):
        stage = 3 if deepspeed.stage == 3 else 0  # without an optimizer only the weights are left to shard
        config = zero.reference_config(model, stage)
        causal_lm, attention, plain = load(model, config, stage, ranks.device)
        module = LogprobModel(causal_lm.requires_grad_(False), attention, temperature).eval()
        if stage == 3:
            self.module, _ = zero.start(module, config)
        else:
            self.module = module.to(ranks.device)
        self.causal_lm = causal_lm
        check_constants(causal_lm, plain)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs [N]. Collective under ZeRO-3."""
        return self.module(batch)[0]
