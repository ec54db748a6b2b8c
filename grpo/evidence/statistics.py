"""Means of held-out items with their intervals, and paired comparisons of the same items under two conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


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


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the mean of independent items and Student's 95 % interval, mean ± t · sd / √n.

    >>> mean_interval([1, 2, 3])                      # sd 1, and t = 4.303 with two degrees of freedom
    (2.0, -0.484..., 4.484...)

    Raises ValueError for fewer than two items.
    """
    if len(values) < 2:
        raise ValueError("an interval needs two items or more")
    mean = fmean(values)
    half = student_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def student_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.15 % (Abramowitz and Stegun 26.7.5; 1 and 2 degrees are exact)."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
