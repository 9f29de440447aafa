"""Compares a VM's record with its last-applied state, and derives the events that are due."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from virtbus.nodeagent.core.disk_drivers import disk_limits
from virtbus.nodeagent.core.disks import media
from virtbus.nodeagent.core.guest_nics import GuestNic
from virtbus.nodeagent.core.plugs import wanted_sizes
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.vm.machine import ENDINGS, START_LATER, UP, MachineEvent, VmPhase
from virtbus.schemas.disk import DiskLimits
from virtbus.schemas.network import LinkState
from virtbus.schemas.resources import NO_LIMITS, Resources
from virtbus.schemas.vm import VmRecord

MOVED = "the VM was moved to another node without this one"
"""The reason to keep the disks of a VM that a fence or a rebuild took from this node."""
DisksWanted = tuple[dict[str, int], dict[str, str]]
UNSEEN = frozenset[VmPhase]({"new", "starting"})
"""Phases in which the agent cannot see yet if a requested pause took effect."""


@dataclass(slots=True)
class Applied:
    """The requests of a VM's record that its actor has applied. They are only in memory."""

    power_epoch: int = -1
    generation: int = 0
    deleting: bool = False
    delete_grace_s: int | None = None
    powered: bool | None = None
    pause_epoch: int = -1
    runs_for: int | None = None
    """The power epoch that the last run was started for; None if the guest never ran."""
    limits: dict[str, DiskLimits] | None = field(default_factory=dict)
    """The limits of the guest's disks; None if the agent does not know them."""
    media: dict[str, str] | None = field(default_factory=dict)
    """The media of the guest's drives; None if the agent does not know them."""
    nics: frozenset[tuple[str, str]] | None = frozenset()
    """The guest's NICs (`nic_set`); None if the agent does not know them."""
    disks: DisksWanted | None = field(default_factory=lambda: ({}, {}))
    """The guest's disks; None if the agent does not know them."""

    resources: Resources | None = NO_LIMITS
    """The limits of the guest on its host; None if the agent does not know them."""

    def started(self, record: VmRecord) -> None:
        """Note that a guest was started with `record`."""
        disks = record.spec.domain.devices.disks
        self.runs_for = record.power_epoch
        limited = any(disk.limits for disk in disks)
        self.limits = None if limited else {}  # None: an update reads libvirt's values
        # resources are set after the start, so that a host without cgroups can start the guest
        self.resources = NO_LIMITS
        self.media = media(record)
        self.disks, self.nics = disks_wanted(record), nic_set(record)

    def update(self, record: VmRecord) -> None:
        """Note the record's generation, power request and delete as applied, but not its pause."""
        self.power_epoch, self.generation = record.power_epoch, record.generation
        self.deleting, self.delete_grace_s = record.ending, record.delete_grace_s
        self.powered = record.powered

    def behind(self, record: VmRecord) -> bool:
        """Return True if the record requests a start for which the domain was not defined.

        The result is also True for a start request that was applied to a running guest, because
        such a request does not change the domain. The caller then lets the last status decide.
        """
        return record.powered and self.power_epoch < record.power_epoch

    def events(self, record: VmRecord, phase: VmPhase) -> list[MachineEvent]:
        """Return the events for the record's pending requests; note the requests as applied.

        A restart, and a start that must wait, are not noted and stay pending.
        """
        event = next_event(record, self, phase)
        if event == "restart":
            return [event]
        update = next_update(record, self, phase)
        if event != "run" or phase not in START_LATER:
            self.update(record)
        pause = next_pause(record, self, phase)
        if pause is None and phase not in UNSEEN:
            self.pause_epoch = record.pause_epoch
        if update is not None:
            disks = record.spec.domain.devices.disks
            self.limits, self.media = disk_limits(disks), media(record)
            self.disks, self.nics = disks_wanted(record), nic_set(record)
            self.resources = resources(record)
        return [one for one in (event, pause, update) if one is not None]

    def taken(self, event: MachineEvent, phase: VmPhase) -> None:
        """Note that `event` was handled in `phase`.

        A restart, and a start during a stop, take effect after the guest has ended. So a start is
        due again at that time.
        """
        if (event == "run" and phase == "stopping") or (event == "restart" and phase in UP):
            self.powered = False

    def epochs(self, record: VmRecord, phase: VmPhase) -> tuple[int, int]:
        """Return the power epoch and the pause epoch for the status.

        While a request is pending, the status shows the epoch of the previous request.
        """
        power, pause = record.power_epoch, record.pause_epoch
        if self.power_epoch >= 0 and next_event(record, self, phase) is not None:
            power = self.power_epoch
        waits = phase in UNSEEN or next_pause(record, self, phase) is not None
        if self.pause_epoch >= 0 and waits:
            pause = self.pause_epoch
        return power, pause


def applied_by(facts: DomainFacts | None, first: MachineEvent, record: VmRecord) -> Applied:
    """Return the requests that an existing domain shows as applied.

    `first` is the event for the domain's state. If the domain has ended, the last applied start
    request is the one in the domain's metadata.
    """
    metadata = facts.metadata if facts is not None else None
    # with another generation, an earlier agent may have died while it changed the devices
    same = metadata is not None and metadata.generation == record.generation
    defined_for = -1 if metadata is None else metadata.power_epoch
    return Applied(
        defined_for if first in ENDINGS and defined_for >= 0 else record.power_epoch,
        record.generation,
        powered=True,
        pause_epoch=record.pause_epoch if metadata is None else metadata.pause_epoch,
        # a domain of an older agent has no power epoch: assume 0
        runs_for=record.power_epoch if metadata is None else max(defined_for, 0),
        limits={} if same else None,
        media=media(record) if same else None,
        disks=disks_wanted(record) if same else None,
        nics=nic_set(record) if same else None,
        # NO_LIMITS: if the record has limits, an update reads the limits in force
        resources=NO_LIMITS if same else None,
    )


def next_event(record: VmRecord, before: Applied, phase: VmPhase) -> MachineEvent | None:
    """Return the event for the pending delete, stop, restart or start; None if none is pending.

    A start that came while the VM was stopping is pending until the VM has stopped. A stop is
    pending again if the VM runs anyway. A restart is pending while a guest of an earlier start
    runs. A changed spec starts a VM again that failed permanently.
    """
    if record.ending:
        again = before.deleting and before.delete_grace_s == record.delete_grace_s
        return None if again else "delete"
    if not record.powered:
        halted = before.powered is False and phase not in UP
        return None if halted else "halt"
    if phase in UP and before.runs_for is not None and before.runs_for < record.restart_epoch:
        return "restart"
    fresh = record.power_epoch > before.power_epoch or before.powered is not True
    changed = phase == "failed" and record.generation > before.generation
    return "run" if fresh or changed else None


def next_pause(record: VmRecord, before: Applied, phase: VmPhase) -> MachineEvent | None:
    """Return "pause" if a running guest should be paused, "unpause" if a paused one should run.

    A guest that was paused outside virtbus stays paused until the record changes.
    """
    if record.ending or not record.powered:
        return None
    if phase == "running" and record.paused:
        return "pause"
    allowed = not record.paused and record.pause_epoch > before.pause_epoch
    return "unpause" if phase == "paused" and allowed else None


def next_update(record: VmRecord, before: Applied, phase: VmPhase) -> MachineEvent | None:
    """Return "update" if the guest, or the preparation of its start, does not match the record.

    A guest matches if its disks, limits, media, NICs and resources are known and are the record's.
    """
    if record.ending or not record.powered:
        return None
    if phase == "preparing":
        return "update" if record.generation > before.generation else None
    if phase not in UP:
        return None
    disks = record.spec.domain.devices.disks
    same = disk_limits(disks) == before.limits and media(record) == before.media
    known = before.disks is not None and before.disks == disks_wanted(record)
    same = same and nic_set(record) == before.nics and resources(record) == before.resources
    return None if same and known else "update"


def resources(record: VmRecord) -> Resources:
    """Return the limits of the record's guest on its host."""
    return record.spec.domain.resources or NO_LIMITS


def nic_set(record: VmRecord) -> frozenset[tuple[str, str]]:
    """Return the names of the record's interfaces, each with its network."""
    return frozenset((one.name, one.network) for one in record.spec.networks)


def disks_wanted(record: VmRecord) -> DisksWanted | None:
    """Return the sizes of disks, and the folders of volumes, by the names of disks.

    None while a volume is being detached: each call then checks if the guest still has the volume.
    """
    if record.detaching:
        return None
    volumes = {name: ref.folder for name, ref in record.volume_refs.items()}
    return wanted_sizes(record), volumes


def grace_s(record: VmRecord) -> int:
    """Return the seconds that the guest has to shut down, by the last request or the spec."""
    if record.ending:
        asked = record.delete_grace_s if record.deleting else None
    else:
        asked = record.stop_grace_s
    return record.spec.termination_grace_s if asked is None else asked


def forced(record: VmRecord) -> bool:
    """Return True if a person asked to end the guest at once, in any state.

    A grace of 0 in the spec is no such request.
    """
    return (record.delete_grace_s if record.deleting else record.stop_grace_s) == 0


def due_links(
    record: VmRecord, nics: Mapping[str, GuestNic], seen: Mapping[str, LinkState]
) -> list[tuple[str, str, LinkState]]:
    """Return the NICs whose link differs from the record, as device, name and wanted state.

    `nics` are the guest's NICs by name. `seen` are the known states of their links. A NIC whose
    link state is unknown is due.
    """
    wanted = record.spec.domain.devices.interfaces
    due = [(nic.name, nic.state or LinkState.UP) for nic in wanted if nic.name in nics]
    return [(nics[name].device, name, to) for name, to in due if seen.get(name) is not to]


def overtaken(record: VmRecord, latest: VmRecord) -> bool:
    """Return True if `record` is older than `latest`, which this host has seen (I15)."""
    epochs = record.epoch, record.generation, record.power_epoch, record.pause_epoch
    return epochs < (latest.epoch, latest.generation, latest.power_epoch, latest.pause_epoch)
