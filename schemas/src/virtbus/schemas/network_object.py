"""Networks: named objects that a VM's interfaces refer to (ADR 0055)."""

from enum import StrEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.ids import UNPLACED, Id, Uid, check_id
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.nic import MTU_MIN
from virtbus.schemas.quantity import Count

EVERYWHERE = UNPLACED
"""The namespace of networks that VMs of all namespaces may use. No VM is in it."""
BUILT_IN = "default"
"""The network of each node that needs no object. No object has this name."""
BRIDGE_MTU = 1500
"""The MTU of a network that virtbus bridges. Its links on the host have it, too."""
SUBNETS_MAX = 64
CONFIG_MAX = 8192
DNS_MAX = 3
_LONGEST_PREFIX = 29


class NetworkKind(StrEnum):
    """The way in which a network connects its guests."""

    NAT = "nat"
    """Guests reach each other on their host, and the outside under the host's address."""
    ROUTED = "routed"
    """As nat, but with the guests' own addresses: the outside needs a route to each subnet."""
    ISOLATED = "isolated"
    """Guests reach other guests of the network on their host, and nothing else."""
    BRIDGE = "bridge"
    """Guests are on the segment of an existing bridge of the host."""
    MACVTAP = "macvtap"
    """Guests are on the segment of an interface of the host, without a bridge."""
    CNI = "cni"
    """The plugins of a CNI conflist, of the node or of the object."""


ON_SEGMENTS = frozenset({NetworkKind.BRIDGE, NetworkKind.MACVTAP})
"""Kinds whose guests are on a segment: its DHCP server gives them their addresses."""


class MacvtapMode(StrEnum):
    """The way in which guests on one interface of a host reach each other."""

    BRIDGE = "bridge"
    """Directly."""
    VEPA = "vepa"
    """By a switch outside that sends their frames back."""
    PRIVATE = "private"
    """Not at all."""
    PASSTHRU = "passthru"
    """There is one guest only, which has the interface to itself."""


def _subnet(text: str) -> str:
    network = IPv4Network(text)
    if network.prefixlen > _LONGEST_PREFIX:
        msg = f"must be /{_LONGEST_PREFIX} or larger"
        raise ValueError(msg)
    if not network.is_private or network.is_loopback or network.is_link_local:
        msg = "must be private, as 10.0.0.0/8, 172.16.0.0/12 and 192.168.0.0/16 are"
        raise ValueError(msg)
    return str(network)


def _address(text: str) -> str:
    address = IPv4Address(text)
    if address.is_unspecified or address.is_multicast or address.is_loopback:
        msg = "must be an IPv4 address that guests can reach"
        raise ValueError(msg)
    return str(address)


def _scope(text: str) -> str:
    return text if text == EVERYWHERE else check_id(text)


Subnet = Annotated[str, StringConstraints(max_length=18), AfterValidator(_subnet)]
Ipv4 = Annotated[str, StringConstraints(max_length=15), AfterValidator(_address)]
LinkName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}$")]
"""The name of a link of a host, such as `br-lan`."""
NetworkScope = Annotated[str, StringConstraints(max_length=63), AfterValidator(_scope)]


class NetworkSpec(StrictModel):
    """The specification of a network. Only `dns`, `mtu` and `protected` change later."""

    kind: NetworkKind
    subnet: Subnet | None = None
    """For `nat` and `isolated`: the guests' addresses, the same on each host."""
    subnets: dict[Id, Subnet] = Field(default_factory=dict, max_length=SUBNETS_MAX)
    """For `routed`: the subnet of each node. Other nodes do not take VMs of the network."""
    gateway: Ipv4 | None = None
    """For `nat`: the host's address in the subnet; default: the first one."""
    dns: tuple[Ipv4, ...] = Field((), max_length=DNS_MAX)
    """Name servers of the guests; empty: those of the node, or none for `isolated`."""
    mtu: Count | None = Field(None, ge=MTU_MIN, le=BRIDGE_MTU)
    """None: 1500, the plugins' for `cni`, or the link's for kinds with `link`."""
    link: LinkName | None = None
    """For `bridge` and `macvtap`: the host's bridge or interface. A node must have and allow it."""
    vlan: Count | None = Field(None, ge=1, le=4094)
    """For `bridge`: the VLAN of the guests' frames, which the guests see untagged."""
    mode: MacvtapMode | None = None
    """For `macvtap`; default: `bridge`."""
    conflist: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = None
    """For `cni`: the name of a conflist that the node has."""
    config: Annotated[str, StringConstraints(max_length=CONFIG_MAX)] | None = None
    """For `cni`: a conflist (JSON) in the object; a node must allow each of its plugins."""
    protected: bool = False
    """True: a delete is refused until this is cleared."""

    def gateway_on(self, node: str) -> IPv4Interface | None:
        """Return the gateway with the prefix of the node's subnet; None if the node has none."""
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
    """The reason why the last delete was reverted; empty if none was."""
    generation: int = Field(1, ge=1)
    """Rises with every change of the spec."""
    created_ns: int
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed it. A repeat changes nothing."""

    @property
    def target(self) -> NetworkTarget:
        """Return the network as the record of a VM describes it."""
        return NetworkTarget(
            uid=self.uid,
            namespace=self.namespace,
            name=self.name,
            generation=self.generation,
            spec=self.spec,
        )


class NetworkState(StrEnum):
    """The state of a network that users see."""

    READY = "Ready"
    IN_USE = "InUse"
    """VMs use it."""
    DELETING = "Deleting"
    """It takes no further VMs, and ends unless a VM uses it."""
