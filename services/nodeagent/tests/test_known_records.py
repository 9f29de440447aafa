"""What a host gives a bus that lost its records: pages that can be sent, whatever a VM's size."""

from pathlib import Path

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.schemas import subjects
from virtbus.schemas.nodework import KnownRecords, RecordsRead
from virtbus.schemas.wire import encode, validate


async def test_large_records_come_in_pages_and_all_of_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        for number in range(1, 13):
            await node.put(record(number, annotations={"note": "x" * 125_000}))
        await eventually(in_state(node, "Running", uid(12)), timeout_s=15)
        seen: list[str] = []
        after, more = "", True
        while more:
            subject = subjects.rpc(NODE, "agent", "records")
            answer = await node.bus.request(subject, RecordsRead(after=after), timeout_s=5)
            page = validate(KnownRecords, answer)
            assert len(encode(page)) < 400_000
            seen += [one.uid for one in page.records]
            after, more = seen[-1], page.more
        assert seen == [uid(number) for number in range(1, 13)]
