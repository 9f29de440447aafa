"""Asks hosts for the addresses and volumes of their VMs, which a restored bus may lack.

A bus that was restored from a backup lacks the claims and holders that were made after the backup.
Each host has copies of its VMs' records, which name the addresses and volumes of the VMs. A host is
"living" while its heartbeat arrives.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import SUSPECT_AFTER_S
from virtbus.controller.core.rebuild_plan import Age, age
from virtbus.controller.edge.host_records import record_pages
from virtbus.schemas.errors import Code, VirtbusError

ASK_S = 3.0
ALL_S = 5.0
"""Time limit for all pages of a host. A host that needs longer counts as a host without an answer.
"""
AGAIN_S = 10.0
"""Interval at which a host is asked while the bus lacks claims or holders that the host has."""
PER_HOST = 1000
"""Maximum number of claims that are kept for a host. A hostile host must not withhold all addresses
of a network."""
VOLUMES_PER_HOST = 10_000
"""Maximum number of volumes that are kept for a host, to limit this controller's memory."""


class HeldOnHost(NamedTuple):
    """A VM that holds a volume according to the record copy on `node`; `age` is the copy's age."""

    node: str
    vm: str
    age: Age


class LivingClaims:
    """The claims and holders that living hosts report, and that the bus lacks.

    Each host is asked once after each complete list of the bus, and repeatedly while the bus lacks
    a claim or a holder that the host has reported.
    """

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._asked_s: dict[str, float] = {}
        self._found: dict[str, dict[str, str]] = {}
        """By node and claim key: the uid in a claim that the bus lacked."""
        self._holders: dict[str, dict[str, HeldOnHost]] = {}
        """By node and folder of the volume: a holder that the bus lacked."""

    async def withheld(self) -> Mapping[str, str]:
        """Return, by claim key, the uids of the claims that hosts have and the bus lacks.

        Raises:
            VirtbusError: 503 `addresses_unheard`: a living host did not answer.
        """
        await self._hear("addresses")
        return {
            key: uid
            for found in self._found.values()
            for key, uid in found.items()
            if key not in self._fleet.claims
        }

    async def holder(self, folder: str) -> HeldOnHost | None:
        """Return a holder that a host reports and the bus does not name; None without such a VM.

        Raises:
            VirtbusError: 503 `volumes_unheard`: a living host did not answer.
        """
        await self._hear("volumes")
        found = (held.get(folder) for held in self._holders.values())
        unknown = [one for one in found if one is not None and not self._is_holder(folder, one.vm)]
        return max(unknown, key=lambda one: one.age, default=None)

    def _is_holder(self, folder: str, vm: str) -> bool:
        """Return True if the volume's record on the bus names the VM as a holder."""
        namespace, name, uid = folder.split(".")
        known = self._fleet.volumes.get(namespace, name)
        return known is not None and known.record.uid == uid and vm in known.record.holders

    async def _hear(self, what: str) -> None:
        """Ask all hosts that are due; raise 503 if a living host has not answered."""
        now_s = asyncio.get_running_loop().time()
        for node in self._asked_s.keys() - self._fleet.nodes.keys():
            # removed from the fleet: nobody could ask it again
            del self._asked_s[node], self._found[node], self._holders[node]
        for node in self._fleet.unheard_nodes():
            if self._fleet.silence_s(node, now_s) < SUSPECT_AFTER_S:
                raise unheard(node, what, "it sent no heartbeat yet")
        due = [node for node in self._fleet.nodes if self._due(node, now_s)]
        await self._ask_each(due, what)

    def _due(self, node: str, now_s: float) -> bool:
        if self._fleet.silent(node, now_s):
            return False
        asked_s = self._asked_s.get(node, -1.0)
        holders = self._holders.get(node, {}).items()
        lacking = any(not self._is_holder(folder, one.vm) for folder, one in holders) or (
            self._found.get(node, {}).keys() - self._fleet.claims.keys()
        )
        return asked_s < self._fleet.quiet_since_s or (bool(lacking) and now_s - asked_s > AGAIN_S)

    async def _ask_each(self, nodes: list[str], what: str) -> None:
        failed: list[VirtbusError] = []

        async def ask(node: str) -> None:
            try:
                await self._ask(node)
            except (BusError, VirtbusError) as error:
                failed.append(unheard(node, what, str(error)))

        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
        if failed:
            raise failed[0]

    async def _ask(self, node: str) -> None:
        now_s = asyncio.get_running_loop().time()
        found: dict[str, str] = {}
        holders: dict[str, HeldOnHost] = {}
        async for page in record_pages(self._bus, node, ask_s=ASK_S, until_s=now_s + ALL_S):
            for record in page.records:
                if record.node != node:
                    continue
                lacking = (key for key in addresses_of(record))
                found |= {key: record.uid for key in lacking if key not in self._fleet.claims}
                one = HeldOnHost(node, record.uid, age(record))
                folders = (ref.folder for ref in record.volume_refs.values())
                holders |= {each: one for each in folders if not self._is_holder(each, record.uid)}
            found = dict(list(found.items())[:PER_HOST])
            holders = dict(list(holders.items())[:VOLUMES_PER_HOST])
        self._found[node] = found
        self._holders[node] = holders
        self._asked_s[node] = now_s


def unheard(node: str, what: str, why: str) -> VirtbusError:
    """Return the error 503 for a host that does not answer."""
    message = f"{node} does not say which {what} its VMs have ({why}); repeat in a moment"
    reason = "volumes_unheard" if what == "volumes" else "addresses_unheard"
    return VirtbusError(Code.UNAVAILABLE, reason, message, after_ms=1000)
