"""Makes and removes a network's host side: a Linux bridge, an nftables table, IP forwarding.

netd makes the host side for the first VM that needs it, and removes the bridge and the table after
the last such VM. Forwarding gets its former value after the last bridge of any netd on the host.

The bridge's alias names the state folder of the netd that made it. A netd never touches a bridge of
another netd.
"""

import logging
import threading
from collections.abc import Collection
from ipaddress import IPv4Interface, ip_network
from pathlib import Path
from typing import NamedTuple

from virtbus.netd.core import host_end, link_addresses, names
from virtbus.netd.core.attachment import NicKind
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.host_table import (
    ROUTER,
    has_host_table,
    host_table,
    list_host_rules,
    no_host_table,
    table_of,
)
from virtbus.netd.core.nft_comparison import (
    by_chain,
    have_equal_rules,
    listed_rule,
    sent_rule,
)
from virtbus.netd.core.nft_tables import rules_in
from virtbus.netd.core.reach import ReachRules, is_host
from virtbus.netd.edge import forwarding, links
from virtbus.netd.edge.bridge_memo import BridgeMemo
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink
from virtbus.schemas.address_pool import Net
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network_object import NetworkTarget

log = logging.getLogger(__name__)


class _Written(NamedTuple):
    """The rules that this netd wrote last."""

    reach: ReachRules
    rules: dict[str, list[bytes]]
    """The rules' expressions, by chain."""


def _has_all_rules(filters: Netlink, bridge: str, written: _Written | None) -> bool:
    """Return True if the table has the rules of `written`.

    If `written` is None, any table will do.
    """
    if filters.ask(has_host_table(bridge)) is None:
        return False
    if written is None:
        return True
    listed = by_chain(listed_rule(one.message) for one in filters.dump(list_host_rules(bridge)))
    return have_equal_rules(written.rules, listed)


class HostBridge:
    """The host side of the built-in network, or of a network object.

    All methods block. Their thread must be in the host's namespace.
    """

    def __init__(
        self,
        name: str,
        gateways: Gateways,
        memo: Path,
        owner: Path,
        reach: ReachRules = ReachRules(),  # noqa: B008  frozen
        target: NetworkTarget | None = None,
    ) -> None:
        """`memo` is the file that keeps the former forwarding; `owner` is netd's state folder.

        The memos of all bridges of this netd are in one folder. `target` is the network object, or
        None for the built-in network.
        """
        self._target = target
        self.kind = NicKind.of(target.spec.kind) if target is not None else NicKind.BRIDGE
        self.reach = reach
        self._written: _Written | None = None
        self.name = name
        self.gateways = gateways
        self.memo = BridgeMemo(memo)
        self.owner = owner
        self.mark = names.owner_mark(str(owner.resolve()))
        """The alias of all bridges of this netd."""
        self._lock = threading.Lock()
        self.index = 0
        """The bridge's link index at the last `ensure`; 0 after `remove`."""
        self.times_made = 0

    def ensure(self, host: Netlink) -> int:
        """Ensure the bridge with its address, rules and forwarding; return its link index.

        Raises:
            VirtbusError: 409 `bridge_in_use`: another netd has the bridge.
                500 `bridge_lost`: the bridge vanished while netd made it.
                409 `subnet_taken`: another link of this host has an address in the subnet. Or a
                host of the fleet or of the bus has an address in a network object's subnet.
        """
        with self._lock:
            link = links.find(host, self.name)
            if link is None or link.index != self.index or not link.up:
                self._owned(host)
                self.index = self._make(host)
                self.times_made += 1
            return self.index

    @property
    def gateway(self) -> IPv4Interface:
        return self.gateways.four

    def check_owner(self) -> None:
        """Raise 409 `bridge_in_use` if the bridge belongs to another netd."""
        with Netlink() as host:
            self.check(host)

    def check(self, host: Netlink) -> None:
        self._owned(host)

    def former(self, host: Netlink, current: Collection[str] = ()) -> list[str]:
        """Return names of bridges that this netd made under earlier settings.

        `current` has the names of the bridges of network objects.
        """
        found = [each.name for each in links.list_links(host) if each.alias == self.mark]
        return sorted(name for name in found if name != self.name and name not in current)

    def remove_former(self, name: str) -> None:
        with Netlink() as host, Netlink(NETLINK_NETFILTER) as filters:
            filters.do(no_host_table(name))
            host.do([links.delete_link(name)])

    def faults(self, *, needed: bool) -> list[str]:
        """Return a message for each missing object.

        If not `needed`, return a message for each remaining object instead.
        """
        with Netlink() as host, Netlink(NETLINK_NETFILTER) as filters:
            link = self._owned(host)
            table = filters.ask(has_host_table(self.name)) is not None
            whole = _has_all_rules(filters, self.name, self._written)
            connected = link is None or _connects(host, link, self._own)
        has = {f"bridge {self.name}": link is not None, f"nftables {table_of(self.name)}": table}
        if not needed:
            return [f"{what}: no VM needs it" for what, there in has.items() if there]
        gone = [f"{what}: gone" for what, there in has.items() if not there]
        if table and not whole:
            gone.append(f"rules of nftables {table_of(self.name)}: gone, added or changed")
        if link is not None and not link.up:
            gone.append(f"bridge {self.name}: down")
        elif not connected:
            gone.append(f"the route to {self.gateway.network} by {self.name}: gone")
        return gone if self._forwards() else [*gone, "ip_forward: off"]

    @property
    def _own(self) -> list[link_addresses.Interface]:
        if self.kind is NicKind.ISOLATED:
            return []
        six = self.gateways.six
        return [self.gateway] if six is None else [self.gateway, ROUTER, six]

    def _forwards(self) -> bool:
        """Return True if the host forwards packets, or if this network needs no forwarding."""
        if self.kind is NicKind.ISOLATED:
            return True
        six = self.gateways.six is None or forwarding.forwards6()
        return six and forwarding.forwards4()

    def _owned(self, host: Netlink) -> links.KernelLink | None:
        """Return the bridge if it exists. A bridge without a mark counts as this netd's own.

        Raises:
            VirtbusError: 409 `bridge_in_use`: the bridge belongs to another netd.
        """
        link = links.find(host, self.name)
        if link is not None and _is_foreign(link, self.mark):
            owner = link.alias.removeprefix(names.OWNER_PREFIX)
            raise VirtbusError(
                Code.CONFLICT,
                "bridge_in_use",
                f"{self.name} belongs to {owner}; give this instance another bridge and subnet: "
                f"VIRTBUS_BRIDGE, VIRTBUS_SUBNET (or, if that instance is gone for good: "
                f"ip link delete {self.name})",
            )
        return link

    def _make(self, host: Netlink) -> int:
        self._check_subnet(host)
        self.memo.write(forwarding.current(), self._target)
        isolated = self.kind is NicKind.ISOLATED
        mac = names.bridge_mac(str(self.gateway.network))
        host.do([links.new_bridge(self.name, mac=mac), host_end.no_ipv6(self.name)])
        routes6 = self.gateways.six is not None and not isolated
        link = self._owned(host)
        if link is None:
            raise VirtbusError(
                Code.INTERNAL, "bridge_lost", f"{self.name} vanished while it was made; try again"
            )
        up = links.set_link(self.name, up=True, alias=self.mark)
        if routes6:
            forwarding.silence_autoconfiguration(self.name)
        host.do([up, *(link_addresses.add_address(link.index, one) for one in self._own)])
        self._apply()
        if not isolated:
            forwarding.begin(six=routes6)
        log.info("host bridge is up", extra={"code": "bridge_up", "bridge": self.name})
        return link.index

    def mend(self) -> None:
        """Restore the address, table and forwarding if another program removed them.

        A table is right if it has the rules that this netd wrote last. Before this netd has written
        any rules, every existing table counts as right.
        """
        with self._lock:
            with Netlink(NETLINK_NETFILTER) as filters:
                gone = not _has_all_rules(filters, self.name, self._written)
            if gone:
                self._apply()
            with Netlink() as host:
                link = self._owned(host)
                if link is not None and not _connects(host, link, self._own):
                    _connect(host, link, self._own)
        if gone or not self._forwards():
            if not self._forwards():
                forwarding.begin(six=self.gateways.six is not None)
            what = "the nftables rules" if gone else "ip_forward"
            extra = {"code": "host_rules_back", "bridge": self.name}
            log.warning("somebody removed %s of %s; it is back", what, self.name, extra=extra)

    def set_reach(self, reach: ReachRules) -> None:
        with self._lock:
            self.reach = reach
            if (self._written and self._written.reach == reach) or not self.made:
                return
            with Netlink(NETLINK_NETFILTER) as filters:
                there = filters.ask(has_host_table(self.name)) is not None
            if there:
                self._apply()
                extra = {"code": "reach_changed", "bridge": self.name}
                log.info("%d addresses are closed to guests", len(reach.hosts), extra=extra)

    def _apply(self) -> None:
        calls = host_table(self.name, self.gateway, self.reach, self.kind, self.gateways.six)
        with Netlink(NETLINK_NETFILTER) as filters:
            filters.do(calls)
        self._written = _Written(self.reach, by_chain(map(sent_rule, rules_in(calls))))

    def addresses(self, others: Collection[str] = ()) -> tuple[str, ...]:
        """Return the addresses by which other hosts reach this host.

        The result excludes addresses of this bridge, and of `others`: further bridges of this netd.
        """
        with Netlink() as host:
            bridges = [links.find(host, name) for name in (self.name, *others)]
            found = links.list_addresses(host)
        own = {bridge.index for bridge in bridges if bridge is not None}
        there = {each.interface.ip for each in found if each.is_global and each.index not in own}
        return tuple(sorted(str(ip) for ip in there if is_host(ip)))

    def _check_subnet(self, host: Netlink) -> None:
        if self.kind is NicKind.ISOLATED:
            return  # the host has no address in the subnet
        ours = links.find(host, self.name)
        own = {(ours.index, one) for one in self.gateways.all} if ours is not None else set()
        for found in links.list_addresses(host):
            subnet = self.gateways.overlapped(found.interface.network)
            if subnet is not None and (found.index, found.interface) not in own:
                raise self._taken(f"the host has the address {found.interface}", subnet)
        for address in sorted(self.reach.hosts, key=str) if self._target is not None else ():
            subnet = self.gateways.overlapped(ip_network(address))
            if subnet is not None:
                raise self._taken(f"a host of the fleet or of the bus has {address}", subnet)

    def _taken(self, who: str, subnet: Net) -> VirtbusError:
        way_out = "set another `subnet` for netd (VIRTBUS_SUBNET)"
        if self._target is not None:
            way_out = f"make the network {self._target.name} again with another subnet"
        message = f"{who} in {subnet} already; {way_out}"
        return VirtbusError(Code.CONFLICT, "subnet_taken", message)

    def remove(self) -> None:
        """Remove the bridge and the table, as far as they exist. A bridge of another netd stays.

        If no bridge of any netd is left on the host, restore the former forwarding.
        """
        with self._lock:
            self.index = 0
            self._written = None
            with Netlink() as host:
                link = links.find(host, self.name)
                if link is None or not _is_foreign(link, self.mark):
                    with Netlink(NETLINK_NETFILTER) as filters:
                        filters.do(no_host_table(self.name))
                    if self._target is not None and self.kind is NicKind.OVERLAY:
                        host.do([links.delete_link(names.tunnel(self._target.uid))])
                    host.do([links.delete_link(self.name)])
                found = links.list_links(host)
            if self.made:
                # guests on other bridges of this or another netd need forwarding
                if not any(each.alias.startswith(names.OWNER_PREFIX) for each in found):
                    forwarding.restore(self.memo.forwarding())
                self.memo.forget()
                log.info("host bridge is gone", extra={"code": "bridge_gone"})

    @property
    def made(self) -> bool:
        """True while parts of the host side may exist."""
        return self.memo.exists()


def _is_foreign(link: links.KernelLink, mark: str) -> bool:
    return link.alias.startswith(names.OWNER_PREFIX) and link.alias != mark


def _connects(host: Netlink, link: links.KernelLink, own: list[link_addresses.Interface]) -> bool:
    """Return True if a bridge is up and has its addresses.

    The kernel derives its routes from them.
    """
    found = links.list_addresses(host) if own else []
    there = {each.interface for each in found if each.index == link.index}
    return link.up and there.issuperset(own)


def _connect(host: Netlink, link: links.KernelLink, own: list[link_addresses.Interface]) -> None:
    up = links.set_link(link.name, up=True)
    host.do([up, *(link_addresses.add_address(link.index, one) for one in own)])
    extra = {"code": "host_route_back", "bridge": link.name}
    log.warning("somebody removed the route of %s; it is back", link.name, extra=extra)
