"""A run that cannot learn says so: from its settings, or as soon as its steps show it, once for each cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.config_file import load_config
from grpo.run.learning import PATIENCE, LearningWatch, warnings_at_start
from launch import report
from tests.small_run import SmallRun, prepare

QUICKSTART = Path("configs/quickstart.yaml")


def config(*settings):
    return load_config(QUICKSTART, [*settings])


def rows(*groups, cut=False, clamped=False):
    """Trace rows of groups of replies, given by what they earned (None: not judged); two conversations of each."""
    return [
        {
            "scenario_id": f"s/{number}",
            "continuation": continuation,
            "first_reply_cut": cut,
            "reward": {"total": total, "weighted": {"a": 2.0}, "clamped": {"a": 1.0 if clamped else 2.0}},
        }
        for number, totals in enumerate(groups)
        for total in totals
        for continuation in (0, 1)
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # 20 steps of one optimizer step each; the last of them has 20/1001 of the learning rate.
        (["optimizer.warmup_steps=1000"], "optimizer.warmup_steps: 1000 leaves none of the run's 20 optimizer steps"),
        (["optimizer.warmup_steps=1000"], "the learning rate rises to 0.02 of optimizer.lr at most"),
        (["optimizer.warmup_steps=20"], "the learning rate rises to 0.95 of"),
        (["optimizer.warmup_steps=20", "update.mini_batch_prompts=1"], None),  # of 40
        (["optimizer.warmup_steps=19"], None),
        (["rewards.weights={token_amount: 0, interactivity: 0.0}"], "rewards.weights: all are 0, so every reply earns"),
        (["rewards.weights={token_amount: 0}", "rewards.truncated=0.0"], "rewards.weights: all are 0"),
        (["rewards.weights={token_amount: 0}", "rewards.truncated=-1.0"], None),  # cut replies earn less
        (["rewards.weights={token_amount: 0}", "rewards.soft_overlong.penalty=1"], None),
    ],
)
def test_settings_that_cannot_learn_are_told_at_the_start(settings, told):
    warnings = list(warnings_at_start(config(*settings), total_steps=20))
    assert len(warnings) == (told is not None) and all(told in warning for warning in warnings)


def test_spreads_that_count_as_none_are_told_in_the_first_step_and_once():
    watch = LearningWatch(config(), {"w": 1.0})
    # The sample standard deviation of 0 and 6e-7 is 6e-7 / √2 = 4.2e-7; the other group has none.
    assert watch.step(1, rows([0.0, 6e-7], [1.0, 1.0]), {"w": 1.0}) == [
        "step 1: the rewards of a prompt's replies differ by 4.2e-07 at most (standard deviation); below 1e-06 that "
        "counts as no difference, from which nothing is learned. Raise rewards.weights"
    ]
    assert all(watch.step(step, rows([0.0, 6e-7]), {"w": 1.0}) == [] for step in range(2, 9))
    assert watch.end() == ["no step changed a weight: the model is the one that the run began with"]


@pytest.mark.parametrize(
    ("settings", "dull", "why"),
    [
        ([], rows([1.0, 1.0], [0.5, 0.5, None]), "all replies to a prompt earned the same"),
        ([], rows([1.0, None], [None, None]), "no two replies to a prompt could be judged"),
        ([], rows([1.0, 1.0], clamped=True), "in every reward a part was cut to rewards.clamp: [-1.0, 1.0]"),
        (
            ["rewards.truncated=0.0"],
            rows([0.0, 0.0], cut=True),
            "every first reply was cut at rollout.max_reply_tokens: 64 (rewards.truncated: 0.0)",
        ),
        (
            ["rewards.truncated=mask"],
            rows([None, None], cut=True),
            "every first reply was cut at rollout.max_reply_tokens: 64 (rewards.truncated: mask)",
        ),
    ],
)
def test_steps_without_any_difference_are_told_with_their_cause_when_they_can_hardly_be_chance(settings, dull, why):
    watch = LearningWatch(config(*settings), {"w": 1.0})
    assert watch.step(1, dull, {"w": 1.0}) == watch.step(2, dull, {"w": 1.0}) == []
    assert watch.step(3, rows([0.0, 1.0]), {"w": 2.0}) == []  # what was before is no row any more
    told = [watch.step(step, dull, {"w": 2.0}) for step in range(4, 4 + 3 * PATIENCE)]
    assert told[PATIENCE - 1] == [
        f"steps 4 to 6: {why}{' (traces/ holds what they said)' if 'same' in why else ''}, so no reply was better than "
        "another: nothing is learned from rewards"
    ]
    assert sum(map(len, told)) == 1
    assert watch.end() == []  # step 3 has changed one


def test_weights_that_do_not_move_though_replies_differ_are_told():
    watch = LearningWatch(config("optimizer.lr=1e-12"), {"w": 1.0})
    told = [watch.step(step, rows([0.0, 1.0]), {"w": 1.0}) for step in (1, 2, 3, 4)]
    assert [len(each) for each in told] == [0, 0, 1, 0]
    assert "steps 1 to 3: no weight changed, though replies differed: optimizer.lr: 1e-12" in told[2][0]


def test_what_was_told_at_the_start_is_not_told_again():
    watch = LearningWatch(config("rewards.weights={token_amount: 0}"), {"w": 1.0})
    assert not any(watch.step(step, rows([0.0, 0.0]), {"w": 1.0}) for step in range(1, 9))


def test_a_run_that_cannot_learn_says_so_at_its_start_in_its_first_step_at_its_end_and_in_its_report(tmp_path, capsys):
    weak = prepare(tmp_path, rewards__weights={"token_amount": -1e-6}, optimizer__warmup_steps=1000)
    with SmallRun(weak) as run:
        assert run.wait() == 0, run.output
    start, _, rest = run.output.partition("loading the model")
    assert "warning: optimizer.warmup_steps: 1000 leaves none of the run's 2 optimizer steps" in start
    assert rest.count("warning: step 1: the rewards of a prompt's replies differ by ") == 1
    assert "warning: no step changed a weight" in rest and rest.count("warning: ") == 2
    assert all(row["update/optimizer_steps"] == 0 for row in run.metrics)
    report.main([str(run.folder)])
    told = capsys.readouterr().out
    assert told.count("warning: ") == 3 and "the run:" not in told and "to go on" not in told
