"""Defines a controller: a kind, its reconcile function, and the changes that trigger it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from virtbus.kubebridge.core.runtime.actions import Action, Refused
from virtbus.kubebridge.core.runtime.kinds import Key, Kind


class Lister(Protocol):
    """Reads a store of one kind. Paths are `namespace/name`."""

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a new copy of the object, or None."""

    def uid(self, name: str) -> str:
        """Return the uid of the object, or an empty string."""

    def ended(self, uid: str) -> bool:
        """Return True if the end of the object was reported."""

    def __iter__(self) -> Iterator[str]:
        """Yield all paths."""


class Inputs(NamedTuple):
    """The inputs of a reconcile: the object, or None if it does not exist, and the time.

    `time_s` is a clock that never jumps. `references` has the objects that `Controller.references`
    named and that exist.
    """

    obj: dict[str, Any] | None
    now: datetime
    time_s: float
    references: Mapping[Key, dict[str, Any]]
    refused: Refused | None = None


def same_name(key: Key) -> Iterable[Key]:
    """Map a changed object to the object of its own name."""
    return (key,)


class Watch(NamedTuple):
    """A source of changes. `keys` maps a changed object to keys of the controller's kind.

    The name is what counts: the runtime replaces the kind of each key by the controller's.
    """

    source: Kind
    keys: Callable[[Key], Iterable[Key]] = same_name


def no_references(_key: Key, _time_s: float) -> Iterable[Key]:
    """Return no references."""
    return ()


@dataclass(frozen=True)
class Controller:
    """A controller of one kind.

    Each of `references` is read from the API server before `reconcile`, without a cache.
    """

    kind: Kind
    reconcile: Callable[[Key, Inputs], Sequence[Action]]
    watches: tuple[Watch, ...]
    references: Callable[[Key, float], Iterable[Key]] = no_references
    workers: int = 16
    gather_s: float = 0.0
    """Seconds for which changes are collected before a reconcile."""
