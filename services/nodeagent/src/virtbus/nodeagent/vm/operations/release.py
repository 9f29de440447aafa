"""Releases all that a VM has on this node: its domain, network, disks and files."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from virtbus.bus.client import tracing
from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.backoff import delays
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.vm.machine import MachineEvent
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.operations.stop import end
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import Release, ReleaseReply
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0


class Leaving(NamedTuple):
    """The conditions under which a VM leaves this node."""

    refused: bool
    """True if the node never accepted the VM."""
    forced: bool
    """True to end a guest that libvirt has lost. With False, such a guest keeps its resources.

    True also lets netd give up the parts of the network that a CNI plugin fails to undo."""


async def release(
    record: VmRecord,
    tools: AgentPorts,
    *,
    starting: asyncio.Task[None] | None,
    written: Callable[[], Awaitable[None]],
    keep_reason: Callable[[], str],
    leaving: Leaving,
) -> MachineEvent:
    """Remove the domain, its resources and our files, in this order.

    `starting` is the task of a start in progress, if any. `written` returns once no file of the VM
    is being written. `keep_reason` returns why the disks go to the quarantine, or "" to remove
    them. Raises VirtbusError or BusError.
    """
    with tracing.span("virtbus release vm", uid=record.uid, parent=record.traceparent):
        await end(record.uid, tools.hypervisor, starting, forced=leaving.forced)
        await tools.hypervisor.undefine(record.uid)
        why = keep_reason()
        keep = QuarantineRequest(why=why, record=record) if why else None
        async with asyncio.TaskGroup() as group:
            group.create_task(_release(tools.bus, "netd", record, forced=leaving.forced))
            disks = group.create_task(_release(tools.bus, "imaged", record, keep))
        await written()
        if kept := disks.result():
            await tools.files.keep_work(record.uid, kept)
        await tools.files.remove_work(record.uid)
        # Done before "released" is posted: an agent that is killed after the purge must not find
        # the record of a deleted VM on disk and start it again (I3).
        await tools.files.forget(record.uid, refused_epoch=record.epoch if leaving.refused else 0)
    return "released"


async def _release(
    bus: Bus,
    service: str,
    record: VmRecord,
    keep: QuarantineRequest | None = None,
    *,
    forced: bool = False,
) -> str:
    """Let a service release the VM's resources; return the new entry in quarantine, "" if none."""
    try:
        answer = await bus.request(
            subjects.rpc(record.node, service, "release"),
            Release(uid=record.uid, epoch=record.epoch, keep=keep, forced=forced),
            timeout_s=RELEASE_TIMEOUT_S,
        )
        return validate(ReleaseReply, answer).kept
    except VirtbusError as error:
        # stale_epoch: a newer assignment owns these resources
        if error.reason != "stale_epoch":
            raise
        return ""


async def purge_status(record: VmRecord, bus: Bus) -> None:
    """Purge the status of a VM whose record was purged; retry until done."""
    key = subjects.vm_status(record.node, record.uid)
    for delay_s in delays(*RETRY_S, bus.sources):
        try:
            await bus.purge(key, marker_ttl_s=86_400)
        except BusError as error:
            extra = {"code": "status_left", "uid": record.uid}
            log.info("cannot purge the status: %s", error, extra=extra)
            await asyncio.sleep(delay_s)
        else:
            return
