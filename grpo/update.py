"""The update: groups with advantages become optimizer steps.

The batch is cut into mini-batches of whole groups, each one optimizer step. Every rank knows the whole batch; the
replies of a mini-batch are dealt to the ranks by what they cost, whoever sampled them, in micro-batches that fit the
memory, the same number on every rank (`grpo.model.packing`, `grpo.dealing`). Old log-probs come from the weights before the
first step; where a mini-batch is the first, they are its own forward pass, detached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from grpo.config import LossSettings, UpdateSettings
from grpo.groups import Group
from grpo.loss import aggregation_weights, kl_penalty, policy_loss, sampling_correction, sequence_sums
from grpo.model.flops import ForwardCost
from grpo.model.packing import (
    PackedBatch,
    TrainSequence,
    idle_batch,
    pack,
    plan_micro_batches,
)
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.model.sequences import train_sequences, valid_samples
from grpo.model.sync import check_gap
from grpo.ranks import Ranks
from rollout.cores import take_cores
from rollout.settings import TrainOn

LARGEST = ("gap", "new_ratio")
"""What is told of a step's tokens with its maximum beside the mean; neither is negative."""


class Tally:
    """Sums over response tokens, added up over micro-batches and ranks, divided once at the end.

    Counts forwarded tokens only; with no KL and no entropy term, zero-advantage replies are not forwarded.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._tokens = 0
        self._max = dict.fromkeys(LARGEST, 0.0)

    def add(self, **per_token_N: torch.Tensor) -> None:
        self._tokens += next(iter(per_token_N.values())).numel()
        sums = torch.stack([values_N.detach().double().sum() for values_N in per_token_N.values()])
        for name, total in zip(per_token_N, sums.tolist(), strict=True):  # one transfer from the device
            self._sums[name] = self._sums.get(name, 0.0) + total
        largest = torch.stack([per_token_N[name].detach().double().max() for name in LARGEST])
        for name, value in zip(LARGEST, largest.tolist(), strict=True):
            self._max[name] = max(self._max[name], value)

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Token means over all ranks, and the largest of `LARGEST`. Collective. Empty where there were no tokens."""
        shares = ranks.gather((self._sums, self._tokens, self._max))
        tokens = sum(share[1] for share in shares)
        if not tokens:
            return {}
        names = next(sums for sums, count, _ in shares if count)
        means = {name: sum(sums.get(name, 0.0) for sums, _, _ in shares) / tokens for name in names}
        return means | {f"{name}_max": max(largest[name] for _, _, largest in shares) for name in LARGEST}


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    micro_batches: list[PackedBatch]
    """As many on every rank."""
    is_own: list[bool]
    """False where this rank has nothing and only joins in."""

    @property
    def has_gradient(self) -> bool:
        return bool(self.micro_batches)


class Updater:
    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        loss: LossSettings,
        update: UpdateSettings,
        *,
        mini_batch_prompts: int,
        max_trained_tokens: int,
        max_gap: float,
        ranks: Ranks,
        train_on: TrainOn = "first_reply",
    ):
        """`max_trained_tokens`: most that one sample trains on, all of its trained replies together. `max_gap`: largest
        mean gap between sampler's and trainer's log-probs, nats (`grpo.model.sync.max_gap`)."""
        self.policy, self.reference = policy, reference
        self.loss, self.settings = loss, update
        self.mini_batch_prompts, self.max_trained_tokens = mini_batch_prompts, max_trained_tokens
        self.max_gap, self.ranks = max_gap, ranks
        self.train_on: TrainOn = train_on
        self._cost = ForwardCost.of(policy.causal_lm)
        self._flops = 0.0

    def update(
        self,
        groups: Sequence[Group],
        advantages_PG: Sequence[Sequence[float]],
        *,
        on_policy: bool = True,
    ) -> dict[str, float]:
        """One pass over all groups of a step, by position; metrics of the step. Collective: all ranks give the same.

        With on_policy=False the sampler used older weights: a log-prob gap is expected and loss.correction handles it,
        so only a NaN gap stops the run.
        """
        max_gap = self.max_gap if on_policy else math.inf
        pairs = [*zip(groups, advantages_PG, strict=True)]
        mini_batches = [
            self._plan(self._sequences(pairs[start : start + self.mini_batch_prompts]))
            for start in range(0, len(pairs), self.mini_batch_prompts)
        ]
        steps = [mini_batch for mini_batch in mini_batches if mini_batch.has_gradient]
        # Before any step is taken: later mini-batches need the log-probs of the weights that sampled them.
        old: list[list[torch.Tensor | None]] = [[None] * len(steps[0].micro_batches)] if steps else []
        for mini_batch in steps:  # forward and twice that backward, the reference, and the log-probs below
            self._count(mini_batch, 3 + self.loss.kl_in_loss + (mini_batch is not steps[0]))
        for mini_batch in steps[1:]:
            old.append([self.policy.frozen_logprobs(batch) for batch in self._batches(mini_batch)])

        tally, metrics = Tally(), {"update/optimizer_steps": 0.0, "update/skipped_steps": 0.0}
        norms = []
        for mini_batch, old_logprobs in zip(steps, old, strict=True):
            self._accumulate(mini_batch, old_logprobs, tally)
            check_gap(tally.means(self.ranks)["gap"], max_gap)
            norm, metrics["update/lr"] = self.policy.step()
            metrics["update/optimizer_steps"] += 1
            metrics["update/skipped_steps"] += norm == float("inf") or norm != norm
            norms.append(norm)
        self.policy.pass_steps(len(mini_batches) - len(steps))
        metrics["update/grad_norm"] = sum(norms) / len(norms) if norms else 0.0
        return metrics | _named(tally.means(self.ranks))

    def reply_kl(self, groups: Sequence[Group]) -> tuple[list[list[float]], float]:
        """KL of policy and reference summed over what each sample trains on (k1, nats), by [group][sample], and its
        token mean. 0 where a sample is invalid: it is not trained on. Collective: all ranks give the same groups.
        """
        samples_P = [valid_samples(group, self.train_on) for group in groups]
        num_samples = sum(map(len, samples_P))
        mini_batch = self._plan(train_sequences(samples_P, [0.0] * num_samples))
        self._count(mini_batch, 2)
        sums = [0.0] * num_samples
        for batch, is_own in zip(self._batches(mini_batch), mini_batch.is_own, strict=True):
            k1_N = kl_penalty(self.policy.frozen_logprobs(batch), self.reference.logprobs(batch), "k1").double()
            if is_own:
                for number, total in enumerate(sequence_sums(k1_N, batch.sequence_N).tolist()):
                    sums[number] += total
        sums = self.ranks.total(sums)
        kl_PG = [[0.0] * len(group.rewards_G) for group in groups]
        totals = iter(sums)
        for kl_G, samples in zip(kl_PG, samples_P, strict=True):
            for sample in samples:
                kl_G[sample.position] = next(totals)
        num_tokens = sum(sample.num_tokens for samples in samples_P for sample in samples)
        if not math.isfinite(sum(sums)):  # on all ranks alike
            raise FloatingPointError(
                "the KL of a reply is not finite: the policy or the reference computes NaN or infinity"
            )
        return kl_PG, sum(sums) / max(num_tokens, 1)

    def take_flops(self) -> float:
        """Floating-point operations that this rank's updates needed since this was last called (`grpo.model.flops`)."""
        taken, self._flops = self._flops, 0.0
        return taken

    def _count(self, mini_batch: _MiniBatch, num_forwards: int) -> None:
        own = (batch for batch, is_own in zip(mini_batch.micro_batches, mini_batch.is_own, strict=True) if is_own)
        self._flops += num_forwards * sum(map(self._cost.forward, own))

    def _sequences(self, groups: Sequence[tuple[Group, Sequence[float]]]) -> list[TrainSequence]:
        """What a mini-batch trains on, with the weights of the whole optimizer step."""
        samples_P = [valid_samples(group, self.train_on, advantages_G) for group, advantages_G in groups]
        lengths = [sample.num_tokens for samples in samples_P for sample in samples]
        weights_S = aggregation_weights(
            torch.tensor(lengths),
            self.loss.aggregate,
            step_tokens=sum(lengths),
            step_sequences=len(lengths),
            max_tokens=self.max_trained_tokens,
        )
        return [
            sequence
            for sequence in train_sequences(samples_P, weights_S.tolist())
            # Without KL and entropy, a sequence without advantage has no gradient: it counts above, and costs nothing.
            if sequence.advantage != 0 or self.loss.kl_in_loss or self.loss.entropy_coef > 0
        ]

    def _plan(self, sequences: Sequence[TrainSequence]) -> _MiniBatch:
        """Micro-batches of what is dealt to this rank, as many as any rank gets. Collective."""
        attention = self.policy.attention
        planned = plan_micro_batches(
            sequences,
            max_tokens=self.settings.max_tokens_per_micro_batch,
            share_prompt=self.settings.share_prompt and attention.shares_rows,
            whole_samples=self.loss.needs_whole_samples,
            pair_cost=attention.pair_cost,
            multiple=attention.row_multiple,
            rank=self.ranks.rank,
            num_ranks=self.ranks.world_size,
        )
        packed = [pack(rows, attention.row_multiple) for rows in planned]
        num_idle = max(self.ranks.gather(len(packed))) - len(packed)
        idle = [idle_batch(attention.row_multiple)] * num_idle
        return _MiniBatch([*packed, *idle], [True] * len(packed) + [False] * num_idle)

    def _batches(self, mini_batch: _MiniBatch) -> Iterator[PackedBatch]:
        """Its micro-batches, on the device."""
        for batch in mini_batch.micro_batches:
            take_cores()
            yield batch.to(self.ranks.device)

    def _accumulate(self, mini_batch: _MiniBatch, old_logprobs: Sequence[torch.Tensor | None], tally: Tally) -> None:
        """Adds up the mini-batch's gradient."""
        last = len(mini_batch.micro_batches) - 1
        for number, (batch, old_N) in enumerate(zip(self._batches(mini_batch), old_logprobs, strict=True)):
            ref_N = self.reference.logprobs(batch) if self.loss.kl_in_loss else None
            logprobs_N, entropy_N = self.policy.logprobs(batch)
            old_N = logprobs_N.detach() if old_N is None else old_N
            losses = policy_loss(
                logprobs_N,
                old_N,
                batch.advantages_N,
                batch.sequence_N,
                variant=self.loss.variant,
                clip=self.loss.clip,
            )
            correction_N = sampling_correction(
                old_N,
                batch.sampler_logprobs_N,
                batch.sequence_N,
                mode=self.loss.correction,
                cap=self.loss.correction_cap,
            )
            loss_N, measured = correction_N * losses.loss_N, {}
            if ref_N is not None:
                measured["kl"] = kl_penalty(logprobs_N, ref_N, self.loss.kl_estimator)
                loss_N = loss_N + self.loss.kl_coef * measured["kl"]
            if self.loss.entropy_coef > 0:
                loss_N = loss_N - self.loss.entropy_coef * entropy_N
            self.policy.backward((batch.weights_N * loss_N).sum(), is_last=number == last)
            if mini_batch.is_own[number]:
                tally.add(
                    gap=(old_N - batch.sampler_logprobs_N).abs(),
                    ratio=(old_N - batch.sampler_logprobs_N).exp(),
                    new_ratio=(logprobs_N.detach() - old_N).exp(),
                    entropy=entropy_N,
                    loss=losses.loss_N,
                    clip_low=losses.clipped_low_N,
                    clip_high=losses.clipped_high_N,
                    **measured,
                )


def _named(means: dict[str, float]) -> dict[str, float]:
    names = {
        "gap": "sampling/logp_gap_mean",
        "gap_max": "sampling/logp_gap_max",
        "ratio": "sampling/ratio_mean",
        "new_ratio": "update/ratio_mean",
        "new_ratio_max": "update/ratio_max",
        "kl": "kl",
        "entropy": "entropy",
        "loss": "loss/policy",
        "clip_low": "clip/low",
        "clip_high": "clip/high",
    }
    return {names[name]: value for name, value in means.items()}
