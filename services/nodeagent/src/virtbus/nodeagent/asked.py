"""Compares the record of a VM with its last-applied state."""

from dataclasses import replace

from virtbus.nodeagent.core.lifecycle import START_LATER, Event, Phase
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.core.recovery import started_for
from virtbus.nodeagent.core.wishes import Taken, pause_wish, taken, wish
from virtbus.schemas.vm import VmRecord, VmStatus

UNSEEN = frozenset({Phase.NEW, Phase.STARTING})
"""Phases in which a pause is decided and not yet observed."""


class Asked:
    """The last-applied state of one VM, in the memory of its actor."""

    def __init__(self) -> None:
        self._taken = Taken()

    def found(self, facts: DomainFacts | None, first: Event, record: VmRecord) -> None:
        """Restore the last-applied state from the domain of an earlier agent."""
        metadata = facts.metadata if facts is not None else None
        self._taken = Taken(
            started_for(facts, first, record),
            record.generation,
            powered=True,
            pause_epoch=record.pause_epoch if metadata is None else metadata.pause_epoch,
            # an older agent's domain has no power epoch: assume one before any restart
            runs_for=record.power_epoch if metadata is None else max(metadata.power_epoch, 0),
        )

    def behind(self, record: VmRecord) -> bool:
        """Return True if the record asks for a start that the domain has not seen.

        The start of an already running guest leaves no trace in its domain; the last status
        decides.
        """
        return record.powered and self._taken.power_epoch < record.power_epoch

    def ended(self, record: VmRecord) -> None:
        """Record that the guest ended after it ran for the record."""
        self._taken = Taken(record.power_epoch, record.generation, powered=True)

    def told(self, status: VmStatus) -> None:
        """Restore the pause state from the last status, because the domain does not contain it."""
        pause_epoch = max(self._taken.pause_epoch, status.pause_epoch)
        self._taken = replace(self._taken, pause_epoch=pause_epoch)

    def events(self, record: VmRecord, phase: Phase) -> list[Event]:
        """Return the events for unapplied parts of the record.

        A start that must wait stays pending.
        """
        event = wish(record, self._taken, phase)
        if event is Event.RESTART:
            return [event]
        if event is not Event.RUN or phase not in START_LATER:
            self._taken = taken(record, self._taken)
        still = pause_wish(record, self._taken, phase)
        if still is None and phase not in UNSEEN:
            self._taken = replace(self._taken, pause_epoch=record.pause_epoch)
        return [one for one in (event, still) if one is not None]

    def started(self, record: VmRecord) -> None:
        """Record that a guest was started for the record."""
        self._taken = replace(self._taken, runs_for=record.power_epoch)

    def confirmed(self, record: VmRecord) -> None:
        """Record that the guest runs, as requested."""
        self._taken = taken(record, self._taken)

    def rests(self) -> None:
        """Record that the guest is ending before a start: the start applies once it has stopped."""
        self._taken = replace(self._taken, powered=False)

    def acted_on(self, record: VmRecord, phase: Phase) -> tuple[int, int]:
        """Return power and pause epochs for the status.

        A request that is still pending reports its previous value.
        """
        before = self._taken
        power, pause = record.power_epoch, record.pause_epoch
        if before.power_epoch >= 0 and wish(record, before, phase) is not None:
            power = before.power_epoch
        waits = phase in UNSEEN or pause_wish(record, before, phase) is not None
        if before.pause_epoch >= 0 and waits:
            pause = before.pause_epoch
        return power, pause
