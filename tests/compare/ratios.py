"""Pairs the figures of two trees by round and bounds the median of their ratios.

The upper 95 % bound is the order statistic of the sign test; the lower one is its mirror. It is
exact and assumes no distribution: the k-th smallest of n ratios is at least their true median with
the chance that n fair coins show fewer than k heads. The smallest k with a chance of 95 % is taken.
Of 12 ratios that is the 10th (98.1 %), of 13 it is the 10th too (95.4 %). Fewer than five ratios
have no bound.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import comb, inf

CONFIDENCE = 0.95
BOUND = 1.10


class Better(Enum):
    """The direction in which a figure improves; a figure without one is not judged."""

    LOWER = "lower"
    HIGHER = "higher"
    TOLD = "told"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of both trees. A ratio above 1 says that the new tree is worse."""

    name: str
    better: Better
    old: float
    new: float
    ratios: tuple[float, ...]
    ratio: float
    lower: float | None
    upper: float | None
    """The bounds of the median, each by CONFIDENCE; None with too few rounds."""

    @property
    def holds(self) -> bool | None:
        """The verdict; None if there are too few rounds or the figure is not judged."""
        if self.better is Better.TOLD or self.upper is None:
            return None
        return self.upper <= BOUND

    @property
    def verdict(self) -> str:
        """Return a row of the table."""
        if self.better is Better.TOLD:
            return "told"
        return "" if self.holds is None else "ok" if self.holds else "WORSE"


def upper_bound(values: Sequence[float]) -> float | None:
    """The upper bound of the median by the sign test."""
    count, chance = len(values), 0.0
    for place, value in enumerate(sorted(values)):
        chance += comb(count, place) / 2**count
        if chance >= CONFIDENCE:
            return value
    return None


def lower_bound(values: Sequence[float]) -> float | None:
    """The lower bound of the median by the sign test."""
    negated = upper_bound([-value for value in values])
    return None if negated is None else -negated


def worse_by(old: float, new: float, better: Better) -> float:
    """Return the factor by which the new value is worse."""
    if better is Better.HIGHER:
        old, new = new, old
    if old == new:
        return 1.0
    return new / old if old > 0 else inf


def compare(
    name: str, better: Better, old: Mapping[int, float], new: Mapping[int, float]
) -> Comparison | None:
    """Return values by round; a round counts only if both trees have it. None if no round does."""
    rounds = sorted(old.keys() & new.keys())
    if not rounds:
        return None
    ratios = tuple(worse_by(old[number], new[number], better) for number in rounds)
    return Comparison(
        name,
        better,
        statistics.median(old[number] for number in rounds),
        statistics.median(new[number] for number in rounds),
        ratios,
        statistics.median(ratios),
        lower_bound(ratios),
        upper_bound(ratios),
    )
