"""Whether a run can learn at all, and does: what tells its user, once for each cause, that it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import stdev
from typing import Any

from grpo.advantages import SPREAD_FLOOR
from grpo.config import Config
from rewards.settings import RewardSettings

PATIENCE = 3
"""Steps in a row without learning before it is told. One such step is chance where a step has few prompts, and so may
be two. Three cost minutes, and what is told of them is true even then.
"""


def warnings_at_start(config: Config, total_steps: int) -> Iterator[str]:
    """What the settings alone say."""
    optimizer, rewards = config.optimizer, config.rewards
    num_updates = total_steps * config.updates_per_step
    if optimizer.warmup_steps >= num_updates:
        highest = num_updates / (optimizer.warmup_steps + 1)
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps} leaves none of the run's {num_updates} optimizer steps "
            f"after the warm-up: the learning rate rises to {highest:.2g} of optimizer.lr at most; lower it"
        )
    if _all_earn_the_same(rewards):
        yield "rewards.weights: all are 0, so every reply earns the same and none is learned from; give one a weight"


def _all_earn_the_same(rewards: RewardSettings) -> bool:
    otherwise = rewards.soft_overlong.penalty or rewards.truncated not in ("score", "mask", 0)
    return not any(rewards.weights.values()) and not otherwise


class LearningWatch:
    """Looks at each step's trace rows and at the weights it pushed; only the main rank has one."""

    def __init__(self, config: Config, marks: Mapping[str, float]):
        """`marks` of the weights that the run begins with (`grpo.model.sync.push_weights`)."""
        self._config, self._marks = config, marks
        self._told = {"signal"} if _all_earn_the_same(config.rewards) else set()
        self._num_without_signal, self._num_unmoved = 0, 0
        self._has_moved = False

    def step(self, step: int, rows: Sequence[Mapping[str, Any]], marks: Mapping[str, float]) -> list[str]:
        """Warnings that this step is the first to give cause for. `rows`: of the groups that it trained on."""
        spreads = _spreads(rows)
        largest = max(spreads, default=0.0)
        self._num_without_signal = self._num_without_signal + 1 if largest < SPREAD_FLOOR else 0
        self._num_unmoved = self._num_unmoved + 1 if marks == self._marks else 0
        self._has_moved |= marks != self._marks
        self._marks = marks
        last = f"steps {step - PATIENCE + 1} to {step}"
        warnings = {}
        if 0 < largest < SPREAD_FLOOR:
            warnings["floor"] = (
                f"step {step}: the rewards of a prompt's replies differ by {largest:.1e} at most (standard deviation); "
                f"below {SPREAD_FLOOR:g} that counts as no difference, from which nothing is learned. Raise "
                "rewards.weights"
            )
        elif self._num_without_signal == PATIENCE:
            why = self._why_the_same(rows, bool(spreads))
            warnings["signal"] = f"{last}: {why}, so no reply was better than another: nothing is learned from rewards"
        if self._num_unmoved == PATIENCE and not self._num_without_signal:
            warnings["unmoved"] = (
                f"{last}: no weight changed, though replies differed: optimizer.lr: {self._config.optimizer.lr:g} "
                f"(less while it warms up) is too small for model.dtype: {self._config.model.dtype}, or every gradient "
                "was not finite (update/skipped_steps)"
            )
        new = [text for cause, text in warnings.items() if cause not in self._told]
        self._told |= warnings.keys()
        return new

    def end(self) -> list[str]:
        """Of the whole run, where it had a step."""
        return [] if self._has_moved else ["no step changed a weight: the model is the one that the run began with"]

    def _why_the_same(self, rows: Sequence[Mapping[str, Any]], are_judged: bool) -> str:
        rewards = self._config.rewards
        if rewards.truncated != "score" and all(row["first_reply_cut"] for row in rows):
            limit = f"rollout.max_reply_tokens: {self._config.rollout.max_reply_tokens}"
            return f"every first reply was cut at {limit} (rewards.truncated: {rewards.truncated})"
        if not are_judged:
            return "no two replies to a prompt could be judged"
        earned = [row["reward"] for row in rows if row["reward"]["total"] is not None]
        if all(reward["clamped"] != reward["weighted"] for reward in earned):
            return f"in every reward a part was cut to rewards.clamp: {[*rewards.clamp]}"
        return "all replies to a prompt earned the same (traces/ holds what they said)"


def _spreads(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Standard deviation of the rewards in each group that has two."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["continuation"] == 0 and row["reward"]["total"] is not None:
            groups.setdefault(row["scenario_id"], []).append(row["reward"]["total"])
    return [stdev(totals) for totals in groups.values() if len(totals) > 1]
