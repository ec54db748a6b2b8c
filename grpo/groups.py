"""Scenarios are played, scored and gathered into groups of sibling replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from grpo.dealing import deal_samples
from rewards.scoring import ReplyReward, Scorer
from rollout.conversation import Rollout, RolloutPlan
from rollout.settings import TrainOn
from rollout.types import Conversation, Reply, Scenario, Score


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling replies to one scenario, or those of them that one rank played. Suffixes: G replies, C conversations
    of a reply.
    """

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
    rollout: Rollout,
    scorer: Scorer,
    scenarios: Sequence[tuple[int, Scenario]],
    plan: RolloutPlan,
    samples_P: Sequence[Sequence[int]] | None = None,
) -> list[Group]:
    """Groups of the (position, scenario) pairs given, in their order; judging runs while others still talk.

    `samples_P`: which samples of each scenario; None: all.
    """
    played = await rollout.play([scenario for _, scenario in scenarios], plan, scorer.submit, samples_P)
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


async def play_share(
    rollout: Rollout,
    scorer: Scorer,
    scenarios: Sequence[tuple[int, Scenario]],
    plan: RolloutPlan,
    rank: int,
    num_ranks: int,
) -> list[Group]:
    """`play_and_score` of what is dealt to one of the ranks; `whole_groups` puts the shares of all of them together."""
    share = deal_samples(len(scenarios), plan.group_size, num_ranks)[rank]
    own, samples_P = [scenarios[number] for number, _ in share], [samples for _, samples in share]
    return await play_and_score(rollout, scorer, own, plan, samples_P)


def whole_groups(shares: Iterable[Sequence[Group]]) -> list[Group]:
    """The groups of all ranks' shares, by position, each with its samples in their order."""
    parts: dict[int, list[Group]] = {}
    for part in chain.from_iterable(shares):
        parts.setdefault(part.position, []).append(part)
    return [_joined(parts[position]) for position in sorted(parts)]


def _joined(parts: Sequence[Group]) -> Group:
    parts = sorted(parts, key=lambda part: part.conversations[0].sample)
    together = {
        name: tuple(chain.from_iterable(getattr(part, name) for part in parts))
        for name in ("conversations_GC", "scores_GC", "rewards_G")
    }
    return replace(parts[0], **together)
