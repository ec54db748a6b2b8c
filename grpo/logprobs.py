"""Log-probs of response tokens without the logits: the head runs over chunks, recomputed in backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo.attention import PackedAttention
from grpo.packing import PackedBatch

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Most logits of one chunk, by device: 128 or 512 MiB of float32. The head's products are faster the more tokens it
takes at once, and ZeRO-3 gathers it for every chunk."""


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

    def num_chunks(self, batch: PackedBatch) -> int:
        """How many chunks of at most `CHUNK_LOGITS` a micro-batch needs."""
        tokens = max(1, CHUNK_LOGITS[self.causal_lm.device.type] // self.causal_lm.get_output_embeddings().out_features)
        return -(-batch.target_N.numel() // tokens)

    def forward(self, batch: PackedBatch, num_chunks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropies [N]): nats, float32, of the tempered distribution logits / temperature.

        Only the states that predict a response token go through the head, in `num_chunks` (its own number of the
        batch unless given). Under ZeRO-3 each chunk gathers the head, so all ranks must cut into as many.
        """
        states_RLD = self.causal_lm.base_model(
            input_ids=batch.input_ids_RL,
            position_ids=batch.position_ids_RL,
            use_cache=False,
            **self.attention.arguments(batch, self.causal_lm.dtype),
        ).last_hidden_state
        states_ND = states_RLD.flatten(0, 1)[batch.predictor_N]
        num_chunks = num_chunks or self.num_chunks(batch)
        *chunks, last = zip(states_ND.tensor_split(num_chunks), batch.target_N.tensor_split(num_chunks), strict=True)
        # Backward begins with the last chunk, which can wait for it as it is; the others are computed again.
        found = [checkpoint(self._head, *chunk, use_reentrant=False) for chunk in chunks] + [self._head(*last)]
        return torch.cat([logprobs_C for logprobs_C, _ in found]), torch.cat([entropy_C for _, entropy_C in found])

    def _head(self, states_CD: torch.Tensor, target_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = self.causal_lm.get_output_embeddings()(states_CD)
        return _TokenStatistics.apply(logits_CV, target_C, self.temperature, self.entropy_has_gradient)


class _TokenStatistics(torch.autograd.Function):
    """(log-probs [C], entropies [C]) of logits [C, V] ÷ temperature, with the gradient written out.

    Written as tensor operations, autograd would walk over the chunk some fifteen times and keep five copies; this is
    six passes over two, and two passes in backward. With p the softmax and H the entropy:
    ∂ logp(target)/∂ logit = (onehot − p) / T, and ∂ H/∂ logit = −p · (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx, logits_CV: torch.Tensor, target_C: torch.Tensor, temperature: float, entropy_has_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In place where the logits are float32 already: nobody else reads them.
        table_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        largest_C1 = table_CV.amax(-1, keepdim=True)
        torch.add(-largest_C1 / temperature, table_CV, alpha=1 / temperature, out=table_CV)
        chosen_C = table_CV.gather(-1, target_C[:, None])[:, 0]
        probs_CV = table_CV.exp()
        total_C = probs_CV.sum(-1)
        entropy_C = total_C.log() - torch.linalg.vecdot(probs_CV, table_CV) / total_C
        probs_CV /= total_C[:, None]
        ctx.save_for_backward(probs_CV, target_C, entropy_C)
        ctx.temperature, ctx.entropy_has_gradient = temperature, entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_C)  # only logged
        return chosen_C - total_C.log(), entropy_C

    @staticmethod
    def backward(ctx, by_logprobs_C: torch.Tensor, by_entropy_C: torch.Tensor):
        probs_CV, target_C, entropy_C = ctx.saved_tensors
        by_logits_CV = probs_CV * (-by_logprobs_C / ctx.temperature)[:, None]
        by_logits_CV.scatter_add_(-1, target_C[:, None], (by_logprobs_C / ctx.temperature)[:, None])
        if ctx.entropy_has_gradient:
            surprise_CV = torch.special.xlogy(probs_CV, probs_CV) + probs_CV * entropy_C[:, None]
            by_logits_CV -= surprise_CV * (by_entropy_C / ctx.temperature)[:, None]
        return by_logits_CV, None, None, None
