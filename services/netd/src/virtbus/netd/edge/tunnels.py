"""Makes overlay networks' VXLAN devices, and their entries for guests on other hosts.

A device neither learns nor floods. It forwards frames only to the guests that the bus names, and
answers ARP queries for their addresses.
"""

import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from ipaddress import IPv4Address

from virtbus.netd.core import host_end, names
from virtbus.netd.core.address_assignment import mtu_too_large
from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.overlay import changes, remote_of
from virtbus.netd.edge import links, neighbours
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.overlay import ENCAPSULATION_BYTES, OverlayPeer, TunnelEnd

log = logging.getLogger(__name__)

_CALLS_AT_ONCE = 100
_ANYWHERE = "192.0.2.1", 9
"""An address that no host has (RFC 5737). A UDP connect to it only looks up a route."""


class Tunnels:
    """The VXLAN devices of this host. Methods that use netlink block."""

    def __init__(self, bridges: HostBridges, address: IPv4Address | None = None) -> None:
        """`address` is this host's address on the underlay. With None, `end` chooses one."""
        self._bridges = bridges
        self._address = address
        self._peers: dict[str, dict[str, OverlayPeer]] = {}
        self._lock = threading.Lock()
        self.guests: Callable[[], Iterable[Nic]] = tuple
        """Returns the interfaces of this host's guests, including networks under construction."""
        self.complete = False
        """True once all peers are known. Entries are deleted only then."""

    def end(self) -> TunnelEnd | None:
        """Return the end of this host's tunnels; None if the host has no address for them.

        Without a set address, the end has the host's address on its default route. Without a
        default route, the end has the host's lowest IPv4 address.
        """
        own = sorted(IPv4Address(text) for text in self._bridges.addresses() if ":" not in text)
        outside = _address_to_outside()
        wanted = self._address or (outside if outside in own else next(iter(own), None))
        with Netlink() as host:
            for found in links.list_addresses(host):
                link = links.find(host, found.label) if found.interface.ip == wanted else None
                if link is not None:
                    return TunnelEnd(address=str(wanted), mtu=link.mtu)
        return None

    def plan(self, nic: Nic) -> TunnelEnd:
        """Return the end of the tunnels for an interface of an overlay.

        Raises:
            VirtbusError: 422 `no_tunnels`: the host has no address for tunnels, or the network has
                no VNI.
                422 `mtu_too_large`: the network's MTU exceeds the tunnels' MTU.
        """
        end, target = self.end(), nic.target
        if end is None or target is None or not target.vni:
            message = (
                "this node has no address for tunnels of overlays; its operator sets "
                "overlay_address of netd"
            )
            detail = Detail(path=nic.network_path, message=message)
            raise VirtbusError(Code.UNSUPPORTED, "no_tunnels", message, details=(detail,))
        most = end.mtu - ENCAPSULATION_BYTES
        if (target.spec.mtu or 0) > most:
            message = (
                f"the network '{nic.network}' has an MTU of {target.spec.mtu}, and tunnels of this "
                f"node carry {most}; make the network again with a smaller one"
            )
            raise mtu_too_large(nic, message)
        return end

    # --- peers ----------------------------------------------------------------------------
    def set_peer(self, peer: OverlayPeer) -> None:
        """Keep another host's guests of a network, and move that host to the end of the list.

        If two hosts name the same guest, the last host in the list counts: its key on the bus is
        newer.
        """
        with self._lock:
            hosts = self._peers.setdefault(peer.network, {})
            hosts.pop(peer.peer, None)
            hosts[peer.peer] = peer

    def drop_peer(self, network: str, peer: str) -> None:
        with self._lock:
            self._peers.get(network, {}).pop(peer, None)

    # --- devices --------------------------------------------------------------------------
    def ensure(self, host: Netlink, nic: Nic) -> None:
        """Ensure the device of an interface's network, as a port of the network's bridge.

        Raises:
            VirtbusError: 409 `vni_taken`: another overlay has the VNI on this host.
                The errors of `plan`.
        """
        end, target, bridge = self.plan(nic), nic.target, self._bridges.of(nic)
        vni = target.vni if target is not None else 0
        name = names.tunnel(nic.place)
        there = links.find(host, name)
        mtu = end.mtu - ENCAPSULATION_BYTES
        if there is not None and (there.alias != end.address or there.mtu != mtu):
            host.do([links.delete_link(name)])  # its address or MTU is outdated
            there = None
        if there is not None and there.master == bridge.index and there.up:
            return
        host.do([links.new_vxlan(name, vni, end.address, mtu)])
        if links.find(host, name) is None:
            message = f"another overlay has the number {vni} on this node; make the network again"
            raise VirtbusError(Code.CONFLICT, "vni_taken", message)
        port = links.set_link(name, master=bridge.index, alias=end.address)
        up = links.set_link(name, up=True)  # last: a device that is up is complete
        host.do([host_end.no_ipv6(name), port, links.quiet_port(name), up])

    def sync(self, host: Netlink, nic: Nic, own: Collection[str]) -> None:
        """Update the device's entries for other hosts' guests.

        `own` has the MACs of guests on this host.
        """
        calls = self._missing(host, nic, own)
        for start in range(0, len(calls), _CALLS_AT_ONCE):
            host.do(calls[start : start + _CALLS_AT_ONCE])

    def faults(self, host: Netlink, nic: Nic, own: Collection[str]) -> list[str]:
        name = names.tunnel(nic.place)
        link = links.find(host, name)
        if link is None or not link.up:
            return [f"{name}: gone or down"]
        count = len(self._missing(host, nic, own))
        return [f"{name}: {count} entries are wrong or missing"] if count else []

    def _missing(self, host: Netlink, nic: Nic, own: Collection[str]) -> list[NetlinkCall]:
        link = links.find(host, names.tunnel(nic.place))
        if link is None:
            return []
        with self._lock:
            peers = list(self._peers.get(nic.place, {}).values())
        wanted = remote_of(peers, own)
        found = neighbours.list_forwarding(host, link.index)
        put, gone = changes(found.remote, wanted.forwarding)
        near, gone_near = changes(neighbours.list_neighbours(host, link.index), wanted.neighbours)
        ports = set(wanted.forwarding)
        calls = [neighbours.put_remote(link.index, mac, address) for mac, address in put.items()]
        calls += [neighbours.forward_to(link.index, mac) for mac in sorted(ports - found.ports)]
        calls += [neighbours.put_neighbour(link.index, ip, mac) for ip, mac in near.items()]
        if not self.complete:
            return calls
        calls += [neighbours.delete_neighbour(link.index, ip) for ip in gone_near]
        calls += [neighbours.forget_local(link.index, mac) for mac in sorted(found.ports - ports)]
        return [*calls, *(neighbours.delete_remote(link.index, mac) for mac in gone)]

    def first_of_each(self, nics: Iterable[Nic]) -> Sequence[tuple[Nic, set[str]]]:
        """Return one interface per overlay of `nics`, and the MACs of its guests on this host."""
        found: dict[str, tuple[Nic, set[str]]] = {}
        for nic in nics:
            if nic.kind is NicKind.OVERLAY:
                found.setdefault(nic.place, (nic, set()))[1].add(nic.mac)
        for nic in self.guests():
            if nic.kind is NicKind.OVERLAY and nic.place in found:
                found[nic.place][1].add(nic.mac)
        return list(found.values())

    def warn(self, nic: Nic, error: VirtbusError) -> None:
        extra = {"code": "tunnel_failed", "network": nic.network}
        log.warning("the tunnel of '%s' cannot be mended: %s", nic.network, error, extra=extra)


def _address_to_outside() -> IPv4Address | None:
    """Return this host's address on its default route; None without such a route.

    The host's first address is unsafe: it may belong to a bridge of containers, with the same
    address on each host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(_ANYWHERE)
        except OSError:
            return None
        return IPv4Address(unsent.getsockname()[0])
