"""Caches the security groups, and derives what the nodes of their members need (ADR 0069).

A node gets one value for each group that selects a VM of it. The value has the group's rules, and
the addresses of the groups that these rules name.
"""

from collections.abc import Iterable, Iterator, Mapping

from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.vm_keys import StoredGroup, StoredVm
from virtbus.schemas.bounds import NODE_GROUP
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.network_object import BUILT_IN, NetworkKind, NetworkTarget, PoolScope
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
"""Addresses by the place where they mean this VM, as in `NodeGroup.peers`."""

_OF_ONE_HOST = frozenset({NetworkKind.NAT, NetworkKind.ISOLATED})
_ADDRESS_BYTES = 48
"""The bytes of an address in JSON, at most."""
ADDRESSES_MAX = (NODE_GROUP.written_bytes - 132 * 1024) // _ADDRESS_BYTES
"""The addresses in the value of one group on one node. Further ones are left out: they have no
access."""


class SecurityGroups(NamedRecords[SecurityGroupRecord]):
    """The groups by key, and the values of nodes as the bus has them."""

    def __init__(self) -> None:
        super().__init__(read_security_group, lambda one: security_group(one.namespace, one.name))
        self.on_nodes: dict[str, tuple[NodeGroup | None, int]] = {}
        """By key: the stored value with its revision; None if it cannot be read."""
        self._by_namespace: dict[str, dict[str, StoredGroup]] = {}

    # --- input ----------------------------------------------------------------------------
    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a group, or the value of a node; raises VirtbusError if it cannot be read."""
        if not of_node_group(key):
            super().put(key, value, revision)
            return
        if self.on_nodes.get(key, (None, 0))[1] < revision:
            self.on_nodes[key] = (None, revision)
            self.on_nodes[key] = (read_node_group(key, value), revision)

    def purge(self, key: str, revision: int) -> None:
        """Process a purge marker of a group, or of the value of a node."""
        if not of_node_group(key):
            super().purge(key, revision)
        elif self.on_nodes.get(key, (None, 0))[1] < revision:
            self.on_nodes.pop(key, None)

    def forget(self, key: str) -> None:
        """Drop a group or a value that a complete list does not contain."""
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
        """Return the keys of all groups, and of the values of nodes."""
        return {*self.keys(), *self.on_nodes}

    @property
    def seen(self) -> int:
        """Return the highest revision of a group that the watch has delivered."""
        return self._seen

    def get(self, namespace: str, name: str) -> StoredGroup | None:
        """Return a group by name."""
        return self.at(security_group(namespace, name))

    def of_namespace(self, namespace: str) -> Iterable[StoredGroup]:
        """Return the groups of a namespace."""
        return self._by_namespace.get(namespace, {}).values()

    def of_vm(self, record: VmRecord) -> Iterator[SecurityGroupRecord]:
        """Yield the groups that select a VM."""
        for held in self.of_namespace(record.namespace):
            if selects(held.record, record):
                yield held.record

    def missing(self, names: Iterable[str], namespace: str) -> list[str]:
        """Return those of `names` that no group of the namespace has."""
        return [name for name in names if self.get(namespace, name) is None]


class Membership:
    """The members of the groups at one moment."""

    def __init__(self, vms: Iterable[StoredVm], statuses: Statuses, groups: SecurityGroups) -> None:
        """Only the VMs of namespaces with a group are read."""
        self._groups = groups
        self._statuses = statuses
        self._vms: dict[str, list[VmRecord]] = {}
        for held in vms:
            if groups.count(held.record.namespace):
                self._vms.setdefault(held.record.namespace, []).append(held.record)
        self._members: dict[str, list[VmRecord]] = {}

    def of(self, group: SecurityGroupRecord) -> list[VmRecord]:
        """Return the VMs that a group selects."""
        found = self._members.get(group.uid)
        if found is None:
            there = self._vms.get(group.namespace, ())
            found = [vm for vm in there if selects(group, vm)]
            self._members[group.uid] = found
        return found

    def wanted(self) -> dict[str, NodeGroup]:
        """Return the value of each node and group that the bus should have, by key."""
        found: dict[str, NodeGroup] = {}
        for held in self._groups.listed(None):
            group = held.record
            for node in {vm.node for vm in self.of(group)} - {UNPLACED}:
                found[node_group(node, group.namespace, group.name)] = self.on_node(group, node)
        return found

    def on_node(self, group: SecurityGroupRecord, node: str) -> NodeGroup:
        """Return a group as the netd of a node applies it."""
        left = ADDRESSES_MAX
        peers: dict[str, dict[str, tuple[str, ...]]] = {}
        for name in group.spec.peers:
            held = self._groups.get(group.namespace, name)
            places: Places = {}
            for vm in self.of(held.record) if held is not None else ():
                seen = self._statuses.get((vm.node, vm.uid))
                _add(places, vm, seen[0] if seen is not None else None, here=vm.node == node)
            peers[name] = {}
            for place in sorted(places):
                some = tuple(sorted(places[place])[:left])
                left -= len(some)
                if some:
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


def _add(places: Places, vm: VmRecord, status: VmStatus | None, *, here: bool) -> None:
    """Add the addresses of a VM that the guests of a node may see; `here`: it is on that node."""
    networks = {one.name: one.network for one in vm.spec.networks}
    for nic, claims in vm.address_claims.items():
        network = networks.get(nic, "")
        place = _place(network, vm.network_targets.get(network), here=here)
        if place:
            places.setdefault(place, set()).update(claims.addresses)
    for seen in status.interfaces if status is not None else ():
        place = _place(seen.network, vm.network_targets.get(seen.network), here=here)
        if place:
            found = {one.partition("/")[0] for one in seen.addresses}
            places.setdefault(place, set()).update(
                one for one in found if len(one) < _ADDRESS_BYTES
            )


def _place(network: str, target: NetworkTarget | None, *, here: bool) -> str:
    """Return the place of an interface's addresses; empty if another guest may have them there.

    Each host has the same subnet of the built-in network, and of one whose pool is of the host.
    """
    if target is None:
        return network if here or network != BUILT_IN else ""
    if target.spec.kind is NetworkKind.ROUTED:
        return ANYWHERE
    if not here and target.spec.kind in _OF_ONE_HOST and target.spec.pool is not PoolScope.FLEET:
        return ""
    return target.uid
