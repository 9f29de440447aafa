"""Publishes the state of imaged or netd on its node."""

import asyncio
from collections.abc import Awaitable, Callable

from virtbus.bus.client.ports import Bus
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.schemas import subjects
from virtbus.schemas.node_rpc import ServiceReport

INTERVAL_S = 4.0
SETTLES_S = 0.1
"""Changes within this time are reported together."""


async def report_state(
    bus: Bus, node: str, changed: asyncio.Event, state: Callable[[], Awaitable[ServiceReport]]
) -> None:
    """Publish `state()` after `changed` is set, and at least every INTERVAL_S, until cancelled."""
    while True:
        changed.clear()
        report = await state()
        await bus.publish(subjects.service_report(node, report.service), report)
        await asyncio.sleep(SETTLES_S)
        await wait_for_event(changed, INTERVAL_S)
