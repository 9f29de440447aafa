"""Statuses and heartbeats fit with any input of their agent: they are cut, never lost."""

from pathlib import Path

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.vm.status import StatusWriter
from virtbus.schemas import bounds, subjects
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.node import NodeRecord, NodeState, ServiceState
from virtbus.schemas.node_rpc import ServiceReport
from virtbus.schemas.records import read_stored
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmStatus

A = uid(1)
KEY = subjects.vm_status(NODE, A)


async def test_a_status_with_a_text_of_any_length_is_stored_and_read() -> None:
    bus = MemoryBus(MemoryServer(), "agent")
    writer = StatusWriter(bus)
    status = VmStatus(uid=A, node=NODE, epoch=1, generation=1, state=VmState.FAILED)

    async def told() -> VmStatus | None:
        entry = await bus.get(KEY)
        return read_stored(VmStatus, KEY, entry.value) if entry is not None else None

    async with background() as tasks:
        tasks.start(writer.run())
        writer.report(status.model_copy(update={"message": "m" * 500_000}))
        found = await eventually(told)
        assert found.state is VmState.FAILED
        assert found.message.startswith("mmm")
        writer.report(status.model_copy(update={"state": VmState.RUNNING}))

        async def runs() -> bool:
            return (await told() or found).state is VmState.RUNNING

        await eventually(runs)


async def test_a_node_with_thousands_of_image_names_is_heard(tmp_path: Path) -> None:
    """They were once all in its heartbeat, which became unreadable above 512 KiB."""
    node = Node(tmp_path)
    await node.join()
    names = tuple(f"registry.example/team/{number:0100d}" for number in range(3000))
    image = ImageInfo(
        names=names,
        digest=f"sha256:{0:064d}",
        format=ImageFormat.RAW,
        size_bytes=1,
        virtual_size_bytes=1,
    )
    state = ServiceState(state=NodeState.READY, version="1")
    async with node.agent():
        key = subjects.node_record(NODE)

        async def heard() -> NodeRecord | None:
            service_report = ServiceReport(service="imaged", state=state, images=(image,))
            await node.bus.publish(subjects.service_report(NODE, "imaged"), service_report)
            entry = await node.bus.get(key)
            found = read_stored(NodeRecord, key, entry.value) if entry is not None else None
            return found if found is not None and found.state is NodeState.READY else None

        found = await eventually(heard)
        assert found.cpus == 4
        await node.put(record())
        await eventually(lambda: ("start", A) in node.domains.done)
        entry = await node.bus.get(key)
        assert entry is not None
        assert len(entry.value) <= bounds.HEARTBEAT.written_bytes
