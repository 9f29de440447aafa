"""Decides which agent may act for a node: one table over the node's host and agent.

A new life of an agent may succeed another one only on the same host. Silence transfers nothing: the
guests of a host that is cut off keep running. See ADR 0031.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from virtbus.schemas.hosts import HostMarks, HostRecord, Instance


class InstanceAction(StrEnum):
    """The next action for the node's key."""

    TAKE = "take"
    WAIT = "wait"
    """The previous life may still be running: check again soon."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Me:
    """This life of the agent. `earlier_lives` are those that this state folder remembers."""

    instance: str
    host: HostMarks
    boot: str
    folder: str
    earlier_lives: frozenset[str] = frozenset()


class InstanceSignals(NamedTuple):
    """The inputs of the table."""

    me: Me
    record: HostRecord | None
    holder: Instance | None
    """The holder of the key; None if there is none."""
    revision: int
    """The revision of the key, even if it was purged; 0: it never existed."""
    heard: bool
    """The holder's heartbeat still exists, or ended too recently to be sure."""
    holding: bool = False
    """This life took the key, and asks because the key is not as it wrote it last."""

    @property
    def unreadable(self) -> bool:
        """The key has a value that names no instance."""
        return self.holder is not None and not self.holder.instance

    @property
    def damaged(self) -> bool:
        """Nobody else can have written the key: only a person can give it to another instance.

        A void takeover counts, too: then a person decides again.
        """
        word = self.record.takeover if self.record is not None else None
        own = {self.me.instance, *self.me.earlier_lives}
        return self.holding and self.unreadable and (word is None or word.instance in own)

    @property
    def granted(self) -> bool:
        """Return True if a person gave the node to this life, and the holder is silent since."""
        word = self.record.takeover if self.record is not None else None
        return word is not None and word.instance == self.me.instance and word.over == self.revision

    @property
    def other_host(self) -> bool:
        """Return True if the node was given to, or is held by, another host."""
        owners = (
            self.record.host if self.record is not None else None,
            self.holder.host if self.holder is not None and not self.unreadable else None,
        )
        return any(owner is not None and not owner.same(self.me.host) for owner in owners)

    @property
    def stranger(self) -> bool:
        """Return True if this state folder does not know the holder: the folder is a copy."""
        return self.holder is not None and self.holder.instance not in self.me.earlier_lives

    @property
    def same_boot(self) -> bool:
        """Return True if the holder lived in this boot of the host."""
        return self.holder is not None and bool(self.me.boot) and self.holder.boot == self.me.boot

    @property
    def copied(self) -> bool:
        """Return True if the holder lived in this boot and in another folder."""
        return self.same_boot and self.holder is not None and self.holder.folder != self.me.folder


ROWS: tuple[tuple[Callable[[InstanceSignals], bool], InstanceAction, str], ...] = (
    (lambda s: s.granted, InstanceAction.TAKE, ""),
    (lambda s: s.other_host, InstanceAction.REFUSE, "it belongs to another host"),
    (lambda s: s.holder is None, InstanceAction.TAKE, ""),
    (lambda s: s.damaged, InstanceAction.TAKE, ""),
    (lambda s: s.unreadable, InstanceAction.REFUSE, "its key on the bus cannot be read"),
    (
        lambda s: s.stranger,
        InstanceAction.REFUSE,
        "its last agent is unknown to this state folder, which is a copy or was restored",
    ),
    (
        lambda s: s.copied,
        InstanceAction.REFUSE,
        "its last agent worked in another state folder here",
    ),
    (lambda s: s.same_boot, InstanceAction.TAKE, ""),  # we have its lock, so its process is gone
    (lambda s: s.heard, InstanceAction.WAIT, "its last agent may still run: it was heard just now"),
    (lambda _: True, InstanceAction.TAKE, ""),
)
"""The first matching row decides."""


def judge(signs: InstanceSignals) -> tuple[InstanceAction, str]:
    """Return the action, and the reason unless the key is to be taken."""
    return next((step, why) for holds, step, why in ROWS if holds(signs))


def replaced(me: Me, record: HostRecord | None) -> bool:
    """Return True if a person gave the node to another host than this one."""
    return (
        record is not None
        and record.takeover is not None
        and record.host is not None
        and not record.host.same(me.host)
    )
