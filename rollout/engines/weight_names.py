"""Weights under the names that they have in a model's files.

In memory some have others, or lie together: transformers keeps the experts of a layer in one tensor. What goes to
another program goes under the names in the files, each weight by itself, as `save_pretrained` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


def stored_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights`, named as in `model`, as its files hold them. They are whole units of `stored_together`."""
    return revert_weight_conversion(model, dict(weights))


def stored_together(model: PreTrainedModel, names: Iterable[str]) -> list[list[str]]:
    """The names in units, each of which its files hold as one or more weights of their own."""
    conversions = getattr(model, "_weight_conversions", None) or []
    undone = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [one for one in undone if isinstance(one, WeightRenaming)]
    converters = [one for one in undone if isinstance(one, WeightConverter)]
    units: dict[str, list[str]] = {}
    for name in names:
        stored, _ = rename_source_key(name, renamings, converters, reverse=True)
        units.setdefault(stored, []).append(name)
    return [*units.values()]
