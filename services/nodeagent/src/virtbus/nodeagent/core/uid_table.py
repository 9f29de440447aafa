"""Holds the tables of the agent's reactions to the bus' messages about a uid.

`LISTINGS` gives the state of a uid after each message. `REACTIONS` gives the reactions to a
message, by what this host has of the VM. ADR 0038 explains the tables. docs/reference/states.md is
generated from them.
"""

from collections.abc import Container
from typing import Literal

Listing = Literal[
    "unknown",
    "listed",
    "unreadable",  # its record exists; the last readable record stays in force
    "absent",  # the joined bus has no record; only a person ends the VM (ADR 0033)
    "deleted",
    "moved",
    "absent, deleted",  # absent before its purge marker arrived: the VM ends
    "absent, moved",
]
"""The state of a uid after the bus' messages so far."""

Holding = Literal[
    "nothing",
    "on disk",  # a record file without an actor
    "actor",
    "actor and next",  # the VM returned to this node before the release of its previous copy
]
"""The parts of a VM that this host has."""

Word = Literal[
    "record",
    "stale",  # a record with a lower epoch than this node acted on or refused
    "left",  # a record of a restored bus, for a VM that has left this host since
    "successor",  # a record with a higher epoch, while the VM ends here
    "unreadable",
    "deleted",  # a purge by a user's delete
    "moved",  # any other purge
    "begin",  # a list begins
    "complete",  # a list of the joined bus is complete
    "other bus",  # a list of another bus is complete
    "gone",  # the actor has ended
    "restored",  # a person brought the VM back from the quarantine
]
"""A message about one uid, or about all uids."""

Reaction = Literal[
    "adopt",  # create an actor
    "reject",
    "update",  # pass the record to the actor
    "queue",  # release the previous copy, and keep the new record until then
    "replace next",
    "forget next",
    "end",  # without grace; only on the joined bus
    "sweep",  # look for orphans soon
    "purge status",
    "resume",
    "hold",
]

FROM_ANY: dict[Word, Listing] = {
    "record": "listed",
    "unreadable": "unreadable",
    "deleted": "deleted",
    "moved": "moved",
    "begin": "unknown",
    "restored": "absent",
}
LISTINGS: dict[tuple[Listing, Word], Listing] = {
    ("unknown", "stale"): "listed",
    ("unreadable", "stale"): "listed",
    ("absent", "stale"): "listed",
    ("unknown", "complete"): "absent",
    ("absent", "other bus"): "unknown",
    ("absent", "gone"): "unknown",
    ("absent", "begin"): "absent",
    ("absent", "deleted"): "absent, deleted",
    ("absent", "moved"): "absent, moved",
    ("absent, deleted", "begin"): "absent",
    ("absent, deleted", "stale"): "deleted",
    ("absent, deleted", "gone"): "deleted",
    ("absent, deleted", "deleted"): "absent, deleted",
    ("absent, deleted", "moved"): "absent, moved",
    ("absent, moved", "begin"): "absent",
    ("absent, moved", "stale"): "moved",
    ("absent, moved", "gone"): "moved",
    ("absent, moved", "deleted"): "absent, deleted",
    ("absent, moved", "moved"): "absent, moved",
}
"""The next state. These rows precede FROM_ANY. Without a row in both tables, the state stays."""

ABSENT = frozenset[Listing]({"absent", "absent, deleted", "absent, moved"})
PURGED: dict[Listing, bool] = {
    "deleted": True,
    "absent, deleted": True,
    "moved": False,
    "absent, moved": False,
}
"""True for a purge by a user's delete, False for any other purge."""

REACTIONS: dict[tuple[Holding, Word], tuple[Reaction, ...]] = {
    ("nothing", "record"): ("adopt",),
    ("nothing", "left"): ("reject",),
    ("nothing", "deleted"): ("sweep", "purge status"),
    ("nothing", "moved"): ("sweep", "purge status"),
    ("on disk", "record"): ("adopt",),
    ("on disk", "left"): ("reject",),
    ("on disk", "stale"): ("adopt",),  # adopt the record on disk instead
    ("on disk", "deleted"): ("sweep",),
    ("on disk", "moved"): ("sweep",),
    ("actor", "record"): ("update",),
    ("actor", "successor"): ("queue",),
    ("actor", "deleted"): ("end",),
    ("actor", "moved"): ("end",),
    ("actor and next", "record"): ("replace next",),
    ("actor and next", "successor"): ("queue",),
    ("actor and next", "deleted"): ("forget next", "end"),
    ("actor and next", "moved"): ("forget next", "end"),
}
AFTER_LIST: dict[Listing, Reaction] = {
    "listed": "resume",
    "unreadable": "resume",
    "deleted": "end",
    "moved": "end",
    "absent, deleted": "end",
    "absent, moved": "end",
    "absent": "hold",
}
"""An actor's reaction to a complete list of the joined bus. After a list of another bus, all actors
are held.
"""


class Listings:
    """The state of each uid on the bus."""

    def __init__(self) -> None:
        self._states: dict[str, Listing] = {}

    def __getitem__(self, uid: str) -> Listing:
        return self._states.get(uid, "unknown")

    def hear(self, uid: str, word: Word) -> Listing:
        """Apply a message about a uid, and return the uid's new state."""
        before = self[uid]
        state = self._states[uid] = LISTINGS.get((before, word), FROM_ANY.get(word, before))
        if state == "unknown":
            del self._states[uid]
        return state

    def begin(self) -> None:
        for uid in list(self._states):
            self.hear(uid, "begin")

    def count(self, these: Container[Listing]) -> int:
        return sum(state in these for state in self._states.values())

    def purged(self, uid: str) -> bool | None:
        """Return True for a purge by a delete, False for another purge, None without a purge."""
        return PURGED.get(self[uid])
