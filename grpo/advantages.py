"""Group-relative advantages: how much better a reply did than its siblings.

DeepSeekMath (arXiv:2402.03300, eq. 21) subtracts the group's mean and divides by its std; Dr. GRPO
(arXiv:2503.20783) drops the division; RLOO (arXiv:2402.14740) leaves the member itself out of its
baseline. Departures: a member whose judgement failed leaves all statistics, and a group whose rewards
hardly differ gives no signal instead of amplified noise.

Suffixes: P prompts, G replies per prompt.
"""

from __future__ import annotations

from typing import Literal

import torch

SPREAD_FLOOR = 1e-6
"""A group whose std is below this carries no signal: what differs is rounding."""


def group_advantages(
    rewards_PG: torch.Tensor,
    valid_PG: torch.Tensor | None = None,
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scale: Literal["group_std", "batch_std", "none"] = "group_std",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advantages [P, G], float64.

    With m the mean over a group's valid members and n their number:

    - `baseline="mean"`: r − m; `"leave_one_out"`: r − mean of the other valid members = (r − m)·n/(n − 1).
    - `scale="group_std"`: divided by (the group's sample std, ddof 1, + eps); `"batch_std"`: by that of all
      valid rewards (uncentred by group); `"none"`: as it is.

    Invalid members get 0. So does every member of a group with fewer than two valid ones, or whose std is
    below 1e-6. Rewards of invalid members may be NaN.

    >>> r = torch.tensor([[1., 1., 0., 0.]]); v = torch.tensor([[True, False, True, True]])
    >>> group_advantages(r, v, scale="none")          # mean of (1, 0, 0) is 1/3
    tensor([[ 0.6667,  0.0000, -0.3333, -0.3333]], dtype=torch.float64)

    Raises ValueError for shapes that differ, unknown names, and a valid reward that is not finite.
    """
    valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if valid_PG is None else valid_PG
    if rewards_PG.ndim != 2 or rewards_PG.shape != valid_PG.shape:
        raise ValueError(f"rewards and validity must both be [P, G], not {[*rewards_PG.shape]} and {[*valid_PG.shape]}")
    if baseline not in ("mean", "leave_one_out") or scale not in ("group_std", "batch_std", "none"):
        raise ValueError(f"unknown baseline {baseline!r} or scale {scale!r}")
    if not rewards_PG[valid_PG].isfinite().all():
        raise ValueError("a valid reward is not finite; a failed judgement must be masked, not scored")

    count_P1, centred_PG, std_P1 = _spread(rewards_PG, valid_PG)
    advantages_PG = centred_PG
    if baseline == "leave_one_out":
        advantages_PG = advantages_PG * count_P1 / (count_P1 - 1).clamp(min=1)
    if scale == "group_std":
        advantages_PG = advantages_PG / (std_P1 + eps)
    elif scale == "batch_std" and valid_PG.sum() > 1:
        advantages_PG = advantages_PG / (rewards_PG[valid_PG].double().std() + eps)
    return torch.where(_differ(count_P1, std_P1), advantages_PG, 0.0)


def has_signal(rewards_PG: torch.Tensor, valid_PG: torch.Tensor) -> torch.Tensor:
    """Which groups tell their members apart, [P] bool: two valid members or more, and a std of 1e-6 or more."""
    count_P1, _, std_P1 = _spread(rewards_PG, valid_PG)
    return _differ(count_P1, std_P1)[:, 0]


def _differ(count_P1: torch.Tensor, std_P1: torch.Tensor) -> torch.Tensor:
    return (count_P1 >= 2) & (std_P1 >= SPREAD_FLOOR)


def _spread(rewards_PG: torch.Tensor, valid_PG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(number of valid members [P, 1], rewards less their mean [P, G], sample std [P, 1]), float64."""
    rewards_PG = torch.where(valid_PG, rewards_PG.double(), 0.0)
    count_P1 = valid_PG.sum(1, keepdim=True)
    mean_P1 = rewards_PG.sum(1, keepdim=True) / count_P1.clamp(min=1)
    centred_PG = torch.where(valid_PG, rewards_PG - mean_P1, 0.0)
    # Two passes: E[x²] − E[x]² leaves a residue where rewards are large and equal.
    std_P1 = (centred_PG.square().sum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
    return count_P1, centred_PG, std_P1
