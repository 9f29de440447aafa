"""Networks: named objects that a VM's interfaces refer to (ADR 0055)."""

from collections.abc import Iterator
from enum import StrEnum
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from operator import not_
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.address_pool import AddressPool, AddressRange, pool_of
from virtbus.schemas.ids import UNPLACED, Id, Uid, check_id
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.nic import MTU_MAX, MTU_MIN
from virtbus.schemas.overlay import VNI_MAX
from virtbus.schemas.quantity import Count

EVERYWHERE = UNPLACED
"""The namespace of networks that VMs of all namespaces may use. This namespace has no VMs."""
BUILT_IN = "default"
"""The network that each node has without a network object. No object has this name."""
BRIDGE_MTU = 1500
"""The MTU of a network that virtbus bridges, if the network object has no MTU."""
SUBNETS_MAX = 64
CONFIG_MAX = 8192
DNS_MAX = 3
RANGES_MAX = 32
_LONGEST_PREFIX = 29
_LONGEST_PREFIX6 = 120


class NetworkKind(StrEnum):
    """The way in which a network connects its guests."""

    NAT = "nat"
    """Guests reach each other on their host, and the outside under the host's address."""
    ROUTED = "routed"
    """As nat, but with the guests' own addresses: the outside needs a route to each subnet."""
    ISOLATED = "isolated"
    """Guests reach other guests of the network on their host, and nothing else."""
    OVERLAY = "overlay"
    """As nat, and guests of several hosts reach each other, by tunnels between the hosts."""
    BRIDGE = "bridge"
    """Guests are on the segment of an existing Linux bridge of the host."""
    MACVTAP = "macvtap"
    """Guests are on the segment of an interface of the host, without a bridge."""
    CNI = "cni"
    """Plugins of a CNI conflist connect the guests. The node or the network object has the
    conflist."""


class PoolScope(StrEnum):
    """The part of the fleet in which each address of a network is given only once."""

    HOST = "host"
    """Each host gives the addresses to its own VMs, so two hosts may give the same address."""
    FLEET = "fleet"
    """Controllers claim each address on the bus before the VM's commit. A VM that moves keeps its
    addresses."""


ON_SEGMENTS = frozenset({NetworkKind.BRIDGE, NetworkKind.MACVTAP})
"""Kinds whose guests are on a segment. If the network has no subnet, the segment's DHCP server
gives them addresses."""


SPANNING = ON_SEGMENTS | {NetworkKind.OVERLAY}
"""Kinds that connect guests of several hosts. All addresses of their subnets are claimed."""


class MacvtapMode(StrEnum):
    """The way in which guests on one interface of a host reach each other."""

    BRIDGE = "bridge"
    """Guests reach each other directly."""
    VEPA = "vepa"
    """Guests reach each other by an external switch, which sends their frames back."""
    PRIVATE = "private"
    """Guests do not reach each other."""
    PASSTHRU = "passthru"
    """There is one guest only, which has the interface to itself."""


def _subnet(text: str) -> str:
    network = IPv4Network(text)
    if network.prefixlen > _LONGEST_PREFIX:
        msg = f"must be /{_LONGEST_PREFIX} or larger"
        raise ValueError(msg)
    first = network.network_address
    if first.is_loopback or first.is_link_local or first.is_multicast or first.is_unspecified:
        msg = "must be a unicast subnet, such as 10.0.0.0/8, 172.16.0.0/12 and 192.168.0.0/16"
        raise ValueError(msg)
    return str(network)


def _subnet6(text: str) -> str:
    network = IPv6Network(text)
    if network.prefixlen > _LONGEST_PREFIX6:
        msg = f"must be /{_LONGEST_PREFIX6} or larger, such as fd00:1:2:3::/64"
        raise ValueError(msg)
    first = network.network_address
    if first.is_multicast or first.is_link_local or first.is_loopback or first.is_unspecified:
        msg = "must be a unicast subnet that is not link-local, such as fd00:1:2:3::/64"
        raise ValueError(msg)
    if first.ipv4_mapped is not None:
        msg = "must not be IPv4-mapped; give the IPv4 subnet in `subnet`"
        raise ValueError(msg)
    return str(network)


def _address6(text: str) -> str:
    address = IPv6Address(text)
    if address.scope_id is not None or address.is_multicast or address.is_loopback:
        msg = "must be an IPv6 address of the subnet, or link-local on a segment"
        raise ValueError(msg)
    return str(address)


def _address(text: str) -> str:
    address = IPv4Address(text)
    if address.is_unspecified or address.is_multicast or address.is_loopback:
        msg = "must be an IPv4 address that guests can reach"
        raise ValueError(msg)
    return str(address)


def _server(text: str) -> str:
    return _address6(text) if ":" in text else _address(text)


def _scope(text: str) -> str:
    return text if text == EVERYWHERE else check_id(text)


Subnet = Annotated[str, StringConstraints(max_length=18), AfterValidator(_subnet)]
Ipv4 = Annotated[str, StringConstraints(max_length=15), AfterValidator(_address)]
Subnet6 = Annotated[str, StringConstraints(max_length=43), AfterValidator(_subnet6)]
Ipv6 = Annotated[str, StringConstraints(max_length=39), AfterValidator(_address6)]
Server = Annotated[str, StringConstraints(max_length=39), AfterValidator(_server)]
LinkName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}$")]
"""The name of a link of a host, such as `br-lan`."""
NetworkScope = Annotated[str, StringConstraints(max_length=63), AfterValidator(_scope)]


class NetworkSpec(StrictModel):
    """The specification of a network. Only `dns`, `mtu` and `protected` can change later."""

    kind: NetworkKind
    subnet: Subnet | None = None
    """The guests' addresses, the same on each host. If a network on a segment has a subnet, netd
    answers DHCP."""
    subnets: dict[Id, Subnet] = Field(default_factory=dict, max_length=SUBNETS_MAX)
    """For `routed`: the subnet of each node. A node without a subnet takes no VMs."""
    gateway: Ipv4 | None = None
    """For `nat` and `overlay`: the host's address in the subnet; default: the first address.

    On a segment: the address of the segment's router; default: none.
    """
    subnet6: Subnet6 | None = None
    """As `subnet`, for IPv6. With both subnets, guests get both addresses. On a segment, `subnet`
    may be left out."""
    subnets6: dict[Id, Subnet6] = Field(default_factory=dict, max_length=SUBNETS_MAX)
    """As `subnets`, for IPv6."""
    gateway6: Ipv6 | None = None
    """As `gateway`, for IPv6. On a segment: the router's link-local address."""
    ranges: tuple[AddressRange, ...] = Field((), max_length=RANGES_MAX)
    """The ranges, of both versions, from which addresses are chosen; empty: the whole subnet."""
    excluded: tuple[AddressRange, ...] = Field((), max_length=RANGES_MAX)
    """Addresses that no interface gets, not even on request."""
    pool: PoolScope | None = None
    """For `nat` and `isolated`. None means `host`."""
    dns: tuple[Server, ...] = Field((), max_length=DNS_MAX)
    """Name servers for names that are not names of VMs.

    Empty: the node's servers, or none for `isolated`.

    IPv6 servers are allowed only if the guests themselves ask them: on segments, and for the kinds
    `isolated` and `cni`.
    """
    mtu: Count | None = Field(None, ge=MTU_MIN, le=MTU_MAX)
    """None means 1500 (less in tunnels); for `cni`, the MTU of the plugins; for kinds with `link`,
    the MTU of the link."""
    link: LinkName | None = None
    """For `bridge` and `macvtap`: the host's Linux bridge or interface. A node must have this link,
    and allow its use."""
    vlan: Count | None = Field(None, ge=1, le=4094)
    """For `bridge`: the VLAN of the guests' frames, which the guests see untagged."""
    mode: MacvtapMode | None = None
    """For `macvtap`; default: `bridge`."""
    conflist: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = None
    """For `cni`: the name of a conflist that the node has."""
    config: Annotated[str, StringConstraints(max_length=CONFIG_MAX)] | None = None
    """For `cni`: a conflist (JSON) in the object; a node must allow each of its plugins."""
    share_names: bool = Field(False, exclude_if=not_)
    """If True, guests on the network can resolve the names of all VMs on the network, also of VMs
    in other namespaces."""
    default_deny: bool = Field(False, exclude_if=not_)
    """If True, guests have only the connections that a rule of a security group allows."""
    protected: bool = False
    """If True, a delete is refused."""

    @property
    def claimed(self) -> bool:
        """Return True if the network's addresses are claimed on the bus, each once in the fleet."""
        has_pool = self.subnet is not None or self.subnet6 is not None
        return has_pool and (self.kind in SPANNING or self.pool is PoolScope.FLEET)

    def pools(self, node: str = "") -> list[AddressPool]:
        """Return the pools of a network on a node: of IPv4, IPv6, both, or neither."""
        if self.kind in ON_SEGMENTS:
            return list(self._pools_on_segment())
        gateways = (self.gateway_on(node), self.gateway6_on(node))
        return [
            pool_of(one.network, one.ip, self.ranges, self.excluded)
            for one in gateways
            if one is not None
        ]

    def _pools_on_segment(self) -> Iterator[AddressPool]:
        """Yield the pools of a network on a segment.

        Its IPv4 gateway is optional. Its IPv6 gateway is link-local, so it is in no subnet.
        """
        if self.subnet is not None:
            gateway = IPv4Address(self.gateway) if self.gateway is not None else None
            yield pool_of(IPv4Network(self.subnet), gateway, self.ranges, self.excluded)
        if self.subnet6 is not None:
            yield pool_of(IPv6Network(self.subnet6), None, self.ranges, self.excluded)

    def gateway6_on(self, node: str) -> IPv6Interface | None:
        """Return the IPv6 gateway with its subnet's prefix length; None without such a subnet."""
        subnet = self.subnets6.get(node) if self.kind is NetworkKind.ROUTED else self.subnet6
        if subnet is None:
            return None
        network = IPv6Network(subnet)
        address = IPv6Address(self.gateway6) if self.gateway6 is not None else network[1]
        return IPv6Interface((address, network.prefixlen))

    def gateway_on(self, node: str) -> IPv4Interface | None:
        """Return the IPv4 gateway with its subnet's prefix length; None without such a subnet."""
        subnet = self.subnets.get(node) if self.kind is NetworkKind.ROUTED else self.subnet
        if subnet is None:
            return None
        network = IPv4Network(subnet)
        address = IPv4Address(self.gateway) if self.gateway is not None else network[1]
        return IPv4Interface((address, network.prefixlen))


class NetworkTarget(LenientModel):
    """A network as the record of a VM describes it, because nodes read only their own keys."""

    uid: Uid
    namespace: NetworkScope
    name: Id
    generation: int = 1
    spec: NetworkSpec
    vni: int = 0
    """For `overlay`: the number of the network in its tunnels."""


class NetworkRecord(LenientModel):
    """`$KV.vm._net.<namespace>.<token>`: a network. The key is also the claim of its name.

    A delete leaves a purge marker with the uid for a day. So a late create of that uid is refused.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: NetworkScope
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    spec: NetworkSpec
    deleting: bool = False
    deleting_since_ns: int = 0
    """Unix time of the delete request; 0 if there is none."""
    kept_for: str = ""
    """The reason why the last delete was reverted; empty if no delete was reverted."""
    generation: int = Field(1, ge=1)
    """Rises with every change of the spec."""
    created_ns: int
    vni: int = Field(0, ge=0, le=VNI_MAX)
    """For `overlay`: as in `NetworkTarget`."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""

    @property
    def target(self) -> NetworkTarget:
        return NetworkTarget(
            uid=self.uid,
            namespace=self.namespace,
            name=self.name,
            generation=self.generation,
            spec=self.spec,
            vni=self.vni,
        )


class NetworkState(StrEnum):
    """The state of a network that users see."""

    READY = "Ready"
    IN_USE = "InUse"
    """VMs use the network."""
    DELETING = "Deleting"
    """The network takes no further VMs. It is removed if no VM uses it."""
