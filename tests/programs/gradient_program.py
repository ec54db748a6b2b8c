"""The gradient of one optimizer step, however the batch is cut and dealt to the ranks.

    torchrun --nproc_per_node N -m tests.programs.gradient_program MODEL OUT DTYPE

Saves {case: (number of micro-batches, flat gradient, samples that each rank trained on)} to OUT, and under "kl" the KL
of every reply, [P][G], with its mean over tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from grpo.config import DeepSpeedSettings, LossSettings, ModelSettings, OptimizerSettings, UpdateSettings
from grpo.dealing import Work, deal_in_rounds
from grpo.groups import Group
from grpo.model import packing
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.ranks import Ranks, end_process
from grpo.update import Updater
from rollout.types import Reply
from tests.groups import group_of, rewards_of

TEMPERATURE = 0.8
LOSS = LossSettings(
    aggregate="seq_mean_token_mean", kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, correction="token"
)
BUDGETS = {1: 4096, 2: 70, 4: 36, 8: 24}
"""Tokens of a micro-batch that cut the batch of one rank into so many."""


def groups() -> list[Group]:
    """Four groups of four replies of 1 to 16 tokens, with prompts of 4 to 7."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: tuple(torch.randint(5, 30, (n,), generator=generator).tolist())  # noqa: E731
    made = []
    for position in range(4):
        prompt = draw(4 + position)
        replies = [Reply(prompt, draw(n), (-3.0,) * n, "", "stop") for n in (1 + position, 5, 9, 16 - 2 * position)]
        made.append(group_of(position, replies, rewards_of([(position, sample) != (2, 1) for sample in range(4)])))
    return made


ADVANTAGES = [[1.0, -1.0, 0.5, -0.5], [0.25, 0.0, 0.75, -1.0], [2.0, 0.0, -1.0, -1.0], [-0.1, 0.1, 0.3, -0.3]]


def in_turn(works: Sequence[Work], num_ranks: int, most_tokens: int) -> list[list[list[int]]]:
    """As `deal_in_rounds`, with no regard for prompts or costs."""
    return [[[*range(rank, len(works), num_ranks)]] for rank in range(num_ranks)]


def all_to_the_last(works: Sequence[Work], num_ranks: int, most_tokens: int) -> list[list[list[int]]]:
    return [[] for _ in range(num_ranks - 1)] + deal_in_rounds(works, 1, most_tokens)


class Recording(Policy):
    """Keeps the gradient instead of taking the step."""

    def step(self) -> tuple[float, float]:
        self.gradient = torch.cat([p.grad.flatten().clone() for p in self.engine.module.parameters()])
        self.engine.optimizer.zero_grad()
        return self.gradient.norm().item(), 0.0


def main() -> None:
    model, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    ranks = Ranks.join()
    settings, zero = ModelSettings(path=model, dtype="float32"), DeepSpeedSettings(stage=0)
    policy = Recording(
        settings,
        OptimizerSettings(max_grad_norm=1e9),
        zero,
        temperature=TEMPERATURE,
        entropy_has_gradient=True,
        total_steps=1,
        ranks=ranks,
    )
    reference = Reference(settings, zero, temperature=TEMPERATURE, ranks=ranks)
    for module in (policy.engine.module, reference.module):
        module.to(dtype)
    policy.engine.communication_data_type = dtype
    get_accelerator().supported_dtypes = lambda: [dtype]  # DeepSpeed lists no float64, and reduces it as any other
    with torch.no_grad():  # else the KL would be zero, and so its gradient
        for weight in reference.module.parameters():
            weight.mul_(0.9)

    whole = groups()
    cases = {f"{n} micro-batches": (budget, True, whole, deal_in_rounds) for n, budget in BUDGETS.items()}
    cases["padded"] = (64, False, whole, deal_in_rounds)
    cases["other order"] = (70, True, whole[::-1], deal_in_rounds)
    cases["every group on every rank"] = (4096, True, whole, in_turn)
    cases["idle ranks"] = (70, True, whole, all_to_the_last)
    results = {}
    for case, (budget, share_prompt, given, packing.deal_in_rounds) in cases.items():
        updater = Updater(
            policy,
            reference,
            LOSS,
            UpdateSettings(max_tokens_per_micro_batch=budget, share_prompt=share_prompt),
            mini_batch_prompts=4,
            max_trained_tokens=16,
            max_gap=float("inf"),
            ranks=ranks,
        )
        planned = []
        plan = updater._plan
        updater._plan = lambda sequences: planned.append(plan(sequences)) or planned[-1]
        updater.update(given, [ADVANTAGES[group.position] for group in given])
        [mini_batch] = planned
        own = [batch for batch, is_own in zip(mini_batch.micro_batches, mini_batch.is_own, strict=True) if is_own]
        samples = {number for batch in own for number in batch.sequence_N.tolist()}
        results[case] = len(mini_batch.micro_batches), policy.gradient, ranks.gather(samples)
    results["kl"] = updater.reply_kl(whole)
    if ranks.is_main:
        torch.save(results, out)
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
