"""Caches the security groups, and derives the values with which nodes apply them (ADR 0069).

A node gets one value for each group that selects a VM on the node. The value has the group's rules,
and the addresses of members of the groups that these rules name.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.vm_keys import StoredGroup, StoredVm
from virtbus.schemas.bounds import NODE_GROUP
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.network_object import NetworkKind, NetworkTarget, PoolScope
from virtbus.schemas.records import of_node_group, read_node_group, read_security_group
from virtbus.schemas.security_group import (
    ANYWHERE,
    NodeGroup,
    SecurityGroupRecord,
    selects,
)
from virtbus.schemas.subjects import node_group, security_group
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus

Statuses = Mapping[tuple[str, str], tuple[VmStatus, int]]
"""The statuses of VMs with their revisions, by node and uid."""
Places = dict[str, set[str]]
"""A VM's addresses by place, as in `NodeGroup.peers`. A place is a network, or ANYWHERE for all
networks. Within its place, each address belongs to one guest only."""

_OF_ONE_HOST = frozenset({NetworkKind.NAT, NetworkKind.ISOLATED, NetworkKind.CNI})
_ADDRESS_BYTES = 48
"""The largest size of an address in JSON."""
_PLACE = 2
"""The name of a place counts as this many addresses, because it needs as many bytes."""
ADDRESSES_MAX = (NODE_GROUP.written_bytes - 132 * 1024) // _ADDRESS_BYTES
"""Limit of addresses in the value of one group for one node. Further addresses are left out, so
rules do not give access to their guests."""


class SecurityGroups(NamedRecords[SecurityGroupRecord]):
    """The groups by key, and the values for nodes on the bus."""

    def __init__(self) -> None:
        super().__init__(read_security_group, lambda one: security_group(one.namespace, one.name))
        self.on_nodes: dict[str, tuple[NodeGroup | None, int]] = {}
        """By key: the stored value (None if it is unreadable), and its revision."""
        self._by_namespace: dict[str, dict[str, StoredGroup]] = {}

    # --- input ----------------------------------------------------------------------------
    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a group, or a value for a node; raise VirtbusError if it is unreadable."""
        if not of_node_group(key):
            super().put(key, value, revision)
            return
        if self.on_nodes.get(key, (None, 0))[1] < revision:
            self.on_nodes[key] = (None, revision)
            self.on_nodes[key] = (read_node_group(key, value), revision)

    def purge(self, key: str, revision: int) -> None:
        if not of_node_group(key):
            super().purge(key, revision)
        elif self.on_nodes.get(key, (None, 0))[1] < revision:
            self.on_nodes.pop(key, None)

    def forget(self, key: str) -> None:
        """Drop a group or a value that was purged, or that a complete list does not contain."""
        self.on_nodes.pop(key, None)
        held = self.at(key)
        if held is not None:
            self._by_namespace[held.record.namespace].pop(key, None)
        super().forget(key)

    def _store(self, key: str, held: StoredGroup) -> None:
        super()._store(key, held)
        self._by_namespace.setdefault(held.record.namespace, {})[key] = held

    # --- answers --------------------------------------------------------------------------
    def all_keys(self) -> set[str]:
        """Return the keys of all groups, and of all values for nodes."""
        return {*self.keys(), *self.on_nodes}

    @property
    def seen(self) -> int:
        """Return the highest revision that the watch delivered since its complete list began."""
        return self._seen

    def get(self, namespace: str, name: str) -> StoredGroup | None:
        return self.at(security_group(namespace, name))

    def of_namespace(self, namespace: str) -> Iterable[StoredGroup]:
        return self._by_namespace.get(namespace, {}).values()

    def of_vm(self, record: VmRecord) -> Iterator[SecurityGroupRecord]:
        for held in self.of_namespace(record.namespace):
            if selects(held.record, record):
                yield held.record

    def missing(self, names: Iterable[str], namespace: str) -> list[str]:
        """Return the `names` that no group of the namespace has."""
        return [name for name in names if self.get(namespace, name) is None]


class _Peers(NamedTuple):
    """The addresses of a group's members by place, sorted, and limited to ADDRESSES_MAX."""

    everywhere: Mapping[str, tuple[str, ...]]
    """The addresses that guests on all nodes see."""
    near: Mapping[str, Places]
    """By node: the addresses that only guests on that node see."""

    def on_node(self, node: str) -> Mapping[str, tuple[str, ...]]:
        """Return the members' addresses that guests on a node may see."""
        near = self.near.get(node)
        if near is None:
            return self.everywhere
        merged = {
            place: tuple(sorted(near[place].union(self.everywhere.get(place, ()))))
            for place in near
        }
        found = {**self.everywhere, **merged}
        return {place: found[place][:ADDRESSES_MAX] for place in sorted(found)}


class Membership:
    """The members of the groups at one time. The addresses of each VM are computed once."""

    def __init__(self, vms: Iterable[StoredVm], statuses: Statuses, groups: SecurityGroups) -> None:
        """Keep only the VMs of namespaces that have a group."""
        self._groups = groups
        self._statuses = statuses
        self._vms: dict[str, list[VmRecord]] = {}
        for held in vms:
            if groups.count(held.record.namespace):
                self._vms.setdefault(held.record.namespace, []).append(held.record)
        self._members: dict[str, list[VmRecord]] = {}
        self._addresses: dict[str, tuple[Places, Places]] = {}
        """By uid of a VM: its addresses for guests on its node, and for guests on other nodes."""
        self._peers: dict[str, _Peers] = {}
        self._node = ""
        self._on_node: dict[str, Mapping[str, tuple[str, ...]]] = {}
        """By uid of a group: the members' addresses that guests on `_node` may see."""

    def of(self, group: SecurityGroupRecord) -> list[VmRecord]:
        found = self._members.get(group.uid)
        if found is None:
            there = self._vms.get(group.namespace, ())
            found = [vm for vm in there if selects(group, vm)]
            self._members[group.uid] = found
        return found

    def gathered(self, groups: Collection[SecurityGroupRecord]) -> Iterator[None]:
        """Find the members of the groups, and the addresses of the groups that their rules name.

        This generator yields after each short step, so that the caller can do other work.
        """
        for group in groups:
            self.of(group)
            yield
        for group in groups:
            for name in group.spec.peers:
                held = self._groups.get(group.namespace, name)
                if held is not None and held.record.uid not in self._peers:
                    self._peers_in(held.record)
                    yield

    def wanted(self) -> Iterator[tuple[str, NodeGroup]]:
        """Yield the wanted keys and values: one for each group and each node with a member."""
        by_node: dict[str, list[SecurityGroupRecord]] = {}
        for held in self._groups.listed(None):
            for node in {vm.node for vm in self.of(held.record)} - {UNPLACED}:
                by_node.setdefault(node, []).append(held.record)
        for node, groups in sorted(by_node.items()):
            for group in groups:
                yield node_group(node, group.namespace, group.name), self.on_node(group, node)

    def on_node(self, group: SecurityGroupRecord, node: str) -> NodeGroup:
        """Return the value with which a node's netd applies a group."""
        if node != self._node:
            self._node = node
            self._on_node.clear()
        left = ADDRESSES_MAX
        peers: dict[str, dict[str, tuple[str, ...]]] = {}
        for name in group.spec.peers:
            peers[name] = {}
            held = self._groups.get(group.namespace, name)
            if held is None or left <= _PLACE:
                continue
            for place, addresses in self._seen_of(held).items():
                some = addresses[: max(left - _PLACE, 0)]
                if some:
                    left -= _PLACE + len(some)
                    peers[name][place] = some
        return NodeGroup(
            uid=group.uid,
            namespace=group.namespace,
            name=group.name,
            owner=group.owner,
            generation=group.generation,
            spec=group.spec,
            peers=peers,
        )

    def _seen_of(self, held: StoredGroup) -> Mapping[str, tuple[str, ...]]:
        """Return the addresses of a group's members that guests on `_node` may see."""
        found = self._on_node.get(held.record.uid)
        if found is None:
            found = self._peers_in(held.record).on_node(self._node)
            self._on_node[held.record.uid] = found
        return found

    def _peers_in(self, group: SecurityGroupRecord) -> _Peers:
        found = self._peers.get(group.uid)
        if found is not None:
            return found
        everywhere: Places = {}
        near: dict[str, Places] = {}
        for vm in self.of(group):
            here, elsewhere = self._addresses_of(vm)
            for place, addresses in elsewhere.items():
                everywhere.setdefault(place, set()).update(addresses)
            for place, addresses in here.items():
                if more := addresses - elsewhere.get(place, set()):
                    near.setdefault(vm.node, {}).setdefault(place, set()).update(more)
        sorted_ = {
            place: tuple(sorted(everywhere[place])[:ADDRESSES_MAX]) for place in sorted(everywhere)
        }
        self._peers[group.uid] = _Peers(sorted_, near)
        return self._peers[group.uid]

    def _addresses_of(self, vm: VmRecord) -> tuple[Places, Places]:
        found = self._addresses.get(vm.uid)
        if found is None:
            status, _ = self._statuses.get((vm.node, vm.uid), (None, 0))
            found = _places(vm, status, here=True), _places(vm, status, here=False)
            self._addresses[vm.uid] = found
        return found


def _places(vm: VmRecord, status: VmStatus | None, *, here: bool) -> Places:
    """Return a VM's addresses that guests may see; `here` is True for guests on its node."""
    places: Places = {}
    networks = {one.name: one.network for one in vm.spec.networks}
    own = set(networks.values())
    for nic, claims in vm.address_claims.items():
        network = networks.get(nic, "")
        place = _place(network, vm.network_targets.get(network), here=here)
        if place:
            places.setdefault(place, set()).update(claims.addresses)
    for seen in status.interfaces if status is not None else ():
        if seen.network not in own:
            continue  # a status must not add addresses on networks that are not in the VM's spec
        place = _place(seen.network, vm.network_targets.get(seen.network), here=here)
        if place:
            found = {one.partition("/")[0] for one in seen.addresses}
            places.setdefault(place, set()).update(
                one for one in found if one.isascii() and len(one) < _ADDRESS_BYTES
            )
    return places


def _place(network: str, target: NetworkTarget | None, *, here: bool) -> str:
    """Return the place of an interface's addresses; empty if another guest may have them, too.

    `here` is True if the addresses are for guests on the VM's own node. A network without `target`
    is the built-in network or a CNI network. On other nodes, guests may have the same addresses on
    the built-in network, on CNI networks, and on networks with a pool for each host.
    """
    if target is None:
        return network if here else ""
    if target.spec.kind is NetworkKind.ROUTED:
        return ANYWHERE
    if not here and target.spec.kind in _OF_ONE_HOST and target.spec.pool is not PoolScope.FLEET:
        return ""
    return target.uid
