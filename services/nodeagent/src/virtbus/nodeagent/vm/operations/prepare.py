"""Prepares a start: the record on disk, the network, the seeds, the disks."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client import tracing
from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.ports import RecordFiles
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.machine import MachineEvent
from virtbus.nodeagent.vm.operations.outcome import Outcome
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.secrets_in_force import in_force
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.vm_status import FailureStage

log = logging.getLogger(__name__)


class RecordCopy:
    """The copy of one VM's record on the host's disk. `latest` returns the record to write."""

    def __init__(self, files: RecordFiles, latest: Callable[[], VmRecord]) -> None:
        self._files = files
        self._latest = latest
        self._saved: VmRecord | None = None
        self._saving = asyncio.Lock()

    @property
    def stale(self) -> bool:
        """Return True if the latest record is not on the host's disk."""
        return self._saved != self._latest()

    async def save(self) -> None:
        """Write the latest record, durable on return; raises VirtbusError 503 `state_write`."""
        async with self._saving:
            while self.stale:
                record = self._latest()
                await self._files.write(record)
                self._saved = record

    async def save_soon(self) -> None:
        """Write the latest record; a failure is only logged."""
        try:
            await self.save()
        except VirtbusError as error:
            extra = {"code": error.reason, "uid": self._latest().uid}
            log.warning("cannot write the record to disk: %s", error, extra=extra)


async def prepare(
    record: VmRecord,
    copy: RecordCopy,
    image: Dependency[ImageReady],
    net: Dependency[NetReady],
    tools: AgentPorts,
    *,
    ask_after_s: float,
) -> Outcome:
    """Write the record, wait for the network, write the seeds, and wait for the disks.

    Return "dependencies ready", or one of "dependencies failed" and "dependencies impossible" with
    the error.
    """
    with tracing.span("virtbus prepare vm", uid=record.uid, parent=record.traceparent):
        stage: FailureStage = "start"
        try:
            await copy.save()
            stage = "network"
            wired = await net.get(record, ask_after_s=ask_after_s)
            stage = "start"
            secrets = await _seed(record, wired, tools)
            stage = "image"
            logins = secrets.image_pull if secrets is not None else {}
            await image.get(record, ask_after_s=ask_after_s, image_pull=logins)
        except VirtbusError as error:
            final = error.body.retry is Retry.NEVER
            event: MachineEvent = "dependencies impossible" if final else "dependencies failed"
            return Outcome(event, error, stage)
    return Outcome("dependencies ready")


async def _seed(record: VmRecord, net: NetReady, tools: AgentPorts) -> VmSecrets | None:
    """Write the seeds; if the bus has lost the secrets, keep the existing seeds.

    Return the secrets, if there are any.
    """
    secrets: VmSecrets | None = None
    if record.sec_digest is not None:
        secrets = await _secrets(record, tools.bus)
        if secrets is None and tools.seeds.stand(record):
            extra = {"code": "secrets_lost", "uid": record.uid}
            log.warning("the bus has lost the secrets; the existing seed is kept", extra=extra)
            return None
        if secrets is None:  # the bus has lost them, or the replica that answered is behind
            message = (
                "the bus does not have the VM's secrets, and this host has no seed; the agent "
                "asks again. If they are lost, create the VM again with its cloud-init"
            )
            raise VirtbusError(Code.UNAVAILABLE, "secrets_lost", message)
    await tools.seeds.write(record, secrets, net.interfaces)
    return secrets


async def _secrets(record: VmRecord, bus: Bus) -> VmSecrets | None:
    try:
        entry = await bus.get(subjects.vm_secret(record.node, record.uid))
    except BusError as error:
        message = "the bus does not give the VM's secrets now; the agent asks again"
        raise VirtbusError(Code.UNAVAILABLE, "bus_unavailable", message) from error
    if entry is None or not entry.value:
        return None
    return in_force(entry.key, entry.value, record.sec_digest or "")


async def without_guest(record: VmRecord, tools: AgentPorts) -> frozenset[str]:
    """Return the names of disks that are being detached and that no guest has.

    Empty while a guest of the VM runs. The next start uses this record or a later record, and so
    has none of these disks.

    Raises:
        VirtbusError: 503 `start_under_way`: libvirt may still carry out an earlier start.
    """
    if tools.hypervisor.start_under_way(record.uid):
        message = "libvirt has not ended an earlier start, which may use disks; the agent retries"
        raise VirtbusError(Code.UNAVAILABLE, "start_under_way", message, after_ms=1000)
    leaving = record.detaching
    if not leaving:
        return frozenset()
    facts = await tools.hypervisor.facts(record.uid)
    if facts is not None and facts.active:
        return frozenset()
    asked = tools.disks.opened
    return frozenset([name for name, ref in leaving.items() if not await asked(record.uid, ref)])
