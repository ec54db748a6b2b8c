"""How many weights are whole at once while a sharded model is gathered."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BUCKET_BYTES = 256 * 1024**2
"""Most of them, unless one unit is larger."""


def weight_buckets(
    units: list[list[tuple[str, torch.nn.Parameter]]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """The parameters of whole units."""
    bucket: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for unit in units:
        num_bytes = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for _, p in unit)
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += num_bytes
    if bucket:
        yield bucket
