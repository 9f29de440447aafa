"""Waiting longer after each failure, never in step with others (decorrelated by full jitter)."""

import random
from collections.abc import Iterator


def delays(first_s: float, most_s: float) -> Iterator[float]:
    """Endless delays: uniform over [half, whole] of a bound that doubles from `first_s`."""
    bound_s = first_s
    while True:
        yield random.uniform(bound_s / 2, bound_s)  # noqa: S311  jitter, no secret
        bound_s = min(most_s, bound_s * 2)
