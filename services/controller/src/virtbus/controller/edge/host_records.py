"""Reads a host's copies of its VMs' records, up to a limit of pages."""

import asyncio
from collections.abc import AsyncIterator

from virtbus.bus.client.ports import Bus
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import KnownRecords, RecordsRead
from virtbus.schemas.wire import validate

PAGES = 100
"""Limit of the pages that are read from a host (about 10,000 VMs). A hostile host must not keep a
controller busy for ever."""


async def record_pages(
    bus: Bus, node: str, *, ask_s: float, until_s: float
) -> AsyncIterator[KnownRecords]:
    """Yield up to PAGES pages of a host. If the last page has `more`, the list is incomplete.

    `ask_s` is the time limit of each answer.

    Raises:
        BusError: the host does not answer.
        VirtbusError: 503 `records_slow`: the list is incomplete at `until_s` (loop's time). Also
            the errors of the agent.
    """
    subject, after = subjects.rpc(node, "agent", "records"), ""
    for _ in range(PAGES):
        answer = await bus.request(subject, RecordsRead(after=after), timeout_s=ask_s)
        page = validate(KnownRecords, answer)
        yield page
        if not page.more or not page.records:
            return
        if asyncio.get_running_loop().time() >= until_s:
            message = f"{node} takes too long to list its VMs; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "records_slow", message, after_ms=1000)
        after = page.records[-1].uid
