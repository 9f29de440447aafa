"""Publishes netd's ready events and events."""

import logging
import time

from virtbus.bus.client import tracing
from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus
from virtbus.netd.core.finding import NetworkFinding
from virtbus.netd.edge.fd_passing import Handover
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

PART = "net"


class NetworkReporter:
    """Publishes on the bus; nothing here decides, or can fail the work."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._events = EventRecorder(bus, "netd", node)

    async def ready(self, ready: NetReady) -> None:
        """Publish the ready event of a create; it may be lost."""
        await self._bus.publish(subjects.ready(self._node, ready.uid, PART), ready)

    def attached(self, record: VmRecord, ready: NetReady, took_ms: float) -> None:
        """Emit that a network was made."""
        addresses = ",".join(a for i in ready.interfaces for a in i.addresses)
        detail = {"addresses": addresses}
        self._events.emit(
            self._events.about(EventKind.NETWORK_READY, record, took_ms=took_ms, detail=detail)
        )

    async def found(self, finding: NetworkFinding) -> None:
        """Emit that a network differed from its state file."""
        attachment = finding.attachment
        extra = {"code": finding.reason, "uid": attachment.uid}
        log.warning("%s", finding.message, extra=extra)
        event = self._events.event(
            EventKind.NETWORK_FAILED if finding.error else EventKind.NETWORK_READY,
            uid=attachment.uid,
            epoch=attachment.epoch,
            generation=attachment.generation,
            namespace=attachment.namespace,
            name=attachment.vm_name,
            reason=finding.reason,
            message=finding.message,
        )
        self._events.emit(event, self._bus.sources.uuid7())
        if finding.error is not None:
            await self.ready(
                NetReady(
                    uid=attachment.uid,
                    epoch=attachment.epoch,
                    generation=attachment.generation,
                    phase=NetPhase.FAILED,
                    error=finding.error,
                )
            )

    def failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> None:
        """Emit a failure; one event for each reason of a generation."""
        detail = {"attempt": str(attempt)}
        why = {"reason": error.reason, "message": str(error), "detail": detail}
        self._events.emit(self._events.about(EventKind.NETWORK_FAILED, record, **why))

    def released(self, uid: str, epoch: int) -> None:
        """Emit that a network was removed."""
        self._events.emit(self._events.event(EventKind.NETWORK_RELEASED, uid=uid, epoch=epoch))

    def wrapped(self, done: Handover) -> None:
        """Record the wrapper's span, which it cannot report itself: it has become QEMU."""
        if done.traceparent is None or not done.entered_ns:
            return
        offset_ns = self._bus.sources.time_ns() - time.monotonic_ns()
        tracing.told(
            "virtbus fetch descriptors",
            uid=done.uid,
            parent=done.traceparent,
            service="vmwrapper",
            start_ns=done.entered_ns + offset_ns,
            end_ns=done.granted_ns + offset_ns,
            connect_us=str((done.connected_ns - done.entered_ns) // 1000),
            ask_us=str((done.asked_ns - done.connected_ns) // 1000),
            grant_us=str((done.granted_ns - done.asked_ns) // 1000),
        )
