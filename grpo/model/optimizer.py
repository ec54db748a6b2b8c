"""AdamW's parameter groups, its averages and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch


def decay_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not. Sizes are asked of ZeRO-3, whose shards are flat."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def claim_averages(adamw: torch.optim.AdamW, shards: list[torch.Tensor] | None) -> None:
    """Makes AdamW's averages now rather than in its first step: what does not fit fails before the first rollout, and
    they do not scatter over the memory that the first update's activations leave.

    `shards` are the parameters under ZeRO-3, which keeps AdamW's groups empty between steps.
    """
    for parameter in shards or [parameter for group in adamw.param_groups for parameter in group["params"]]:
        state = adamw.state[parameter]
        if state:
            state["step"].zero_()  # DeepSpeed's step of zeros does not count
        else:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def lr_factor(step: int, total_steps: int, warmup_steps: int, schedule: str) -> float:
    """Factor on the learning rate at optimizer step `step` (from 0): linear warm-up, then the schedule.

    The first of W warm-up steps has 1/(W + 1); `linear` and `cosine` reach 0 after the last step.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
