"""Log-probs of response tokens with few logits at a time: the head runs over blocks of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from grpo.model.attention import PackedAttention
from grpo.model.packing import PackedBatch

BLOCK_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Most logits of one block, by device: 16 or 512 MiB of float32. Two or three blocks are alive at once, besides
those that are kept."""

KEPT_LOGITS = {"cpu": 2**26, "cuda": 2**27}
"""Most logits that wait for backward, which computes the others again: 256 or 512 MiB of float32."""

ALIGNMENT = 128
"""Blocks of the vocabulary are as wide as a multiple of this, where they can: tensor cores want whole tiles."""


class LogprobModel(nn.Module):
    """A causal language model that answers with log-probs and entropies of a packed batch.

    A module of its own so that DeepSpeed wraps it and its hooks gather what each part needs.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        attention: PackedAttention,
        temperature: float,
        *,
        entropy_has_gradient: bool = False,
    ):
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        self.head = LogprobHead(causal_lm.get_output_embeddings(), temperature, entropy_has_gradient)

    def forward(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropies [N]): nats, float32, of the tempered distribution logits / temperature.

        Only the states that predict a response token go through the head.
        """
        states_RLD = self.causal_lm.base_model(
            input_ids=batch.input_ids_RL,
            position_ids=batch.position_ids_RL,
            use_cache=False,
            **self.attention.arguments(batch, self.causal_lm.dtype),
        ).last_hidden_state
        return self.head(states_RLD.flatten(0, 1)[batch.predictor_N], batch.target_N)


class LogprobHead(nn.Module):
    """The model's own head, with log-probs and entropies in place of logits.

    It shares the weight of the linear layer, which itself is never called: ZeRO-3 gathers the weight for this module
    instead, for all blocks at once.
    """

    def __init__(self, linear: nn.Linear, temperature: float, entropy_has_gradient: bool):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.temperature = temperature
        self.entropy_has_gradient = entropy_has_gradient

    def forward(self, states_ND: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _HeadLogprobs.apply(
            states_ND,
            self.weight,
            self.bias,
            target_N,
            self.temperature,
            self.entropy_has_gradient,
            KEPT_LOGITS[states_ND.device.type] if torch.is_grad_enabled() else 0,
        )


class _HeadLogprobs(torch.autograd.Function):
    """Head, softmax, log-prob of the target and entropy in one, with the gradient written out.

    Suffixes: N response tokens, D width, V vocabulary, B a block of it. Blocks of the vocabulary rather than of the
    tokens: the head's gradient is then written once, block by block, instead of being added up. Forward carries each
    token's largest logit so far and, with x the distance of a tempered logit from it, the sums of exp(x) and of
    exp(x) · x. The last blocks are kept, as many as may be, each with the largest logits of its time; backward begins
    with them and computes the others again. With p the softmax, H the entropy and T the temperature:

        ∂ logp(target) / ∂ logit = (onehot − p) / T        ∂ H / ∂ logit = −p · (log p + H) / T
    """

    @staticmethod
    def forward(
        ctx,
        states_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        temperature: float,
        entropy_has_gradient: bool,
        most_kept: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(states_ND.dtype, torch.float32)
        max_N = states_ND.new_full(target_N.shape, -1e30, dtype=dtype)  # below any logit, but for -inf
        chosen_N, total_N, total_x_N = (torch.zeros_like(max_N) for _ in range(3))
        blocks = [*_blocks(len(states_ND), weight_VD)]
        first_kept = len(blocks) - most_kept // (len(states_ND) * blocks[0].stop)  # none is wider than the first
        kept: list[torch.Tensor] = []
        for number, block in enumerate(blocks):
            x_NB = _logits(states_ND, weight_VD, bias_V, block)
            column_N, is_here_N = _columns(target_N, block)
            chosen_N = torch.where(is_here_N, x_NB.gather(-1, column_N[:, None])[:, 0], chosen_N)
            before_N, max_N = max_N, torch.maximum(max_N, x_NB.amax(-1))
            torch.add((-max_N / temperature)[:, None], x_NB, alpha=1 / temperature, out=x_NB)
            exp_NB = x_NB.exp()
            # What was summed before was relative to a smaller logit.
            shift_N = (before_N - max_N) / temperature
            shrink_N = shift_N.exp()
            total_x_N = shrink_N * (total_x_N + shift_N * total_N) + torch.linalg.vecdot(exp_NB, x_NB)
            total_N = shrink_N * total_N + exp_NB.sum(-1)
            if number >= first_kept:
                kept += [x_NB, max_N]
            del exp_NB, x_NB
        log_total_N = total_N.log()
        entropy_N = log_total_N - total_x_N / total_N
        ctx.save_for_backward(states_ND, weight_VD, bias_V, target_N, max_N, log_total_N, entropy_N, *kept)
        ctx.blocks, ctx.temperature, ctx.entropy_has_gradient = blocks, temperature, entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_N)  # only logged
        return (chosen_N - max_N) / temperature - log_total_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, by_logprobs_N: torch.Tensor, by_entropy_N: torch.Tensor):
        states_ND, weight_VD, bias_V, target_N, max_N, log_total_N, entropy_N, *kept = ctx.saved_tensors
        by_states_ND = torch.zeros_like(states_ND, dtype=max_N.dtype)
        by_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        by_bias_V = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        normalizer_N1 = (max_N / ctx.temperature + log_total_N)[:, None]
        by_chosen_N = by_logprobs_N / ctx.temperature
        by_entropy_N = by_entropy_N / ctx.temperature if ctx.entropy_has_gradient else None
        by_logits_NB = None
        for block in reversed(ctx.blocks):
            del by_logits_NB  # the block before goes first
            if kept:
                then_N, x_NB = kept.pop(), kept.pop()
                table_NB = x_NB + ((then_N - max_N) / ctx.temperature - log_total_N)[:, None]
            else:
                table_NB = _logits(states_ND, weight_VD, bias_V, block)
                torch.add(-normalizer_N1, table_NB, alpha=1 / ctx.temperature, out=table_NB)
            by_logits_NB = _by_logits(table_NB, *_columns(target_N, block), by_chosen_N, by_entropy_N, entropy_N)
            by_logits_NB = by_logits_NB.to(weight_VD.dtype)
            del table_NB
            by_states_ND += by_logits_NB @ weight_VD[block]
            if by_weight_VD is not None:
                torch.mm(by_logits_NB.t(), states_ND, out=by_weight_VD[block])
            if by_bias_V is not None:
                by_bias_V[block] = by_logits_NB.sum(0)
        return by_states_ND.to(states_ND.dtype), by_weight_VD, by_bias_V, None, None, None, None


def _by_logits(
    logprobs_NB: torch.Tensor,
    column_N: torch.Tensor,
    is_here_N: torch.Tensor,
    by_chosen_N: torch.Tensor,
    by_entropy_N: torch.Tensor | None,
    entropy_N: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a block's logits, in the place of its log-probs. The other gradients come divided by T."""
    if by_entropy_N is None:
        logprobs_NB.exp_().mul_(-by_chosen_N[:, None])
    else:
        share_N1 = (by_chosen_N + entropy_N * by_entropy_N)[:, None]
        share_NB = torch.addcmul(share_N1, logprobs_NB, by_entropy_N[:, None])
        logprobs_NB.exp_().mul_(share_NB.neg_())
    return logprobs_NB.scatter_add_(-1, column_N[:, None], torch.where(is_here_N, by_chosen_N, 0)[:, None])


def _blocks(num_tokens: int, weight_VD: torch.Tensor) -> Iterator[slice]:
    """Of the vocabulary, all about equal, each with at most `BLOCK_LOGITS` logits of `num_tokens` tokens."""
    vocabulary = len(weight_VD)
    unit = ALIGNMENT if BLOCK_LOGITS[weight_VD.device.type] >= ALIGNMENT * num_tokens else 1
    most = max(1, BLOCK_LOGITS[weight_VD.device.type] // num_tokens // unit) * unit
    number = -(-vocabulary // most)
    size = -(-vocabulary // number // unit) * unit
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


def _logits(
    states_ND: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, block: slice
) -> torch.Tensor:
    logits_NB = nn.functional.linear(states_ND, weight_VD[block], None if bias_V is None else bias_V[block])
    return logits_NB.to(torch.promote_types(logits_NB.dtype, torch.float32))


def _columns(target_N: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target within the block, whether it is in there; 0 where it is not)."""
    is_here_N = (target_N >= block.start) & (target_N < block.stop)
    return torch.where(is_here_N, target_N - block.start, 0), is_here_N
