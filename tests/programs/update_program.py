"""Two steps of updates on fixed replies, on however many ranks torchrun started; saves the weights.

    torchrun --nproc_per_node 2 -m tests.programs.update_program MODEL OUT STAGE/DTYPE[/checkpointed] ...

The weights of each case go to a folder of its name in OUT.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import torch

from grpo.config import (
    DeepSpeedSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    UpdateSettings,
)
from grpo.groups import Group
from grpo.model import logprobs
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.ranks import Ranks, end_process
from grpo.run.model_writer import ModelWriter
from grpo.update import Updater
from rollout.types import Reply
from tests.groups import group_of, rewards_of

MINI_BATCH_PROMPTS, NUM_PROMPTS, STEPS = 2, 6, 2
LOSS = LossSettings(kl_coef=0.1, kl_estimator="k3", dual_clip=3.0, entropy_coef=0.02)
# A large epsilon: Adam divides by the size of a gradient, which makes rounding of tiny ones count in full.
OPTIMIZER = OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5)
TEMPERATURE = 0.8
ADVANTAGES = [[1.0, -1.0, 0.0], [0.5, 0.25, -0.75], [0.0, 0.0, 0.0], [2.0, -1.0, -1.0], [0.5, 0.0, 0.0], [0.0] * 3]


def fixed_replies() -> list[list[Reply]]:
    """[P][G] replies of uneven lengths, some of them invalid."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: tuple(torch.randint(5, 30, (n,), generator=generator).tolist())  # noqa: E731
    replies = []
    for position in range(NUM_PROMPTS):
        prompt = draw(3 + position)
        lengths = [2 + position, 5, 9 - position]
        replies.append([Reply(prompt, draw(n), (-3.3,) * n, "", "stop") for n in lengths])
    return replies


def is_valid(position: int, sample: int) -> bool:
    """The last mini-batch has a single reply, so that the second of two ranks idles."""
    return (position, sample) != (1, 2) and (position < 4 or (position, sample) == (4, 0))


def make_groups() -> list[Group]:
    return [
        group_of(position, replies, rewards_of([is_valid(position, sample) for sample in range(len(replies))]))
        for position, replies in enumerate(fixed_replies())
    ]


def run(model: Path, stage: int, dtype: str, checkpointed: bool, out: Path, ranks: Ranks) -> None:
    settings = ModelSettings(path=model, dtype=dtype, gradient_checkpointing=checkpointed)
    # DeepSpeed keeps small weights whole at stage 3, which are all that the model has; large ones come and go.
    extra = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    zero = DeepSpeedSettings(stage=stage, extra=extra)
    trained = Policy(
        settings, OPTIMIZER, zero, temperature=TEMPERATURE, total_steps=100, entropy_has_gradient=True, ranks=ranks
    )
    assert trained.engine.zero_param_persistence_threshold() == 0
    reference = Reference(settings, zero, temperature=TEMPERATURE, ranks=ranks)
    updater = Updater(
        trained,
        reference,
        LOSS,
        UpdateSettings(max_tokens_per_micro_batch=16),
        mini_batch_prompts=MINI_BATCH_PROMPTS,
        max_trained_tokens=16,
        max_gap=float("inf"),  # the replies are made up, so no model sampled them
        ranks=ranks,
    )
    if ranks.world_size == 1:
        assert callable(trained.engine.flatten)
        trained.engine.flatten = None  # a rank by itself has no use for it: calling it would raise
    adamw = getattr(trained.optimizer, "optimizer", trained.optimizer)
    averages = [state["exp_avg"] for state in adamw.state.values()]
    if (stage, dtype) == (0, "bfloat16"):  # DeepSpeed has taken a step of zeros
        narrow, wide = (
            list(chain.from_iterable(g)) for g in (trained.optimizer.fp16_groups, trained.optimizer.fp32_groups)
        )
        assert narrow and all(one.float().equal(other) for one, other in zip(narrow, wide, strict=True))
    groups = make_groups()
    metrics = [updater.update(groups, ADVANTAGES) for _ in range(STEPS)]
    # AdamW has its averages from the start, those and no others, and has counted the steps it took.
    assert averages and all(a is state["exp_avg"] for a, state in zip(averages, adamw.state.values(), strict=True))
    assert {state["step"].item() for state in adamw.state.values()} == {STEPS * NUM_PROMPTS / MINI_BATCH_PROMPTS}
    ModelWriter(trained, model).save(out)
    if ranks.is_main:
        (out / "metrics.json").write_text(json.dumps(metrics))


def main() -> None:
    # So that ranks cut the head differently: ZeRO-3 must not mind.
    logprobs.BLOCK_LOGITS, logprobs.KEPT_LOGITS = {"cpu": 5 * 30}, {"cpu": 2 * 5 * 30}
    model, out = map(Path, sys.argv[1:3])
    ranks = Ranks.join()
    for case in sys.argv[3:]:
        stage, dtype, *checkpointed = case.split("/")
        (out / case).parent.mkdir(parents=True, exist_ok=True)
        run(model, int(stage), dtype, bool(checkpointed), out / case, ranks)
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
