"""A step's experience: scenarios are played, scored and gathered into groups of sibling replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.overlap import reference_overlap
from rewards.scoring import ReplyReward, Scorer
from rollout.conversation import Rollout, RolloutPlan
from rollout.settings import TrainOn
from rollout.types import Conversation, Reply, Scenario, Score

TRACE_SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling replies to one scenario. Suffixes: G replies, C conversations of a reply."""

    scenario: Scenario
    position: int
    """Of the scenario in the step's batch: mini-batches are cut by it."""
    conversations_GC: tuple[tuple[Conversation, ...], ...]
    scores_GC: tuple[tuple[Score, ...], ...]
    rewards_G: tuple[ReplyReward, ...]

    @property
    def replies_G(self) -> tuple[Reply, ...]:
        return tuple(conversations_C[0].first_reply for conversations_C in self.conversations_GC)

    def trained_G(self, train_on: TrainOn) -> tuple[tuple[Reply, ...], ...]:
        """The replies that each sample trains on."""
        if train_on == "first_reply":
            return tuple((reply,) for reply in self.replies_G)
        return tuple(conversations_C[0].replies for conversations_C in self.conversations_GC)

    @property
    def conversations(self) -> list[Conversation]:
        return [conversation for conversations_C in self.conversations_GC for conversation in conversations_C]

    @property
    def failures(self) -> list[str]:
        """One line for each conversation that could not be judged."""
        return failure_lines(score.failures for scores_C in self.scores_GC for score in scores_C)


def failure_lines(failures: Iterable[Mapping[str, str]]) -> list[str]:
    """The first failure of each conversation that has any."""
    return [f"{name}: {reason}" for each in failures for name, reason in [*each.items()][:1]]


async def play_and_score(
    rollout: Rollout, scorer: Scorer, scenarios: Sequence[tuple[int, Scenario]], plan: RolloutPlan
) -> list[Group]:
    """Groups of the (position, scenario) pairs given, in their order; judging runs while others still talk."""
    played = await rollout.play([scenario for _, scenario in scenarios], plan, on_end=scorer.submit)
    scores = await scorer.finish()
    groups = []
    for (position, scenario), conversations_GC in zip(scenarios, played, strict=True):
        scores_GC = tuple(
            tuple(scores[scenario.scenario_id, talk.sample, talk.continuation] for talk in conversations_C)
            for conversations_C in conversations_GC
        )
        rewards_G = tuple(
            scorer.reward(conversations_C, scores_C)
            for conversations_C, scores_C in zip(conversations_GC, scores_GC, strict=True)
        )
        groups.append(Group(scenario, position, tuple(map(tuple, conversations_GC)), scores_GC, rewards_G))
    return groups


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
