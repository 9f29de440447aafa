"""Corrupted records: key and record name two VMs, and neither counts."""

from pathlib import Path

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.schemas import subjects
from virtbus.schemas.wire import encode


async def test_a_record_under_another_vms_key_starts_nothing_and_ends_nothing(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.join()
    await node.put(record(1))
    async with node.agent():
        await eventually(lambda: ("start", uid(1)) in node.domains.done)
        for key in (uid(1), uid(3)):
            body = encode(record(2 if key == uid(1) else 1, generation=2))
            await node.bus.put(subjects.vm_record(NODE, key), body)
        elsewhere = record(4).model_copy(update={"node": "n2"})
        await node.bus.put(subjects.vm_record(NODE, uid(4)), encode(elsewhere))
        await node.start_another()
        assert node.domains.done == [("start", uid(1)), ("start", uid(99))]
        assert set(await node.files.list()) == {uid(1), uid(99)}
