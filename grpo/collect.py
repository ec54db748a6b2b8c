"""A step's batch: conversations are started, waited for, and replaced where their groups hold no signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from grpo.advantages import has_signal
from grpo.background import LoopThread, wait_for
from grpo.config import Config
from grpo.evidence.metrics import role_counts
from grpo.groups import Group, play_share, whole_groups
from grpo.ranks import Ranks
from rewards.scoring import Scorer, check_failure_rate, first_different
from rollout.conversation import Rollout, RolloutPlan
from rollout.data import batch_rows, spare_rows
from rollout.roles.client import LLMClient
from rollout.types import Scenario


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains on, the same on all ranks but for the counts."""

    groups: list[Group]
    """By position."""
    replaced: list[Group]
    """Groups dropped for equal rewards and replaced by other prompts."""
    weight_version: int
    """Of the weights that sampled all of it."""
    counts: dict[str, float]
    """What it cost this rank (`Collector.new_counts`)."""


class Collector:
    def __init__(
        self,
        config: Config,
        rollout: Rollout,
        scorer: Scorer,
        train: Sequence[Scenario],
        clients: Mapping[str, LLMClient],
        ranks: Ranks,
        runner: LoopThread,
    ):
        """`clients` by role, where a server plays it. `runner`: the loop that all conversations of a run share."""
        self.sampling, self.seed = config.rollout, config.run.seed
        self.max_failure_rate = config.rewards.max_failure_rate
        self.rollout, self.scorer, self.train, self.clients = rollout, scorer, train, clients
        self.ranks, self.runner = ranks, runner
        self.weight_version = -1
        """Of the weights in the engine: how often trained weights were pushed; 0 are those the run began with."""
        self.counted = self.counts()
        """All that this rank's clients and engine did, up to the last `new_counts`."""
        self.num_started, self.num_failed = 0, 0
        self.first_failures: list[str] = []

    def start(self, step: int, wanted: Mapping[int, int] | None = None) -> Future[list[Group]]:
        """This rank's share of a step's conversations, which go on by themselves. Not collective.

        `wanted`: position in the batch → row of the data; None: the step's own.
        """
        plan = RolloutPlan.of_training(self.sampling, self.seed, step)
        wanted = dict(enumerate(self._rows(step))) if wanted is None else wanted
        scenarios = [(position, self.train[row]) for position, row in wanted.items()]
        share = play_share(self.rollout, self.scorer, scenarios, plan, self.ranks.rank, self.ranks.world_size)
        return self.runner.start(share)

    def collect(self, step: int, playing: Future[list[Group]] | None = None) -> Batch:
        """All groups of a step, those without signal replaced by others as often as was asked for.

        `playing`: this rank's share of the step's conversations, where they were started before. Collective: the ranks
        exchange what they played, and all know the whole batch from then on.
        """
        playing = playing or self.start(step)
        rows = self._rows(step)
        spare = iter(spare_rows(step, len(self.train), rows, self.seed))
        groups: dict[int, Group] = {}
        wanted, replaced = dict(enumerate(rows)), []
        for last in [False] * self.sampling.dynamic_sampling.max_rounds + [True]:
            replaced += [group for position, group in groups.items() if position in wanted]
            groups = {position: group for position, group in groups.items() if position not in wanted}
            played = whole_groups(self.ranks.gather(wait_for(playing)))
            self._check_failures(played)
            groups |= {group.position: group for group in played}
            if last:
                break
            signal_P = has_signal(*reward_matrices(in_order(groups)))
            wanted = dict(zip((~signal_P).nonzero()[:, 0].tolist(), spare, strict=False))
            if not wanted:
                break
            playing = self.start(step, wanted)
        return Batch(in_order(groups), replaced, self.weight_version, self.new_counts())

    def new_counts(self) -> dict[str, float]:
        """What the roles' servers and the engine did for this rank since this was last called."""
        before, self.counted = self.counted, self.counts()
        return {name: count - before.get(name, 0.0) for name, count in self.counted.items()}

    def counts(self) -> dict[str, float]:
        """All of it so far."""
        engine = self.rollout.engine
        return role_counts(self.clients) | {
            "policy/prompt_tokens": float(engine.num_prompt_tokens),
            "policy/cached_tokens": float(engine.num_cached_tokens),
        }

    def _rows(self, step: int) -> list[int]:
        return batch_rows(step - 1, len(self.train), self.sampling.prompts_per_step, self.seed)

    def _check_failures(self, groups: Sequence[Group]) -> None:
        """Raises where too many conversations failed: in this step, or in training so far."""
        started = sum(len(group.conversations) for group in groups)
        failures = [failure for group in groups for failure in group.failures]
        self.num_started += started
        self.num_failed += len(failures)
        self.first_failures = first_different(self.first_failures + failures)
        check_failure_rate(len(failures), started, failures, self.max_failure_rate)
        # Steps may be too small to tell.
        check_failure_rate(self.num_failed, self.num_started, self.first_failures, self.max_failure_rate)


def in_order(groups: Mapping[int, Group]) -> list[Group]:
    return [groups[position] for position in sorted(groups)]


def reward_matrices(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards, validity), [P, G] each."""
    return (
        torch.tensor([[reward.total for reward in group.rewards_G] for group in groups], dtype=torch.float64),
        torch.tensor([[reward.valid for reward in group.rewards_G] for group in groups]),
    )
