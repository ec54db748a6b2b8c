"""Floating-point operations that an update needs, and what a card could do at most.

Counted are the products with the model's matrices (2 a weight and token) and those of attention (4 a channel, query and
key it may look at): once forward, twice that backward. A prompt that replies share counts once, the head for trained
tokens alone, padding never, and what is computed again to save memory neither: a share of the peak then tells how much
of the card the update makes use of, as PaLM's "model FLOPs utilization" does (arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from grpo.model.packing import PADDING, PackedBatch, prompt_of

BF16_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A40": 149.7,
    "A10": 125,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364,
    "RTX 4090": 165,
}
"""Peak of dense bfloat16 products (NVIDIA's data sheets, without sparsity) by a card's name, or part of it."""


def peak_tflops(card: str, dtype: torch.dtype) -> float | None:
    """TFLOP/s; None where the card is not known, is shared out (MIG), or computes in another dtype.

    >>> peak_tflops("NVIDIA H100 80GB HBM3", torch.bfloat16), peak_tflops("NVIDIA H100 PCIe", torch.bfloat16)
    (989, 756)
    """
    if dtype != torch.bfloat16 or "MIG" in card:
        return None
    words = card.replace("-", " ").split()
    found = [name for name in BF16_TFLOPS if _within(name.split(), words)]
    return BF16_TFLOPS[max(found, key=len)] if found else None


def _within(part: list[str], words: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words)))


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """What one forward pass of a model needs."""

    body: float
    """Weights of the matrices that a token meets, the head's not; of experts, as many as are chosen."""
    head: int
    """Weights of the head."""
    channels: int
    """Of all heads of an attention layer."""
    windows: tuple[int | None, ...]
    """By attention layer: how many tokens a query looks back at, itself included; None: at all."""

    @classmethod
    def of(cls, causal_lm: nn.Module) -> ForwardCost:
        config = causal_lm.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 0
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        head = causal_lm.get_output_embeddings().weight
        chosen = _chosen_experts(config)
        body = sum(
            parameter_numel(parameter) * (chosen if "experts" in f"{name}.{leaf}".split(".") else 1.0)
            for name, module in causal_lm.named_modules()
            if not isinstance(module, nn.Embedding)
            for leaf, parameter in module.named_parameters(recurse=False)
            if parameter is not head and len(_shape(parameter)) > 1
        )
        return cls(body, parameter_numel(head), heads * head_dim, tuple(_windows(config)))

    def forward(self, batch: PackedBatch) -> float:
        """Operations of one forward pass over the batch's real tokens."""
        num_tokens = int((batch.segment_RL != PADDING).sum())
        pairs = {window: _pairs(batch.segment_RL, window) for window in set(self.windows)}
        attention = 4 * self.channels * sum(pairs[window] for window in self.windows)
        return 2 * self.body * num_tokens + 2 * self.head * len(batch.target_N) + attention


def parameter_numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter, under ZeRO-3 too."""
    return int(torch.Size(_shape(parameter)).numel())


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _chosen_experts(config: PretrainedConfig) -> float:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((value for name in names if (value := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / number if number and chosen else 1.0


def _windows(config: PretrainedConfig) -> list[int | None]:
    """Layers that carry a state instead of looking back have no pairs, and are left out."""
    window = getattr(config, "sliding_window", None)
    if kinds := getattr(config, "layer_types", None):
        by_kind = {
            "full_attention": None,
            "sliding_attention": window,
            "chunked_attention": getattr(config, "attention_chunk_size", None),
        }
        return [by_kind[kind] for kind in kinds if kind in by_kind]
    return [window if getattr(config, "use_sliding_window", True) else None] * config.num_hidden_layers


def _pairs(segment_RL: torch.Tensor, window: int | None) -> int:
    """(query, key) pairs that may look: a prompt at itself, a reply at the prompt and itself, never at later tokens."""
    pairs = 0
    for segment_L in segment_RL:
        segments, lengths = segment_L[segment_L != PADDING].unique(return_counts=True)
        length_of = dict(zip(segments.tolist(), lengths.tolist(), strict=True))
        if window is not None:  # such models have one reply in a row
            length = sum(length_of.values())
            seen = min(length, window)
            pairs += seen * (seen + 1) // 2 + (length - seen) * window
        else:
            prompts = prompt_of(segments).tolist()
            for segment, prompt in zip(segments.tolist(), prompts, strict=True):
                own = length_of[segment]
                pairs += own * (own + 1) // 2 + (own * length_of[prompt] if segment != prompt else 0)
    return pairs
