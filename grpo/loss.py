"""The objective: KL penalties, policy losses, and how token losses add up to one number.

Everything here is a pure function of flat tensors. Suffixes: N response tokens (flat over the batch),
S sequences. Log-probs are in nats, of the tempered distribution. A token's final loss is
`weight · (policy + kl_coef · kl)`, summed: the weights of `aggregation_weights` carry the denominators
of the *whole optimizer step*, so any split into micro-batches and ranks adds up to the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Variant = Literal["grpo", "gspo", "cispo"]
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
        return d_N.exp() - d_N - 1
    if estimator == "low_var_kl":
        d_N = d_N.clamp(-20, 20)
        return (d_N.exp() - d_N - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3, low_var_kl")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss_N: torch.Tensor
    clipped_low_N: torch.Tensor
    """Where the lower clip (or the dual clip) holds the gradient back; bool."""
    clipped_high_N: torch.Tensor


def policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    variant: Variant = "grpo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Loss per token, before aggregation; with ρ = exp(logp − old) and A the sequence's advantage:

    - `grpo`: −min(ρA, clip(ρ, 1 − low, 1 + high)·A) (PPO, arXiv:1707.06347 eq. 7; a larger `clip_high` is
      DAPO's clip-higher, arXiv:2503.14476 eq. 10). With `dual_clip=c`, no larger than −cA where A < 0
      (arXiv:1912.09729 eq. 5).
    - `gspo`: the same with ρ = exp(mean over the sequence of logp − old), whose gradient goes to each token
      (arXiv:2507.18071 eq. 14).
    - `cispo`: −stop_grad(clip(ρ, 1 − low, 1 + high)) · A · logp (arXiv:2506.13585 eq. 4).

    `sequence_N` numbers the sequence of each token from 0; only `gspo` reads it, and needs every sequence
    whole.
    """
    if variant == "gspo":
        ratio_N = _sequence_ratio(logprobs_N, old_logprobs_N, sequence_N)
    elif variant in ("grpo", "cispo"):
        ratio_N = (logprobs_N - old_logprobs_N).exp()
    else:
        raise ValueError(f"unknown loss variant {variant!r}; known: grpo, gspo, cispo")
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    low_N, high_N = ratio_N < 1 - clip_low, ratio_N > 1 + clip_high

    if variant == "cispo":
        return PolicyLoss(-bounded_N.detach() * advantages_N * logprobs_N, low_N, high_N)
    loss_N = torch.maximum(-ratio_N * advantages_N, -bounded_N * advantages_N)
    clipped_low_N = low_N & (advantages_N < 0)
    if dual_clip is not None:
        bound_N = -dual_clip * advantages_N
        clipped_low_N = clipped_low_N | ((advantages_N < 0) & (loss_N > bound_N))
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
    return PolicyLoss(loss_N, clipped_low_N, high_N & (advantages_N > 0))


def _sequence_ratio(logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """GSPO's ratio at each token: the sequence's value, with the gradient of the token's own log-prob."""
    difference_N = (logprobs_N - old_logprobs_N).detach()
    num_sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    total_S = difference_N.new_zeros(num_sequences).index_add(0, sequence_N, difference_N)
    length_S = sequence_N.bincount(minlength=num_sequences).clamp(min=1)
    mean_N = (total_S / length_S)[sequence_N]
    return (mean_N + logprobs_N - logprobs_N.detach()).exp()


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
