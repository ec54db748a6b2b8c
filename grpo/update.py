"""The update: groups with advantages become optimizer steps.

The batch is cut into mini-batches of whole groups, each one optimizer step; a mini-batch into
micro-batches that fit the memory, the same number on every rank. Old log-probs come from the weights
before the first step; where a mini-batch is the first, they are its own forward pass, detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from grpo.config import LossSettings, UpdateSettings
from grpo.experience import Group
from grpo.logprobs import head_chunks
from grpo.loss import aggregation_weights, kl_penalty, policy_loss
from grpo.packing import (
    PackedBatch,
    TrainSequence,
    idle_batch,
    pack,
    plan_micro_batches,
)
from grpo.policy import Policy, Reference
from grpo.ranks import Ranks
from grpo.sync import check_gap


class Tally:
    """Sums over response tokens, added up over micro-batches and ranks, divided once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._tokens = 0
        self._gap_max = 0.0

    def add(self, **per_token_N: torch.Tensor) -> None:
        self._tokens += next(iter(per_token_N.values())).numel()
        for name, values_N in per_token_N.items():
            self._sums[name] = self._sums.get(name, 0.0) + values_N.detach().double().sum().item()
        self._gap_max = max(per_token_N["gap"].max().item(), self._gap_max)  # in this order NaN wins

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Token means over all ranks, and the largest gap. Collective. Empty where there were no tokens."""
        shares = ranks.gather((self._sums, self._tokens, self._gap_max))
        tokens = sum(share[1] for share in shares)
        if not tokens:
            return {}
        names = next(sums for sums, count, _ in shares if count)
        means = {name: sum(sums.get(name, 0.0) for sums, _, _ in shares) / tokens for name in names}
        return means | {"gap_max": max(share[2] for share in shares)}


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    micro_batches: list[PackedBatch | None]
    """As many on every rank; None where this rank has nothing and only joins in."""
    head_chunks: list[int]
    """Of each micro-batch, the same on every rank: ZeRO-3 gathers the head for each."""

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
        max_reply_tokens: int,
        max_gap: float,
        ranks: Ranks,
    ):
        """`max_gap`: largest mean gap between sampler's and trainer's log-probs, nats (`grpo.sync.max_gap`)."""
        self.policy, self.reference = policy, reference
        self.loss, self.settings = loss, update
        self.mini_batch_prompts, self.max_reply_tokens = mini_batch_prompts, max_reply_tokens
        self.max_gap, self.ranks = max_gap, ranks

    def update(
        self, groups: Sequence[Group], advantages_PG: Sequence[Sequence[float]], num_prompts: int
    ) -> dict[str, float]:
        """One pass over this rank's groups of a step of `num_prompts` prompts; metrics of the step. Collective."""
        mini_batches = [
            self._plan(
                [
                    pair
                    for pair in zip(groups, advantages_PG, strict=True)
                    if start <= pair[0].position < start + self.mini_batch_prompts
                ]
            )
            for start in range(0, num_prompts, self.mini_batch_prompts)
        ]
        steps = [mini_batch for mini_batch in mini_batches if mini_batch.has_gradient]
        # Before any step is taken: later mini-batches need the log-probs of the weights that sampled them.
        old: list[list[torch.Tensor | None]] = [[None] * len(steps[0].micro_batches)] if steps else []
        for mini_batch in steps[1:]:
            old.append(
                [
                    self.policy.frozen_logprobs(self._on_device(batch), chunks)
                    for batch, chunks in zip(mini_batch.micro_batches, mini_batch.head_chunks, strict=True)
                ]
            )

        tally, metrics = Tally(), {"update/optimizer_steps": 0.0, "update/skipped_steps": 0.0}
        norms = []
        for mini_batch, old_logprobs in zip(steps, old, strict=True):
            self._accumulate(mini_batch, old_logprobs, tally)
            check_gap(tally.means(self.ranks)["gap"], self.max_gap)
            norm, metrics["update/lr"] = self.policy.step()
            metrics["update/optimizer_steps"] += 1
            metrics["update/skipped_steps"] += norm == float("inf") or norm != norm
            norms.append(norm)
        self.policy.pass_steps(len(mini_batches) - len(steps))
        metrics["update/grad_norm"] = sum(norms) / len(norms) if norms else 0.0
        return metrics | _named(tally.means(self.ranks))

    def _plan(self, groups: Sequence[tuple[Group, Sequence[float]]]) -> _MiniBatch:
        trained = [
            (reply, advantage)
            for group, advantages_G in groups
            for reply, reward, advantage in zip(group.replies_G, group.rewards_G, advantages_G, strict=True)
            if reward.valid
        ]
        tokens, num_sequences = self.ranks.total([sum(len(reply.token_ids) for reply, _ in trained), len(trained)])
        weights_S = aggregation_weights(
            torch.tensor([len(reply.token_ids) for reply, _ in trained]),
            self.loss.aggregate,
            step_tokens=int(tokens),
            step_sequences=int(num_sequences),
            max_tokens=self.max_reply_tokens,
        )
        sequences = [
            TrainSequence(reply.prompt_ids, reply.token_ids, reply.logprobs, advantage, weight)
            for (reply, advantage), weight in zip(trained, weights_S.tolist(), strict=True)
            # Without KL, a sequence without advantage has no gradient: it counts above, and costs nothing.
            if advantage != 0 or self.loss.kl_coef > 0
        ]
        planned = plan_micro_batches(
            sequences, max_tokens=self.settings.max_tokens_per_micro_batch, share_prompt=self.settings.share_prompt
        )
        packed = [pack(rows) for rows in planned]
        # Ranks agree on every collective call: on the number of micro-batches, and on how each is cut for the head.
        shares = self.ranks.gather([head_chunks(batch) for batch in packed])
        chunks = [max(column) for column in zip_longest(*shares, fillvalue=1)]
        return _MiniBatch([*packed, *[None] * (len(chunks) - len(packed))], chunks)

    def _accumulate(self, mini_batch: _MiniBatch, old_logprobs: Sequence[torch.Tensor | None], tally: Tally) -> None:
        """Adds up the mini-batch's gradient."""
        last = len(mini_batch.micro_batches) - 1
        for number, (micro_batch, chunks, old_N) in enumerate(
            zip(mini_batch.micro_batches, mini_batch.head_chunks, old_logprobs, strict=True)
        ):
            batch = self._on_device(micro_batch)
            ref_N = self.reference.logprobs(batch, chunks) if self.reference else None
            logprobs_N, entropy_N = self.policy.logprobs(batch, chunks)
            old_N = logprobs_N.detach() if old_N is None else old_N
            losses = policy_loss(
                logprobs_N,
                old_N,
                batch.advantages_N,
                batch.sequence_N,
                variant=self.loss.variant,
                clip_low=self.loss.clip_low,
                clip_high=self.loss.clip_high,
                dual_clip=self.loss.dual_clip,
            )
            loss_N, kl_N = losses.loss_N, torch.zeros_like(logprobs_N)
            if ref_N is not None:
                kl_N = kl_penalty(logprobs_N, ref_N, self.loss.kl_estimator)
                loss_N = loss_N + self.loss.kl_coef * kl_N
            self.policy.backward((batch.weights_N * loss_N).sum(), is_last=number == last)
            if micro_batch is not None:
                tally.add(
                    gap=(old_N - batch.sampler_logprobs_N).abs(),
                    ratio=(old_N - batch.sampler_logprobs_N).exp(),
                    kl=kl_N,
                    entropy=entropy_N,
                    loss=losses.loss_N,
                    clip_low=losses.clipped_low_N,
                    clip_high=losses.clipped_high_N,
                )

    def _on_device(self, micro_batch: PackedBatch | None) -> PackedBatch:
        return (micro_batch or idle_batch()).to(self.ranks.device)


def _named(means: dict[str, float]) -> dict[str, float]:
    names = {
        "gap": "sampling/logp_gap_mean",
        "gap_max": "sampling/logp_gap_max",
        "ratio": "sampling/ratio_mean",
        "kl": "kl",
        "entropy": "entropy",
        "loss": "loss/policy",
        "clip_low": "clip/low",
        "clip_high": "clip/high",
    }
    return {names[name]: value for name, value in means.items()}
