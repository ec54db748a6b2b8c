"""What benches do with figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]


def medians(runs: Sequence[Figures]) -> Figures:
    """Of every figure over the runs that have it, lists element by element."""
    first = runs[0]
    if isinstance(first, dict):
        return {name: medians([run[name] for run in runs if name in run]) for name in first}
    if isinstance(first, list):
        return [medians(list(column)) for column in zip(*runs, strict=False)]
    return statistics.median(runs)
