"""Decides by a table if this agent may take its node's instance key.

An agent's new instance may replace an earlier instance only on the same host. Another host never
gets the node by itself, not even without a heartbeat, because the guests of a cut-off host keep
running (ADR 0031).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from virtbus.schemas.hosts import HostMarks, HostRecord, Instance


class InstanceAction(StrEnum):
    """The next action on the node's instance key."""

    TAKE = "take"
    WAIT = "wait"
    """Check again soon: the earlier instance may still run."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Me:
    """This instance of the agent. `earlier_lives` has the earlier instances on its state folder."""

    instance: str
    host: HostMarks
    boot: str
    folder: str
    earlier_lives: frozenset[str] = frozenset()


class InstanceSignals(NamedTuple):
    """The inputs of the table `ROWS`."""

    me: Me
    record: HostRecord | None
    holder: Instance | None
    """The value of the instance key; None without the key."""
    revision: int
    """The key's revision, also after a purge; 0 if the key never existed."""
    heard: bool
    """True if the holder may still run: its heartbeat exists without a farewell, or has been
    missing for only a few seconds.
    """
    holding: bool = False
    """True if this instance held the key, and found the key changed."""

    @property
    def unreadable(self) -> bool:
        """True if the key's value names no instance."""
        return self.holder is not None and not self.holder.instance

    @property
    def damaged(self) -> bool:
        """True if this instance held the key, and the value became unreadable.

        No agent writes such a value, so this instance may repair the key. But if a person has ever
        granted a takeover of the node to another instance (`takeover` of the host record), a person
        must decide again.
        """
        word = self.record.takeover if self.record is not None else None
        own = {self.me.instance, *self.me.earlier_lives}
        return self.holding and self.unreadable and (word is None or word.instance in own)

    @property
    def granted(self) -> bool:
        """True if a person gave the node to this instance, and the key is unchanged since."""
        word = self.record.takeover if self.record is not None else None
        return word is not None and word.instance == self.me.instance and word.over == self.revision

    @property
    def other_host(self) -> bool:
        """True if the host record or the key names another host."""
        owners = (
            self.record.host if self.record is not None else None,
            self.holder.host if self.holder is not None and not self.unreadable else None,
        )
        return any(owner is not None and not owner.same(self.me.host) for owner in owners)

    @property
    def stranger(self) -> bool:
        """True if this state folder does not know the holder, as a copied or restored folder."""
        return self.holder is not None and self.holder.instance not in self.me.earlier_lives

    @property
    def same_boot(self) -> bool:
        """True if the holder ran in the current boot of this host."""
        return self.holder is not None and bool(self.me.boot) and self.holder.boot == self.me.boot

    @property
    def copied(self) -> bool:
        """True if the holder ran in the current boot, with another state folder."""
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
    (
        lambda s: s.same_boot,
        InstanceAction.TAKE,
        "",
    ),  # the holder has ended: this process has the state folder's lock
    (lambda s: s.heard, InstanceAction.WAIT, "its last agent may still run: it was heard just now"),
    (lambda _: True, InstanceAction.TAKE, ""),
)
"""Condition, action and reason. The first matching row decides."""


def judge(signs: InstanceSignals) -> tuple[InstanceAction, str]:
    """Return the action and its reason, which is empty for TAKE."""
    return next((step, why) for holds, step, why in ROWS if holds(signs))


def replaced(me: Me, record: HostRecord | None) -> bool:
    """Return True if a person gave the node to another host."""
    return (
        record is not None
        and record.takeover is not None
        and record.host is not None
        and not record.host.same(me.host)
    )
