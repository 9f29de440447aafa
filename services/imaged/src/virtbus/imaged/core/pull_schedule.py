"""Schedules pulls fairly: selects the pull that runs next, and the pull that gives up its slot.

Each host gets at most half of the slots, and each namespace as well. A pull that several namespaces
request needs a free slot in the share of only one namespace.

While pulls wait, a running pull gives up its slot at the end of its turn. A slow pull has a short
turn. A pull is slow if its rate is below a minimum, which grows with the queue.

A pull that gave up its slot waits behind pulls that gave up fewer slots. Its next turn is longer,
so a large image from a slow server is completed, too. A slow pull's turn stays short if the next
waiting pull has given up fewer slots.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from virtbus.imaged.core.limits import TransferLimits

_FIRST_DOUBLINGS = 3
_MOST_DOUBLINGS = 7
"""Limit of doublings of `min_rate_bytes_s`. By default, the minimum rate is 512 KiB/s if one pull
waits, and at most 4 MiB/s."""
_LONGER_SLOW = 6
"""Maximum number of doublings of a slow pull's turn; _LONGER_FAST limits any other pull's turn."""
_LONGER_FAST = 3


@dataclass(frozen=True, slots=True)
class Pull:
    """The state of a pull. `order` rises with arrival; `yields` counts the slots it gave up.

    `host` is empty for a local source. `namespaces` are those of all requests for the image.
    `held_s` and `moved_bytes` are the time and the bytes of the current turn.
    """

    order: int
    host: str
    namespaces: frozenset[str]
    yields: int = 0
    held_s: float = 0.0
    moved_bytes: int = 0
    settled: bool = False
    """True if the pull is about to end by itself, and so keeps its slot."""


def next_of(waiting: Collection[Pull], running: Sequence[Pull], most: int) -> Pull | None:
    """Return the waiting pull that gets a free slot; None if no slot or no share is free."""
    found = [pull for pull in waiting if _has_room(pull, running, most)]
    return min(found, key=lambda pull: _rank(pull, running), default=None)


def gives_way(
    waiting: Collection[Pull], running: Sequence[Pull], most: int, limits: TransferLimits
) -> Pull | None:
    """Return the running pull that must give up its slot to a waiting pull; None if none must."""
    least = least_rate_bytes_s(len(waiting), limits)
    movable = [pull for pull in running if not pull.settled]
    for pull in sorted(movable, key=lambda pull: (-pull.yields, pull.moved_bytes, pull.order)):
        others = [other for other in running if other is not pull]
        heir = next_of(waiting, others, most)
        if heir is not None and pull.held_s >= _turn_s(pull, heir, least, limits):
            return pull
    return None


def least_rate_bytes_s(waiting: int, limits: TransferLimits) -> int:
    """Return the minimum rate for this queue length."""
    return limits.min_rate_bytes_s << min(_FIRST_DOUBLINGS + waiting, _MOST_DOUBLINGS)


def _turn_s(pull: Pull, heir: Pull, least_bytes_s: int, limits: TransferLimits) -> float:
    if pull.moved_bytes >= least_bytes_s * pull.held_s:
        return limits.turn_s * float(1 << min(pull.yields, _LONGER_FAST))
    if heir.yields < pull.yields:
        return limits.slow_turn_s
    return limits.slow_turn_s * float(1 << min(pull.yields, _LONGER_SLOW))


def _has_room(pull: Pull, running: Sequence[Pull], most: int) -> bool:
    share = max(1, most // 2)
    of_host, of_namespace = _held(pull, running)
    return len(running) < most and of_host < share and of_namespace < share


def _held(pull: Pull, running: Sequence[Pull]) -> tuple[int, int]:
    """Return the used slots of the pull's host, and the fewest used slots of its namespaces."""
    of_host = sum(other.host == pull.host for other in running) if pull.host else 0
    of_namespaces = [sum(n in other.namespaces for other in running) for n in pull.namespaces]
    return of_host, min(of_namespaces, default=0)


def _rank(pull: Pull, running: Sequence[Pull]) -> tuple[int, int, int, int]:
    of_host, of_namespace = _held(pull, running)
    return pull.yields, of_namespace, of_host, pull.order
