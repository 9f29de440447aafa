"""Asks hosts for the addresses of their VMs, so that a restored bus gives none of them out again.

A bus that was restored from a backup lacks the claims that were made after the backup. Each host
has the records of its VMs, with their claims.
"""

import asyncio
from collections.abc import Mapping

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import SUSPECT_AFTER_S
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import KnownRecords, RecordsRead
from virtbus.schemas.wire import validate

ASK_S = 3.0
AGAIN_S = 10.0
"""Time after which a host with claims that the bus lacks is asked again."""
PER_HOST = 1000
"""Limit of claims that the bus lacks, so that a hostile host cannot withhold a whole pool."""


class LivingClaims:
    """The claims of all living hosts. Each is asked once after each complete list of the bus."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._asked_s: dict[str, float] = {}
        self._found: dict[str, dict[str, str]] = {}
        """By node: the claims that the bus lacked, by key, with their uids."""

    async def withheld(self) -> Mapping[str, str]:
        """Return the claims that only hosts know, by key, with their uids.

        Raises:
            VirtbusError: 503 `addresses_unheard`: a living host did not answer.
        """
        now_s = asyncio.get_running_loop().time()
        for node in self._fleet.unheard_nodes():
            if self._fleet.silence_s(node, now_s) < SUSPECT_AFTER_S:
                raise _unheard(node, "it sent no heartbeat yet")
        due = [node for node in self._fleet.nodes if self._due(node, now_s)]
        await self._ask_each(due)
        return {
            key: uid
            for found in self._found.values()
            for key, uid in found.items()
            if key not in self._fleet.claims
        }

    def _due(self, node: str, now_s: float) -> bool:
        if self._fleet.silent(node, now_s):
            return False
        asked_s = self._asked_s.get(node, -1.0)
        lacking = self._found.get(node, {}).keys() - self._fleet.claims.keys()
        return asked_s < self._fleet.quiet_since_s or (bool(lacking) and now_s - asked_s > AGAIN_S)

    async def _ask_each(self, nodes: list[str]) -> None:
        failed: list[VirtbusError] = []

        async def ask(node: str) -> None:
            try:
                await self._ask(node)
            except (BusError, VirtbusError) as error:
                failed.append(_unheard(node, str(error)))

        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
        if failed:
            raise failed[0]

    async def _ask(self, node: str) -> None:
        now_s = asyncio.get_running_loop().time()
        found: dict[str, str] = {}
        after, more = "", True
        while more:
            ask = RecordsRead(after=after)
            subject = subjects.rpc(node, "agent", "records")
            page = validate(KnownRecords, await self._bus.request(subject, ask, timeout_s=ASK_S))
            for record in page.records:
                if record.node == node and record.address_claims:
                    lacking = (key for key in addresses_of(record))
                    found |= {key: record.uid for key in lacking if key not in self._fleet.claims}
            more = page.more and bool(page.records)
            after = page.records[-1].uid if page.records else ""
        self._found[node] = dict(list(found.items())[:PER_HOST])
        self._asked_s[node] = now_s


def _unheard(node: str, why: str) -> VirtbusError:
    message = f"{node} does not say which addresses its VMs have ({why}); repeat in a moment"
    return VirtbusError(Code.UNAVAILABLE, "addresses_unheard", message, after_ms=1000)
