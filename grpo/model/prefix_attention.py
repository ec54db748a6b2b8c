"""Attention within packed rows on any device, computing only the pairs that may look at each other.

A dense mask of a row of L tokens costs L² pairs, most of them ruled out. Here every prompt attends to itself with
the causal kernel, and replies of about one length attend side by side, each to its prompt's keys followed by its
own:

    prompts   [G, P] queries × [G, P] keys, causal
    block     [B, D] queries × [B, P + D] keys, a prompt's keys repeated for each of its replies

The tokens move from their rows into these slots and back; slots are padded to the longest of their block. Suffixes:
R rows, L tokens in a row, G prompts, P prompt tokens, B replies of a block, D tokens of a reply, H heads, W width of
all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from grpo.model.packing import PADDING, prompt_of

MAX_PADDING = 1.5
"""Pairs of a block, padding included, over those that its replies need."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A reply within the rows."""

    prompt: int
    """Number of the prompt that it follows."""
    start: int
    """Flat index of its first token."""
    length: int
    prompt_length: int

    @property
    def num_pairs(self) -> int:
        return self.length * (self.prompt_length + self.length)


@dataclass(frozen=True, slots=True)
class _Block:
    prompt_B: torch.Tensor
    reply_length: int
    prompt_length: int
    bias_B1DK: torch.Tensor
    """0 where a query may look at a key (prompt keys, then own), -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """Where the tokens of a packed batch go, worked out once for all layers."""

    num_prompts: int
    prompt_length: int
    """Of the longest."""
    blocks: tuple[_Block, ...]
    token_of_slot: torch.Tensor
    slot_of_token: torch.Tensor
    empty_slots: torch.Tensor
    """Slots that hold no token."""
    empty_tokens: torch.Tensor
    """Flat indices of the rows' padding."""

    @classmethod
    def of(cls, segment_RL: torch.Tensor, dtype: torch.dtype) -> PrefixLayout:
        """`segment_RL` as in `PackedBatch`; `dtype` is that of the queries."""
        device = segment_RL.device
        prompt_starts, prompt_lengths, replies = _spans(segment_RL)
        prompt_length = max(prompt_lengths)
        grids = [_grid(prompt_starts, prompt_lengths, prompt_length)]
        blocks = []
        for spans in _similar(replies):
            longest = max(span.length for span in spans)
            longest_prompt = max(span.prompt_length for span in spans)
            grids.append(_grid([span.start for span in spans], [span.length for span in spans], longest))
            bias = _bias([span.prompt_length for span in spans], longest_prompt, longest, dtype)
            prompts = torch.tensor([span.prompt for span in spans], device=device)
            blocks.append(_Block(prompts, longest, longest_prompt, bias.to(device)))
        token_of_slot = torch.cat(grids)
        empty_slots = (token_of_slot == -1).nonzero()[:, 0]
        slot_of_token = torch.zeros(segment_RL.numel(), dtype=torch.long)
        full_slots = (token_of_slot >= 0).nonzero()[:, 0]
        slot_of_token[token_of_slot[full_slots]] = full_slots
        return cls(
            len(prompt_lengths),
            prompt_length,
            tuple(blocks),
            token_of_slot.clamp(min=0).to(device),
            slot_of_token.to(device),
            empty_slots.to(device),
            (segment_RL.flatten() == PADDING).nonzero()[:, 0],
        )

    def to_slots(self, tokens_TW: torch.Tensor) -> torch.Tensor:
        return _Move.apply(tokens_TW, self.token_of_slot, self.empty_slots, self.slot_of_token, self.empty_tokens)

    def to_tokens(self, slots_SW: torch.Tensor) -> torch.Tensor:
        return _Move.apply(slots_SW, self.slot_of_token, self.empty_tokens, self.token_of_slot, self.empty_slots)


def attend(
    module: torch.nn.Module,
    query_RHLX: torch.Tensor,
    key_RHLX: torch.Tensor,
    value_RHLX: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    prefix_layout: PrefixLayout,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it: what the heads read, [R, L, H, X], X the head size of
    the values."""
    layout = prefix_layout
    rows, heads, length, _ = query_RHLX.shape
    slots = [
        layout.to_slots(states.transpose(1, 2).reshape(rows * length, -1)).unflatten(1, (-1, states.shape[-1]))
        for states in (query_RHLX, key_RHLX, value_RHLX)
    ]
    sizes = [layout.num_prompts * layout.prompt_length, *(len(b.prompt_B) * b.reply_length for b in layout.blocks)]
    (query_P, *queries), (key_P, *keys), (value_P, *values) = (states.split(sizes) for states in slots)
    query_GPHX, key_GPHX, value_GPHX = (
        states.unflatten(0, (layout.num_prompts, layout.prompt_length)) for states in (query_P, key_P, value_P)
    )
    read = [_attend(query_GPHX, key_GPHX, value_GPHX, scaling, is_causal=True)]
    for block, query, key, value in zip(layout.blocks, queries, keys, values, strict=True):
        shape = (len(block.prompt_B), block.reply_length)
        key_BKHX, value_BKHX = (
            torch.cat([whole[:, : block.prompt_length].index_select(0, block.prompt_B), own.unflatten(0, shape)], dim=1)
            for whole, own in ((key_GPHX, key), (value_GPHX, value))
        )
        read.append(_attend(query.unflatten(0, shape), key_BKHX, value_BKHX, scaling, attn_mask=block.bias_B1DK))
    return layout.to_tokens(torch.cat(read)).view(rows, length, heads, -1), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, **mask: Any) -> torch.Tensor:
    """[B, D, H, X] queries and [B, K, H', X] keys and values → [B · D, W]."""
    read_BHDX = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, enable_gqa=True, **mask
    )
    return read_BHDX.transpose(1, 2).flatten(0, 1).flatten(1)


class _Move(torch.autograd.Function):
    """Rows of a matrix to other places. Each goes to one place at most, so the gradient moves back the same way."""

    @staticmethod
    def forward(ctx, rows, sources, holes, sources_back, holes_back):
        ctx.save_for_backward(sources_back, holes_back)
        return rows.index_select(0, sources).index_fill_(0, holes, 0)

    @staticmethod
    def backward(ctx, gradient):
        sources_back, holes_back = ctx.saved_tensors
        return gradient.index_select(0, sources_back).index_fill_(0, holes_back, 0), None, None, None, None


def _spans(segment_RL: torch.Tensor) -> tuple[list[int], list[int], list[_Span]]:
    """(first tokens, lengths) of the prompts, as flat indices, and the replies."""
    starts: list[int] = []
    lengths: list[int] = []
    replies: list[_Span] = []
    for row, segment_L in enumerate(segment_RL.cpu()):
        segments, counts = torch.unique_consecutive(segment_L, return_counts=True)
        firsts = (row * len(segment_L) + counts.cumsum(0) - counts).tolist()
        prompts = prompt_of(segments).tolist()
        for segment, prompt, first, count in zip(segments.tolist(), prompts, firsts, counts.tolist(), strict=True):
            if segment == prompt:
                starts.append(first)
                lengths.append(count)
            elif segment != PADDING:
                replies.append(_Span(len(lengths) - 1, first, count, lengths[-1]))
    return starts, lengths, replies


def _similar(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Cut into blocks none of which pads beyond `MAX_PADDING`, the most expensive replies first."""
    blocks: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: -span.num_pairs):
        if blocks and _padding([*blocks[-1], span]) <= MAX_PADDING:
            blocks[-1].append(span)
        else:
            blocks.append([span])
    return blocks


def _padding(spans: Sequence[_Span]) -> float:
    longest = max(span.length for span in spans)
    computed = len(spans) * longest * (max(span.prompt_length for span in spans) + longest)
    return computed / sum(span.num_pairs for span in spans)


def _grid(starts: Sequence[int], lengths: Sequence[int], width: int) -> torch.Tensor:
    """Flat token indices of slots [len(starts) · width], -1 where a slot stays empty."""
    columns = torch.arange(width)
    tokens = torch.tensor(starts)[:, None] + columns
    return torch.where(columns < torch.tensor(lengths)[:, None], tokens, -1).flatten()


def _bias(prompt_lengths: Sequence[int], prompt_length: int, reply_length: int, dtype: torch.dtype) -> torch.Tensor:
    sees_prompt_BP = torch.arange(prompt_length) < torch.tensor(prompt_lengths)[:, None]
    sees_own_DD = torch.ones(reply_length, reply_length, dtype=torch.bool).tril()
    shape = (len(prompt_lengths), reply_length, -1)
    sees_BDK = torch.cat([sees_prompt_BP[:, None].expand(shape), sees_own_DD.expand(shape)], dim=2)
    # Made once: a mask of booleans would become one like this in every layer, and be kept there for backward.
    return torch.zeros(sees_BDK.shape, dtype=dtype).masked_fill_(~sees_BDK, float("-inf"))[:, None]
