"""Log-probs of response tokens without the logits: the head runs over blocks of the vocabulary, again in backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from grpo.attention import PackedAttention
from grpo.packing import PackedBatch

BLOCK_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Most logits of one block, by device: 16 MiB of float32, which stay in a CPU's cache, or 512 MiB."""


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
    instead, once in each pass.
    """

    def __init__(self, linear: nn.Linear, temperature: float, entropy_has_gradient: bool):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.temperature = temperature
        self.entropy_has_gradient = entropy_has_gradient

    def forward(self, states_ND: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _HeadLogprobs.apply(
            states_ND, self.weight, self.bias, target_N, self.temperature, self.entropy_has_gradient
        )


class _HeadLogprobs(torch.autograd.Function):
    """Head, softmax, log-prob of the target and entropy in one, with the gradient written out.

    Suffixes: N response tokens, D width, V vocabulary, B a block of it. Blocks of the vocabulary rather than of the
    tokens: the head's gradient is then written once, block by block, and the products are large in all directions.
    Forward carries each token's largest logit and, relative to it, the sums of exp(l) and of exp(l) · l over the
    blocks so far. Backward computes a block's logits again, but for the last, with which it begins. With p the
    softmax, H the entropy and T the temperature:

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for block in _blocks(len(states_ND), weight_VD):
            logits_NB = _logits(states_ND, weight_VD, bias_V, block)
            largest_N = logits_NB.amax(-1)
            if block.start == 0:
                max_N, chosen_N = largest_N, torch.zeros_like(largest_N)
                total_N, total_logits_N = torch.zeros_like(largest_N), torch.zeros_like(largest_N)
            largest_N = torch.maximum(max_N, largest_N)
            shrink_N = ((max_N - largest_N) / temperature).exp()
            exp_NB = torch.add((-largest_N / temperature)[:, None], logits_NB, alpha=1 / temperature).exp_()
            total_N = total_N * shrink_N + exp_NB.sum(-1)
            total_logits_N = total_logits_N * shrink_N + torch.linalg.vecdot(exp_NB, logits_NB)
            column_N, is_here_N = _columns(target_N, block)
            chosen_N = torch.where(is_here_N, logits_NB.gather(-1, column_N[:, None])[:, 0], chosen_N)
            max_N = largest_N
        normalizer_N = max_N / temperature + total_N.log()
        entropy_N = normalizer_N - total_logits_N / total_N / temperature
        ctx.save_for_backward(states_ND, weight_VD, bias_V, target_N, normalizer_N, entropy_N, logits_NB)
        ctx.temperature, ctx.entropy_has_gradient = temperature, entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_N)  # only logged
        return chosen_N / temperature - normalizer_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, by_logprobs_N: torch.Tensor, by_entropy_N: torch.Tensor):
        states_ND, weight_VD, bias_V, target_N, normalizer_N, entropy_N, last_logits_NB = ctx.saved_tensors
        by_states_ND = torch.zeros_like(states_ND, dtype=normalizer_N.dtype)
        by_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        by_bias_V = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        by_chosen_N = by_logprobs_N / ctx.temperature
        for block in reversed([*_blocks(len(states_ND), weight_VD)]):
            is_last = block.stop == len(weight_VD)
            logits_NB = last_logits_NB if is_last else _logits(states_ND, weight_VD, bias_V, block)
            # From here on in place: log-probs, probabilities, gradient.
            table_NB = torch.add(-normalizer_N[:, None], logits_NB, alpha=1 / ctx.temperature)
            if ctx.entropy_has_gradient:
                surprise_NB = (table_NB + entropy_N[:, None]) * (by_entropy_N / ctx.temperature)[:, None]
                by_logits_NB = table_NB.exp_().mul_(-surprise_NB.add_(by_chosen_N[:, None]))
            else:
                by_logits_NB = table_NB.exp_().mul_(-by_chosen_N[:, None])
            column_N, is_here_N = _columns(target_N, block)
            by_logits_NB.scatter_add_(-1, column_N[:, None], torch.where(is_here_N, by_chosen_N, 0)[:, None])
            by_logits_NB = by_logits_NB.to(weight_VD.dtype)
            by_states_ND += by_logits_NB @ weight_VD[block]
            if by_weight_VD is not None:
                torch.mm(by_logits_NB.t(), states_ND, out=by_weight_VD[block])
            if by_bias_V is not None:
                by_bias_V[block] = by_logits_NB.sum(0)
        return by_states_ND.to(states_ND.dtype), by_weight_VD, by_bias_V, None, None, None


def _blocks(num_tokens: int, weight_VD: torch.Tensor) -> Iterator[slice]:
    """Of the vocabulary, all about equal, each with at most `BLOCK_LOGITS` logits of `num_tokens` tokens."""
    vocabulary = len(weight_VD)
    number = -(-vocabulary // max(1, BLOCK_LOGITS[weight_VD.device.type] // num_tokens))
    size = -(-vocabulary // number)
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
