"""The gradient of two sequences in bfloat16, on one rank in two micro-batches or on two ranks, one each.

    torchrun --nproc_per_node N -m tests.programs.communication_program MODEL OUT STAGE/COMMUNICATION_DTYPE ...

Saves {case: flat gradient in the dtype it is kept in} to OUT; on one rank also under "first" and "second" what the
backward pass of each sequence alone gives.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.packing import PackedBatch, pack, plan_micro_batches
from grpo.model.policy import Policy
from grpo.ranks import Ranks, end_process
from tests.programs.update_program import fixed_replies
from tests.test_packing import sequence


def batches() -> list[PackedBatch]:
    replies = [fixed_replies()[3][sample] for sample in (1, 2)]
    return [
        pack(rows)
        for reply in replies
        for rows in plan_micro_batches([sequence(reply.prompt_ids, reply.token_ids)], max_tokens=64)
    ]


def load(model: Path, stage: int, communication: str, ranks: Ranks) -> Policy:
    zero = DeepSpeedSettings(stage=stage, communication_dtype=communication)
    settings = ModelSettings(path=model, dtype="bfloat16")
    return Policy(settings, OptimizerSettings(), zero, temperature=1.0, total_steps=1, ranks=ranks)


def gradient(policy: Policy, own: list[PackedBatch]) -> torch.Tensor:
    for number, batch in enumerate(own):
        logprobs_N, _ = policy.logprobs(batch)
        policy.backward(-logprobs_N.sum() / 11, is_last=number == len(own) - 1)
    return torch.cat([safe_get_full_grad(weight).flatten().clone() for weight in policy.engine.module.parameters()])


def main() -> None:
    model, out = map(Path, sys.argv[1:3])
    ranks = Ranks.join()
    both, results = batches(), {}
    for case in sys.argv[3:]:
        stage, communication = case.split("/")
        own = both if ranks.world_size == 1 else [both[ranks.rank]]
        results[case] = gradient(load(model, int(stage), communication, ranks), own)
    if ranks.world_size == 1:
        for name, one in zip(("first", "second"), both, strict=True):
            results[name] = gradient(load(model, 0, "float32", ranks), [one])
    if ranks.is_main:
        torch.save(results, out)
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
