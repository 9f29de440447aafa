"""Security groups: rules about the packets of VMs with certain labels (ADR 0069)."""

import re
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_network
from typing import Annotated, Protocol

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.vm import Labels

RULES_MAX = 64
PORTS_MAX = 16
CIDRS_MAX = 64
GROUPS_MAX = 16
EXPRESSIONS_MAX = 16
MATCHES_MAX = 1024
"""The most ports and peers in all rules of a group. Each packet is compared with them in turn."""
ANYWHERE = "*"
"""In `NodeGroup.peers`: the place of addresses that no other guest has, on any network."""
_PORT_MAX = 65_535
_KEY = r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"


class Direction(StrEnum):
    """The direction in which a connection is opened."""

    INGRESS = "ingress"
    """Somebody connects to a member."""
    EGRESS = "egress"
    """A member connects to somebody."""


class IpProtocol(StrEnum):
    """The protocol of a rule."""

    ANY = "any"
    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"
    """ICMP of IPv4, and ICMPv6."""


class LabelOperator(StrEnum):
    """The condition on one label, as in Kubernetes."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


_WITH_VALUES = frozenset({LabelOperator.IN, LabelOperator.NOT_IN})


def _label_key(text: str) -> str:
    if not re.fullmatch(_KEY, text):
        msg = "must be a label's key, such as app or example.org/app"
        raise ValueError(msg)
    return text


def _label_value(text: str) -> str:
    if not re.fullmatch(_VALUE, text):
        msg = "must be a label's value: up to 63 letters, digits, '-', '_' and '.'"
        raise ValueError(msg)
    return text


# Functions check the texts, because a pattern would look like a link in the generated Markdown.
ExpressionValue = Annotated[str, StringConstraints(max_length=63), AfterValidator(_label_value)]


class LabelExpression(StrictModel):
    """A condition on one label. A VM without the label matches NotIn and DoesNotExist."""

    key: Annotated[str, StringConstraints(max_length=253), AfterValidator(_label_key)]
    operator: LabelOperator
    values: tuple[ExpressionValue, ...] = Field(
        (), max_length=EXPRESSIONS_MAX, validate_default=True
    )
    """The values for In and NotIn."""

    @field_validator("values")
    @classmethod
    def _fit(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        operator = info.data.get("operator")
        if operator in _WITH_VALUES and not values:
            msg = f"{operator} needs at least one value"
            raise ValueError(msg)
        if operator is not None and operator not in _WITH_VALUES and values:
            msg = f"{operator} has no values; leave them out, or use In"
            raise ValueError(msg)
        return values

    def holds(self, labels: Mapping[str, str]) -> bool:
        found = labels.get(self.key)
        match self.operator:
            case LabelOperator.IN:
                return found in self.values
            case LabelOperator.NOT_IN:
                return found not in self.values
            case LabelOperator.EXISTS:
                return found is not None
            case LabelOperator.DOES_NOT_EXIST:
                return found is None


class LabelSelector(StrictModel):
    """Selects VMs of the group's namespace by their labels. An empty selector selects all VMs."""

    labels: Labels = Field(default_factory=dict)
    expressions: tuple[LabelExpression, ...] = Field((), max_length=EXPRESSIONS_MAX)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return self.labels.items() <= labels.items() and all(
            one.holds(labels) for one in self.expressions
        )


def _ports(text: str) -> str:
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= _PORT_MAX:
        msg = f"must be a port or a range within 1-{_PORT_MAX}, such as 80 or 8000-8080"
        raise ValueError(msg)
    return f"{low}-{high}" if low != high else str(low)


def _cidr(text: str) -> str:
    network = ip_network(text)  # its error says that host bits are set
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        msg = "must not be IPv4-mapped; give the IPv4 network"
        raise ValueError(msg)
    return str(network)


Ports = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,5}(-[0-9]{1,5})?$"), AfterValidator(_ports)
]
"""A port, or a range of ports such as `8000-8080`."""
Cidr = Annotated[str, StringConstraints(max_length=43), AfterValidator(_cidr)]
"""An IPv4 or IPv6 network, such as `10.0.0.0/8` or `fd00::/8`."""


def port_range(ports: str) -> tuple[int, int]:
    """Return the first and the last port of valid `Ports`."""
    first, _, last = ports.partition("-")
    return int(first), int(last or first)


class SecurityRule(StrictModel):
    """Connections that members may open or accept, with their packets in both directions.

    A peer is in one of `cidrs`, or a member of one of `groups`. Without both, everybody is a peer.
    """

    direction: Direction
    protocol: IpProtocol = IpProtocol.ANY
    ports: tuple[Ports, ...] = Field((), max_length=PORTS_MAX)
    """The destination ports, for tcp and udp; empty: all."""
    cidrs: tuple[Cidr, ...] = Field((), max_length=CIDRS_MAX)
    groups: tuple[Id, ...] = Field((), max_length=GROUPS_MAX)
    """Groups of the same namespace. A group that does not exist has no members."""

    @property
    def matches(self) -> int:
        """Return the largest number of comparisons that a host makes for the rule."""
        return 2 * max(1, len(self.ports)) + len(self.cidrs) + 2 * len(self.groups)

    @field_validator("ports")
    @classmethod
    def _fit(cls, ports: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        protocol = info.data.get("protocol")
        if ports and protocol not in {None, IpProtocol.TCP, IpProtocol.UDP}:
            msg = f"{protocol} has no ports; leave them out, or choose tcp or udp"
            raise ValueError(msg)
        return ports


class GroupSpec(StrictModel):
    """The specification of a security group."""

    selector: LabelSelector
    rules: tuple[SecurityRule, ...] = Field((), max_length=RULES_MAX)
    isolates: tuple[Direction, ...] | None = Field(None, max_length=2)
    """The directions in which members have only the connections that a rule allows. None: each
    direction that has a rule."""

    @field_validator("rules")
    @classmethod
    def _few(cls, rules: tuple[SecurityRule, ...]) -> tuple[SecurityRule, ...]:
        count = sum(rule.matches for rule in rules)
        if count > MATCHES_MAX:
            msg = f"have {count} ports and peers; at most {MATCHES_MAX}, so use ranges and groups"
            raise ValueError(msg)
        return rules

    @property
    def isolated(self) -> frozenset[Direction]:
        if self.isolates is not None:
            return frozenset(self.isolates)
        return frozenset(rule.direction for rule in self.rules)

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the groups in the rules, each once, in order."""
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.groups))


class SecurityGroupRecord(LenientModel):
    """`$KV.vm._sg.<namespace>.<token>`: a security group. The key also claims its name.

    A delete leaves a purge marker with the uid for a day. So a late create of that uid is refused.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    spec: GroupSpec
    owner: str = ""
    """The bridge that made the group, or empty. No other bridge may change the group."""
    generation: int = Field(1, ge=1)
    """Rises with every change of the spec."""
    created_ns: int
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""

    @property
    def deleting(self) -> bool:
        """Return False: a delete ends a group at once."""
        return False


class GroupedVm(Protocol):
    """The properties of a VM that decide which groups select it."""

    @property
    def namespace(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def owner(self) -> str: ...


def selects(group: "SecurityGroupRecord | NodeGroup", vm: GroupedVm) -> bool:
    """Return True if a VM is a member of a group. A bridge's group has only VMs of that bridge."""
    if group.namespace != vm.namespace or (group.owner and group.owner != vm.owner):
        return False
    return group.spec.selector.matches(vm.labels)


class NodeGroup(LenientModel):
    """`$KV.vm.<node>._sg.<namespace>.<token>`: a group of VMs of the node, as netd applies it.

    `peers` has the addresses of the groups that the rules name, by group and by place. A place is
    the uid of a network object, the name of another network, or `*` for addresses that no other
    guest has.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    owner: str = ""
    generation: int = 1
    spec: GroupSpec
    peers: dict[str, dict[str, tuple[str, ...]]] = Field(default_factory=dict)

    def addresses(self, group: str, place: str) -> tuple[str, ...]:
        """Return the addresses of a peer group's members that an interface at `place` may see."""
        there = self.peers.get(group, {})
        return (*there.get(place, ()), *there.get(ANYWHERE, ()))
