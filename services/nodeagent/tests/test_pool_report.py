"""A node writes the pools that imaged reports, on change, next to its heartbeat."""

import asyncio
from pathlib import Path

from services.nodeagent.tests.pretended_node import NODE, Node, eventually

from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.pool_report import PoolsReport
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import ServiceReport
from virtbus.schemas.pool import POOLS_MAX, NodePools, PoolKind, PoolReport, PoolState
from virtbus.schemas.wire import encode, read

LONG = "x" * 300
MANY = tuple(
    PoolReport(name=f"pool-{n:02}", kind=PoolKind.LOCAL, state=PoolState.GONE, message=LONG)
    for n in range(POOLS_MAX)
)


async def test_the_pools_of_a_node_are_a_record_of_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        state = ServiceState(state=NodeState.READY)
        report = ServiceReport(service="imaged", state=state, pools=MANY)

        async def reported() -> bool:
            await node.bus.publish(subjects.service_report(NODE, "imaged"), report)
            entry = await node.bus.get(subjects.node_pools(NODE))
            return entry is not None and read(NodePools, entry.value).pools == MANY

        await eventually(reported)
        beat = await node.bus.get(subjects.node_record(NODE))
        assert beat is not None
        assert len(beat.value) < 2 * 1024


async def test_a_report_that_fits_no_message_ends_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    report = PoolsReport(node.bus, NODE, pause_s=0.01)
    one = PoolReport(name="san", kind=PoolKind.NBD, state=PoolState.READY)
    async with background() as tasks:
        tasks.start(report.run())
        report.tell("servers", [one.model_copy(update={"size_bytes": 2**64})])
        await asyncio.sleep(0.05)
        report.tell("servers", [one])

        async def reported() -> bool:
            entry = await node.bus.get(subjects.node_pools(NODE))
            return entry is not None and read(NodePools, entry.value).pools == (one,)

        await eventually(reported)


def test_the_largest_reports_are_small() -> None:
    assert len(encode(NodePools(node="n" * 63, pools=MANY))) < 16 * 1024
