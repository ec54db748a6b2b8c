"""Plays the held-out scenarios with the present policy and scores them: the measure of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.config import EvaluationSettings
from grpo.evidence.statistics import mean_interval
from grpo.evidence.traces import trace_rows
from grpo.groups import play_share
from grpo.ranks import Ranks
from rewards.scoring import Scorer
from rollout.conversation import Rollout, RolloutPlan
from rollout.types import Scenario

EVALUATION_STEP = -1
"""Seeds of evaluations derive from this, so that all evaluations of a run draw alike."""

EVALUATION = "evaluation/reward"
"""The metric that every evaluation has, and no step."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Trace rows of all held-out conversations, in the order of the data, by any number of ranks."""

    step: int
    rows: tuple[dict[str, Any], ...]

    @property
    def reward(self) -> float:
        """Mean over the items that could be judged; NaN where none could."""
        totals = list(item_rewards(self.rows).values())
        return fmean(totals) if totals else float("nan")

    def metrics(self) -> dict[str, float]:
        """Held-out means of the reward and each component, with the ends of their 95 % intervals where there are two
        items or more. An item is a prompt.
        """
        names = dict.fromkeys(name for row in self.rows for name in row["reward"]["means"])
        columns = {name: item_components(self.rows, name) for name in names}
        metrics = {EVALUATION: self.reward}
        for name, items in ({"reward": item_rewards(self.rows)} | columns).items():
            if len(items) > 1:
                mean, low, high = mean_interval([*items.values()])
                metrics |= {f"evaluation/{name}": mean, f"evaluation/{name}_low": low, f"evaluation/{name}_high": high}
            elif items:
                metrics[f"evaluation/{name}"] = fmean(items.values())
        return metrics


def evaluation_plan(settings: EvaluationSettings, seed: int) -> RolloutPlan:
    return RolloutPlan(
        group_size=1,
        continuations=settings.continuations,
        temperature=settings.temperature,
        run_seed=seed,
        step=EVALUATION_STEP,
        max_new_turns=settings.max_new_turns,
        user_opens=settings.user_opens,
    )


async def evaluate(
    rollout: Rollout,
    scorer: Scorer,
    scenarios: Sequence[Scenario],
    settings: EvaluationSettings,
    *,
    step: int,
    seed: int,
    ranks: Ranks,
) -> Evaluation:
    """One reply per held-out scenario. Collective: each rank plays its share."""
    chosen = list(enumerate(scenarios[: settings.prompts]))
    plan = evaluation_plan(settings, seed)
    groups = await play_share(rollout, scorer, chosen, plan, ranks.rank, ranks.world_size)
    own = [(group.position, trace_rows(group, step)) for group in groups]
    by_position = sorted((pair for share in ranks.gather(own) for pair in share), key=lambda pair: pair[0])
    return Evaluation(step, tuple(row for _, rows in by_position for row in rows))


def item_rewards(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """scenario_id → reward of its reply, of the items that could be judged."""
    return {row["scenario_id"]: row["reward"]["total"] for row in rows if row["reward"]["total"] is not None}


def item_components(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """scenario_id → mean of one reward component over the reply's conversations."""
    return {row["scenario_id"]: row["reward"]["means"][name] for row in rows if name in row["reward"]["means"]}
