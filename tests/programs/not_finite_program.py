"""Gradients that are not finite, under every ZeRO stage: nothing may change, and three in a row must stop.

torchrun --nproc_per_node N -m tests.programs.not_finite_program MODEL OUT STAGE/DTYPE [...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.packing import pack, plan_micro_batches
from grpo.model.policy import Policy
from grpo.ranks import Ranks, end_process
from tests.programs.update_program import fixed_replies
from tests.test_packing import sequence


def total(policy: Policy) -> float:
    return sum(weight.double().sum().item() for _, weight in policy.weights())


def step(policy: Policy, factor: float) -> float:
    reply = fixed_replies()[0][1]
    (rows,) = plan_micro_batches([sequence(reply.prompt_ids, reply.token_ids)], max_tokens=64)
    logprobs, _ = policy.logprobs(pack(rows))
    policy.backward(-factor * logprobs.sum(), is_last=True)
    return policy.step()[0]


def run(model: Path, stage: int, dtype: str, ranks: Ranks) -> dict[str, object]:
    policy = Policy(
        ModelSettings(path=model, dtype=dtype),
        OptimizerSettings(lr=1e-2),
        DeepSpeedSettings(stage=stage),
        temperature=1.0,
        total_steps=10,
        ranks=ranks,
    )
    start = total(policy)
    # One rank alone has the fault: the others must skip with it.
    faulty = float("nan") if ranks.rank == 0 else 1.0
    norms = [step(policy, faulty)]
    after_fault = total(policy)
    norms.append(step(policy, 1.0))
    after_good = total(policy)
    error = None
    try:
        for _ in range(3):
            norms.append(step(policy, faulty))
    except FloatingPointError as raised:
        error = str(raised)
    return {
        "kept": after_fault == start,
        "moved": after_good != start and torch.tensor(after_good).isfinite().item(),
        "norms": [str(norm) for norm in norms],
        "error": error,
    }


def main() -> None:
    model, out = map(Path, sys.argv[1:3])
    ranks = Ranks.join()
    results = {}
    for case in sys.argv[3:]:
        stage, dtype = case.split("/")
        results[case] = ranks.gather(run(model, int(stage), dtype, ranks))
    if ranks.is_main:
        out.write_text(json.dumps(results))
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
