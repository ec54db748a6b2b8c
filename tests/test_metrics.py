"""Metrics of a step, by hand."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from grpo.evidence.evaluate import Evaluation
from grpo.evidence.metrics import (
    StepShare,
    conversation_metrics,
    experience_metrics,
    group_metrics,
    machine_metrics,
    role_counts,
    sampled_tokens,
    step_metrics,
    summed,
)
from grpo.run.recorder import read_rows, write_rows
from rewards.overlap import reference_overlap
from rollout.roles.client import Usage
from rollout.types import Conversation, Scenario


def row(
    scenario,
    sample,
    continuation,
    total,
    advantage,
    tokens,
    *,
    cut=False,
    failures=None,
    value=0.0,
    overlap=None,
    prompt=7,
    ended="turn_limit",
):
    means = {"interactivity": value} if total is not None else {}
    weighted = {name: 2 * mean for name, mean in means.items()}
    return {
        "scenario_id": scenario,
        "sample": sample,
        "continuation": continuation,
        "prompt_tokens": prompt,
        "reply_tokens": tokens,
        "ended": ended,
        "replaced": False,
        "first_reply_cut": cut,
        "user_reference_overlap": overlap,
        "advantage": advantage,
        "score": {"failures": failures or {}, "notes": {"bleu_word": 0.25}},
        "reward": {
            "total": total,
            "means": means,
            "weighted": weighted,
            "clamped": {n: min(w, 1) for n, w in weighted.items()},
            "overlong": 0.0,
        },
    }


ROWS = [
    row("a", 0, 0, 1.0, 0.5, [10, 20], value=0.9),
    row("a", 0, 1, 1.0, 0.5, [10, 5, 5], value=0.9),
    row("a", 1, 0, 0.0, -0.5, [4], cut=True, value=0.1, ended="length"),
    row("b", 0, 0, None, 0.0, [6, 3], failures={"interactivity": "judge: timeout"}, prompt=12),
    row("b", 1, 0, 0.5, 0.0, [8], value=0.2, prompt=12, ended="user_satisfied"),
]


def test_metrics_by_hand():
    metrics = experience_metrics(ROWS, ["interactivity"])
    assert metrics["reward/mean"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(((0.5) ** 2 + 0.5**2 + 0) / 3))
    assert metrics["reward/zero_std_groups"] == 1
    assert metrics["reward/clamped"] == pytest.approx(1 / 3)  # 2 x 0.9 was clamped to 1
    assert metrics["reply/length_mean"] == (10 + 4 + 6 + 8) / 4
    assert metrics["reply/truncated"] == 1 / 4
    assert metrics["conversation/turns_mean"] == (2 + 3 + 1 + 2 + 1) / 5
    assert (metrics["judge/failure_rate"], metrics["user/failure_rate"]) == (1 / 5, 0)
    assert metrics["reward/interactivity"] == pytest.approx((0.9 + 0.1 + 0.2) / 3)
    assert metrics["reward/bleu_word"] == 0.25


def test_lengths_and_endings_by_hand():
    metrics = conversation_metrics(ROWS, ["interactivity"])
    assert [metrics[f"reply/length_{of}"] for of in ("min", "max")] == [4, 10]  # of first replies, each once
    assert [metrics[f"later_reply/length_{of}"] for of in ("mean", "min", "max")] == [(20 + 5 + 5 + 3) / 4, 3, 20]
    assert [metrics[f"prompt/length_{of}"] for of in ("mean", "min", "max")] == [(7 + 12) / 2, 7, 12]  # each once
    endings = {name.removeprefix("conversation/ended/"): n for name, n in metrics.items() if "/ended/" in name}
    assert endings == {
        "turn_limit": 3 / 5, "length": 1 / 5, "user_satisfied": 1 / 5, "context_full": 0, "simulator_failed": 0
    }  # fmt: skip
    assert "later_reply/length_mean" not in conversation_metrics(ROWS[2:3], [])  # there is none


def test_spreads_and_advantages_by_hand():
    metrics = group_metrics(ROWS, ["interactivity"])
    mean = (0.9 + 0.1 + 0.2) / 3
    variance = ((0.9 - mean) ** 2 + (0.1 - mean) ** 2 + (0.2 - mean) ** 2) / 3
    assert metrics["reward/interactivity_std"] == pytest.approx(math.sqrt(variance))
    assert metrics["reward/zero_std_fraction"] == 1 / 2
    # Of the valid replies: 0.5, -0.5 and 0.
    assert metrics["advantage/mean"] == 0 and metrics["advantage/std"] == pytest.approx(math.sqrt(0.5 / 3))
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-0.5, 0.5)
    assert metrics["advantage/zero_fraction"] == pytest.approx(1 / 3)
    assert "advantage/mean" not in group_metrics([ROWS[3]], [])  # no valid reply


def test_replaced_groups_count_as_refilled_alone():
    replaced = [one | {"scenario_id": "gone", "replaced": True} for one in ROWS[:3]]
    assert experience_metrics(replaced + ROWS, ["interactivity"]) == experience_metrics(ROWS, ["interactivity"]) | {
        "rollout/refilled_groups": 1
    }


def test_what_a_step_took_is_that_of_the_rank_that_needed_most_and_the_mean_card():
    peaks = [{"rollout": 3.0, "update": 1.0}, {"rollout": 2.0, "update": 4.0}]
    metrics = machine_metrics({"rollout": 5.0, "update": 2.0}, 8.0, 400, peaks, [3e14, 1e14], peak_tflops=400)
    assert metrics == {
        "time/rollout": 5, "time/update": 2, "time/step": 8, "tokens_per_second": 50,
        "memory/rollout_gib": 3, "memory/update_gib": 4, "memory/peak_gib": 4,
        "perf/update_tflops": 100, "perf/mfu": 0.25,
    }  # fmt: skip
    assert "perf/mfu" not in machine_metrics({"update": 2.0}, 8.0, 400, [{"update": 1.0}], [1.0], peak_tflops=None)


def test_a_steps_metrics_are_those_of_all_ranks_together():
    rows = [one | {"weight_version": 3} for one in ROWS]
    counts = {"policy/prompt_tokens": 30.0, "policy/cached_tokens": 5.0}
    shares = [
        StepShare(rows[:2], counts, {"user/calls": 4.0}, {"rollout": 3.0, "update": 1.0}, 3e12),
        StepShare(rows[2:], counts | {"user/calls": 2.0}, {"user/calls": 5.0}, {"rollout": 2.0, "update": 4.0}, 1e12),
    ]
    metrics = step_metrics(rows, shares, ["interactivity"], {"rollout": 5.0, "update": 2.0}, 8.0, peak_tflops=None)
    expected = {
        "policy/prompt_tokens": 60, "policy/cached_tokens": 10, "user/calls": 2, "total/user/calls": 9,
        "rollout/prefix_hit_rate": 1 / 6, "rollout/weight_version": 3, "reward/mean": 0.5,
        "tokens_per_second": 61 / 8, "memory/peak_gib": 4, "perf/update_tflops": 1,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected


def test_an_evaluation_tells_means_with_their_intervals():
    rows = [
        row(item, 0, c, total, None, [5], value=value)
        for item, c, total, value in (("a", 0, 1, 0.2), ("a", 1, 1, 0.2), ("b", 0, 2, 0.4), ("c", 0, 3, 0.6))
    ]
    metrics = Evaluation(4, (*rows, row("d", 0, 0, None, None, [5]))).metrics()
    half = 4.302653 / math.sqrt(3)  # t of two degrees of freedom, sd 1, three items that could be judged
    assert metrics == {
        "evaluation/reward": 2,
        "evaluation/reward_low": pytest.approx(2 - half),
        "evaluation/reward_high": pytest.approx(2 + half),
        "evaluation/interactivity": pytest.approx(0.4),
        "evaluation/interactivity_low": pytest.approx(0.4 - 0.2 * half),
        "evaluation/interactivity_high": pytest.approx(0.4 + 0.2 * half),
    }
    alone = Evaluation(4, (row("a", 0, 0, 1.0, None, [5], value=0.2),)).metrics()
    assert alone == {"evaluation/reward": 1, "evaluation/interactivity": 0.2}


def test_a_failure_of_the_user_is_none_of_the_judge():
    rows = [*ROWS, row("b", 1, 1, None, 0.0, [8], failures={"user": "user: timeout"})]
    rows += [row("b", 1, 2, None, 0.0, [8], failures={"interactivity": "judge: cut", "bleu_score": "judge: cut"})]
    metrics = conversation_metrics(rows, [])
    assert (metrics["judge/failure_rate"], metrics["user/failure_rate"]) == (2 / 7, 1 / 7)
    assert metrics["conversation/failure_rate"] == 3 / 7


def test_a_first_reply_is_sampled_once_however_often_it_is_continued():
    assert sampled_tokens(ROWS) == (10 + 4 + 6 + 8) + (20 + 5 + 5 + 3)


def test_a_step_without_any_valid_reply_has_no_reward():
    metrics = experience_metrics([ROWS[3]], ["interactivity"])
    assert math.isnan(metrics["reward/mean"]) and math.isnan(metrics["reward/std"])


def test_the_users_overlap_is_a_mean_over_the_conversations_that_have_one():
    rows = [row("a", 0, 0, 1.0, 0.5, [9], overlap=0.5), row("a", 0, 1, 1.0, 0.5, [9], overlap=0.0), ROWS[2]]
    assert conversation_metrics(rows, [])["user/reference_overlap"] == 0.25
    assert "user/reference_overlap" not in conversation_metrics(ROWS, [])


REFERENCE = "The bees on the roof hum, and keep warm."


@pytest.mark.parametrize(
    ("said", "overlap"),
    [
        (["I want: the bees ON THE ROOF, hum!"], 6 / 8),  # two runs of five that share four words
        (["I want: the bees on the roof hum", "bees on the roof"], 6 / 12),  # four words are no run
        (["the bees on", "the roof hum and"], 0.0),  # a run ends with its message
        ([REFERENCE], 1.0),
        (["the bees on the roof and the roof hum and keep warm"], 11 / 12),  # a run on either side of one word
        (["..."], None),
        ([], None),
    ],
)
def test_the_overlap_of_user_and_reference_by_hand(said, overlap):
    assert reference_overlap(talk(said, REFERENCE)) == (pytest.approx(overlap) if overlap is not None else None)


def test_without_a_reference_nothing_overlaps():
    assert reference_overlap(talk([REFERENCE], None)) is None


def talk(said, reference):
    """The prompt and the assistant quote the reference, which is not the user's doing."""
    prompt = ({"role": "user", "content": REFERENCE},)
    scenario = Scenario("s/0", prompt, "", "", reference, "s", 0)
    answered = [m for text in said for m in ({"role": "user", "content": text}, {"role": "assistant", "content": "ok"})]
    return Conversation(
        scenario, 0, 0, (*prompt, {"role": "assistant", "content": REFERENCE}, *answered), 1, (), "length"
    )


def test_counts_of_the_roles_add_up_over_ranks():
    user = SimpleNamespace(counts=Usage(3, 1, {"timeout": 1}, 21, 9, 1.5, {"timeout": 2}))
    judge = SimpleNamespace(counts=Usage(2, 0, {}, 14, 6, 0.25))
    own = role_counts({"user": user, "judge": judge})
    assert own == {
        "user/calls": 3, "user/retries": 1, "user/prompt_tokens": 21, "user/completion_tokens": 9, "user/seconds": 1.5,
        "judge/calls": 2, "judge/retries": 0, "judge/prompt_tokens": 14, "judge/completion_tokens": 6,
        "judge/seconds": 0.25, "user/errors/timeout": 2, "user/failures/timeout": 1,
    }  # fmt: skip
    assert summed([own, own, own])["judge/prompt_tokens"] == 42
    assert summed([{"user/calls": 1}, own])["user/errors/timeout"] == 2  # a kind that one rank alone has met
    assert role_counts({}) == summed([{}, {}]) == {}


def test_traces_survive_lone_surrogates(tmp_path):
    text = "broken \ud83d half, \u2028 line, \u0085 line, whole \U0001f41d, umlaut \u00e4"
    write_rows(tmp_path / "rows.jsonl", [{"text": text}])
    assert read_rows(tmp_path / "rows.jsonl") == [{"text": text}]
    assert "\u00e4" in (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))["text"] == text
