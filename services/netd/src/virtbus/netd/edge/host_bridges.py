"""Finds the host bridge of the built-in network, and of each network object.

The VM's record has a copy of the network object, so netd makes the bridge without the bus. A memo
on disk names each existing bridge, so that a later netd can remove the unused bridge.
"""

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace

from virtbus.netd.core import names as core_names
from virtbus.netd.core.attachment import WITH_NAMES, Nic, NicKind
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge import links
from virtbus.netd.edge.bridge_memo import target_in
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import NetworkTarget

log = logging.getLogger(__name__)

_BRIDGED = frozenset(NicKind) - {NicKind.HOST_BRIDGE, NicKind.MACVTAP, NicKind.CNI}


class HostBridges:
    """The bridges of one host. Methods that use netlink block."""

    def __init__(self, built_in: HostBridge, node: str = "") -> None:
        """`node` is the node id. It selects the subnet of a routed network."""
        self.built_in = built_in
        self._node = node
        self._named: dict[str, HostBridge] = {}  # replaced, not modified: threads iterate
        self._lock = threading.Lock()

    def of(self, nic: Nic) -> HostBridge:
        """Return the bridge of an interface's network. The link itself may not exist yet.

        Raises:
            VirtbusError: 422 `network_not_here`: the network has no subnet for this node.
        """
        return self.built_in if nic.target is None else self._of_target(nic.target, nic.index)

    def name_of(self, nic: Nic) -> str:
        """Return the name of an interface's bridge, even if the network is not on this host."""
        target = nic.target
        return self.built_in.name if target is None else core_names.network_bridge(target.uid)

    def _of_target(self, target: NetworkTarget, index: int = 0) -> HostBridge:
        with self._lock:
            known = self._named.get(target.uid)
            if known is None:
                gateway = target.spec.gateway_on(self._node)
                if gateway is None:
                    raise _not_here(target, self._node, index)
                name = core_names.network_bridge(target.uid)
                memo = self.built_in.memo.beside(name)
                gateways = Gateways(gateway, target.spec.gateway6_on(self._node))
                known = HostBridge(name, gateways, memo, self.built_in.owner, target=target)
                known.reach = self._reach(self.built_in.reach, known)
                self._named = {**self._named, target.uid: known}
            return known

    def all(self) -> list[HostBridge]:
        """Return all known bridges. Their links may not exist."""
        return [self.built_in, *self._named.values()]

    def recover(self) -> None:
        for memo in self.built_in.memo.all():
            try:
                target = target_in(memo)
                if target is not None:
                    self._of_target(target)
            except (ValueError, VirtbusError) as error:
                extra = {"code": "bad_memo"}
                log.error("%s cannot be used (%s); remove it", memo, error, extra=extra)

    def ports(self, host: Netlink) -> dict[str, str]:
        """Return the VM's uid for each host end on these bridges, by the host end's name."""
        self.built_in.check(host)
        bridges = (links.find(host, each.name) for each in self.all())
        masters = {bridge.index for bridge in bridges if bridge is not None}
        return {
            each.name: each.alias
            for each in links.list_links(host)
            if each.master in masters and core_names.is_host_link(each.name)
        }

    def set_reach(self, reach: ReachRules) -> None:
        self.built_in.set_reach(reach)
        with self._lock:
            named = self._named  # later bridges take `reach` from `built_in`
        for each in named.values():
            each.set_reach(self._reach(reach, each))

    def _reach(self, reach: ReachRules, bridge: HostBridge) -> ReachRules:
        """Return `reach` for the bridge of a network object.

        On a network whose gateway answers DNS queries, that gateway replaces the built-in network's
        gateway as a permitted DNS server.
        """
        own = self.built_in.gateway.ip
        dns = tuple(server for server in reach.dns if server != own)
        if bridge.kind in WITH_NAMES and own in reach.dns:
            dns = (bridge.gateway.ip, *dns)
        return replace(reach, dns=dns)

    def times_made(self) -> int:
        """Count all makings of bridges. A new bridge lacks the host ends of existing VMs."""
        return sum(each.times_made for each in self.all())

    def needed(self, used: Iterable[Nic]) -> list[tuple[HostBridge, bool]]:
        """Return each known bridge, with True if an interface of `used` needs the bridge."""
        places = {nic.place for nic in used if is_bridged(nic)}
        named = [(each, uid in places) for uid, each in self._named.items()]
        return [(self.built_in, "" in places), *named]

    def surplus(self, used: Iterable[Nic]) -> list[HostBridge]:
        return [each for each, needed in self.needed(used) if not needed and each.made]

    def addresses(self) -> tuple[str, ...]:
        return self.built_in.addresses(self.names())

    def remove(self, bridge: HostBridge) -> None:
        bridge.remove()
        with self._lock:
            self._named = {uid: one for uid, one in self._named.items() if one is not bridge}

    def names(self) -> Collection[str]:
        """Exclude the bridge of the built-in network."""
        return {each.name for each in self._named.values()}


def is_bridged(nic: Nic) -> bool:
    """Return True for an interface whose host end is on a bridge of virtbus."""
    return nic.kind in _BRIDGED


def has_host_end(nic: Nic) -> bool:
    """Return True for an interface whose veth pair has an end in the host's namespace."""
    return is_bridged(nic) or nic.kind is NicKind.HOST_BRIDGE


def _not_here(target: NetworkTarget, node: str, index: int) -> VirtbusError:
    there = ", ".join(sorted(target.spec.subnets)) or "no node"
    message = (
        f"the network '{target.name}' has no subnet for {node or 'this node'}; it has some for "
        f"{there}: move the VM there"
    )
    detail = Detail(path=f"spec.networks[{index}].network", message="has no subnet for the node")
    return VirtbusError(Code.UNSUPPORTED, "network_not_here", message, details=(detail,))
