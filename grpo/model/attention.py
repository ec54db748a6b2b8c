"""How the model attends within packed rows: which mask it is given, and what a long row costs.

A row holds several replies that must not see each other (`grpo.model.packing`). On CUDA, FlexAttention skips the
blocks that the mask rules out; elsewhere prompts and replies attend in parts (`grpo.model.prefix_attention`). A dense
mask serves models that take neither, at a cost that grows with the square of the row. Layers that look through
a window or carry a state cannot be told: such models get one sequence per row and make their own masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig

from grpo.model.packing import PADDING, PackedBatch, visibility
from grpo.model.prefix_attention import PrefixLayout, attend

FLEX_BLOCK = 128
PREFIX_ATTENTION = "shared_prefix"
AttentionInterface.register(PREFIX_ATTENTION, attend)


@dataclass(frozen=True, slots=True)
class PackedAttention:
    kind: Literal["prefix", "dense", "flex", "own"]
    """`own`: the model's own masks, one sequence per row."""
    pair_cost: float
    """Cost of one (query, key) pair of a row, masked or not, in units of one token's matrix products."""
    implementation: str
    """Its name in transformers."""
    reason: str

    @property
    def shares_rows(self) -> bool:
        return self.kind != "own"

    @property
    def row_multiple(self) -> int:
        """Rows are padded to whole blocks of FlexAttention, so that few shapes are ever compiled."""
        return FLEX_BLOCK if self.kind == "flex" else 1

    def arguments(self, batch: PackedBatch, dtype: torch.dtype) -> dict[str, Any]:
        """What tells the model who may look at whom. `attention_mask` is [R, 1, L, L] bool, a BlockMask, or [R, L]
        of 0 and 1; `dtype` is that of the activations.
        """
        if self.kind == "prefix":
            return {"attention_mask": None, "prefix_layout": PrefixLayout.of(batch.segment_RL, dtype)}
        if self.kind == "own":
            return {"attention_mask": (batch.segment_RL != PADDING).long()}
        if self.kind == "dense":
            return {"attention_mask": batch.attention_mask()}
        return {"attention_mask": _block_mask(batch.segment_RL)}


def choose_attention(
    config: PretrainedConfig, device: torch.device, wanted: Literal["auto", "dense"] = "auto"
) -> PackedAttention:
    """The fastest that the model and the device take, and why; `dense` asks for the plainest."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    own_masks = _why_own_masks(config)
    if own_masks or not architecture._supports_sdpa:
        implementation = "sdpa" if architecture._supports_sdpa else "eager"
        reason = f"one sequence per row, since the model has {own_masks or 'attention of its own'}"
        return PackedAttention("own", 0.0, implementation, reason)
    if device.type == "cuda" and wanted == "auto" and architecture._supports_flex_attn:
        _allow_many_shapes()
        return PackedAttention("flex", 0.0, "flex_attention", "replies share their prompt's row (FlexAttention)")
    if wanted == "auto" and architecture._supports_attention_backend:
        return PackedAttention("prefix", 0.0, PREFIX_ATTENTION, "replies share their prompt's row (prefix attention)")
    return PackedAttention("dense", _pair_cost(config), "sdpa", "replies share their prompt's row (dense mask)")


def _allow_many_shapes() -> None:
    """Lets torch compile FlexAttention for all the shapes of a run: with and without gradients, one row and several,
    one block and many. Beyond its limit of 8 it would compute whole score matrices, with no more than a warning.

    The default is changed, since a setting counts in its own thread alone, and autograd recomputes in another.
    """
    torch._dynamo.config._config["recompile_limit"].default = 64


def _why_own_masks(config: PretrainedConfig) -> str | None:
    """Kinds of layer that prevent packing several replies into a row (sliding window, ALiBi, recurrent); None if there
    are none.
    """
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    kinds |= {f"{kind} attention" for kind in getattr(config, "attention_layers", None) or [] if kind != "global"}
    if not kinds and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        kinds.add("ALiBi")
    if not getattr(config, "num_attention_heads", None):
        kinds.add("layers without attention")
    return ", ".join(sorted(kinds)) or None


def _block_mask(segment_RL: torch.Tensor):
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = segment_RL.shape
    may_look = visibility(segment_RL)
    return create_block_mask(may_look, rows, None, length, length, device=segment_RL.device, BLOCK_SIZE=FLEX_BLOCK)


def _pair_cost(config: PretrainedConfig) -> float:
    """Two products of the head size per head and pair, against the weights that a token meets in a layer.

    Operations cost alike in both on a CPU (tests/bench/bench_rows.py).
    """
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    shared_heads = getattr(config, "num_key_value_heads", None) or heads
    mlp = 3 * width * (getattr(config, "intermediate_size", None) or 4 * width)
    weights = 2 * width * head_dim * (heads + shared_heads) + mlp
    return 2 * heads * head_dim / weights
