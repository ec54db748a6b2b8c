"""The objective: KL penalties, policy losses, and how token losses add up to one number.

Everything here is a pure function of flat tensors. Suffixes: N response tokens (flat over the batch),
S sequences. Log-probs are in nats, of the tempered distribution. A token's final loss is
`weight · (correction · policy + kl_coef · kl − entropy_coef · entropy)`, summed: the weights of
`aggregation_weights` carry the denominators of the *whole optimizer step*, so any split into
micro-batches and ranks adds up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Variant = Literal["grpo", "gspo", "cispo"]
Correction = Literal["none", "token", "sequence"]  # not "off", which YAML reads as false
Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def kl_penalty(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL(policy ‖ reference) per token, from samples of the policy; with d = ref − logp:

    `k1` = −d; `k2` = d²/2; `k3` = exp(d) − d − 1 (http://joschu.net/blog/kl-approx.html);
    `low_var_kl` = k3 with d clamped to ±20 and the result to ±10, as the published recipe has it.
    """
    d_N = ref_logprobs_N - logprobs_N
    if estimator == "k1":
        return -d_N
    if estimator == "k2":
        return 0.5 * d_N.square()
    if estimator == "k3":
        return d_N.expm1() - d_N
    if estimator == "low_var_kl":
        d_N = d_N.clamp(-20, 20)
        return (d_N.expm1() - d_N).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3, low_var_kl")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss_N: torch.Tensor
    clipped_low_N: torch.Tensor
    """Where the lower clip (or the dual clip) holds the gradient back; bool."""
    clipped_high_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio ρ: 1 − low, 1 + high, and the factor of the dual clip where there is one."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


def policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    variant: Variant = "grpo",
    clip: Clip = Clip(),
) -> PolicyLoss:
    """Loss per token, before aggregation, of one of `VARIANTS`.

    `sequence_N` numbers the sequence of each token; only `gspo` reads it, and needs every sequence whole.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown loss variant {variant!r}; known: {', '.join(VARIANTS)}")
    return VARIANTS[variant](logprobs_N, old_logprobs_N, advantages_N, sequence_N, clip)


def grpo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: Clip,
) -> PolicyLoss:
    """−min(ρA, clip(ρ, 1 − low, 1 + high)·A) with ρ = exp(logp − old): PPO's clipping, per token.

    arXiv:1707.06347 eq. 7; a larger `clip.high` is DAPO's clip-higher, arXiv:2503.14476 eq. 10. With
    `clip.dual=c`, no larger than −cA where A < 0 (arXiv:1912.09729 eq. 5).
    """
    return _clipped((logprobs_N - old_logprobs_N).exp(), advantages_N, clip)


def gspo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: Clip,
) -> PolicyLoss:
    """`grpo` with the sequence's ratio: ρ = exp(mean over the sequence of logp − old).

    Each token holds the sequence's ratio with the gradient of its own log-prob (arXiv:2507.18071 eq. 14).
    """
    mean_N = sequence_mean((logprobs_N - old_logprobs_N).detach(), sequence_N)
    return _clipped((mean_N + logprobs_N - logprobs_N.detach()).exp(), advantages_N, clip)


def cispo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: Clip,
) -> PolicyLoss:
    """−stop_grad(clip(ρ, 1 − low, 1 + high)) · A · logp: every token keeps a gradient (arXiv:2506.13585 eq. 4)."""
    ratio_N = (logprobs_N - old_logprobs_N).exp().detach()
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss(-bounded_N * advantages_N * logprobs_N, ratio_N < 1 - clip.low, ratio_N > 1 + clip.high)


VARIANTS: dict[str, Callable[..., PolicyLoss]] = {"grpo": grpo, "gspo": gspo, "cispo": cispo}
"""Every policy loss there is. A new one is a function above, its name here and in `Variant`."""


def _clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: Clip) -> PolicyLoss:
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    loss_N = torch.maximum(-ratio_N * advantages_N, -bounded_N * advantages_N)
    is_bad_N = advantages_N < 0
    low_N, high_N = (ratio_N < 1 - clip.low) & is_bad_N, (ratio_N > 1 + clip.high) & (advantages_N > 0)
    if clip.dual is not None:
        bound_N = -clip.dual * advantages_N
        low_N = low_N | (is_bad_N & (loss_N > bound_N))
        loss_N = torch.where(is_bad_N, torch.minimum(loss_N, bound_N), loss_N)
    return PolicyLoss(loss_N, low_N, high_N)


def sampling_correction(
    old_logprobs_N: torch.Tensor,
    sampler_logprobs_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    mode: Correction,
    cap: float,
) -> torch.Tensor:
    """Weight per token of the policy loss, detached: how much likelier the trainer finds what the sampler drew.

    Engine and trainer compute the same model with different kernels, so the sampler is slightly off-policy.

    - `token`: min(exp(old − sampler), cap), truncated importance sampling (https://fengyao.notion.site/off-policy-rl).
    - `sequence`: the same with the mean over the sequence, the geometric mean of its ratios.
    - `none`: 1.
    """
    difference_N = (old_logprobs_N - sampler_logprobs_N).detach()
    if mode == "none":
        return torch.ones_like(difference_N)
    if mode == "sequence":
        difference_N = sequence_mean(difference_N, sequence_N)
    return difference_N.exp().clamp(max=cap)


def sequence_mean(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """At each token, the mean of `values_N` over the tokens of its sequence."""
    return (sequence_sums(values_N, sequence_N) / sequence_N.bincount().clamp(min=1))[sequence_N]


def sequence_sums(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Sums [S] of `values_N` over each sequence, by its number; 0 for numbers that do not occur."""
    num_sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def aggregation_weights(
    lengths_S: torch.Tensor,
    aggregate: Aggregate,
    *,
    step_tokens: int,
    step_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """Weight of each token of each sequence, [S]; the step's loss is the weighted sum over its tokens.

    `step_tokens` and `step_sequences` count the valid ones of the whole optimizer step, over all ranks and
    micro-batches; a denominator is never below 1.

    - `token_mean`: 1 / step_tokens (DAPO; verl's default).
    - `seq_mean_token_mean`: 1 / (length · step_sequences) (GRPO as published).
    - `seq_mean_token_sum`: 1 / step_sequences.
    - `seq_mean_token_sum_norm`: 1 / (max_tokens · step_sequences), max_tokens the reply limit (Dr. GRPO).
    """
    tokens, sequences = max(step_tokens, 1), max(step_sequences, 1)
    ones_S = torch.ones_like(lengths_S, dtype=torch.float32)
    if aggregate == "token_mean":
        return ones_S / tokens
    if aggregate == "seq_mean_token_mean":
        return ones_S / (lengths_S.clamp(min=1) * sequences)
    if aggregate == "seq_mean_token_sum":
        return ones_S / sequences
    if aggregate == "seq_mean_token_sum_norm":
        return ones_S / (max_tokens * sequences)
    raise ValueError(f"unknown aggregation {aggregate!r}")
