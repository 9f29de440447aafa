"""Derives the demands that a VM's networks make on the VM's node (ADR 0055)."""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple

from virtbus.schemas.address_pool import Address
from virtbus.schemas.cni_config import plugins_in
from virtbus.schemas.network_object import BUILT_IN, NetworkKind, NetworkTarget
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.vm import VmSpec

Targets = Mapping[str, NetworkTarget]
"""The network objects of a VM, by the names in its spec."""
NO_TARGETS: Targets = MappingProxyType({})


class NetworkDemand(NamedTuple):
    """The demands of a VM's networks. VMs with equal demands have equal values."""

    offered: frozenset[str] = frozenset({BUILT_IN})
    """Networks that the node itself must offer: `default`, and conflists by name."""
    nodes: frozenset[str] | None = None
    """The nodes on which all routed networks of the VM have subnets with its static addresses;
    None if the VM has no routed network."""
    plugins: frozenset[str] = frozenset()
    """CNI plugins that the node must allow."""
    tunnel: bool = False
    """True if the node needs an address for overlay tunnels."""
    links: frozenset[tuple[str, str]] = frozenset()
    """Links that the node must allow, each with the kind of its network."""
    bindings: frozenset[NicBinding] = frozenset()
    """Bindings for which the node needs a program; only `passt`."""


def network_demand(spec: VmSpec, targets: Targets) -> NetworkDemand:
    """Return the demands of the networks of a spec."""
    offered: set[str] = set()
    nodes: frozenset[str] | None = None
    plugins: set[str] = set()
    tunnel, links = False, set[tuple[str, str]]()
    for name in {network.network for network in spec.networks}:
        target = targets.get(name)
        if target is None:
            offered.add(name)
            continue
        if target.spec.conflist:
            offered.add(target.spec.conflist)
        if target.spec.config:
            plugins |= _plugins(target.spec.config)
        tunnel = tunnel or target.spec.kind is NetworkKind.OVERLAY
        if target.spec.link:
            links.add((target.spec.link, target.spec.kind))
        if target.spec.subnets:
            static = _static(spec, name)
            there = frozenset(node for node in target.spec.subnets if _has(target, node, static))
            nodes = there if nodes is None else nodes & there
    asked = {nic.binding for nic in spec.domain.devices.interfaces}
    bindings = frozenset({NicBinding.PASST} & asked)
    return NetworkDemand(
        frozenset(offered), nodes, frozenset(plugins), tunnel, frozenset(links), bindings
    )


def _static(spec: VmSpec, network: str) -> list[Address]:
    """Return the static addresses of the interfaces on a network."""
    names = {one.name for one in spec.networks if one.network == network}
    nics = (nic for nic in spec.domain.devices.interfaces if nic.name in names)
    return [ip_address(text) for nic in nics for text in nic.addresses]


def _has(target: NetworkTarget, node: str, static: list[Address]) -> bool:
    """Return True if the network has all the static addresses on the node."""
    pools = target.spec.pools(node) if static else []
    return all(any(pool.has(address) for pool in pools) for address in static)


@lru_cache(256)
def _plugins(config: str) -> frozenset[str]:
    """Return the plugins of a conflist that a network's create has checked."""
    return frozenset(plugin for _, plugin in plugins_in(config))
