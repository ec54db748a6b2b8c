"""Metrics of a step, by hand."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from grpo.metrics import conversation_metrics, role_counts, sampled_tokens, summed
from grpo.recorder import read_rows, write_rows
from rewards.overlap import reference_overlap
from rollout.llm_client import Usage
from rollout.types import Conversation, Scenario


def row(scenario, sample, continuation, total, advantage, tokens, *, cut=False, failures=None, value=0.0, overlap=None):
    means = {"interactivity": value} if total is not None else {}
    weighted = {name: 2 * mean for name, mean in means.items()}
    return {
        "scenario_id": scenario,
        "sample": sample,
        "continuation": continuation,
        "reply_tokens": tokens,
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
    row("a", 1, 0, 0.0, -0.5, [4], cut=True, value=0.1),
    row("b", 0, 0, None, 0.0, [6, 3], failures={"interactivity": "judge: timeout"}),
    row("b", 1, 0, 0.5, 0.0, [8], value=0.2),
]


def test_metrics_by_hand():
    metrics = conversation_metrics(ROWS, ["interactivity"])
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


def test_a_failure_of_the_user_is_none_of_the_judge():
    rows = [*ROWS, row("b", 1, 1, None, 0.0, [8], failures={"user": "user: timeout"})]
    rows += [row("b", 1, 2, None, 0.0, [8], failures={"interactivity": "judge: cut", "bleu_score": "judge: cut"})]
    metrics = conversation_metrics(rows, [])
    assert (metrics["judge/failure_rate"], metrics["user/failure_rate"]) == (2 / 7, 1 / 7)
    assert metrics["conversation/failure_rate"] == 3 / 7


def test_a_first_reply_is_sampled_once_however_often_it_is_continued():
    assert sampled_tokens(ROWS) == (10 + 4 + 6 + 8) + (20 + 5 + 5 + 3)


def test_a_step_without_any_valid_reply_has_no_reward():
    assert math.isnan(conversation_metrics([ROWS[3]], ["interactivity"])["reward/mean"])


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
