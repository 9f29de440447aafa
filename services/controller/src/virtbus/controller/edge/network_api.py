"""Handles `virtbus.api.v1.network.*`, the requests about network objects."""

import logging
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple

from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.ports import Bus, Request
from virtbus.controller.core import network_changes, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.named_creates import refuse_other
from virtbus.controller.core.network_hosts import refuse_impossible, refuse_mtu
from virtbus.controller.core.networks import users_by_network, users_of
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredNetwork
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.network_api import (
    NetworkCreate,
    NetworkCreated,
    NetworkDelete,
    NetworkList,
    NetworkObjectPage,
    NetworkObjectView,
    NetworkRef,
    NetworkUpdate,
)
from virtbus.schemas.network_object import NetworkKind, NetworkRecord
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class NetworkLimits(NamedTuple):
    """The quota of networks, and the subnets that clients may choose from."""

    quota: Quota
    client_subnets: tuple[IPv4Network | IPv6Network, ...] = ()


class NetworkApi:
    """The handlers of `network.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        storage: BusStorageGuard,
        limits: NetworkLimits,
    ) -> None:
        self._fleet = fleet
        self._events = events
        self._storage = storage
        self._limits = limits
        self._writes = NetworkWrites(bus)
        self._sources = bus.sources

    async def create(self, request: Request) -> NetworkCreated:
        want = validate(NetworkCreate, request.data)
        free = self._limits.client_subnets
        network_changes.refuse_spec(want.name, want.spec)
        network_changes.refuse_client(want.namespace, want.spec, request.account, free)
        record = NetworkRecord(
            uid=want.uid or self._sources.uuid7(),
            namespace=want.namespace,
            name=want.name,
            labels=dict(want.labels),
            spec=want.spec,
            created_ns=self._sources.time_ns(),
        )
        if want.spec.kind is NetworkKind.OVERLAY:
            vni = network_changes.choose_vni(record.uid, self._fleet.networks)
            record = record.model_copy(update={"vni": vni})
        if self._fleet.networks.get(want.namespace, want.name) is None:
            refuse_impossible(want.spec, self._nodes())
            network_changes.refuse_overlap(record, self._fleet.networks, self._nodes())
            self._refuse_more(want.namespace)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        self._fleet.networks.apply(held)
        if created:
            self._tell(EventKind.NETWORK_CREATED, held, f"{record.namespace}/{record.name}")
        return NetworkCreated(network=self._show(held), created=created)

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new network would exceed a quota, or the bus space kept free for VMs."""
        self._storage.refuse_create("networks", OBJECTS_UNTIL_FULL)
        if why := self._limits.quota.full(self._fleet.networks, namespace, "networks"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "network_quota", message, after_ms=10_000)

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> NetworkObjectView:
        return self._show(await self._find(validate(NetworkRef, request.data)))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(NetworkList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        users, nodes, labels = users_by_network(self._fleet.vms), self._nodes(), want.labels.items()
        found = (
            (
                "/".join(held.order()),
                network_changes.shown(
                    held,
                    sorted(users.get(held.record.uid, ())),
                    nodes,
                    self._fleet.addresses.count(held.record.uid),
                ),
            )
            for held in self._fleet.networks.listed(want.namespace)
            if held.order() > after and labels <= held.record.labels.items()
        )
        return pages.answer(NetworkObjectPage, found, request, most=want.limit)

    # --- change ---------------------------------------------------------------------------
    async def update(self, request: Request) -> NetworkObjectView:
        want = validate(NetworkUpdate, request.data)
        network_changes.refuse_client(want.namespace, None, request.account, ())

        def change(record: NetworkRecord) -> NetworkRecord:
            after = network_changes.updated(record, want)
            if after.spec.mtu != record.spec.mtu:
                refuse_mtu(after.spec, self._nodes())
            return after

        return self._show(await self._change(want, change, EventKind.NETWORK_UPDATED, request))

    async def delete(self, request: Request) -> NetworkObjectView:
        """Mark a network that no VM uses as deleting.

        The leader task `NetworkRemovals` purges the network, or takes back the mark (ADR 0055).
        """
        want = validate(NetworkDelete, request.data)
        network_changes.refuse_client(want.namespace, None, request.account, ())
        now_ns = self._sources.time_ns()

        def change(record: NetworkRecord) -> NetworkRecord:
            return network_changes.deleting(record, self._users(record.uid), now_ns)

        try:
            held = await self._change(want, change, EventKind.NETWORK_DELETING, request)
        except UnreadableValueError as error:
            held = await self._mend(want, error, now_ns)
        return self._show(held)

    async def _mend(
        self, want: NetworkDelete, error: UnreadableValueError, now_ns: int
    ) -> StoredNetwork:
        """Replace an unreadable record by a record that marks the network as deleting."""
        known = self._fleet.networks.get(want.namespace, want.name)
        users = [
            f"{vm.record.namespace}/{vm.record.name}"
            for vm in self._fleet.vms.values()
            for one in vm.record.network_targets.values()
            if (one.namespace, one.name) == (want.namespace, want.name)
        ]
        last, uid = known.record if known else None, self._sources.uuid7()
        record = network_changes.mended(want, last, users, uid, now_ns)
        held = await self._writes.mend(error, record)
        self._tell(EventKind.NETWORK_DELETING, held, "its record could not be read")
        return held

    async def _change(
        self,
        want: NetworkRef,
        change: Callable[[NetworkRecord], NetworkRecord],
        kind: EventKind,
        request: Request,
    ) -> StoredNetwork:
        held, changed = await self._writes.change(lambda: self._find(want), change, request)
        if changed:
            self._tell(kind, held, "")
        return held

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: NetworkRef) -> StoredNetwork:
        """Return the network, read from the stream's leader.

        Raises:
            VirtbusError: 404: the network does not exist. 409: its uid differs from the requested.
        """
        held = await self._writes.latest(want.namespace, want.name)
        if held is None:
            raise network_changes.not_found(want)
        refuse_other(want.uid, held.record, "network")
        return held

    def _users(self, uid: str) -> Sequence[str]:
        return users_of(uid, self._fleet.vms.values())

    def _nodes(self) -> dict[str, NodeRecord]:
        return {name: seen.record for name, seen in self._fleet.nodes.items()}

    def _tell(self, kind: EventKind, held: StoredNetwork, message: str) -> None:
        self._fleet.networks.apply(held)
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)

    def _show(self, held: StoredNetwork) -> NetworkObjectView:
        uid = held.record.uid
        given = self._fleet.addresses.count(uid)
        return network_changes.shown(held, self._users(uid), self._nodes(), given)
