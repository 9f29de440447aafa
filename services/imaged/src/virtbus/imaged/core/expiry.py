"""Which names of images a node lets go of: those long unused, and the least used of too many.

A name that a VM of the node was made with stays. A plain name (of `images.d`) does not grow old,
as its operator may have fetched it for later; it only counts.
"""

from collections.abc import Iterable
from typing import NamedTuple


class NameUse(NamedTuple):
    """A name, when it was last used (seconds since 1970), and whether disks rest on its image."""

    name: str
    used_s: float
    held: bool

    @property
    def is_plain(self) -> bool:
        """True for a name of `images.d`, which is no URL."""
        return "://" not in self.name


class Keep(NamedTuple):
    """How many names are kept, and for how long."""

    max_age_s: float
    max_names: int


def expired(
    uses: Iterable[NameUse], wanted: frozenset[str], now_s: float, keep: Keep
) -> tuple[str, ...]:
    """The names that go; `wanted` are those in the records of the node's VMs."""
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
