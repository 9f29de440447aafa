"""Selects image names to remove: old names, and the least recently used names above a limit.

A name in the record of a VM on the node is never removed. A name whose image disks use does not
expire by age. Neither does a plain name (of `images.d`): an operator may have pulled its image in
advance. Above the limit, the least recently used names are removed first, and plain names last.
"""

from collections.abc import Iterable
from typing import NamedTuple


class NameUse(NamedTuple):
    """A name, its last use (seconds since 1970), and True if disks use its image."""

    name: str
    used_s: float
    held: bool

    @property
    def is_plain(self) -> bool:
        return is_plain(self.name)


def is_plain(name: str) -> bool:
    """Return True for a name of `images.d`: no URL, and no image name of the bus."""
    return "://" not in name and "#" not in name


class ExpiryLimits(NamedTuple):
    """Limits of the number and age of names."""

    max_age_s: float
    max_names: int


def expired(
    uses: Iterable[NameUse], wanted: frozenset[str], now_s: float, keep: ExpiryLimits
) -> tuple[str, ...]:
    """Return the names to remove. `wanted` are the names in the records of the node's VMs."""
    uses = tuple(uses)
    free = [use for use in uses if use.name not in wanted]
    old = [
        use
        for use in free
        if not (use.held or use.is_plain) and now_s - use.used_s > keep.max_age_s
    ]
    rest = sorted(set(free) - set(old), key=lambda use: (use.is_plain, use.used_s, use.name))
    too_many = max(0, len(uses) - len(old) - keep.max_names)
    return tuple(use.name for use in (*old, *rest[:too_many]))
