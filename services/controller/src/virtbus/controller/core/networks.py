"""Caches the networks of the fleet, and finds the VMs that use them (ADR 0055)."""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network

from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.vm_keys import StoredNetwork, StoredVm
from virtbus.schemas.address_pool import Net
from virtbus.schemas.network_object import ON_SEGMENTS, NetworkKind, NetworkRecord, NetworkSpec
from virtbus.schemas.records import read_network
from virtbus.schemas.subjects import network_record

_ON_HOSTS = frozenset({NetworkKind.NAT, NetworkKind.ROUTED, NetworkKind.OVERLAY})
"""Kinds of networks to whose subnets the hosts have routes. These subnets must not overlap."""


class Networks(NamedRecords[NetworkRecord]):
    """The networks by key."""

    def __init__(self) -> None:
        super().__init__(read_network, lambda one: network_record(one.namespace, one.name))
        self.deleting: set[str] = set()
        """The keys of networks that are being deleted."""

    def forget(self, key: str) -> None:
        """Drop a network that was purged, or that a complete list does not contain."""
        self.deleting.discard(key)
        super().forget(key)

    def _store(self, key: str, held: StoredNetwork) -> None:
        super()._store(key, held)
        if held.record.deleting:
            self.deleting.add(key)

    # --- answers --------------------------------------------------------------------------
    def get(self, namespace: str, name: str) -> StoredNetwork | None:
        return self.at(network_record(namespace, name))

    def delivered(self, revision: int) -> bool:
        """Return True if the watch has delivered all messages on networks up to the revision."""
        return self._seen >= revision

    def subnets(self, link: str = "") -> Iterator[tuple[Net, NetworkRecord]]:
        """Yield the subnets to which hosts have routes, each with its network.

        With a `link` from `link_of`, yield the subnets of networks on that segment instead.
        """
        for held in self._stored.values():
            for _, subnet in subnets_of(held.record) if link_of(held.record.spec) == link else ():
                yield subnet, held.record


def subnets_of(record: NetworkRecord) -> list[tuple[str, Net]]:
    """Return the subnets that must not overlap, with field paths; [] for kinds without such."""
    alone = record.spec.kind in _ON_HOSTS | ON_SEGMENTS
    return list(every_subnet(record.spec)) if alone else []


def link_of(spec: NetworkSpec) -> str:
    """Return a text that identifies the network's segment; empty for kinds without a segment."""
    return f"{spec.link} {spec.vlan or ''}" if spec.kind in ON_SEGMENTS else ""


def every_subnet(spec: NetworkSpec) -> Iterator[tuple[str, Net]]:
    """Yield the subnets of a network, each with its field path."""
    if spec.subnet is not None:
        yield "spec.subnet", IPv4Network(spec.subnet)
    if spec.subnet6 is not None:
        yield "spec.subnet6", IPv6Network(spec.subnet6)
    for node, text in spec.subnets.items():
        yield f"spec.subnets.{node}", IPv4Network(text)
    for node, text in spec.subnets6.items():
        yield f"spec.subnets6.{node}", IPv6Network(text)


def users_by_network(vms: Mapping[str, StoredVm]) -> dict[str, list[str]]:
    """Return the VMs that use each network, as `<namespace>/<name>`, by the network's uid."""
    found: dict[str, list[str]] = {}
    for held in vms.values():
        for uid in {target.uid for target in held.record.network_targets.values()}:
            found.setdefault(uid, []).append(f"{held.record.namespace}/{held.record.name}")
    return found


def users_of(uid: str, vms: Iterable[StoredVm]) -> list[str]:
    """Return the VMs that use one network, as `<namespace>/<name>`."""
    return sorted(
        f"{held.record.namespace}/{held.record.name}"
        for held in vms
        if any(target.uid == uid for target in held.record.network_targets.values())
    )
