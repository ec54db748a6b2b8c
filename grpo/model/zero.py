"""DeepSpeed: how it is set up, started and asked for whole weights. The only file that imports it.

DeepSpeed would average gradients over ranks and micro-batches. Our token weights already hold the denominators of the
whole optimizer step, so gradients are summed; where DeepSpeed can only average over ranks (stage 3), the policy
multiplies the loss by their number.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for others first, and warn about each
import deepspeed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError
from transformers.integrations import HfDeepSpeedConfig

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.constants import Constants
from grpo.model.deepspeed_extra import Watched, with_extra
from rollout.settings import near_name

REDUCE_BUCKET = 10**8
"""Gradients on their way between ranks at once: copies of 0.4 GiB each in float32."""

MICRO_BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
"""Nominal, DeepSpeed wants some: micro-batches are ours, and their number changes from step to step."""

deepspeed.logger.setLevel(logging.ERROR)
if not torch.cuda.is_available():
    # It would try compilers for each of its kernels, and then compile a shared-memory collective for CPUs: minutes, and
    # gloo serves as well. This takes the place of what it would find out the first time it looks.
    deepspeed.ops.__compatible_ops__ = {}
# Stage 1 in bfloat16 would print the memory at every turn of its start.
deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None


def join_group() -> None:
    """Over the process group that `Ranks.join` made."""
    deepspeed.init_distributed(dist_init_required=False)


def start(
    module: torch.nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> tuple[deepspeed.DeepSpeedEngine, Any]:
    """DeepSpeed's engine around `module`, and its optimizer around ours."""
    engine, optimizer, _, _ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, optimizer


def gathered(parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Inside it, sharded parameters are whole. Collective."""
    return deepspeed.zero.GatheredParameters(parameters)


def deepspeed_config(model: ModelSettings, optimizer: OptimizerSettings, zero: DeepSpeedSettings) -> dict[str, Any]:
    # Stage 0 has no such thing as grad_accum_dtype: there autograd adds up in float32 (Policy).
    wide = {"data_types": {"grad_accum_dtype": "fp32"}} if zero.stage >= 1 else {}
    # An average is divided before it is widened for the way (stage 2), and rounds twice.
    summed = {"gradient_allreduce_op": "sum"} if zero.stage < 3 else {}
    ours = (
        MICRO_BATCH
        | wide
        | summed
        | {
            "zero_optimization": {"stage": zero.stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {
                "enabled": model.dtype == "bfloat16",
                "check_grad_overflow": True,  # without it, stage 2 takes a step of NaNs
                "immediate_grad_update": True,  # stage 1: into the float32 sum, and gone, weight by weight
            },
            "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[zero.communication_dtype],
            "gradient_clipping": optimizer.max_grad_norm,
            "steps_per_print": 10**9,
        }
    )
    whole = with_extra(ours, zero.extra)
    whole["zero_optimization"].setdefault("reduce_bucket_size", REDUCE_BUCKET)
    if "offload_optimizer" in zero.offloads:  # it refuses torch's AdamW there, as slower than its own
        whole.setdefault("zero_force_ds_cpu_optimizer", False)
    return whole


def reference_config(model: ModelSettings, stage: int) -> dict[str, Any]:
    """Of a frozen model, which has no optimizer."""
    return {"zero_optimization": {"stage": stage}, "bf16": {"enabled": model.dtype == "bfloat16"}} | MICRO_BATCH


def sharding(plain: Constants, config: dict[str, Any]) -> HfDeepSpeedConfig:
    """Alive while a model loads, it makes from_pretrained hand each rank only its shard."""
    return HfDeepSpeedConfig(config | _keeping_wide(plain, config))


def _keeping_wide(plain: Constants, config: dict[str, Any]) -> dict[str, Any]:
    """What keeps DeepSpeed from giving float32 buffers the dtype of the weights, as it does to whatever a sharded
    model makes while it is built.
    """
    names = [name for name, value in plain.items() if getattr(value, "dtype", None) == torch.float32]
    return {"data_types": config.get("data_types", {}) | {"keep_in_fp32_modules": names}}


def check_extra(model: ModelSettings, optimizer: OptimizerSettings, zero: DeepSpeedSettings) -> None:
    """Raises ValueError where DeepSpeed refuses `deepspeed.extra`, or does not know a key of it."""
    watched = Watched(deepspeed_config(model, optimizer, zero))
    try:
        deepspeed.DeepSpeedConfig(watched)
    except ValidationError as error:
        fault = error.errors()[0]
        told = f"{'.'.join(map(str, fault['loc']))}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
        if fault["type"] == "extra_forbidden":
            fields = {name for section in _sections(DeepSpeedConfigModel) for name in section.model_fields}
            told = f"{'.'.join(map(str, fault['loc']))}: there is no such key{near_name(fault['loc'][-1], fields)}"
        raise ValueError(f"deepspeed.extra: DeepSpeed refuses it ({error.title}): {told}") from None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        raise ValueError(f"deepspeed.extra: DeepSpeed refuses it: {error}") from error
    for unknown in watched.unasked():
        raise ValueError(unknown)


def _sections(section: type) -> Iterator[type]:
    yield section
    for one in section.__subclasses__():
        yield from _sections(one)
