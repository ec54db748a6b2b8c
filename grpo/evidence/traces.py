"""A group's conversations become the rows of a trace: what was said, how it was scored, what was trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo.groups import Group
from rewards.overlap import reference_overlap

TRACE_SCHEMA = 3


def trace_rows(
    group: Group,
    step: int,
    advantages_G: Sequence[float] | None = None,
    kl_G: Sequence[float] | None = None,
    *,
    replaced: bool = False,
) -> list[dict[str, Any]]:
    """One row per conversation, with everything its reply was trained on.

    `advantages_G` is None where nothing was trained: in evaluations, and for groups that others replaced.
    `kl_G` is each reply's KL (nats, summed over its tokens) where the reward was charged for it.
    """
    rows = []
    nothing = [None] * len(group.rewards_G)
    for conversations_C, scores_C, reward, advantage, kl in zip(
        group.conversations_GC, group.scores_GC, group.rewards_G, advantages_G or nothing, kl_G or nothing, strict=True
    ):
        for talk, score in zip(conversations_C, scores_C, strict=True):
            rows.append(
                {
                    "schema": TRACE_SCHEMA,
                    "step": step,
                    "scenario_id": group.scenario.scenario_id,
                    "sample": talk.sample,
                    "continuation": talk.continuation,
                    "messages": [dict(message) for message in talk.messages],
                    "num_prompt_messages": talk.num_prompt_messages,
                    "ended": talk.ended,
                    "farewell": talk.farewell,
                    "prompt_tokens": len(talk.first_reply.prompt_ids) if talk.replies else None,
                    "reply_tokens": [len(reply.token_ids) for reply in talk.replies],
                    "thoughts": [reply.thought for reply in talk.replies],
                    "first_reply_cut": talk.first_reply_cut,
                    "user_reference_overlap": reference_overlap(talk),
                    "score": {
                        "values": dict(score.values),
                        "failures": dict(score.failures),
                        "notes": dict(score.notes),
                    },
                    "reward": {
                        "total": reward.total if reward.valid else None,
                        "means": dict(reward.means),
                        "weighted": dict(reward.weighted),
                        "clamped": dict(reward.clamped),
                        "overlong": reward.overlong,
                    },
                    "kl": kl,
                    "advantage": advantage,
                    "replaced": replaced,
                }
            )
    return rows
