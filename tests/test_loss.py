"""KL, policy losses and aggregation by numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.loss import Clip, aggregation_weights, kl_penalty, policy_loss, sampling_correction

LN2 = math.log(2)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, *expected):
    torch.testing.assert_close(actual, tensor(*expected), atol=1e-9, rtol=0)


def loss(ratio, advantage, **options):
    """One token with probability ratio `ratio`."""
    return policy_loss(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), torch.tensor([0]), **options)


def test_kl_estimators_at_a_ratio_of_two():
    # d = ln 2: k1 = -ln 2, k2 = (ln 2)²/2, k3 = 2 - ln 2 - 1.
    logp, ref = tensor(-1.0), tensor(-1.0 + LN2)
    close(kl_penalty(logp, ref, "k1"), -LN2)
    close(kl_penalty(logp, ref, "k2"), LN2**2 / 2)
    close(kl_penalty(logp, ref, "k3"), 1 - LN2)
    close(kl_penalty(logp, ref, "low_var_kl"), 1 - LN2)


def test_low_var_kl_is_clamped_where_k3_is_not():
    logp, ref = tensor(0.0, 0.0), tensor(30.0, 5.0)
    close(kl_penalty(logp, ref, "low_var_kl"), 10, 10)
    close(kl_penalty(logp, ref, "k3")[1:], math.exp(5) - 6)


def test_low_var_kl_clamps_the_difference_first():
    # d = -40 becomes -20: exp(-20) + 20 - 1 = 19.000000002, then clamped to 10.
    close(kl_penalty(tensor(40.0), tensor(0.0), "low_var_kl"), 10)
    close(kl_penalty(tensor(40.0), tensor(0.0), "k3"), math.exp(-40) + 39)


def test_an_unclipped_token_costs_minus_ratio_times_advantage():
    close(loss(1.1, 2.0).loss_N, -2.2)
    close(loss(0.9, -2.0).loss_N, 1.8)


def test_a_good_token_earns_nothing_beyond_the_upper_clip():
    result = loss(1.5, 2.0)
    close(result.loss_N, -2.4)
    assert result.clipped_high_N.item() and not result.clipped_low_N.item()


def test_a_bad_token_earns_nothing_below_the_lower_clip():
    result = loss(0.5, -2.0)
    close(result.loss_N, 1.6)
    assert result.clipped_low_N.item() and not result.clipped_high_N.item()


def test_the_pessimistic_side_is_never_clipped():
    close(loss(1.5, -2.0).loss_N, 3.0)
    close(loss(0.5, 2.0).loss_N, -1.0)


def test_clip_higher_moves_only_the_upper_bound():
    close(loss(1.25, 1.0, clip=Clip(high=0.28)).loss_N, -1.25)
    close(loss(0.5, -1.0, clip=Clip(high=0.28)).loss_N, 0.8)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    close(loss(5.0, -2.0).loss_N, 10)
    result = loss(5.0, -2.0, clip=Clip(dual=3.0))
    close(result.loss_N, 6)
    assert result.clipped_low_N.item()
    close(loss(5.0, 2.0, clip=Clip(dual=3.0)).loss_N, -2.4)


def test_gspo_uses_the_geometric_mean_of_the_sequence():
    # Sequence 0: ratios 2 and 1/2, mean of logs 0, so ratio 1; sequence 1: ratio 1.1.
    logp = tensor(LN2, -LN2, math.log(1.1)).requires_grad_()
    result = policy_loss(logp, tensor(0.0, 0, 0), tensor(1.0, 1, 1), torch.tensor([0, 0, 1]), variant="gspo")
    close(result.loss_N.detach(), -1, -1, -1.1)
    result.loss_N.sum().backward()
    close(logp.grad, -1, -1, -1.1)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    logp = tensor(math.log(3.0)).requires_grad_()
    result = policy_loss(logp, tensor(0.0), tensor(2.0), torch.tensor([0]), variant="cispo")
    result.loss_N.sum().backward()
    close(logp.grad, -1.2 * 2)
    assert result.clipped_high_N.item()


def test_grpo_has_no_gradient_where_it_clips():
    logp = tensor(math.log(3.0)).requires_grad_()
    policy_loss(logp, tensor(0.0), tensor(2.0), torch.tensor([0])).loss_N.sum().backward()
    close(logp.grad, 0)


def test_at_a_ratio_of_one_the_gradient_is_minus_the_advantage():
    logp = tensor(-1.5, -0.5).requires_grad_()
    policy_loss(logp, logp.detach(), tensor(2.0, -3.0), torch.tensor([0, 1])).loss_N.sum().backward()
    close(logp.grad, -2, 3)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(tensor(0.0), tensor(0.0), "k4")
    with pytest.raises(ValueError, match="ppo2"):
        loss(1.0, 1.0, variant="ppo2")


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        # Two sequences of 1 and 3 tokens, token losses 4 and (1, 1, 1); the step has these two alone.
        ("token_mean", (4 + 3) / 4),
        ("seq_mean_token_mean", (4 + 1) / 2),
        ("seq_mean_token_sum", (4 + 3) / 2),
        ("seq_mean_token_sum_norm", (4 + 3) / (10 * 2)),
    ],
)
def test_aggregation_by_hand(aggregate, expected):
    weights_S = aggregation_weights(torch.tensor([1, 3]), aggregate, step_tokens=4, step_sequences=2, max_tokens=10)
    total = weights_S[0] * 4 + weights_S[1] * 3
    assert total.item() == pytest.approx(expected)


def test_an_empty_step_has_a_denominator_of_one():
    weights_S = aggregation_weights(torch.tensor([2]), "token_mean", step_tokens=0, step_sequences=0, max_tokens=1)
    assert weights_S.item() == 1


# ── sampler and trainer ──

# Sequence 0 has ratios 2 and 8 (geometric mean 4), sequence 1 has 1/2.
OLD, SAMPLER, SEQUENCE = tensor(LN2, 3 * LN2, -LN2), tensor(0.0, 0, 0), torch.tensor([0, 0, 1])


@pytest.mark.parametrize(
    ("mode", "cap", "expected"),
    [
        ("none", 2.0, (1, 1, 1)),
        ("token", 2.0, (2, 2, 0.5)),
        ("token", 5.0, (2, 5, 0.5)),
        ("sequence", 9.0, (4, 4, 0.5)),
        ("sequence", 3.0, (3, 3, 0.5)),
    ],
)
def test_the_correction_weighs_by_how_much_likelier_the_trainer_finds_a_token(mode, cap, expected):
    close(sampling_correction(OLD, SAMPLER, SEQUENCE, mode=mode, cap=cap), *expected)


def test_the_correction_has_no_gradient():
    old = OLD.clone().requires_grad_()
    assert not sampling_correction(old, SAMPLER, SEQUENCE, mode="sequence", cap=2.0).requires_grad


# ── properties ──


def uneven(seed):
    """Log-probs, old ones, advantages and sequence numbers of three sequences of 1, 4 and 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(8, generator=generator, dtype=torch.float64)
    logprobs = old + 0.6 * (torch.rand(8, generator=generator, dtype=torch.float64) - 0.5)
    sequence = torch.tensor([0, 1, 1, 1, 1, 4, 4, 4])
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)[sequence]
    return logprobs, old, advantages, sequence


def surrogate(variant, logprobs, frozen, old, advantages, sequence, clip):
    """The scalar whose gradient a variant claims, with the parts under stop-gradient read from `frozen`."""
    ratio = (logprobs - old).exp()
    if variant == "cispo":
        return -((frozen - old).exp().clamp(1 - clip.low, 1 + clip.high) * advantages * logprobs).sum()
    if variant == "gspo":
        means = torch.stack([(frozen - old)[sequence == s].mean() for s in sequence])
        ratio = (means + logprobs - frozen).exp()
    per_token = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if clip.dual:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -clip.dual * advantages), per_token)
    return per_token.sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", [Clip(), Clip(0.1, 0.28), Clip(0.1, 0.1, dual=1.05)])
@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo"])
def test_gradients_equal_finite_differences_of_the_surrogate(variant, clip, seed):
    logprobs, old, advantages, sequence = uneven(seed)
    leaf = logprobs.clone().requires_grad_()
    loss_N = policy_loss(leaf, old, advantages, sequence, variant=variant, clip=clip).loss_N
    loss_N.sum().backward()
    assert loss_N.sum().item() == pytest.approx(
        surrogate(variant, logprobs, logprobs, old, advantages, sequence, clip).item(), abs=1e-12
    )
    step = 1e-6 * torch.eye(8, dtype=torch.float64)
    numeric = torch.stack(
        [
            surrogate(variant, logprobs + h, logprobs, old, advantages, sequence, clip)
            - surrogate(variant, logprobs - h, logprobs, old, advantages, sequence, clip)
            for h in step
        ]
    ) / (2e-6)
    torch.testing.assert_close(leaf.grad, numeric, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "surrogate"),
    [
        ("k1", lambda d: -d),
        ("k2", lambda d: d**2 / 2),
        ("k3", lambda d: math.exp(d) - d - 1),
        ("low_var_kl", lambda d: min(math.exp(d) - d - 1, 10.0) if abs(d) < 20 else 10.0),
    ],
)
def test_gradients_of_the_kl_equal_finite_differences(estimator, surrogate):
    logprobs, ref = tensor(-1.0, -2.0, -0.5, -6.0, -25.0), tensor(-1.3, -0.5, -0.5, -1.0, -1.0)
    leaf = logprobs.clone().requires_grad_()
    kl_penalty(leaf, ref, estimator).sum().backward()
    step = 1e-6
    numeric = [
        (surrogate(r - (p + step)) - surrogate(r - (p - step))) / (2 * step)
        for p, r in zip(logprobs.tolist(), ref.tolist(), strict=True)
    ]
    torch.testing.assert_close(leaf.grad, tensor(*numeric), atol=1e-7, rtol=1e-6)


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_k3_is_never_negative_and_zero_where_the_models_agree(logp, ref):
    assert kl_penalty(tensor(logp), tensor(ref), "k3").item() >= -1e-12  # where they nearly agree, it is rounding
    assert -1e-12 <= kl_penalty(tensor(logp), tensor(ref), "low_var_kl").item() <= 10
    assert kl_penalty(tensor(logp), tensor(logp), "k3").item() == 0
