"""Paired comparisons of the same held-out items under two conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class PairedDifference:
    before: float
    after: float
    difference: float
    standard_error: float
    t: float
    """difference / standard_error; NaN where every item changed by the same amount."""
    n: int


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """Means, mean difference, its standard error (sd of the differences / √n) and the paired t.

    >>> paired_difference([1, 2, 3], [2, 4, 3])       # differences 1, 2, 0: mean 1, sd 1
    PairedDifference(before=2.0, after=3.0, difference=1.0, standard_error=0.577..., t=1.732..., n=3)

    Raises ValueError for fewer than two items, or unequal numbers of them.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"a paired comparison needs the same two or more items, not {len(before)} and {len(after)}")
    differences = [b - a for a, b in zip(before, after, strict=True)]
    standard_error = stdev(differences) / math.sqrt(len(differences))
    difference = fmean(differences)
    t = difference / standard_error if standard_error > 0 else math.nan
    return PairedDifference(fmean(before), fmean(after), difference, standard_error, t, len(differences))
