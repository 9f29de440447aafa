"""What the agent's core and actors ask of the host (the lead's; edge/ implements it)."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.schemas.guest import GuestQuestion
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeWish
from virtbus.schemas.nodework import Arm, MadeDisk
from virtbus.schemas.vm import VmRecord, VmSecrets


class DomainState(StrEnum):
    """Libvirt's state, as far as the agent tells it apart."""

    RUNNING = "running"
    STARTING = "starting"
    """PAUSED with reason STARTING_UP: a create is under way."""
    PAUSED = "paused"
    SHUTTING_DOWN = "shutting down"
    SHUT_OFF = "shut off"


class Ending(StrEnum):
    """Why a domain is shut off."""

    UNKNOWN = "unknown"
    SHUT_DOWN = "shut down"
    """The guest powered itself off."""
    ENDED = "ended"
    """Destroyed, by us or from outside."""
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """One domain of ours. `metadata` is None where ours is missing or unreadable."""

    uid: str
    state: DomainState
    ending: Ending = Ending.UNKNOWN
    metadata: "DomainMetadata | None" = None
    waits_for_disk: bool = False
    """Paused by the emulator, which could not write: mostly a full disk."""

    @property
    def active(self) -> bool:
        return self.state is not DomainState.SHUT_OFF

    @property
    def starting(self) -> bool:
        return self.state is DomainState.STARTING


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """What the domain's own metadata says (design §5: the hypervisor is the agent's database)."""

    uid: str
    namespace: str
    name: str
    node: str
    epoch: int
    generation: int
    spec_hash: str
    domain_hash: str
    traceparent: str = ""
    power_epoch: int = -1
    """The start that the domain was last defined for; -1: an older agent defined it."""
    pause_epoch: int = 0
    """The last pause or unpause before that."""


class DomainChange(StrEnum):
    """What a lifecycle event says happened."""

    STARTED = "started"
    PAUSED = "paused"
    RESUMED = "resumed"
    SHUT_DOWN = "shut down"
    ENDED = "ended"
    CRASHED = "crashed"
    PANICKED = "panicked"
    """The guest's kernel said so; libvirt ends it, and tells that next."""
    START_FAILED = "start failed"
    REBOOTED = "rebooted"
    WATCHDOG_POWEROFF = "watchdog: poweroff"
    """QEMU ends at once, which libvirt tells next as if it had crashed."""
    WATCHDOG_RESET = "watchdog: reset"
    WATCHDOG_SHUTDOWN = "watchdog: shutdown"
    AWAY = "libvirt is away"
    """Of no domain: nothing is known of any from now on."""


@dataclass(frozen=True, slots=True)
class DomainEvent:
    """A hint: re-read the state before acting on it.

    `change` None: libvirt was away and is back, anything may have changed.
    """

    uid: str
    change: DomainChange | None


class Hypervisor(Protocol):
    """Libvirt. Every method raises VirtbusError: 503 `libvirt_down`, or the cause in words."""

    @property
    def healthy(self) -> bool:
        """False when so many calls hang that the agent should be started anew."""

    async def list_domains(self) -> list[DomainFacts]: ...
    async def facts(self, uid: str) -> DomainFacts | None: ...
    async def define(self, xml: str) -> None: ...
    async def start(self, uid: str, *, paused: bool = False) -> None:
        """Return when the guest runs, or stands still before its first instruction (`paused`).

        Raises with the emulator's own last line as cause.
        """

    async def shutdown(self, uid: str) -> bool:
        """Ask by ACPI; False when there is no running domain to ask."""

    async def reset(self, uid: str) -> bool:
        """Press the reset button; False when there is no guest."""

    async def reboot(self, uid: str) -> bool:
        """Ask the guest to boot anew, by its agent or ACPI; False when there is no guest."""

    async def destroy(self, uid: str) -> None:
        """End the guest; nothing where none runs."""

    async def suspend(self, uid: str) -> None:
        """Let the guest's CPUs stand still; nothing where none runs."""

    async def resume(self, uid: str) -> None:
        """Let a paused guest go on; nothing where none is."""

    async def undefine(self, uid: str) -> None:
        """Forget the domain; nothing where none is defined."""

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[DomainEvent]]: ...


class RecordFiles(Protocol):
    """`<state_dir>/vms/<uid>/` and the host's epoch ledger."""

    async def write(self, record: VmRecord) -> None:
        """Durable on return (fsync, rename); raises the ledger's epoch of the uid."""

    async def list(self) -> Mapping[str, VmRecord]:
        """Every readable record on disk, by uid."""

    async def remove_work(self, uid: str) -> None:
        """Remove all of the VM but its record: seeds, console socket and log."""

    async def keep_work(self, uid: str, entry: str) -> None:
        """Move the record, the seeds and all else of a VM to the entry of the quarantine."""

    async def bring_back(self, entry: str, uid: str) -> None:
        """Give the seeds of an entry, where it has any, to the VM `uid`, whose record stands."""

    async def purge_kept(self, entry: str) -> None:
        """Remove what `keep_work` kept."""

    async def forget(self, uid: str, *, refused_epoch: int = 0) -> None:
        """Remove the record too, and mark the uid removed in the ledger (kept for 24 h).

        `refused_epoch`: the VM was not taken under that epoch.
        """

    async def commands(self, uid: str) -> Mapping[str, str]:
        """What became of the VM's last commands, by id, in order."""

    async def keep_commands(self, uid: str, told: Mapping[str, str]) -> None:
        """Durable on return."""

    def epoch(self, uid: str) -> int:
        """The highest epoch ever acted on; 0 for an unknown uid."""

    def left(self, uid: str) -> int:
        """The epoch at which a VM left this host; 0 for one that is here, or was never."""

    def refused(self, uid: str) -> int:
        """The epoch under which this host did not take a VM; 0 for any other."""

    def removed(self) -> Mapping[str, int]:
        """The uids whose VM left this host in the last 24 h, with the epoch it had."""

    def seen(self, time_ns: int) -> None:
        """The bus stored something at this time of its own; removals are stamped by it."""

    def nonce(self) -> str:
        """The bus incarnation that this node joined; empty before the first join."""

    def set_nonce(self, nonce: str) -> None: ...
    def wish(self) -> NodeWish | None:
        """What the bus that was joined last wanted of this node; None: nothing."""

    def set_wish(self, wish: NodeWish | None) -> None: ...
    async def new_boot(self, uid: str) -> None:
        """Set the console log of the boot before aside: what is in the log is of this boot."""

    def console_socket(self, uid: str) -> Path: ...
    def console_log(self, uid: str) -> Path: ...


class Owned(Hypervisor, Protocol):
    """A hypervisor that tells the domains of this agent from those of another instance."""

    async def uses(self, uid: str, folder: Path) -> bool:
        """True when the domain is made of files below `folder`."""


class Remains(RecordFiles, Protocol):
    """Files that tell what is on disk, with or without a record."""

    async def things(self) -> Mapping[str, tuple[str, ...]]:
        """Paths by the uid in their name."""


class Seeds(Protocol):
    """NoCloud seeds, one a cloud-init volume."""

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None: ...
    def paths(self, record: VmRecord) -> Mapping[str, Path]:
        """Seed file by volume name."""

    def stand(self, record: VmRecord) -> bool:
        """True when every seed of the VM is on disk."""


class DiskFiles(Protocol):
    """A VM's disks as files of this host."""

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk]
    ) -> Mapping[str, DiskSource]:
        """The files by volume name, judged now; raises VirtbusError 409 `disk_refused`."""


class Readiness(Protocol):
    """When a guest counts as ready."""

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        """Why it does; waits as long as it takes.

        `rebooted`: what its console has said until now is of the boot before.
        """


class NetdAdmin(Protocol):
    """netd's admin socket."""

    async def arm(self, arm: Arm) -> None:
        """Let the wrapper fetch its tap fds; raises VirtbusError when netd refuses or is away."""


class ConsoleViewer(Protocol):
    """One who looks at a VM's serial console; `closed` says why `output` ended."""

    closed: str

    def output(self) -> AsyncIterator[bytes | str]:
        """What the guest writes, as bytes; as text what is to be said of the session."""

    async def write(self, data: bytes) -> None: ...


class Console(Protocol):
    """Serial consoles and their logs."""

    def attach(
        self, uid: str, *, write: bool, tail_bytes: int, owner: str
    ) -> AbstractAsyncContextManager[ConsoleViewer]:
        """Look on, with others; raises VirtbusError 409 where the guest does not run."""

    def read_log(self, uid: str, *, tail_bytes: int, follow: bool) -> AsyncIterator[bytes]:
        """The last `tail_bytes`, then what is added (`follow`)."""


class GuestAgents(Protocol):
    """QEMU's guest agent inside our guests."""

    async def ask(
        self, uid: str, about: Sequence[GuestQuestion], *, timeout_s: float
    ) -> Mapping[str, object]:
        """Libvirt's flat map of answers, within `timeout_s` whatever the guest does.

        Raises:
            VirtbusError: 409 `guest_agent_absent`, 503 `guest_agent_silent`, 409 `domain_state`.
        """


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the host is; sizes in bytes."""

    hostname: str
    cpus: int
    memory_bytes: int
    disk_free_bytes: int
    disk_reserve_bytes: int
    max_vcpus: int
    accelerators: tuple[str, ...]
    versions: Mapping[str, str]
    disk_bytes: int = 0
