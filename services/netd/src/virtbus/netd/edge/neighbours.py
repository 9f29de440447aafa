"""Builds netlink calls for forwarding entries and neighbours, and lists a link's entries."""

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_interface
from socket import AF_INET, AF_INET6

from virtbus.netd.core.netlink import HEADER_BYTES, NetlinkCall
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.rtnl import FORWARDING, NEIGHBOURS, Message

_AF_BRIDGE = 7
_NTF_SELF, _NTF_MASTER = 0x02, 0x04
_NUD_NOARP, _NUD_PERMANENT = 0x40, 0x80
_INDEX = struct.Struct("=i")


def forward_to(port: int, mac: str) -> NetlinkCall:
    """Return the call that makes the bridge of `port` send all frames for a MAC to this port."""
    mac_ = ("NDA_LLADDR", mac)
    fields = {"family": _AF_BRIDGE, "ifindex": port, "flags": _NTF_MASTER, "state": _NUD_NOARP}
    return NEIGHBOURS.ensure(f"forwarding of {mac}", mac_, **fields)


def forget_local(port: int, mac: str) -> NetlinkCall:
    """Return the call that removes the entry of `mac` at `port`, even the port's own MAC."""
    what, mac_ = f"local {mac}", ("NDA_LLADDR", mac)
    fields = {"family": _AF_BRIDGE, "ifindex": port, "flags": _NTF_MASTER}
    return NEIGHBOURS.delete(what, mac_, gone=errno.ENOENT, **fields)


@dataclass(frozen=True, slots=True)
class Forwarding:
    """A VXLAN device's forwarding entries, and its bridge's entries that lead to the device."""

    remote: dict[str, str]
    """The address of each MAC's host."""
    ports: frozenset[str]
    """The MACs that the bridge sends to the device."""


def list_forwarding(netlink: Netlink, index: int) -> Forwarding:
    """Return the forwarding entries of a VXLAN device."""
    remote, ports = {}, set()
    listed = FORWARDING.list_all("forwarding", family=_AF_BRIDGE, index=index)
    for mac, message in _entries(netlink, listed, index):
        host = message.get_attr("NDA_DST")
        if host is not None:
            remote[mac] = str(host)
        elif message.get_attr("NDA_MASTER") and not message["state"] & _NUD_PERMANENT:
            ports.add(mac)
    return Forwarding(remote, frozenset(ports))


def list_neighbours(netlink: Netlink, index: int) -> dict[str, str]:
    """Return the MAC of each static neighbour of a link, by address."""
    return {
        str(ip_interface(message.get_attr("NDA_DST")).ip): mac
        for family in (AF_INET, AF_INET6)
        for mac, message in _entries(
            netlink, NEIGHBOURS.list_all("neighbours", family=family), index
        )
        if message["state"] & _NUD_PERMANENT and message.get_attr("NDA_DST")
    }


def _entries(netlink: Netlink, listing: NetlinkCall, index: int) -> Iterator[tuple[str, Message]]:
    for reply in netlink.dump(listing):
        if _INDEX.unpack_from(reply.message, HEADER_BYTES + 4)[0] != index:
            continue
        message = NEIGHBOURS.read(reply)
        mac = message.get_attr("NDA_LLADDR")
        if mac:
            yield str(mac), message


def put_remote(index: int, mac: str, host: str) -> NetlinkCall:
    """Return the call that sends the frames for a MAC to another host."""
    attributes = ("NDA_LLADDR", mac), ("NDA_DST", host)
    fields = {"family": _AF_BRIDGE, "flags": _NTF_SELF, "state": _NUD_PERMANENT}
    return NEIGHBOURS.put(f"{mac} at {host}", *attributes, ifindex=index, **fields)


def delete_remote(index: int, mac: str) -> NetlinkCall:
    """Return the call that deletes the entry that `put_remote` made."""
    fields = {"family": _AF_BRIDGE, "ifindex": index, "flags": _NTF_SELF}
    return NEIGHBOURS.delete(f"remote {mac}", ("NDA_LLADDR", mac), gone=errno.ENOENT, **fields)


def put_neighbour(index: int, address: str, mac: str) -> NetlinkCall:
    """Return the call that sets the MAC of an address on a link."""
    attributes = ("NDA_DST", address), ("NDA_LLADDR", mac)
    fields = {"family": _family(address), "state": _NUD_PERMANENT}
    return NEIGHBOURS.put(f"{address} at {mac}", *attributes, ifindex=index, **fields)


def delete_neighbour(index: int, address: str) -> NetlinkCall:
    """Return the call that deletes the entry that `put_neighbour` made."""
    fields = {"family": _family(address), "ifindex": index}
    return NEIGHBOURS.delete(address, ("NDA_DST", address), gone=errno.ENOENT, **fields)


def _family(address: str) -> int:
    return AF_INET6 if ":" in address else AF_INET
