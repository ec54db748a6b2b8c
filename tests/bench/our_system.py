"""This project's update and training step, driven for `bench_update`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from grpo.advantages import group_advantages
from grpo.config import Config, DeepSpeedSettings, LossSettings, ModelSettings, OptimizerSettings, UpdateSettings
from grpo.groups import Group
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.ranks import Ranks
from grpo.run.recorder import read_steps
from grpo.update import Updater
from launch.train import check_inputs, run_training
from rewards.scoring import ReplyReward
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
    matrix_rate,
    memory_of,
    prompt_texts,
)
from tests.groups import group_of


def _make_updater(model: Path, shape: Shape) -> Updater:
    ranks = Ranks.join()
    settings, zero = ModelSettings(path=model, dtype="float32"), DeepSpeedSettings(stage=0)
    optimizer = OptimizerSettings(lr=LR, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)
    return Updater(
        Policy(settings, optimizer, zero, temperature=TEMPERATURE, total_steps=1000, ranks=ranks),
        Reference(settings, zero, temperature=TEMPERATURE, ranks=ranks),
        LossSettings(kl_coef=KL_COEF, kl_estimator="k3"),
        UpdateSettings(max_tokens_per_micro_batch=TOKENS_PER_FORWARD),
        mini_batch_prompts=shape.prompts,
        max_trained_tokens=shape.reply_tokens,
        max_gap=float("inf"),  # no model sampled the replies
        ranks=ranks,
    )


def _make_groups(model: Path, shape: Shape) -> list[Group]:
    rewards = [ReplyReward(total, True, {}, {}, {}) for total in group_rewards(shape)]
    return [group_of(position, replies, rewards) for position, replies in enumerate(fixed_replies(model, shape))]


def _update(updater: Updater, model: Path, shape: Shape, *, timed: int, memory: bool = False) -> dict[str, Any]:
    """A warm-up, `timed` updates and perhaps one for the memory: medians of the seconds, gradient norms of all."""
    groups = _make_groups(model, shape)
    rewards_PG = torch.tensor([group_rewards(shape)] * shape.prompts, dtype=torch.float64)
    advantages_PG = group_advantages(rewards_PG, baseline="mean", scale="group_std").tolist()
    updater.mini_batch_prompts = shape.prompts
    meter, figures, metrics = Meter(), [], []
    phases = {
        "reference forward": _timed(updater.reference, "logprobs"),
        "policy forward": _timed(updater.policy, "logprobs"),
        "backward": _timed(updater.policy, "backward"),
        "optimizer step": _timed(updater.policy, "step"),
    }
    for number in range(1 + timed + memory):
        for seconds in phases.values():
            seconds.clear()
        meter.start(trim=number > timed)
        metrics.append(updater.update(groups, advantages_PG))
        meter.stop()
        if 1 <= number <= timed:
            figures.append({name: sum(seconds) for name, seconds in phases.items()} | {"all": meter.last["seconds"]})
    medians = {name: statistics.median(row[name] for row in figures) for name in figures[0]}
    return (
        {"seconds": medians.pop("all")}
        | (memory_of(meter) if memory else {})
        | {
            "phases": medians,
            "grad_norms": [row["update/grad_norm"] for row in metrics],
            "losses": [row["loss/policy"] + KL_COEF * row["kl"] for row in metrics],
        }
    )


def _timed(owner: Any, name: str) -> list[float]:
    """Makes a method of `owner` add the seconds of each of its calls to the list returned."""
    method, seconds = getattr(type(owner), name).__get__(owner), []

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = method(*arguments, **named)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    return seconds


def _floors(updater: Updater, shape: Shape, rate: float) -> dict[str, float]:
    """Seconds of each phase if the needed matrix products were all of it, at `rate` operations a second.

    2 operations per weight and token in a forward pass, 4 in a backward pass; prompts once; the head on response
    tokens alone. Attention scores, norms, softmax and recomputation are not in it.
    """
    causal_lm = updater.policy.causal_lm
    embedding = causal_lm.get_input_embeddings().weight.numel()
    head = causal_lm.get_output_embeddings().weight.numel()
    body = sum(parameter.numel() for parameter in causal_lm.parameters()) - embedding
    if not updater.policy.tied:
        body -= head
    forward = 2 * (body * shape.tokens + head * shape.response_tokens) / rate
    return {"reference forward": forward, "policy forward": forward, "backward": 2 * forward, "optimizer step": 0.0}


def update(model: Path, shape: Shape, *, memory: bool) -> dict[str, Any]:
    """The second of two updates on the fixed replies; with `memory`, that of a third."""
    updater = _make_updater(model, shape)
    figures, rate = _update(updater, model, shape, timed=1, memory=memory), matrix_rate()
    return figures | {"matrix_gflops": rate / 1e9, "floors": _floors(updater, shape, rate)}


def growth(model: Path, cases: dict[str, list[Shape]]) -> dict[str, list[dict[str, float]]]:
    """Of each case's shapes: tokens, and the median seconds of three updates."""
    updater = _make_updater(model, cases["batch"][-1])
    return {
        name: [
            {"tokens": shape.tokens, "seconds": _update(updater, model, shape, timed=3)["seconds"]} for shape in shapes
        ]
        for name, shapes in cases.items()
    }


def step(model: Path, shape: Shape) -> dict[str, float]:
    """The second of two training steps of `launch.train`, with vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "prompts.jsonl")
        data.write_text(
            "".join(json.dumps({"prompt": text, "goal": "An article."}) + "\n" for text in prompt_texts(model, shape))
        )
        config = Config.model_validate(
            {
                "run": {"name": "bench", "folder": folder, "steps": 2},
                "model": {"path": model, "dtype": "float32"},
                "data": {"train": data, "max_prompt_tokens": shape.prompt_tokens},
                "engine": {"kind": "vllm", "max_context_tokens": 256},
                "rollout": {
                    "prompts_per_step": shape.prompts,
                    "group_size": shape.group_size,
                    "continuations": 0,
                    "temperature": TEMPERATURE,
                    "max_reply_tokens": shape.reply_tokens,
                    "user": {"kind": "scripted"},
                },
                "rewards": {"weights": {"token_amount": -1.0}, "truncated": "score"},
                "loss": {"kl_coef": KL_COEF, "kl_estimator": "k3"},
                "update": {"max_tokens_per_micro_batch": TOKENS_PER_FORWARD},
                "optimizer": {"lr": LR, "weight_decay": 0.0, "max_grad_norm": MAX_GRAD_NORM},
                "deepspeed": {"stage": 0},
            }
        )
        run_training(config, check_inputs(config))
        row = read_steps(Path(folder, "bench", "metrics.jsonl"))[-1]
    names = {"seconds": "time/step", "reply_tokens_mean": "reply/length_mean", "grad_norm": "update/grad_norm"}
    names |= {name: f"time/{name}" for name in ("rollout", "update", "sync")}
    return {name: row[metric] for name, metric in names.items()}
