"""Removes networks marked as deleting, or takes back the mark if VMs use them, as a leader task.

A create of a VM reads its networks, commits within COMMIT_MOST_S, and then takes back any mark.
Therefore each VM whose create read the network before the mark has a record COMMIT_MOST_S after the
mark. At that time, this task writes the network once more, unchanged. The watch delivers that write
after those records. When it arrives, all users are in the cache (ADR 0055).
"""

import asyncio
import logging

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.network_changes import kept
from virtbus.controller.core.networks import users_of
from virtbus.controller.core.vm_keys import StoredNetwork
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.network_targets import COMMIT_MOST_S
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind

log = logging.getLogger(__name__)

WAIT_S = COMMIT_MOST_S + 1.0
"""The time between the first sight of a delete mark and the search for users of the object."""
ROUND_S = 1.0
DELIVERY_S = 5.0
POLL_S = 0.5
IDLE_S = 30.0


class NetworkRemovals:
    """Completes deletes of networks. The marks are on the bus, so that any leader can continue."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._fleet = fleet
        self._events = events
        self._writes = NetworkWrites(bus)
        self._marked_s: dict[tuple[str, int], float] = {}
        """By uid and time of a mark: the loop's time at which this leader first saw the mark. The
        wait starts at that time, because the clocks of hosts may differ."""
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Start a round if a network is marked as deleting."""
        if self._fleet.networks.deleting:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Remove networks while the fleet lease is held."""
        while True:
            for key in sorted(self._fleet.networks.deleting):
                tenure.check()
                await self._remove(key)
            waits = self._fleet.networks.deleting
            if not waits:
                self._marked_s.clear()
            await wait_for_event(self._wake, ROUND_S if waits else IDLE_S)
            if waits:
                await asyncio.sleep(ROUND_S)
            self._wake.clear()

    async def _remove(self, key: str) -> None:
        held = self._fleet.networks.at(key)
        if held is None or not held.record.deleting or not self._due(held):
            return
        try:
            held = await self._writes.replace(held, held.record)
            async with asyncio.timeout(DELIVERY_S):
                await self._delivered(held.revision)
            await self._settle(held)
        except ConflictError:
            return  # another controller was first
        except (BusError, VirtbusError, TimeoutError) as error:
            extra = {"code": "network_remains", "uid": held.record.uid}
            log.info("removal of %s will be retried: %s", held.record.name, error, extra=extra)

    async def _delivered(self, revision: int) -> None:
        """Wait until the watch has delivered the entries of networks up to this revision."""
        while not self._fleet.networks.delivered(revision):
            await wait_for_event(self._wake, POLL_S)
            self._wake.clear()

    def _due(self, held: StoredNetwork) -> bool:
        mark, now_s = (held.record.uid, held.record.deleting_since_ns), _now_s()
        return now_s - self._marked_s.setdefault(mark, now_s) >= WAIT_S

    async def _settle(self, held: StoredNetwork) -> None:
        """Purge the network, or take back its mark if VMs use it.

        Raises ConflictError, BusError.
        """
        record, users = held.record, users_of(held.record.uid, self._fleet.vms.values())
        if users:
            held = await self._writes.replace(held, kept(record, users))
            self._fleet.networks.apply(held)
            kind, revision, message = EventKind.NETWORK_KEPT, held.revision, held.record.kept_for
        else:
            revision = await self._writes.end(held)
            kind, message = EventKind.NETWORK_DELETED, ""
        self._events.named(kind, record, revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": record.uid}
        log.info("%s %s/%s", kind, record.namespace, record.name, extra=extra)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
