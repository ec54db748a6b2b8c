"""Advantages by numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.advantages import group_advantages, has_signal


def advantages(rewards, valid=None, **options):
    valid = None if valid is None else torch.tensor(valid)
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), valid, **options)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_a_failed_member_leaves_the_mean_and_gets_zero():
    # The valid rewards are 1, 0, 0: mean 1/3.
    close(advantages([[1.0, 1, 0, 0]], [[True, False, True, True]], scale="none"), [[2 / 3, 0, -1 / 3, -1 / 3]])


def test_the_reward_of_a_failed_member_may_be_nan_and_does_not_matter():
    valid = [[True, False, True]]
    nan = advantages([[1.0, math.nan, 0]], valid)
    torch.testing.assert_close(nan, advantages([[1.0, 1000, 0]], valid))
    assert nan.isfinite().all()


def test_group_std_divides_by_the_sample_standard_deviation():
    # 1, 2, 3: mean 2, squares 1 + 0 + 1 over n - 1 = 2 gives std 1.
    close(advantages([[1.0, 2, 3]]), [[-1, 0, 1]])


def test_spreads_are_those_of_the_valid_members():
    valid = [[True, True, True, False]]
    close(advantages([[1.0, 2, 3, 100]], valid), [[-1, 0, 1, 0]])
    std = math.sqrt(20 / 3)  # of 0, 2, 4, 6, as below
    found = advantages([[0.0, 2, 100], [4, 6, math.nan]], [[True, True, False]] * 2, scale="batch_std")
    close(found, [[-1 / std, 1 / std, 0]] * 2)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 3 against (1 + 2)/2, 1 against (3 + 2)/2, 2 against (3 + 1)/2.
    close(advantages([[3.0, 1, 2]], baseline="leave_one_out", scale="none"), [[1.5, -1.5, 0]])


def test_leave_one_out_counts_only_valid_others():
    close(advantages([[3.0, 1, 9]], [[True, True, False]], baseline="leave_one_out", scale="none"), [[2, -2, 0]])


def test_batch_std_divides_every_group_by_the_spread_of_all_rewards():
    # All rewards 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, over 3: std sqrt(20/3).
    std = math.sqrt(20 / 3)
    close(advantages([[0.0, 2], [4, 6]], scale="batch_std"), [[-1 / std, 1 / std], [-1 / std, 1 / std]])


def test_constant_rewards_give_zero_advantage_under_every_setting():
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group_std", "batch_std", "none"):
            close(advantages([[0.7, 0.7, 0.7], [0, 1, 2]], baseline=baseline, scale=scale)[:1], [[0, 0, 0]])


def test_rounding_of_large_equal_rewards_is_no_signal():
    # 1e9 apart by one float64 rounding (1.2e-7): a one-pass variance would leave a residue here.
    reward = 1e9
    close(advantages([[reward, reward, math.nextafter(reward, math.inf)]]), [[0, 0, 0]])


def test_one_valid_member_gives_zero():
    close(advantages([[5.0, 1]], [[True, False]]), [[0, 0]])


def test_a_valid_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        advantages([[1.0, math.inf]])


def test_shapes_and_names_are_checked():
    with pytest.raises(ValueError, match=r"\[P, G\]"):
        group_advantages(torch.zeros(3))
    with pytest.raises(ValueError, match="unknown baseline"):
        advantages([[1.0, 0]], baseline="median")


groups = st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=3)
masks = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3)
baselines, scales = st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["group_std", "batch_std", "none"])


def spread_out(rewards):
    """Away from the floor below which a group has no signal, where rounding and scaling decide what counts."""
    return [[reward + 30 * place for place, reward in enumerate(group)] for group in rewards]


@given(groups, masks, baselines, scales)
def test_the_advantages_of_a_groups_valid_members_sum_to_zero(rewards, valid, baseline, scale):
    found = advantages(rewards, valid[: len(rewards)], baseline=baseline, scale=scale)
    assert found.sum(1).abs().max() < 1e-6
    assert not found[~torch.tensor(valid[: len(rewards)])].any()


@given(groups, masks, st.floats(-100, 100), baselines, scales)
def test_adding_a_constant_to_all_rewards_changes_nothing(rewards, valid, constant, baseline, scale):
    rewards = spread_out(rewards)
    shifted = [[reward + constant for reward in group] for group in rewards]
    options = {"valid": valid[: len(rewards)], "baseline": baseline, "scale": scale}
    torch.testing.assert_close(advantages(rewards, **options), advantages(shifted, **options), atol=1e-5, rtol=1e-5)


@given(groups, masks, st.floats(0.5, 20), baselines)
def test_multiplied_rewards_change_unscaled_advantages_alone(rewards, valid, factor, baseline):
    rewards, options = spread_out(rewards), {"valid": valid[: len(rewards)], "baseline": baseline}
    scaled = [[factor * reward for reward in group] for group in rewards]
    for scale, expected in (("none", factor), ("group_std", 1.0), ("batch_std", 1.0)):
        torch.testing.assert_close(
            advantages(scaled, scale=scale, **options),
            expected * advantages(rewards, scale=scale, **options),
            atol=1e-4,
            rtol=1e-4,
        )


def test_a_group_has_signal_where_two_valid_members_differ():
    rewards = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [1.0, 0, 0], [1.0, 0, 7.0]])
    valid = torch.tensor([[True, True, True], [True, True, True], [False, True, True], [False, True, False]])
    assert has_signal(rewards, valid).tolist() == [True, False, False, False]


def test_inputs_are_left_as_they_were():
    rewards, valid = torch.tensor([[1.0, math.nan, 0]]), torch.tensor([[True, False, True]])
    before = rewards.clone()
    group_advantages(rewards, valid)
    torch.testing.assert_close(rewards, before, equal_nan=True)
