"""Publishes events about networks, and sends ready events to the agent."""

import logging
import time

from virtbus.bus.client import tracing
from virtbus.bus.client.ports import Bus
from virtbus.bus.client.step_reporter import StepEvents, StepReporter
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.cni_results import remains
from virtbus.netd.core.finding import NetworkFinding
from virtbus.netd.edge.fd_passing import Handover
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import NetPhase, NetReady

log = logging.getLogger(__name__)

EVENTS = StepEvents(
    "net", EventKind.NETWORK_READY, EventKind.NETWORK_FAILED, EventKind.NETWORK_RELEASED
)


class NetworkReporter(StepReporter):
    """A `StepReporter` that also reports findings of comparisons, and vmwrapper's spans."""

    def __init__(self, bus: Bus, node: str) -> None:
        super().__init__(bus, "netd", node, EVENTS)

    async def found(self, finding: NetworkFinding) -> None:
        """Emit an event about a network that differed from its state file.

        If the guest has lost the network, also send the agent a ready event with the phase
        `failed`.
        """
        attachment = finding.attachment
        extra = {"code": finding.reason, "uid": attachment.uid}
        log.warning("%s", finding.message, extra=extra)
        whole = finding.error is None and not finding.incomplete
        event = self.event(
            EventKind.NETWORK_READY if whole else EventKind.NETWORK_FAILED,
            uid=attachment.uid,
            epoch=attachment.epoch,
            generation=attachment.generation,
            namespace=attachment.namespace,
            name=attachment.vm_name,
            reason=finding.reason,
            message=finding.message,
        )
        self.emit(event, self._bus.sources.uuid7())
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

    def given_up(self, attachment: Attachment, error: VirtbusError) -> None:
        message = f"given up: {error.body.message}. These may remain: {remains(attachment.nics)}"
        log.warning("%s", message, extra={"code": "cni_given_up", "uid": attachment.uid})
        event = self.event(
            EventKind.NETWORK_FAILED,
            uid=attachment.uid,
            epoch=attachment.epoch,
            generation=attachment.generation,
            namespace=attachment.namespace,
            name=attachment.vm_name,
            reason="cni_given_up",
            message=message,
        )
        self.emit(event)

    def wrapped(self, done: Handover) -> None:
        """Record vmwrapper's span, because vmwrapper has become QEMU."""
        if done.traceparent is None or not done.entered_ns:
            return
        offset_ns = self._bus.sources.time_ns() - time.monotonic_ns()
        tracing.record_span(
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
