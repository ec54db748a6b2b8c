"""The policy: the model that is trained, under DeepSpeed.

Gradients are summed over ranks and micro-batches (`grpo.model.zero`). In bfloat16 one backward pass gives gradients of
bfloat16. From there on, over micro-batches, ranks and the optimizer, they are float32 at every stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model import zero
from grpo.model.constants import check_constants
from grpo.model.loading import load
from grpo.model.logprobs import LogprobModel
from grpo.model.optimizer import claim_averages, decay_groups, lr_factor
from grpo.model.packing import PackedBatch
from grpo.model.recompute import keep_less
from grpo.model.weight_buckets import weight_buckets
from grpo.ranks import Ranks
from rollout.engines.weight_names import stored_together, stored_weights


class Policy:
    """The model being trained: log-probs, backward, optimizer steps, and its weights for others."""

    def __init__(
        self,
        model: ModelSettings,
        optimizer: OptimizerSettings,
        deepspeed: DeepSpeedSettings,
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
        config = zero.deepspeed_config(model, optimizer, deepspeed)
        causal_lm, self.attention, plain = load(model, config, deepspeed.stage, ranks.device)
        self.tied = bool(causal_lm.config.tie_word_embeddings)
        if model.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            keep_less(causal_lm)
        module = LogprobModel(causal_lm, self.attention, temperature, entropy_has_gradient=entropy_has_gradient)
        adamw = torch.optim.AdamW(
            decay_groups(module, optimizer.weight_decay),
            lr=0.0,  # `step` sets it; DeepSpeed's own step of zeros (bfloat16, stage 0) must not decay anything
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.engine, self.optimizer = zero.start(module, config, adamw)
        if deepspeed.stage == 0:
            self.engine.enable_backward_allreduce = False  # `_sum_over_ranks` does
            for parameter in self._trained() if self.dtype == torch.bfloat16 else []:
                parameter.grad_dtype = torch.float32  # what autograd adds its gradients up in
        claim_averages(adamw, getattr(self.optimizer, "fp32_partitioned_groups_flat", None))
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
        for bucket in weight_buckets([[(name, parameters[name]) for name in unit] for unit in units]):
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
        return zero.gathered(parameters)

    def state_on_main(self) -> dict[str, torch.Tensor]:
        """The whole model in the main rank's CPU memory, empty elsewhere. Collective."""
        head = _head_name(self.causal_lm) if self.tied else None
        return {name: tensor.cpu().clone() for name, tensor in self.weights() if self.ranks.is_main and name != head}


def _head_name(causal_lm: torch.nn.Module) -> str:
    head = causal_lm.get_output_embeddings()
    return next(f"{name}.weight" for name, module in causal_lm.named_modules() if module is head)
