"""TRL's update and training step, driven for `bench_update`: all of it is TRL's own `GRPOTrainer.train()`.

For an update the fixed replies come in through TRL's `rollout_func`. From there to the end of `optimizer.step()` runs
TRL: reference log-probs, reward, advantages, `compute_loss`, backward, gradient clip, optimizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.bench.common import (
    KL_COEF,
    LR,
    MAX_GRAD_NORM,
    TEMPERATURE,
    TOKENS_PER_FORWARD,
    Meter,
    Shape,
    fixed_replies,
    group_rewards,
    memory_of,
    prompt_texts,
)


def update(model: Path, shape: Shape, *, memory: bool) -> dict[str, Any]:
    """The second of two updates on the fixed replies; with `memory`, that of a third."""
    replies, meter, seconds = fixed_replies(model, shape), Meter(), []

    class Stop(TrainerCallback):
        def on_optimizer_step(self, *arguments: Any, **named: Any) -> None:
            meter.stop()
            seconds.append(meter.last["seconds"])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """`prompts` are numbers of prompts, each repeated for its group."""
        chosen = [replies[int(prompt)][number % shape.group_size] for number, prompt in enumerate(prompts)]
        meter.start(trim=len(seconds) == 2)
        return {
            "prompt_ids": [list(reply.prompt_ids) for reply in chosen],
            "completion_ids": [list(reply.token_ids) for reply in chosen],
            "logprobs": None,
        }

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return group_rewards(shape) * shape.prompts

    prompts = [str(number) for number in range(shape.prompts)]
    logs = _train_trl(model, shape, prompts, reward, Stop(), rollout, steps=3 if memory else 2)
    figures = {"seconds": seconds[1]} | (memory_of(meter) if memory else {})
    return figures | {"grad_norms": [log["grad_norm"] for log in logs], "losses": [log["loss"] for log in logs]}


def step(model: Path, shape: Shape) -> dict[str, float]:
    """The second of two training steps of TRL's trainer, which generates with transformers."""
    meter = Meter()

    class Step(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            meter.start()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            meter.stop()

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [-len(ids) / 1000 for ids in completion_ids]

    prompts = [[{"role": "user", "content": text}] for text in prompt_texts(model, shape)]
    log = _train_trl(model, shape, prompts, reward, Step(), None)[-1]
    figures = {"reply_tokens_mean": log["completions/mean_length"], "grad_norm": log["grad_norm"]}
    return {"seconds": meter.last["seconds"]} | figures


def _train_trl(
    model: Path,
    shape: Shape,
    prompts: list[Any],
    reward: Callable[..., list[float]],
    callback: Any,
    rollout: Callable[..., dict[str, Any]] | None,
    steps: int = 2,
) -> list[dict[str, float]]:
    """`steps` steps of `GRPOTrainer.train()`; what it logged of each."""
    fits = TOKENS_PER_FORWARD // (shape.prompt_tokens + shape.reply_tokens)
    rows = max(rows for rows in range(1, fits + 1) if shape.num_replies % rows == 0)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=shape.num_replies // rows,
            num_generations=shape.group_size,
            max_completion_length=shape.reply_tokens,
            temperature=TEMPERATURE,
            beta=KL_COEF,
            loss_type="dapo",  # token mean, as ours
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            str(model),
            reward,
            settings,
            Dataset.from_dict({"prompt": prompts}),
            callbacks=[callback],
            rollout_func=rollout,
        )
        trainer.train()
        return [log for log in trainer.state.log_history if "grad_norm" in log]
