"""Translation of a NetworkPolicy to security groups.

A part without a translation allows no traffic. A policy becomes one group, and one more group for
each selector of peers. A group selects VMs by the labels of their VMIs. Every VM of a bridge counts
as a pod with the label `LAUNCHER`.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network, summarize_address_range
from itertools import islice
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.policy.model import Peer, Policy, Port, Rule, Selector
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.security_group import (
    CIDRS_MAX,
    EXPRESSIONS_MAX,
    GROUPS_MAX,
    MATCHES_MAX,
    PORTS_MAX,
    RULES_MAX,
    Direction,
    GroupSpec,
    IpProtocol,
    SecurityRule,
)
from virtbus.schemas.wire import validate

POLICY_LABEL = "virtbus.io/network-policy"
"""The label of a group. Its value is the name of the policy, shortened by `short`."""
LAUNCHER = ("kubevirt.io", "virt-launcher")
"""KubeVirt's label of every pod with a guest."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
NAME_MAX = 63
PEER_GROUPS_MAX = 128
"""Limit of the groups that one policy makes for selectors of peers. A namespace may have 200."""
DENIED_MAX = 64
"""Limit of the problems that are kept of a policy. Its Event shows fewer."""
_TYPES = {"Ingress": Direction.INGRESS, "Egress": Direction.EGRESS}
_PROTOCOLS = {"": IpProtocol.TCP, "TCP": IpProtocol.TCP, "UDP": IpProtocol.UDP}
Net = IPv4Network | IPv6Network


class Translated(NamedTuple):
    """The groups of a policy by name, and the parts of the policy that have no translation."""

    groups: Mapping[str, GroupSpec]
    denied: tuple[str, ...] = ()


def short(name: str) -> str:
    """Return a policy's name as a label value. A long name is cut and ends with a digest."""
    if len(name) <= NAME_MAX:
        return name
    return f"{name[:40]}.{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def group_name(policy: str, selector: Mapping[str, Any] | None = None) -> str:
    """Return the name of the policy's own group; with `selector`, of the group of these peers."""
    plain = policy.replace(".", "-")
    digest = hashlib.sha256(policy.encode()).hexdigest()[:10]
    stem = f"np-{plain}" if plain == policy and len(policy) <= 40 else f"np-{plain[:30]}-{digest}"
    if selector is None:
        return stem
    return f"{stem}-{hashlib.sha256(repr(sorted_(selector)).encode()).hexdigest()[:10]}"


def sorted_(value: Any) -> Any:
    """Return JSON in a form that has the same `repr` for equal objects."""
    if isinstance(value, Mapping):
        return [(key, sorted_(one)) for key, one in sorted(value.items())]
    return [sorted_(one) for one in value] if isinstance(value, list | tuple) else value


def groups_of(policy: Policy) -> Translated:
    """Return the groups of a policy."""
    return _Translation(policy).done()


class _Translation:
    """The translation of one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._peers: dict[str, GroupSpec] = {}
        self._denied: list[str] = []

    def done(self) -> Translated:
        policy = self._policy
        types = {_TYPES[one] for one in policy.types if one in _TYPES} or {Direction.INGRESS}
        own = {
            "selector": self._selector(policy.pods, "spec.podSelector"),
            "rules": self._within(self._all_rules(types)),
            "isolates": sorted(types),
        }
        found = self._valid(own, "spec")
        groups = {} if found is None else {group_name(policy.name): found}
        denied = tuple(islice(dict.fromkeys(self._denied), DENIED_MAX))
        return Translated(groups | self._peers, denied)

    def _valid(self, spec: Mapping[str, Any], where: str) -> GroupSpec | None:
        try:
            return validate(GroupSpec, spec)
        except VirtbusError as error:
            self._denied.append(f"{where}: {error.body.message}")
            return None

    def _within(self, rules: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return as many valid rules as a group may have. Surplus rules are not even computed."""
        kept: list[dict[str, Any]] = []
        left = MATCHES_MAX
        for index, rule in enumerate(rules):
            try:
                left -= validate(SecurityRule, rule).matches
            except VirtbusError as error:
                self._denied.append(f"a rule: {error.body.message}")
                if index < RULES_MAX:
                    continue
            if left < 0 or index >= RULES_MAX:
                self._denied.append(f"rules beyond {RULES_MAX}, or {MATCHES_MAX} ports and peers")
                break
            kept.append(rule)
        return kept

    # --- selectors ------------------------------------------------------------------------
    def _selector(self, selector: Selector, where: str) -> dict[str, Any]:
        """Return a selector of VMs. Without its surplus expressions it isolates more VMs."""
        found = _conditions(selector)
        if len(found["expressions"]) > EXPRESSIONS_MAX:
            self._denied.append(f"{where}: expressions beyond {EXPRESSIONS_MAX}; more VMs match")
        return found | {"expressions": found["expressions"][:EXPRESSIONS_MAX]}

    def _group(self, selector: Mapping[str, Any], where: str) -> str:
        """Return the name of the group of a peer's selector; empty if the group is refused."""
        name = group_name(self._policy.name, selector)
        if len(self._peers) >= PEER_GROUPS_MAX and name not in self._peers:
            self._denied.append(f"{where}: selectors of peers beyond {PEER_GROUPS_MAX}")
            return ""
        spec = self._valid({"selector": selector, "isolates": []}, where)
        if spec is None:
            return ""
        self._peers[name] = spec
        return name

    # --- rules ----------------------------------------------------------------------------
    def _all_rules(self, types: Collection[Direction]) -> Iterator[dict[str, Any]]:
        for direction, some, field in (
            (Direction.INGRESS, self._policy.ingress, "ingress"),
            (Direction.EGRESS, self._policy.egress, "egress"),
        ):
            for index, rule in enumerate(some if direction in types else ()):
                yield from self._rules(direction, rule, f"spec.{field}[{index}]")

    def _rules(self, direction: Direction, rule: Rule, where: str) -> Iterator[dict[str, Any]]:
        """Yield the rules of virtbus for one rule of the policy, split at the limits of virtbus."""
        peers = rule.sources if direction is Direction.INGRESS else rule.destinations
        field = "from" if direction is Direction.INGRESS else "to"
        cidrs: dict[str, None] = {}
        groups: dict[str, None] = {}
        for index, peer in enumerate(peers):
            if len(cidrs) > MATCHES_MAX:
                break  # `_within` reports that there are too many
            self._peer(peer, f"{where}.{field}[{index}]", cidrs, groups)
        if peers and not cidrs and not groups:
            return
        parts = [
            *({"cidrs": some} for some in _split(cidrs, CIDRS_MAX)),
            *({"groups": some} for some in _split(groups, GROUPS_MAX)),
        ] or [{}]
        for what in self._ports(rule, where):
            for part in parts:
                yield {"direction": direction, **what, **part}

    def _peer(
        self, peer: Peer, where: str, cidrs: dict[str, None], groups: dict[str, None]
    ) -> None:
        if peer.cidr:
            cidrs.update(dict.fromkeys(self._networks(peer, where)))
            return
        if peer.namespaces is not None:
            names = read(Selector, peer.namespaces)
            everywhere = not names.labels and not names.expressions
            own = dict(names.labels) == {NAMESPACE_NAME: self._policy.namespace}
            if not everywhere and (not own or names.expressions):
                self._denied.append(f"{where}: VMs and pods of other namespaces")
                return
            if everywhere:
                self._denied.append(f"{where}: VMs and pods of other namespaces than its own")
        selector = read(Selector, peer.pods or {})
        name = self._group(_conditions(selector), where)
        if name:
            groups[name] = None

    def _networks(self, peer: Peer, where: str) -> list[str]:
        try:
            network = ip_network(peer.cidr, strict=False)
            outs = [ip_network(text, strict=False) for text in peer.excepted]
        except (ValueError, TypeError):
            self._denied.append(f"{where}: {peer.cidr} is no network, or an exception is none")
            return []
        found = [str(one) for one in islice(_without(network, outs), MATCHES_MAX + 1)]
        if len(found) > MATCHES_MAX:
            self._denied.append(
                f"{where}: {peer.cidr} without its exceptions is more than {MATCHES_MAX} networks"
            )
            return []
        return found

    def _ports(self, rule: Rule, where: str) -> list[dict[str, Any]]:
        if not rule.ports:
            return [{"protocol": IpProtocol.ANY}]
        found: dict[IpProtocol, list[str]] = {}
        whole: set[IpProtocol] = set()
        for index, port in enumerate(rule.ports):
            protocol = _PROTOCOLS.get(port.protocol)
            if protocol is None:
                self._denied.append(f"{where}.ports[{index}]: the protocol {port.protocol}")
            elif port.port is None:
                whole.add(protocol)
            elif isinstance(port.port, int) and not isinstance(port.port, bool):
                found.setdefault(protocol, []).append(_range(port))
            else:
                message = "ports of a guest have no names; write a number"
                self._denied.append(f"{where}.ports[{index}]: {port.port}: {message}")
        parts: list[dict[str, Any]] = [{"protocol": one} for one in sorted(whole)]
        for protocol, ports in sorted(found.items()):
            if protocol not in whole:
                parts += [{"protocol": protocol, "ports": one} for one in _split(ports, PORTS_MAX)]
        return parts


def _conditions(selector: Selector) -> dict[str, Any]:
    return {
        "labels": {
            key: value
            for key, value in selector.labels.items()
            if isinstance(value, str) and (key, value) != LAUNCHER
        },
        "expressions": [
            {"key": one.key, "operator": one.operator, "values": list(one.values)}
            for one in selector.expressions
        ],
    }


def _range(port: Port) -> str:
    return f"{port.port}-{port.end}" if port.end else str(port.port)


def _split(found: Iterable[str], most: int) -> Iterator[list[str]]:
    unique = list(dict.fromkeys(found))
    for start in range(0, len(unique), most):
        yield unique[start : start + most]


def _without(network: Net, outs: Iterable[Net]) -> Iterator[Net]:
    """Yield the subnets of `network` that are in none of `outs`, in the order of addresses."""
    address = type(network.network_address)
    start, end = int(network.network_address), int(network.broadcast_address)
    gaps = [
        (int(out.network_address), int(out.broadcast_address))
        for out in outs
        if out.version == network.version
    ]
    for first, last in [*sorted(gaps), (end + 1, end + 1)]:
        before = min(first - 1, end)
        if start <= before:
            yield from summarize_address_range(address(start), address(before))
        start = max(start, last + 1)
