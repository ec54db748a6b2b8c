"""The policy and the reference under DeepSpeed. The only file that imports DeepSpeed.

DeepSpeed would average gradients over ranks and micro-batches. Our token weights already hold the denominators of the
whole optimizer step, so gradients are summed; where DeepSpeed can only average over ranks (stage 3), the loss is
multiplied by their number.

In bfloat16 one backward pass gives gradients of bfloat16. From there on, over micro-batches, ranks and the optimizer,
they are float32 at every stage.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for others first, and warn about each
import deepspeed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError
from transformers.integrations import HfDeepSpeedConfig

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.attention import PackedAttention, choose_attention
from grpo.model.constants import Constants, check_constants, plain_constants
from grpo.model.deepspeed_extra import Watched, with_extra
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import PackedBatch
from grpo.model.recompute import keep_less
from grpo.ranks import Ranks
from rollout.engines.weight_names import stored_together, stored_weights
from rollout.model_folder import read_model
from rollout.settings import near_name

BUCKET_BYTES = 256 * 1024**2
"""Most weights that are whole at once while a sharded model is gathered."""

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


class Policy:
    """The model being trained: log-probs, backward, optimizer steps, and its weights for others."""

    def __init__(
        self,
        model: ModelSettings,
        optimizer: OptimizerSettings,
        zero: DeepSpeedSettings,
        *,
        temperature: float,
        total_steps: int,
        entropy_has_gradient: bool = False,
        ranks: Ranks,
    ):
        self.ranks = ranks
        self.settings = optimizer
        self.total_steps = total_steps
        self.num_steps = 0
        """Optimizer steps of the schedule so far, those that were skipped or had no gradient included."""
        self.num_skipped_in_a_row = 0
        self.dtype = getattr(torch, model.dtype)
        config = deepspeed_config(model, optimizer, zero)
        causal_lm, self.attention, plain = _load(model, config, zero.stage, ranks.device)
        self.tied = bool(causal_lm.config.tie_word_embeddings)
        if model.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            keep_less(causal_lm)
        module = LogprobModel(causal_lm, self.attention, temperature, entropy_has_gradient=entropy_has_gradient)
        adamw = torch.optim.AdamW(
            _decay_groups(module, optimizer.weight_decay),
            lr=0.0,  # `step` sets it; DeepSpeed's own step of zeros (bfloat16, stage 0) must not decay anything
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=adamw, config=config, dist_init_required=False
        )
        if zero.stage == 0:
            self.engine.enable_backward_allreduce = False  # `_sum_over_ranks` does
            for parameter in self._trained() if self.dtype == torch.bfloat16 else []:
                parameter.grad_dtype = torch.float32  # what autograd adds its gradients up in
        _claim_averages(adamw, getattr(self.optimizer, "fp32_partitioned_groups_flat", None))
        self.engine.train()
        check_constants(self.causal_lm, plain)

    @property
    def causal_lm(self) -> torch.nn.Module:
        return self.engine.module.causal_lm

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropies [N]) with gradients. Collective under ZeRO-3."""
        return self.engine(batch)

    @torch.no_grad()
    def frozen_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs [N] of the present weights, no gradients. Collective as `logprobs` is."""
        return self.engine(batch)[0]

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Accumulates the gradient of this rank's share of the step's loss; `is_last` before `step`."""
        stage = self.engine.zero_optimization_stage()
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self.ranks.world_size if stage == 3 else loss, scale_wrt_gas=False)
        if is_last and stage == 0:
            self._sum_over_ranks()

    def _sum_over_ranks(self) -> None:
        """Of the whole gradients that stage 0 has."""
        for parameter in self._trained():
            if parameter.grad is None:  # not part of the loss this time: it decays all the same
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if self.ranks.world_size > 1:  # alone, it would copy them
            self.engine.allreduce_gradients()

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.engine.module.parameters() if parameter.requires_grad]

    def step(self) -> tuple[float, float]:
        """One optimizer step: (gradient norm before clipping, learning rate).

        A gradient that is not finite changes nothing and is counted: the norm returned is infinite.
        Raises FloatingPointError after three in a row.
        """
        lr = self.settings.lr * lr_factor(
            self.num_steps, self.total_steps, self.settings.warmup_steps, self.settings.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self._take_step()
        self.num_steps += 1
        self.num_skipped_in_a_row = 0 if math.isfinite(norm) else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row == 3:
            raise FloatingPointError(
                "the gradient was not finite three optimizer steps in a row; the policy has probably diverged: lower "
                "optimizer.lr, raise loss.kl_coef, or go back to an earlier model folder of this run"
            )
        return norm, lr

    def pass_steps(self, number: int) -> None:
        """Mini-batches without a gradient keep their place in the learning rate's schedule."""
        self.num_steps += number

    def _take_step(self) -> float:
        if self.engine.zero_optimization_stage() > 0:
            self.engine.step()  # skips by itself where the norm is not finite
            return float(self.engine.get_global_grad_norm())
        # Stage 0 has no such check: its gradients are whole and reduced here, so look before stepping.
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self._trained()]).item()
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm

    def weights(self, *, stored: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of all that a checkpoint holds, parameters gathered in bounded buckets; `stored`: as the
        model's files name and divide them (`rollout.engines.weight_names`).

        A tied head comes under both of its names, since some engines keep a copy of it. Collective: every
        rank must exhaust it.
        """
        head = _head_name(self.causal_lm) if self.tied else None
        embeddings = self.causal_lm.get_input_embeddings().weight
        parameters = dict(self.causal_lm.named_parameters())
        units = stored_together(self.causal_lm, parameters) if stored else [[name] for name in parameters]
        for bucket in _buckets([[(name, parameters[name]) for name in unit] for unit in units]):
            with self._whole([parameter for _, parameter in bucket]):
                whole = {name: parameter.detach() for name, parameter in bucket}
                if head and any(parameter is embeddings for _, parameter in bucket):
                    whole[head] = embeddings.detach()
                yield from (stored_weights(self.causal_lm, whole) if stored else whole).items()
        every = {name for name, _ in self.causal_lm.named_parameters(remove_duplicate=False)}
        rest = {name: buffer for name, buffer in self.causal_lm.state_dict().items() if name not in every}
        yield from (stored_weights(self.causal_lm, rest) if stored else rest).items()

    def _whole(self, parameters: list[torch.nn.Parameter]):
        if self.engine.zero_optimization_stage() < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(parameters)

    def state_on_main(self) -> dict[str, torch.Tensor]:
        """The whole model in the main rank's CPU memory, empty elsewhere. Collective."""
        head = _head_name(self.causal_lm) if self.tied else None
        return {name: tensor.cpu().clone() for name, tensor in self.weights() if self.ranks.is_main and name != head}


class Reference:
    """The frozen model that the KL penalty pulls towards; tempered and sharded like the policy."""

    def __init__(self, model: ModelSettings, zero: DeepSpeedSettings, *, temperature: float, ranks: Ranks):
        stage = 3 if zero.stage == 3 else 0  # without an optimizer only the weights are left to shard
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": model.dtype == "bfloat16"}} | MICRO_BATCH
        causal_lm, attention, plain = _load(model, config, stage, ranks.device)
        module = LogprobModel(causal_lm.requires_grad_(False), attention, temperature).eval()
        if stage == 3:
            self.module, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
        else:
            self.module = module.to(ranks.device)
        self.causal_lm = causal_lm
        check_constants(causal_lm, plain)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs [N]. Collective under ZeRO-3."""
        return self.module(batch)[0]


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


def _load(
    model: ModelSettings, config: dict[str, Any], stage: int, device: torch.device
) -> tuple[torch.nn.Module, PackedAttention, Constants]:
    """The model of this rank, its shard at stage 3; how it attends; and the constants that it must end up with."""
    deepspeed.init_distributed(dist_init_required=False)  # over the group that Ranks.join made
    architecture = AutoConfig.from_pretrained(model.path)
    for name, value in architecture.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "_pdrop")):
            setattr(architecture, name, 0.0)  # the sampler has none, so the ratios must not either
    attention = choose_attention(architecture, device, model.attention)
    dtype = getattr(torch, model.dtype)
    plain = plain_constants(architecture, dtype, model.path)
    # Alive while the model loads, it makes from_pretrained hand each rank only its shard.
    sharding = HfDeepSpeedConfig(config | _keeping_wide(plain, config)) if stage == 3 else None
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=architecture,
        dtype=dtype,
        attn_implementation=attention.implementation,
    )
    causal_lm.generation_config = GenerationConfig()  # nothing generates with it, and it need not be fit to be saved
    if sharding:  # transformers then keeps all conversions for saving, not those alone that this checkpoint needed
        del sharding
        causal_lm._weight_conversions = read_model(model.path).model._weight_conversions
    return causal_lm, attention, plain


def _keeping_wide(plain: Constants, config: dict[str, Any]) -> dict[str, Any]:
    """What keeps DeepSpeed from giving float32 buffers the dtype of the weights, as it does to whatever a sharded
    model makes while it is built.
    """
    names = [name for name, value in plain.items() if getattr(value, "dtype", None) == torch.float32]
    return {"data_types": config.get("data_types", {}) | {"keep_in_fp32_modules": names}}


def _decay_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not. Sizes are asked of ZeRO-3, whose shards are flat."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _claim_averages(adamw: torch.optim.AdamW, shards: list[torch.Tensor] | None) -> None:
    """Makes AdamW's averages now rather than in its first step: what does not fit fails before the first rollout, and
    they do not scatter over the memory that the first update's activations leave.

    `shards` are the parameters under ZeRO-3, which keeps AdamW's groups empty between steps.
    """
    for parameter in shards or [parameter for group in adamw.param_groups for parameter in group["params"]]:
        state = adamw.state[parameter]
        if state:
            state["step"].zero_()  # DeepSpeed's step of zeros does not count
        else:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _head_name(causal_lm: torch.nn.Module) -> str:
    head = causal_lm.get_output_embeddings()
    return next(f"{name}.weight" for name, module in causal_lm.named_modules() if module is head)


def _buckets(
    units: list[list[tuple[str, torch.nn.Parameter]]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """The parameters of whole units."""
    bucket: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for unit in units:
        num_bytes = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for _, p in unit)
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += num_bytes
    if bucket:
        yield bucket


def lr_factor(step: int, total_steps: int, warmup_steps: int, schedule: str) -> float:
    """Factor on the learning rate at optimizer step `step` (from 0): linear warm-up, then the schedule.

    The first of W warm-up steps has 1/(W + 1); `linear` and `cosine` reach 0 after the last step.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
