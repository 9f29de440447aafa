"""Bundles the ports that all VM actors of an agent use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus, Gate
from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.disk_file_port import DiskFiles
from virtbus.nodeagent.core.disk_work import DiskWork
from virtbus.nodeagent.core.freezes import Freezes
from virtbus.nodeagent.core.guest_backups import GuestBackupPort
from virtbus.nodeagent.core.guest_layers import GuestLayerPort
from virtbus.nodeagent.core.logins import Logins, NoLogins
from virtbus.nodeagent.core.plugs import DiskPlugs
from virtbus.nodeagent.core.ports import (
    Hypervisor,
    NetdAdmin,
    Readiness,
    RecordFiles,
    Seeds,
)
from virtbus.nodeagent.core.shares import NoShares, SharedDirectories
from virtbus.nodeagent.edge.freezing import NoFreezes
from virtbus.nodeagent.edge.libvirt_backups import NoBackups
from virtbus.nodeagent.edge.libvirt_layers import NoLayers
from virtbus.nodeagent.edge.libvirt_readings import NoReadings
from virtbus.nodeagent.edge.no_plugs import NoPlugs
from virtbus.nodeagent.settings import Settings
from virtbus.nodeagent.streams import DiskServers
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm import VmRecord


class AgentEvents:
    """Emits the agent's events.

    Each event has a unique id, so that no event is dropped as a duplicate.
    """

    def __init__(self, bus: Bus, node: str) -> None:
        self._events = EventRecorder(bus, "nodeagent", node)
        self._count = 0
        self._run = bus.sources.time_ns()

    def emit(self, kind: EventKind, record: VmRecord, **fields: Any) -> None:
        """`fields` are reason, message and took_ms."""
        self._count += 1
        self._events.emit(self._events.about(kind, record, **fields), f"{self._run}:{self._count}")


@dataclass(frozen=True, slots=True)
class AgentPorts:
    """The ports of one agent. Defaults with `No` in their name are for simulated guests."""

    bus: Bus
    settings: Settings
    hypervisor: Hypervisor
    files: RecordFiles
    seeds: Seeds
    disks: DiskFiles
    netd: NetdAdmin
    reach: Readiness
    events: AgentEvents
    accelerator: Callable[[VmRecord], str]
    gate: Gate | None = None
    """Awaited before each list of the records. Raises if another instance holds the node."""
    freezes: Freezes = field(default_factory=NoFreezes)
    layers: GuestLayerPort = field(default_factory=NoLayers)
    backups: GuestBackupPort = field(default_factory=NoBackups)
    reads: DiskServers = field(default_factory=NoReadings)
    plugs: DiskPlugs = field(default_factory=NoPlugs)
    logins: Logins = field(default_factory=NoLogins)
    shares: SharedDirectories = field(default_factory=NoShares)
    disk_work: DiskWork = field(default_factory=DiskWork)
    servers: AwayServers = field(default_factory=AwayServers)
    """The pools whose server does not answer."""
