"""Metrics of a step, by hand."""

from __future__ import annotations

import json
import math

import pytest

from grpo.metrics import conversation_metrics, sampled_tokens
from grpo.recorder import read_rows, write_rows


def row(scenario, sample, continuation, total, advantage, tokens, *, cut=False, failures=None, value=0.0):
    means = {"interactivity": value} if total is not None else {}
    weighted = {name: 2 * mean for name, mean in means.items()}
    return {
        "scenario_id": scenario,
        "sample": sample,
        "continuation": continuation,
        "reply_tokens": tokens,
        "first_reply_cut": cut,
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
    assert metrics["judge/failure_rate"] == 1 / 5
    assert metrics["reward/interactivity"] == pytest.approx((0.9 + 0.1 + 0.2) / 3)
    assert metrics["reward/bleu_word"] == 0.25


def test_a_first_reply_is_sampled_once_however_often_it_is_continued():
    assert sampled_tokens(ROWS) == (10 + 4 + 6 + 8) + (20 + 5 + 5 + 3)


def test_a_step_without_any_valid_reply_has_no_reward():
    assert math.isnan(conversation_metrics([ROWS[3]], ["interactivity"])["reward/mean"])


def test_traces_survive_lone_surrogates(tmp_path):
    text = "broken \ud83d half, \u2028 line, \u0085 line, whole \U0001f41d, umlaut \u00e4"
    write_rows(tmp_path / "rows.jsonl", [{"text": text}])
    assert read_rows(tmp_path / "rows.jsonl") == [{"text": text}]
    assert "\u00e4" in (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))["text"] == text
