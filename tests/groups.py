"""Groups of made-up replies, for programs that update without playing conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo.groups import Group
from grpo.ranks import Ranks
from rewards.scoring import ReplyReward
from rollout.types import Conversation, Reply, Scenario


@dataclass(frozen=True, slots=True)
class Alone(Ranks):
    """One rank without a process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def group_of(position: int, replies: Sequence[Reply], rewards: Sequence[ReplyReward]) -> Group:
    scenario = Scenario(f"s/{position}", ({"role": "user", "content": "x"},), "", "", None, "s", position)
    talks = tuple(
        (Conversation(scenario, sample, 0, scenario.messages, 1, (reply,), "turn_limit"),)
        for sample, reply in enumerate(replies)
    )
    return Group(scenario, position, talks, ((),) * len(replies), tuple(rewards))


def rewards_of(valid: Sequence[bool]) -> list[ReplyReward]:
    """Rewards of 0 that say only who is valid."""
    return [ReplyReward(0.0, is_valid, {}, {}, {}) for is_valid in valid]
