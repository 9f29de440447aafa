"""What the record asks of a VM, and how much of that was acted on."""

from dataclasses import replace

from virtbus.nodeagent.core.lifecycle import START_LATER, Event, Phase
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.core.recovery import started_for
from virtbus.nodeagent.core.wishes import Taken, pause_wish, taken, wish
from virtbus.schemas.vm import VmRecord, VmStatus

UNSEEN = frozenset({Phase.NEW, Phase.STARTING})
"""Whether the guest will stand still is decided, and not yet seen."""


class Asked:
    """The memory of one VM's actor for what its record asked."""

    def __init__(self) -> None:
        self._taken = Taken()

    def found(self, facts: DomainFacts | None, first: Event, record: VmRecord) -> None:
        """An earlier agent acted on the record, as far as the domain tells."""
        metadata = facts.metadata if facts is not None else None
        self._taken = Taken(
            started_for(facts, first, record),
            record.generation,
            powered=True,
            pause_epoch=record.pause_epoch if metadata is None else metadata.pause_epoch,
            # an older agent's domain does not tell: it is of no restart, and before any
            runs_for=record.power_epoch if metadata is None else max(metadata.power_epoch, 0),
        )

    def behind(self, record: VmRecord) -> bool:
        """True where the record asks for a start that, by the domain, was not acted on.

        A start of a guest that runs leaves no trace in its domain; what was told decides.
        """
        return record.powered and self._taken.power_epoch < record.power_epoch

    def ended(self, record: VmRecord) -> None:
        """Its guest ran for the record, and has ended."""
        self._taken = Taken(record.power_epoch, record.generation, powered=True)

    def told(self, status: VmStatus) -> None:
        """How far an earlier agent had come with pausing: the domain does not tell who did it."""
        pause_epoch = max(self._taken.pause_epoch, status.pause_epoch)
        self._taken = replace(self._taken, pause_epoch=pause_epoch)

    def events(self, record: VmRecord, phase: Phase) -> list[Event]:
        """What the record asks and was not acted on; a start that cannot be yet stays asked."""
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
        """A guest was started for the record."""
        self._taken = replace(self._taken, runs_for=record.power_epoch)

    def confirmed(self, record: VmRecord) -> None:
        """The guest runs, and that is what was asked."""
        self._taken = taken(record, self._taken)

    def rests(self) -> None:
        """The guest ends for a start that comes after it: that counts at rest."""
        self._taken = replace(self._taken, powered=False)

    def acted_on(self, record: VmRecord, phase: Phase) -> tuple[int, int]:
        """The power and pause epochs to tell. What waits did not end what was asked for since."""
        before = self._taken
        power, pause = record.power_epoch, record.pause_epoch
        if before.power_epoch >= 0 and wish(record, before, phase) is not None:
            power = before.power_epoch
        waits = phase in UNSEEN or pause_wish(record, before, phase) is not None
        if before.pause_epoch >= 0 and waits:
            pause = before.pause_epoch
        return power, pause
