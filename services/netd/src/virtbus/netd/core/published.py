"""Builds the host's nftables table of published ports, and finds out who holds a port.

A packet to a published port is sent on to the guest before the host's own rules see it. Packets of
guests are excepted: a guest reaches its neighbours by their own addresses, and no port of a host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface

from virtbus.netd.core import nft, nft_tables
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.host_table import table_of
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.publish import PublishedPort

_FAMILY = nft.Family.INET
_PREROUTING, _OUTPUT, _DESTINATION_NAT = 0, 3, -100
_PROTOCOLS = {"tcp": nft.TCP, "udp": nft.UDP}
_LISTENS = {"tcp": "0A", "udp": "07"}
"""The states in /proc/net of sockets that accept packets from any peer."""
_ANY6 = "0" * 32


@dataclass(frozen=True, slots=True)
class Lead:
    """A published port and the guest that it leads to; `owner` names the VM in messages."""

    port: PublishedPort
    guest: IPv4Address
    owner: str


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of the host that takes packets; `address` None: at every address."""

    address: IPv4Address | None
    port: int
    protocol: str
    inode: int


def leads_of(attachment: Attachment) -> tuple[Lead, ...]:
    """Return the published ports of a VM whose addresses are known."""
    owner = f"the VM {attachment.namespace}/{attachment.vm_name} ({attachment.uid})"
    return tuple(
        Lead(port, IPv4Interface(nic.addresses[0]).ip, owner)
        for nic in attachment.nics
        for port in (nic.publish if nic.addresses else ())
    )


def table_name(bridge: str) -> str:
    """Return the name of the table of a bridge's guests."""
    return f"{table_of(bridge)}_ports"


def ports_table(bridge: str, leads: Sequence[Lead]) -> list[NetlinkCall]:
    """Return the transaction that replaces the table."""
    chains = [
        nft.Chain("prerouting", _PREROUTING, _DESTINATION_NAT, kind="nat"),
        nft.Chain("output", _OUTPUT, _DESTINATION_NAT, kind="nat"),
    ]
    outside = nft.comes_from_elsewhere_than(bridge)
    rules = []
    for lead in leads:
        place = _place(lead.port)
        redirect = nft.redirect_to(lead.guest, lead.port.guest_port)
        rules.append(nft.rule("prerouting", outside, place, redirect))
        rules.append(nft.rule("output", nft.is_ipv4(), nft.is_not_to_loopback(), place, redirect))
    return nft_tables.replace_table(_FAMILY, table_name(bridge), chains, rules)


def _place(port: PublishedPort) -> tuple[bytes, ...]:
    address = port.host_address
    return (
        *nft.is_ipv4(),
        *(nft.is_to_the_host() if address is None else nft.ip_destination(IPv4Address(address))),
        *nft.l4_protocol(_PROTOCOLS[port.protocol]),
        *nft.destination_port(port.host_port),
    )


def has_ports_table(bridge: str) -> NetlinkCall:
    """Return the query for the table."""
    return nft_tables.get_table(_FAMILY, table_name(bridge))


def no_ports_table(bridge: str) -> list[NetlinkCall]:
    """Return the transaction that removes the table (ENOENT if there is none)."""
    return nft_tables.batch([nft_tables.delete_table(_FAMILY, table_name(bridge))])


def holder(port: PublishedPort, leads: Mapping[str, Sequence[Lead]], uid: str) -> str:
    """Return the VM other than `uid` that has published the port; empty if none has."""
    others = (lead for other, held in leads.items() if other != uid for lead in held)
    return next((lead.owner for lead in others if lead.port.clashes(port)), "")


def listeners(protocol: str, text: str) -> Iterator[Listener]:
    """Yield the listening sockets in the text of `/proc/net/tcp`, `udp`, `tcp6` or `udp6`.

    Sockets of loopback addresses, and of single IPv6 addresses, take no published port.
    """
    for line in text.splitlines()[1:]:
        words = line.split()
        raw, _, port = words[1].partition(":")
        if words[3] != _LISTENS[protocol]:
            continue
        if len(raw) == 8:
            address = IPv4Address(int.from_bytes(bytes.fromhex(raw)[::-1], "big"))
            if address.is_loopback:
                continue
            where = None if address.is_unspecified else address
        elif raw == _ANY6:
            where = None
        else:
            continue
        yield Listener(where, int(port, 16), protocol, int(words[9]))


def taken_by(port: PublishedPort, found: Sequence[Listener]) -> Listener | None:
    """Return the listener that takes packets to the port."""
    for one in found:
        mine = port.host_address
        same = (one.protocol, one.port) == (port.protocol, port.host_port)
        if same and (mine is None or one.address is None or str(one.address) == mine):
            return one
    return None


def port_taken(port: PublishedPort, who: str) -> VirtbusError:
    """Return 409 `port_taken`, which names the holder. netd retries: the port may be freed."""
    message = f"{port.place} of this host belongs to {who}; publish another port"
    return VirtbusError(Code.CONFLICT, "port_taken", message, retry=Retry.LATER, after_ms=5000)


def no_such_address(port: PublishedPort) -> VirtbusError:
    """Return 409 `address_missing`: the host does not have the address of a published port."""
    message = (
        f"this host has no address {port.host_address} for {port.place}; publish on every address, "
        "or place the VM on the host that has it"
    )
    return VirtbusError(Code.CONFLICT, "address_missing", message, retry=Retry.LATER, after_ms=5000)
