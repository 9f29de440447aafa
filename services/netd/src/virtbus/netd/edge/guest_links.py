"""Builds and checks a VM's namespace: links, inner bridges, taps, filters, DHCP sockets.

All methods block, and most leave their thread in the VM's namespace: call each in `in_thread`. All
methods are idempotent: the same calls build a network, complete a partial network, and adopt a
running network. A host end is the end of a VM's veth pair in the host's namespace.
"""

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from virtbus.netd.core import host_end, names
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.core.paths import OF_MTU
from virtbus.netd.edge import filters, group_filters, links, masquerade, neighbours, taps, tuning
from virtbus.netd.edge.attachers import Attachers
from virtbus.netd.edge.dhcp_sockets import dhcp_sockets
from virtbus.netd.edge.host_bridges import has_host_end
from virtbus.netd.edge.namespaces import (
    OWN_NAMESPACE,
    Namespaces,
    opened,
    read_sysctl,
    write_sysctl,
)
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink
from virtbus.schemas.counters import Counters, NicCounters, Traffic
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.nic import NicBinding

log = logging.getLogger(__name__)

_BRIDGE_INDEX = 1000
"""The link index of the first inner bridge, above the indices that the kernel assigns."""
_NO_IPV6 = "net/ipv6/conf/all/disable_ipv6"


class GuestLinks:
    """Makes and reads the links in `namespaces`. `attachers` connect the links to the host."""

    def __init__(self, namespaces: Namespaces, attachers: Attachers, groups: NodeGroupBook) -> None:
        self._namespaces = namespaces
        self._groups = groups
        self._attachers = attachers
        self._bridge = attachers.bridges.built_in

    def open_namespace(self, attachment: Attachment) -> None:
        """Ensure the namespace, and connect the interfaces to the host.

        Raises:
            VirtbusError: 409 `link_taken`, and the errors of the attachers.
        """
        with Netlink() as host:
            self._attachers.prepare(host, attachment.nics)
            stands = self._namespaces.exists(attachment.netns)
            ends = [nic for nic in attachment.nics if has_host_end(nic)]
            _claim(host, attachment.uid, ends, fresh=not stands)
            if stands:
                self._namespaces.enter(attachment.netns)
            else:
                self._namespaces.remove(attachment.netns)
                self._namespaces.make_and_enter(attachment.netns)
            if not attachment.has_cni:
                _no_ipv6()
            with opened(OWN_NAMESPACE) as fd:
                self._attachers.attach(host, attachment, fd)

    def close_up(
        self, attachment: Attachment, *, keeps_running: bool = False
    ) -> list[socket.socket]:
        """Bridge each interface with its tap, and return one DHCP socket per interface.

        The filter exists before the tap is up, so that no frame passes unchecked (NET-07). The
        thread must be in the VM's namespace. `keeps_running`: see `build`.
        """
        if attachment.has_cni:
            _no_ipv6()
        with Netlink() as inside:
            _make_taps(inside, attachment.nics)
            calls = [links.set_link("lo", up=True, alias=self._bridge.mark)]
            inside.do(
                [*calls, *(call for nic in attachment.nics for call in _join(attachment.uid, nic))]
            )
            if keeps_running:
                inside.do([call for nic in attachment.nics for call in _opened_up(inside, nic)])
            inside.do([call for nic in attachment.nics for call in _delivered(inside, nic)])
            tuning.limit(inside, attachment.nics)
            masquerade.connect(inside, attachment.nics)
            self._guard_first(inside, attachment, keeps_running=keeps_running)
            inside.do([links.set_link(nic.tap, up=True) for nic in attachment.nics])
        return dhcp_sockets(attachment.nics)

    def build(self, attachment: Attachment, *, keeps_running: bool = False) -> list[socket.socket]:
        """Run `open_namespace` and `close_up` in one thread; return the DHCP sockets.

        Build a network without CNI interfaces, or build the rest of a network around its CNI links.

        With `keeps_running`, undo a lowered MTU or an isolated port on links of a running guest. If
        the kernel then lacks br_netfilter for security groups, log an error and return normally:
        the links stay, no traffic passes, and `faults` reports the links.

        Raises:
            VirtbusError: 422 `no_bridge_filter`, and the errors of `open_namespace`.
        """
        self.open_namespace(attachment)
        return self.close_up(attachment, keeps_running=keeps_running)

    def open_taps(self, attachment: Attachment) -> list[int]:
        """Return a new tap descriptor for each queue of each interface. The caller closes them.

        Raises:
            VirtbusError: 409 `tap_busy`: another process has the tap open.
        """
        self._namespaces.enter(attachment.netns)
        opened: list[int] = []
        try:
            for nic in attachment.nics:
                _refuse_busy(nic)
                many = nic.queues > 1
                for _queue in range(nic.queues):
                    opened.append(taps.open_tap(nic.tap, multi_queue=many))  # noqa: PERF401  # closed on failure
        except BaseException:
            close_all(opened)
            raise
        return opened

    def faults(self, attachment: Attachment) -> list[str]:
        lost = self._attachers.passt.lost(attachment.nics)
        self._namespaces.enter(attachment.netns)
        with Netlink() as inside:
            found = lost + [fault for nic in attachment.nics for fault in _faults(inside, nic)]
            found += tuning.faults(inside, attachment.nics)
            with Netlink(NETLINK_NETFILTER) as rules:
                found += masquerade.faults(inside, rules, attachment.nics)
        with Netlink(NETLINK_NETFILTER) as rules:
            found += filters.faults(rules, attachment.nics, self._bridge.reach)
            return found + group_filters.faults(rules, self._groups.of(attachment))

    def tune(self, attachment: Attachment) -> None:
        self._namespaces.enter(attachment.netns)
        with Netlink() as inside:
            inside.do([tuning.link_state(nic) for nic in attachment.nics])
            tuning.limit(inside, attachment.nics, lift=True)
            masquerade.connect(inside, attachment.nics)

    def guard(self, attachment: Attachment) -> None:
        """Ensure the filters of an existing network after a change of its addresses or reach."""
        self._namespaces.enter(attachment.netns)
        self._guard(attachment)

    def _guard_first(self, inside: Netlink, attachment: Attachment, *, keeps_running: bool) -> None:
        """Install the filters before the taps are up. `keeps_running`: see `build`."""
        try:
            self._guard(attachment)
        except VirtbusError as error:
            if not (keeps_running and any(_running(inside, nic.tap) for nic in attachment.nics)):
                raise
            extra = {"code": "rules_failed", "uid": attachment.uid}
            log.error("the rules of its groups are not in force: %s", error, extra=extra)

    def _guard(self, attachment: Attachment) -> None:
        with Netlink(NETLINK_NETFILTER) as rules:
            filters.guard(rules, attachment.nics, self._bridge.reach)
            masquerade.guard(rules, attachment.nics)
            group_filters.guard(rules, self._groups.of(attachment))

    def counters(self, attachment: Attachment) -> Counters:
        """A tap receives the packets that its guest sends."""
        nics = attachment.joined.nics
        self._namespaces.enter(attachment.netns)
        with Netlink(NETLINK_NETFILTER) as rules:
            refused = filters.refused(rules, nics, self._bridge.reach)
            by_group = group_filters.refused(rules, self._groups.of(attachment.joined))
            by_port = masquerade.refused(rules, nics)
        with Netlink() as inside:
            taps_ = [links.find(inside, nic.tap) for nic in nics]
        found = [
            _counted(
                nic,
                tap.counted if tap is not None else {},
                drops | by_group.get(nic.index, {}) | by_port.get(nic.index, {}),
            )
            for nic, tap, drops in zip(nics, taps_, refused, strict=True)
        ]
        return Counters(uid=attachment.uid, interfaces=tuple(found))

    def all_held(self, attachment: Attachment) -> bool:
        """Return True if processes have all taps open.

        A tap whose interface is `leaving` may be closed.
        """
        needed = {nic.tap for nic in attachment.joined.nics if not nic.leaving}
        return needed <= self.held(attachment)

    def held(self, attachment: Attachment) -> set[str]:
        self._namespaces.enter(attachment.netns)
        with Netlink() as inside:
            return {nic.tap for nic in attachment.nics if _running(inside, nic.tap)}

    def in_use(self, attachment: Attachment) -> bool:
        return self._namespaces.exists(attachment.netns) and bool(self.held(attachment))

    def delete_host_links(self, host_links: Collection[str]) -> None:
        """Delete these host ends. They survive a lost namespace that a process keeps alive."""
        with Netlink() as host:
            _delete(host, host_links)

    def delete_orphans(self, kept: Collection[str]) -> None:
        """Delete host ends on this netd's own bridges that are not in `kept`.

        netd calls this at start.

        All other host ends stay, because they may belong to another netd.
        """
        with Netlink() as host:
            _delete(host, self._attachers.bridges.ports(host).keys() - set(kept))

    def is_ours(self, netns: str) -> bool:
        if not self._namespaces.exists(netns):
            return False
        self._namespaces.enter(netns)
        with Netlink() as inside:
            lo = links.find(inside, "lo")
            return lo is not None and lo.alias == self._bridge.mark


def _counted(nic: Nic, counted: Mapping[str, int], refused: dict[str, int]) -> NicCounters:
    """Refused packets count as received, not as dropped."""

    def traffic(way: str) -> Traffic:
        return Traffic(
            bytes=counted.get(f"{way}_bytes", 0),
            packets=counted.get(f"{way}_packets", 0),
            dropped=counted.get(f"{way}_dropped", 0),
        )

    return NicCounters(
        name=nic.name,
        to_guest=traffic("tx"),
        from_guest=traffic("rx"),
        refused={rule: count for rule, count in refused.items() if count},
    )


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that `open_taps` returned."""
    for fd in descriptors:
        socket.close(fd)


def _claim(host: Netlink, uid: str, nics: Sequence[Nic], *, fresh: bool) -> None:
    """Raise 409 `link_taken` if another VM has a host end with one of these names.

    `fresh` means that the namespace is new. Then delete host ends that an earlier namespace left.
    """
    for nic in nics:
        found = links.find(host, nic.host_link)
        if found is None:
            continue
        if found.alias not in {"", uid}:
            raise VirtbusError(
                Code.CONFLICT,
                "link_taken",
                f"{nic.host_link} on this host belongs to {found.alias}; give the VM another uid",
            )
        if fresh:
            host.do([links.delete_link(nic.host_link)])


def _delete(host: Netlink, names_: Collection[str]) -> None:
    for name in sorted(names_):
        host.do([links.delete_link(name)])  # a batch each: every deletion waits for RCU


def _no_ipv6() -> None:
    """Switch IPv6 off in the namespace.

    Write only if necessary, because a write visits every link.
    """
    if read_sysctl(_NO_IPV6) != "1":
        write_sysctl(_NO_IPV6, "1")


def _join(uid: str, nic: Nic) -> list[NetlinkCall]:
    bridge = _BRIDGE_INDEX + nic.index
    mac, macvlan = names.wire_mac(uid, nic.index), nic.is_macvlan
    if nic.is_translated:  # the network sees the guest's MAC with addresses of the namespace
        return [
            links.new_bridge(nic.bridge, index=bridge, mac=mac),
            links.set_link(nic.eth, up=True, mac=nic.mac),
            links.set_link(nic.tap, master=bridge, mtu=nic.mtu),
            tuning.link_state(nic),
        ]
    wire = mac if nic.kind is NicKind.CNI and not macvlan else ""
    own = mac if macvlan else None
    # A plugin's bridge may return the guest's own broadcasts (hairpin mode: flannel, Weave). From
    # these the inner bridge would learn that the guest is behind `eth`.
    deaf = [links.deaf_port(nic.eth)] if nic.kind is NicKind.CNI else []
    return [
        links.new_bridge(nic.bridge, index=bridge, mac=own),
        host_end.plug(nic.eth, bridge, mac=wire),
        *deaf,
        links.set_link(nic.tap, master=bridge, mtu=nic.mtu),
        tuning.link_state(nic),
    ]


def _opened_up(inside: Netlink, nic: Nic) -> list[NetlinkCall]:
    """Return the calls that undo changes of other programs: a lower MTU, or an isolated port."""
    there = [link for link in _links_of(inside, nic).values() if link is not None]
    return [
        *(links.open_port(link.name) for link in there if link.isolated),
        *(links.raise_mtu(link.name, nic.mtu) for link in there if link.mtu < nic.mtu),
    ]


def _delivered(inside: Netlink, nic: Nic) -> list[NetlinkCall]:
    """Return the calls that direct the guest's frames to its tap if `eth` has the guest's MAC.

    Without these calls, the inner bridge would keep frames for the MAC of its own port `eth`.
    """
    if not nic.is_macvlan or nic.is_translated:
        return []
    eth, tap = links.find(inside, nic.eth), links.find(inside, nic.tap)
    if eth is None or tap is None or eth.mac != nic.mac:
        return []
    return [neighbours.forget_local(eth.index, nic.mac), neighbours.forward_to(tap.index, nic.mac)]


def _make_taps(inside: Netlink, nics: Sequence[Nic]) -> None:
    """Make missing taps.

    Never open an existing tap with several queues: the new queue would take frames from its guest.
    """
    for nic in nics:
        many = nic.queues > 1
        if many and links.find(inside, nic.tap) is not None:
            continue
        with suppress(VirtbusError):  # tap_busy: QEMU has the tap open
            taps.make_tap(nic.tap, multi_queue=many)


def _refuse_busy(nic: Nic) -> None:
    """Raise 409 `tap_busy` for a tap with several queues that a process has open."""
    if nic.queues > 1:
        with Netlink() as inside:
            if _running(inside, nic.tap):
                raise taps.busy(nic.tap)


def _faults(inside: Netlink, nic: Nic) -> list[str]:
    found = _links_of(inside, nic)
    bridge = found[nic.bridge]
    if bridge is None:
        return [f"{nic.bridge} is gone"]
    wrong = {
        nic.eth: _wrong(found[nic.eth], None if nic.is_translated else bridge),
        nic.tap: _wrong(found[nic.tap], bridge),
    }
    if nic.binding is NicBinding.PASST and found[nic.eth] is None:
        wrong[nic.eth] = "gone, because its passt has ended"
    low = [
        link
        for name, link in found.items()
        if link is not None and link.mtu < nic.mtu and not wrong.get(name)
    ]
    return [
        *(f"{name} is {what}" for name, what in wrong.items() if what),
        *(f"{link.name} {OF_MTU} {link.mtu} instead of {nic.mtu}" for link in low),
    ]


def _wrong(link: links.KernelLink | None, bridge: links.KernelLink | None) -> str:
    """Return the fault of a link, or an empty string. The link must be a port of `bridge`.

    If `bridge` is None, the link must not be a port.
    """
    if link is None:
        return "gone"
    if link.master != (bridge.index if bridge is not None else 0):
        return f"not on {bridge.name}" if bridge is not None else "a port of a bridge"
    if link.isolated:
        return "an isolated port"
    return "" if link.up else "down"


def _links_of(inside: Netlink, nic: Nic) -> dict[str, links.KernelLink | None]:
    return {name: links.find(inside, name) for name in (nic.eth, nic.tap, nic.bridge)}


def _running(netlink: Netlink, name: str) -> bool:
    link = links.find(netlink, name)
    return link is not None and link.running
