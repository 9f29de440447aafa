"""The ports of a VM's actor, created once by the service."""

from collections.abc import Callable
from dataclasses import dataclass

from virtbus.bus.client.ports import Bus, Gate
from virtbus.nodeagent.core.ports import (
    DiskFiles,
    Hypervisor,
    NetdAdmin,
    Readiness,
    RecordFiles,
    Seeds,
)
from virtbus.nodeagent.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.vm import VmRecord


class EventRecorder:
    """The agent's emitter of events."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._count = 0
        self._run = bus.sources.time_ns()

    def emit(
        self,
        kind: EventKind,
        record: VmRecord,
        *,
        reason: str = "",
        message: str = "",
        took_ms: float | None = None,
    ) -> None:
        """Emit an event after the step, without waiting."""
        self._count += 1
        event = Event(
            kind=kind,
            uid=record.uid,
            node=self._node,
            epoch=record.epoch,
            generation=record.generation,
            namespace=record.namespace,
            name=record.name,
            reason=reason,
            message=message,
            service="nodeagent",
            at_ns=self._bus.sources.time_ns(),
            took_ms=took_ms,
        )
        self._bus.emit(
            subjects.event(self._node, record.uid, kind),
            event,
            message_id=f"{self._run}:{self._count}",
        )


@dataclass(frozen=True, slots=True)
class AgentPorts:
    """The ports of one agent."""

    bus: Bus
    settings: Settings
    hypervisor: Hypervisor
    files: RecordFiles
    seeds: Seeds
    disks: DiskFiles
    netd: NetdAdmin
    reach: Readiness
    facts: EventRecorder
    accelerator: Callable[[VmRecord], str]
    gate: Gate | None = None
    """Awaited before each list: this agent acts for the node."""
