"""Log-probs of response tokens without the logits: the head runs over chunks, recomputed in backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo.attention import PackedAttention
from grpo.packing import PackedBatch

CHUNK_TOKENS = 256
"""Response tokens that go through the head at once: the most logits ever alive is this × vocabulary."""


def head_chunks(batch: PackedBatch) -> int:
    """How many pieces of at most `CHUNK_TOKENS` response tokens a micro-batch needs."""
    return -(-batch.target_N.numel() // CHUNK_TOKENS)


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
        self.temperature = temperature
        self.entropy_has_gradient = entropy_has_gradient

    def forward(self, batch: PackedBatch, num_chunks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropies [N]): nats, float32, of the tempered distribution logits / temperature.

        Only the states that predict a response token go through the head, in `num_chunks` pieces (`head_chunks`
        of the batch unless given). Under ZeRO-3 each piece gathers the head, so all ranks must cut into as many.
        """
        states_RLD = self.causal_lm.base_model(
            input_ids=batch.input_ids_RL,
            attention_mask=self.attention.mask(batch),
            position_ids=batch.position_ids_RL,
            use_cache=False,
        ).last_hidden_state
        states_ND = states_RLD.flatten(0, 1)[batch.predictor_N]
        num_chunks = num_chunks or head_chunks(batch)
        pairs = [
            checkpoint(self._head, states_CD, target_C, use_reentrant=False)
            for states_CD, target_C in zip(
                states_ND.tensor_split(num_chunks), batch.target_N.tensor_split(num_chunks), strict=True
            )
        ]
        return torch.cat([logprobs_C for logprobs_C, _ in pairs]), torch.cat([entropy_C for _, entropy_C in pairs])

    def _head(self, states_CD: torch.Tensor, target_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = self.causal_lm.get_output_embeddings()(states_CD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return _TokenStatistics.apply(logits_CV, target_C, self.temperature, self.entropy_has_gradient)


class _TokenStatistics(torch.autograd.Function):
    """(log-probs [C], entropies [C]) of logits [C, V] ÷ temperature, with the gradient written out.

    Written as tensor operations, autograd would walk over the chunk some fifteen times; this is six passes and
    two in backward. With p the softmax and H the entropy: ∂ logp(target)/∂ logit = (onehot − p) / T, and
    ∂ H/∂ logit = −p · (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx, logits_CV: torch.Tensor, target_C: torch.Tensor, temperature: float, entropy_has_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table_CV = logits_CV / temperature
        table_CV -= table_CV.logsumexp(-1, keepdim=True)
        probs_CV = table_CV.exp()
        logprobs_C = table_CV.gather(-1, target_C[:, None])[:, 0]
        entropy_C = -torch.linalg.vecdot(probs_CV, table_CV)
        ctx.save_for_backward(probs_CV, target_C, entropy_C)
        ctx.temperature, ctx.entropy_has_gradient = temperature, entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_C)  # only logged
        return logprobs_C, entropy_C

    @staticmethod
    def backward(ctx, by_logprobs_C: torch.Tensor, by_entropy_C: torch.Tensor):
        probs_CV, target_C, entropy_C = ctx.saved_tensors
        by_logits_CV = probs_CV * (-by_logprobs_C / ctx.temperature)[:, None]
        by_logits_CV.scatter_add_(-1, target_C[:, None], (by_logprobs_C / ctx.temperature)[:, None])
        if ctx.entropy_has_gradient:
            surprise_CV = torch.special.xlogy(probs_CV, probs_CV) + probs_CV * entropy_C[:, None]
            by_logits_CV -= surprise_CV * (by_entropy_C / ctx.temperature)[:, None]
        return by_logits_CV, None, None, None
