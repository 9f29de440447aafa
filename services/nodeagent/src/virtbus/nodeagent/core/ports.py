"""Defines the agent's ports: the interfaces that `edge/` implements."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.disks import DriveState
from virtbus.nodeagent.core.live_devices import LiveDevices
from virtbus.nodeagent.core.resource_values import ResourcesSet
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.node_rpc import Arm
from virtbus.schemas.resources import Resources
from virtbus.schemas.vm import VmRecord, VmSecrets

NO_FILES: Mapping[str, int] = MappingProxyType({})


class DomainState(StrEnum):
    """libvirt's state of a domain, reduced to the agent's needs."""

    RUNNING = "running"
    STARTING = "starting"
    """libvirt's PAUSED with reason STARTING_UP: a create is in progress."""
    PAUSED = "paused"
    SHUTTING_DOWN = "shutting down"
    SHUT_OFF = "shut off"
    LOST = "lost"
    """libvirt reports no guest, but the guest's QEMU runs (ADR 0061)."""


class Ending(StrEnum):
    """The reason why a domain is shut off."""

    UNKNOWN = "unknown"
    SHUT_DOWN = "shut down"
    """The guest powered itself off."""
    ENDED = "ended"
    """The agent or another program destroyed the domain."""
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """One domain of virtbus. `metadata` is None if missing or unreadable."""

    uid: str
    state: DomainState
    ending: Ending = Ending.UNKNOWN
    metadata: "DomainMetadata | None" = None
    waits_for_disk: bool = False
    """QEMU paused the guest at an I/O error, usually because the host's disk is full."""
    pid: int = 0
    """The process of a lost guest; 0 for others."""

    @property
    def active(self) -> bool:
        return self.state is not DomainState.SHUT_OFF

    @property
    def starting(self) -> bool:
        return self.state is DomainState.STARTING


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """The fields of the domain's metadata that the agent reads."""

    uid: str
    epoch: int
    domain_hash: str
    power_epoch: int = -1
    """The `power_epoch` of the record at the domain's last definition; -1 if an agent of an older
    version defined the domain.
    """
    pause_epoch: int = 0
    """The `pause_epoch` of the record at the domain's last definition."""
    generation: int = 0
    """The generation of the record at the domain's last definition."""
    nics: tuple[tuple[str, str], ...] = ()
    """The names and hashes of the NICs at the domain's last definition, in order."""
    addresses: Addresses = field(default_factory=dict)
    disks: Mapping[str, str] = field(default_factory=dict)
    """The hashes of the domain's disks that are volumes, by name."""


class DomainChange(StrEnum):
    """The kind of a lifecycle event."""

    STARTED = "started"
    PAUSED = "paused"
    RESUMED = "resumed"
    SHUT_DOWN = "shut down"
    ENDED = "ended"
    CRASHED = "crashed"
    PANICKED = "panicked"
    """The guest's kernel panicked. libvirt ends the guest and reports the end next."""
    START_FAILED = "start failed"
    REBOOTED = "rebooted"
    WATCHDOG_POWEROFF = "watchdog: poweroff"
    """QEMU ends at once. libvirt reports the end next, as a crash."""
    WATCHDOG_RESET = "watchdog: reset"
    WATCHDOG_SHUTDOWN = "watchdog: shutdown"
    AWAY = "libvirt is away"
    """Concerns all domains: their states are unknown from now on."""


@dataclass(frozen=True, slots=True)
class DomainEvent:
    """A lifecycle event. It is only a hint: read the domain's state before you act.

    `change` is None when libvirt answers again after an absence: any domain may have changed.
    """

    uid: str
    change: DomainChange | None


class Hypervisor(Protocol):
    """libvirt. Methods raise VirtbusError: 503 `libvirt_down`, or libvirt's own error."""

    @property
    def healthy(self) -> bool:
        """False if so many calls hang that the agent should be restarted."""

    @property
    def devices(self) -> LiveDevices:
        """The port that plugs and unplugs devices of running guests."""

    async def list_domains(self) -> list[DomainFacts]:
        """Return all domains of virtbus, running or not."""

    async def uses(self, uid: str, folder: Path) -> bool:
        """Return True if the domain uses files below `folder`, as this agent's domains do."""

    async def facts(self, uid: str) -> DomainFacts | None:
        """Return the VM's domain as it is now, or None."""

    async def define(self, xml: str) -> None:
        """Define the domain, or replace its definition."""

    async def start(
        self, uid: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        """Start the guest, and return once it runs.

        With `paused`, pause it before its first instruction.

        `files` has descriptors of open files, by their names in the domain.

        An error contains QEMU's last line of output. Raises 409 `guest_lost` if libvirt has lost
        the VM's running guest.
        """

    def start_under_way(self, uid: str) -> bool:
        """Return True while libvirt may still carry out a start, even after an error of `start`."""

    async def shutdown(self, uid: str) -> bool:
        """Request a shutdown by ACPI. Return False if no guest runs.

        Raises 409 `guest_lost` if libvirt has lost the guest.
        """

    async def reset(self, uid: str) -> bool:
        """Reset the guest. Return False if no guest runs."""

    async def reboot(self, uid: str) -> bool:
        """Request a reboot by the guest agent or ACPI. Return False if no guest runs."""

    async def destroy(self, uid: str, *, forced: bool = False) -> None:
        """End the guest, if it runs.

        End a lost guest only if `forced`. Without `forced`, raise 409 `guest_lost`.
        """

    async def suspend(self, uid: str) -> None:
        """Pause the guest's CPUs, if it runs."""

    async def resume(self, uid: str) -> None:
        """Resume the guest, if it is paused."""

    async def limit(
        self, uid: str, wanted: Mapping[str, Mapping[str, int]]
    ) -> Mapping[str, Mapping[str, int]] | None:
        """Set the limits of a guest's disks that differ, by target and libvirt's names.

        Return libvirt's new figures by target; None if no guest runs.
        """

    async def set_resources(self, uid: str, wanted: Resources) -> ResourcesSet:
        """Set the limits of a guest that differ. After a failure of one limit, set the others.

        The guest's memory follows later, with its balloon. Only an error that concerns all limits
        is raised.
        """

    async def set_drives(self, uid: str, wanted: Mapping[str, DriveState]) -> None:
        """Change the media that differ, by target, if the guest runs.

        Raises:
            VirtbusError: 409 `tray_locked`: the guest has locked a tray, or libvirt's own error.
        """

    async def set_link(self, uid: str, device: str, *, up: bool) -> None:
        """Set the link of the NIC with the QEMU id `device`, if the guest runs."""

    async def undefine(self, uid: str) -> None:
        """Remove the domain, if it exists."""

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[DomainEvent]]:
        """Open an iterator of lifecycle events.

        The iterator may miss changes while libvirt is away, or if too many events wait. After an
        absence of libvirt, the iterator yields an event with `change` None.
        """


class RecordFiles(Protocol):
    """The agent's files about VMs, the node and the joined bus, and the host's ledger of epochs."""

    async def write(self, record: VmRecord) -> None:
        """Write the record durably, and raise the uid's epoch in the ledger."""

    async def list(self) -> Mapping[str, VmRecord]:
        """Return the readable records on disk, by uid."""

    async def things(self) -> Mapping[str, tuple[str, ...]]:
        """Return all paths on disk, by the uid in their name. They may lack a record."""

    async def remove_work(self, uid: str) -> None:
        """Remove seeds, links to disks, sockets and logs of the VM.

        The record, results of commands and a freeze stay.
        """

    async def keep_work(self, uid: str, entry: str) -> None:
        """Move a VM's folder to `entry` of the quarantine, without the links to its disks."""

    async def bring_back(self, entry: str, uid: str) -> None:
        """Restore the seeds of a quarantine entry, if any, for the VM `uid`.

        The VM must have a record.
        """

    async def purge_kept(self, entry: str) -> None:
        """Remove the files that `keep_work` moved to `entry`."""

    async def forget(self, uid: str, *, refused_epoch: int = 0) -> None:
        """Remove the record with its folder, and mark the uid as removed in the ledger.

        The mark stays for at least 24 h. `refused_epoch` is the epoch of a refused VM.
        """

    async def commands(self, uid: str) -> Mapping[str, str]:
        """Return the results of the VM's last commands by command id, oldest first."""

    async def keep_commands(self, uid: str, results: Mapping[str, str]) -> None:
        """Store the results of the VM's commands durably, if the VM is still on this host."""

    def epoch(self, uid: str) -> int:
        """Return the highest epoch in the ledger that was acted on or refused, or 0."""

    def left(self, uid: str) -> int:
        """Return the epoch at which a VM left this host; 0 without such an entry in the ledger."""

    def refused(self, uid: str) -> int:
        """Return the epoch under which this host refused a VM, or 0."""

    def removed(self) -> Mapping[str, int]:
        """Return the epoch of each VM in the ledger that left this host, by uid."""

    def seen(self, time_ns: int) -> None:
        """Take a time stamp of the bus. The ledger dates removals by the newest time stamp."""

    def nonce(self) -> str:
        """Return the bus incarnation that this node joined; empty before the first join."""

    def set_nonce(self, nonce: str) -> None:
        """Store durably the incarnation of the bus that the node joined."""

    def node_spec(self) -> NodeSpec | None:
        """Return the last desired state of this node on the joined bus, or None."""

    def set_node_spec(self, node_spec: NodeSpec | None) -> None:
        """Store the desired state of this node. A failure is only logged."""

    async def new_boot(self, uid: str) -> None:
        """Rotate the console log, which then contains only the current boot."""

    def console_socket(self, uid: str) -> Path:
        """Return the path of the socket of the VM's serial console."""

    def console_log(self, uid: str) -> Path:
        """Return the path of the console log that libvirt writes."""


class Seeds(Protocol):
    """A VM's first-boot data: an ISO for each seed and each set of files, and Ignition's file."""

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        """Write all ISOs and Ignition's file of the VM. Raises VirtbusError 503 `state_write`."""

    def paths(self, record: VmRecord) -> Mapping[str, Path]:
        """Return the paths of the ISOs by volume name."""

    def ignition_path(self, record: VmRecord) -> Path | None:
        """Return the file with Ignition's configuration, or None."""

    def stand(self, record: VmRecord) -> bool:
        """Return True if every file of the VM's first-boot data is on disk."""


class Readiness(Protocol):
    """Detects ready guests."""

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        """Wait until the guest is ready. Return the reason `GuestSaysReady` or `AddressAnswers`.

        With `rebooted`, ignore earlier console output: it is of the previous boot.
        """


class NetdAdmin(Protocol):
    """netd's admin socket."""

    async def arm(self, arm: Arm) -> None:
        """Let vmwrapper fetch the VM's tap descriptors from netd.

        Raises:
            VirtbusError: netd refuses, or does not answer.
        """


class ConsoleViewer(Protocol):
    """A client of a VM's serial console. `closed` is the reason of the end of `output`."""

    closed: str

    def output(self) -> AsyncIterator[bytes | str]:
        """Return the guest's output as bytes, and notes about the session as text."""

    async def write(self, data: bytes) -> None:
        """Send input to the guest. Waits while the guest does not read."""


class Console(Protocol):
    """Serial consoles and their logs."""

    def attach(
        self, uid: str, *, write: bool, tail_bytes: int, owner: str
    ) -> AbstractAsyncContextManager[ConsoleViewer]:
        """Attach a further viewer. Raises VirtbusError 409 if no guest runs."""

    def read_log(self, uid: str, *, tail_bytes: int, follow: bool) -> AsyncIterator[bytes]:
        """Return the last `tail_bytes` of the log, and then new output if `follow`."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of the host; sizes in bytes."""

    hostname: str
    cpus: int
    memory_bytes: int
    disk_free_bytes: int
    disk_reserve_bytes: int
    max_vcpus: int
    accelerators: tuple[str, ...]
    versions: Mapping[str, str]
    disk_bytes: int = 0
