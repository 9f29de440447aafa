"""Fair scheduling of pulls: which one runs next, and which one gives way.

No source and no namespace has more than half of the slots. While others wait, a turn ends: soon for
a pull below a minimum rate, which grows with the queue; later for any other. A pull that gave way
waits behind those that did so less often, and its next turn is longer. So a large image from a slow
server arrives as well.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from virtbus.imaged.core.limits import TransferLimits

_FIRST_DOUBLINGS = 3
_MOST_DOUBLINGS = 7
"""Doublings of `min_rate_bytes_s` by the queue's length: 512 KiB/s for one waiting pull, at most 4
MiB/s."""
_LONGER_SLOW = 6
"""Number of times that a slow pull's turn doubles."""
_LONGER_FAST = 3


@dataclass(frozen=True, slots=True)
class Pull:
    """The state of a pull. `order` is that of arrival.

    `host` is empty for a local source. `namespaces` are those of all requests. `held_s` and
    `moved_bytes` are of the current turn.
    """

    order: int
    host: str
    namespaces: frozenset[str]
    yields: int = 0
    held_s: float = 0.0
    moved_bytes: int = 0
    settled: bool = False
    """It is about to end by itself, and keeps its slot."""


def next_of(waiting: Collection[Pull], running: Sequence[Pull], most: int) -> Pull | None:
    """Return the pull that gets a free slot; None if there is none, or all have their share."""
    found = [pull for pull in waiting if _has_room(pull, running, most)]
    return min(found, key=lambda pull: _rank(pull, running), default=None)


def gives_way(
    waiting: Collection[Pull], running: Sequence[Pull], most: int, limits: TransferLimits
) -> Pull | None:
    """Return the running pull that gives way to a waiting one; None: none does."""
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
    """Return the slots of the pull's host, and of its namespace with the fewest."""
    of_host = sum(other.host == pull.host for other in running) if pull.host else 0
    of_namespaces = [sum(n in other.namespaces for other in running) for n in pull.namespaces]
    return of_host, min(of_namespaces, default=0)


def _rank(pull: Pull, running: Sequence[Pull]) -> tuple[int, int, int, int]:
    of_host, of_namespace = _held(pull, running)
    return pull.yields, of_namespace, of_host, pull.order
