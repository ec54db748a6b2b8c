"""The same modules, keeping less for backward: the norms and gated MLPs of the Llama family.

Autograd keeps the input of every operation. What is cheap to compute again from what is kept anyway is dropped here:
of a norm its input and one number per token stay, of an MLP its two projections. Values and gradients are unchanged
(tests/test_recompute.py). Suffixes: T tokens (any leading axes), D width, M width within the MLP.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
GATED_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
"""Classes of transformers whose forward is known to be the one written here."""


def keep_less(model: nn.Module) -> None:
    """Gives every module that is known here a forward of the same results; all others stay as they are."""
    for module in model.modules():
        if type(module).__name__ in RMS_NORMS:
            module.forward = MethodType(_rms_norm, module)
        elif type(module).__name__ in GATED_MLPS:
            module.forward = MethodType(_gated_mlp, module)


def _rms_norm(self: nn.Module, states_TD: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(states_TD, self.weight, self.variance_epsilon)


def _gated_mlp(self: nn.Module, states_TD: torch.Tensor) -> torch.Tensor:
    def down(gate_TM: torch.Tensor, up_TM: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(gate_TM) * up_TM)

    gate_TM, up_TM = self.gate_proj(states_TD), self.up_proj(states_TD)
    if not torch.is_grad_enabled():
        return down(gate_TM, up_TM)
    # Backward recomputes only act(gate) * up, not the down projection (under ZeRO-3 that one too).
    return checkpoint(down, gate_TM, up_TM, use_reentrant=False, preserve_rng_state=False)


class _RMSNorm(torch.autograd.Function):
    """weight · x / √(mean x² + ε), the mean in float32 whatever the dtype, as the original has it.

    With n = x / √(…) and g the gradient times the weight: ∂x = (g − n · mean(g · n)) / √(…).
    """

    @staticmethod
    def forward(ctx, states_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide_TD = states_TD.to(torch.float32)
        scale_T1 = torch.rsqrt(torch.linalg.vecdot(wide_TD, wide_TD).div_(wide_TD.shape[-1]).add_(eps))[..., None]
        ctx.save_for_backward(states_TD, weight_D, scale_T1)
        return (wide_TD * scale_T1).to(states_TD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx, by_normed_TD: torch.Tensor):
        states_TD, weight_D, scale_T1 = ctx.saved_tensors
        normed_TD = states_TD.to(torch.float32) * scale_T1
        by_normed_TD = by_normed_TD.to(torch.float32)
        by_weight_D = (by_normed_TD * normed_TD).flatten(0, -2).sum(0).to(weight_D.dtype)
        by_states_TD = by_normed_TD * weight_D
        mean_T1 = torch.linalg.vecdot(by_states_TD, normed_TD).div_(normed_TD.shape[-1])[..., None]
        by_states_TD -= normed_TD.mul_(mean_T1)
        return by_states_TD.mul_(scale_T1).to(states_TD.dtype), by_weight_D, None
