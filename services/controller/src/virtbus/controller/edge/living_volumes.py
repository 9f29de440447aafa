"""Refuses a volume if a living host contradicts the bus about the volume's holder or node.

A bus that was restored from a backup may lack a volume's holder, first use or move. Without the
check, a second guest could write to the volume, or a guest could get an empty disk (ADR 0045).
"""

import asyncio

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.rebuild_plan import age
from virtbus.controller.edge.key_states import known_of
from virtbus.controller.edge.living_claims import VOLUMES_PER_HOST, LivingClaims, unheard
from virtbus.controller.edge.volume_orphans import VolumeOrphans, data_nodes
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.volume_ref import VolumeRef

AGAIN_MS = 10_000


class LivingVolumes:
    """Compares volumes on the bus with the answers of hosts.

    Each host answers once after each complete list of the bus; later checks use that answer.
    """

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self.claims = LivingClaims(bus, fleet)
        self._orphans = VolumeOrphans(bus, fleet)
        self._asked_s: dict[str, float] = {}
        self._found: dict[str, set[str]] = {}
        """By node: the folders of volumes that the node has, and the bus does not place there."""

    async def refuse(self, ref: VolumeRef, vm: str, home: str) -> None:
        """Raise an error if the VM must not hold the volume.

        `home` is the volume's node on the bus; "" if the bus knows of no data.

        Raises:
            VirtbusError:
                409 `held_on_node`: the volume is not shared, and a host reports another holder.
                409 `data_elsewhere`: the volume's data is on another node.
                503 `volumes_unheard`: a living host did not answer.
        """
        other = None if ref.shared else await self.claims.holder(ref.folder)
        if other is not None and other.vm != vm:
            known = known_of(await self._bus.get(subjects.vm_anywhere(other.vm)))
            if known.record is None or age(known.record) < other.age:
                message = (
                    f"{other.node} holds VM {other.vm} with the volume {ref.name}, which the bus "
                    "does not know; `virtbus bus rebuild` writes it back"
                )
                raise VirtbusError(Code.CONFLICT, "held_on_node", message, after_ms=AGAIN_MS)
        if not ABILITIES[ref.kind].shared:
            await self._refuse_elsewhere(ref, home)

    async def _refuse_elsewhere(self, ref: VolumeRef, home: str) -> None:
        silent = await self._hear(ref.pool)
        there = [node for node, found in self._found.items() if ref.folder in found]
        if not there and not silent:
            return
        asked = home
        try:
            if home and await self._orphans.has(home, ref):
                return
            for asked in there:
                if asked != home and await self._orphans.has(asked, ref):
                    raise _elsewhere(ref, asked, home)
                self._found[asked].discard(ref.folder)
        except BusError as error:
            raise unheard(asked, "volumes", str(error)) from None
        for node, why in silent.items():
            raise unheard(node, "volumes", why)

    async def _hear(self, pool: str) -> dict[str, str]:
        """Ask the hosts that are due; return the hosts without an answer, and why.

        A host is due until it has answered after the last complete list of the bus, and could read
        all its pools. A host that cannot read `pool` counts as a host without an answer.
        """
        now_s = asyncio.get_running_loop().time()
        silent: dict[str, str] = {}

        async def ask(node: str) -> None:
            found, unread = set[str](), set[str]()
            try:
                async for page in self._orphans.pages(node, ""):
                    found.update(held.folder for held in page.volumes)
                    unread.update(page.unread_pools)
            except (BusError, VirtbusError) as error:
                silent[node] = str(error)
                return
            known = self._fleet.volumes
            lost = sorted(one for one in found if node not in (data_nodes(known, one) or ()))
            self._found[node] = set(lost[:VOLUMES_PER_HOST])
            if pool in unread:
                silent[node] = f"it cannot read its pool {pool}"
            elif not unread:
                self._asked_s[node] = now_s

        async with asyncio.TaskGroup() as group:
            for node in self._fleet.nodes:
                asked = self._asked_s.get(node, -1.0) >= self._fleet.quiet_since_s
                if not asked and not self._fleet.silent(node, now_s):
                    group.create_task(ask(node))
        return silent


def _elsewhere(ref: VolumeRef, node: str, home: str) -> VirtbusError:
    where = f"not on {home}, as the bus says" if home else "and the bus knows of no data"
    message = (
        f"the data of the volume {ref.name} is on {node}, {where}; `virtbus volume delete "
        f"{ref.name} -n {ref.namespace}`, then `virtbus volume adopt {ref.name} -n {ref.namespace} "
        f"--node {node}`, record what is there"
    )
    return VirtbusError(Code.CONFLICT, "data_elsewhere", message)
