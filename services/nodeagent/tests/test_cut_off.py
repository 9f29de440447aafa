"""A guest that loses its network while it runs: its status reports it, and the guest continues."""

from pathlib import Path

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm_status import VmStatus

A = uid(1)
LOST = VirtbusError(Code.CONFLICT, "network_lost", "the running guest is cut off").body


async def test_the_status_of_a_cut_off_guest_reports_it_and_keeps_the_address(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.join()
    await node.put(record())

    async def seen(kind: str) -> VmStatus | None:
        status = await node.status(A)
        found = status is not None and any(c.type == kind and c.status for c in status.conditions)
        return status if found else None

    async with node.agent():
        before = await eventually(lambda: seen("Ready"))
        netd = MemoryBus(node.server, "netd")
        ready = NetReady(uid=A, epoch=1, phase=NetPhase.FAILED, error=LOST)
        await netd.publish(subjects.ready(NODE, A, "net"), ready)
        status = await eventually(lambda: seen("NetworkLost"))
        assert (status.state, status.interfaces) == (before.state, before.interfaces)
        whole = NetReady(uid=A, epoch=1, phase=NetPhase.READY, interfaces=before.interfaces)
        await netd.publish(subjects.ready(NODE, A, "net"), whole)

        async def over() -> bool:
            return await seen("NetworkLost") is None

        await eventually(over)
    assert node.domains.done == [("start", A)]
