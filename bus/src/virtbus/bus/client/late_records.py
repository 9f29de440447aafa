"""Notes late records: a requester has them, but the node's watch has not delivered them yet.

The watch may never deliver the requester's record: after a restore of the bus, the stored record
may be older, or this version cannot read it. A list that begins after the request proves this.
"""

from collections.abc import Callable, Container
from typing import NamedTuple

Age = tuple[int, int]
"""Epoch and generation of a record."""


class _Late(NamedTuple):
    age: Age
    after_list: int
    """Number of the last list before the request."""


class LateRecords:
    """Notes late records, and requests the lists that prove them undeliverable."""

    def __init__(self) -> None:
        self.relist: Callable[[], None] = lambda: None
        self._late: dict[str, _Late] = {}
        self._begun = 0
        self._listing = False

    def begin(self) -> None:
        self._begun += 1
        self._listing = True

    def complete(self, listed: Container[str]) -> None:
        """Note that a list is complete. If a record was noted during the list, request another."""
        self._listing = False
        self._late = {
            uid: late
            for uid, late in self._late.items()
            if uid in listed or late.after_list >= self._begun - 1
        }
        if any(late.after_list == self._begun for late in self._late.values()):
            self.relist()

    def note(self, uid: str, age: Age) -> None:
        """Note a late record and request a list. During a list, `complete` makes the request."""
        known = self._late.get(uid)
        if known is not None and known.age >= age:
            return
        self._late[uid] = _Late(age, self._begun)
        if not self._listing:
            self.relist()

    def proven(self, uid: str, age: Age) -> bool:
        """Return True if a list has begun since the record was noted."""
        late = self._late.get(uid)
        return late is not None and late.age >= age and late.after_list < self._begun
