"""The host's nftables table of published ports, and the holders of ports.

A packet to a published port is redirected to the guest before the host's own rules see it. Packets
from guests are not redirected: a guest reaches other guests by their own addresses, and reaches no
port of a host. CNI plugins publish the ports of their own interfaces.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_interface

from virtbus.netd.core import names, nft, nft_tables, redirected
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.host_table import table_of
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.schemas.address_pool import Address
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.publish import PublishedPort

_FAMILY = nft.Family.INET
_PREROUTING, _OUTPUT, _DESTINATION_NAT = 0, 3, -100
_PROTOCOLS = {"tcp": nft.TCP, "udp": nft.UDP}
_LISTENS = {"tcp": "0A", "udp": "07"}
"""The states in /proc/net of sockets that accept packets from any peer."""
_LOOPBACK6, _ON_LINK6 = IPv6Network("::1/128"), IPv6Network("fe80::/10")


@dataclass(frozen=True, slots=True)
class Lead:
    """A published port and the guest to which it leads. `owner` names the VM in messages."""

    port: PublishedPort
    guest: Address
    owner: str

    @property
    def end(self) -> redirected.GuestPort:
        protocol = _PROTOCOLS[self.port.protocol]
        return redirected.GuestPort(self.guest, protocol, self.port.guest_port)


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of the host, at one address or at any address (`0.0.0.0`, `::`).

    A socket of `::` also takes packets of IPv4, if its program has not refused IPv4.
    """

    address: Address
    port: int
    protocol: str
    inode: int

    def takes(self, lead: Lead) -> bool:
        port, mine = lead.port, lead.port.host_address
        if (self.protocol, self.port) != (port.protocol, port.host_port):
            return False
        if self.address.version != lead.guest.version:
            return self.address == IPv6Address(0)
        return self.address.is_unspecified or mine is None or str(self.address) == mine


def leads_of(attachment: Attachment) -> tuple[Lead, ...]:
    """Return the published ports of a VM whose addresses are known.

    The port of overlay tunnels is left out, because an earlier netd may have published it.
    """
    owner = f"the VM {attachment.namespace}/{attachment.vm_name} ({attachment.uid})"
    return tuple(
        Lead(port, guest, owner)
        for nic in _own(attachment)
        for port in nic.publish
        for guest in _first_of_each(nic)
        if port.has(guest.version) and not port.is_of_tunnels
    )


def refuse_tunnel_port(attachment: Attachment) -> None:
    """Raise 422 `port_reserved` if a published port is the port of overlay tunnels.

    A redirect would give the guest the frames of other overlays. Each host refuses the port,
    because it may get its first overlay at any time.
    """
    for nic in attachment.nics:
        for port in nic.publish:
            if port.is_of_tunnels:
                message = f"hosts use {port.place} for overlay networks; publish another port"
                raise VirtbusError(Code.UNSUPPORTED, "port_reserved", message)


def refuse_without_ipv6(attachment: Attachment) -> None:
    """Raise 422 `no_ipv6` if a port is published on an IPv6 address for a guest without IPv6."""
    for nic in _own(attachment):
        for port in nic.publish if nic.addresses and not nic.addresses6 else ():
            if not port.has(4):
                raise _no_ipv6(port)


def check_ports(attachment: Attachment, others: Iterable[Nic]) -> None:
    """Refuse a published port that another interface has, if one of the two is a CNI interface.

    Plugins do not notice the clash, and one guest would get all packets.

    Raises:
        VirtbusError: 409 `port_taken`.
    """
    held = [(other, port) for other in others for port in other.publish]
    for nic in attachment.nics:
        for port in nic.publish:
            for other, taken in held:
                if NicKind.CNI in {nic.kind, other.kind} and port.clashes(taken):
                    raise port_taken(port, f"another VM's interface on '{other.network}'")


def _own(attachment: Attachment) -> Iterator[Nic]:
    return (nic for nic in attachment.nics if nic.kind is not NicKind.CNI)


def _first_of_each(nic: Nic) -> Iterator[Address]:
    for addresses in (nic.addresses4, nic.addresses6):
        yield from (ip_interface(text).ip for text in addresses[:1])


def table_name(bridge: str) -> str:
    """Return the name of the table of a bridge's guests."""
    return f"{table_of(bridge)}_ports"


def ports_table(bridge: str, leads: Sequence[Lead]) -> list[NetlinkCall]:
    """Return the transaction that replaces the table."""
    chains = [
        nft.Chain("prerouting", _PREROUTING, _DESTINATION_NAT, kind="nat"),
        nft.Chain("output", _OUTPUT, _DESTINATION_NAT, kind="nat"),
    ]
    outside = (
        *nft.comes_from_elsewhere_than(bridge),
        *nft.comes_from_no(names.NETWORK_BRIDGES),
    )
    rules = []
    for lead in leads:
        place = _place(lead)
        redirect = redirected.redirect_to(lead.guest, lead.port.guest_port)
        rules.append(nft.rule("prerouting", outside, place, redirect))
        rules.append(nft.rule("output", place, redirect))
    return nft_tables.replace_table(_FAMILY, table_name(bridge), chains, rules)


def _place(lead: Lead) -> tuple[bytes, ...]:
    """Return the match of packets to a published port.

    Packets to loopback and link-local addresses are left out. A host never forwards packets between
    link-local addresses.
    """
    port = lead.port
    if port.host_address is None:
        to = nft.is_to_the_host()
    else:
        address = ip_address(port.host_address)
        if isinstance(address, IPv4Address):
            to = nft.ip_destination(address)
        else:
            to = nft.ip6_destination(address)
    if lead.guest.version == 4:
        which = (*nft.is_ipv4(), *nft.is_not_to_loopback())
    else:
        outside = (nft.ip6_destination_outside(one) for one in (_LOOPBACK6, _ON_LINK6))
        which = (*nft.is_ipv6(), *(part for match in outside for part in match))
    return (
        *which,
        *to,
        *nft.l4_protocol(_PROTOCOLS[port.protocol]),
        *nft.destination_port(port.host_port),
    )


def has_ports_table(bridge: str) -> NetlinkCall:
    """Return the query for the table."""
    return nft_tables.get_table(_FAMILY, table_name(bridge))


def no_ports_table(bridge: str) -> list[NetlinkCall]:
    """Return the transaction that removes the table, if there is one."""
    return nft_tables.batch(nft_tables.ended(_FAMILY, table_name(bridge)))


def holder(port: PublishedPort, leads: Mapping[str, Sequence[Lead]], uid: str) -> str:
    """Return the VM other than `uid` that has published the port; empty if none has."""
    others = (lead for other, held in leads.items() if other != uid for lead in held)
    return next((lead.owner for lead in others if lead.port.clashes(port)), "")


def listeners(protocol: str, text: str) -> Iterator[Listener]:
    """Yield the listening sockets in the text of `/proc/net/tcp`, `udp`, `tcp6` or `udp6`.

    Sockets of loopback addresses and of link-local IPv6 addresses are left out, because packets to
    these addresses are never redirected.
    """
    for line in text.splitlines()[1:]:
        words = line.split()
        raw, _, port = words[1].partition(":")
        if words[3] != _LISTENS[protocol]:
            continue
        address = _address(raw)
        on_link = isinstance(address, IPv6Address) and address.is_link_local
        if not (address.is_loopback or on_link):
            yield Listener(address, int(port, 16), protocol, int(words[9]))


def _address(raw: str) -> Address:
    """Return the address of a socket. The kernel writes words of 32 bits in the host's order."""
    words = (bytes.fromhex(raw[start : start + 8])[::-1] for start in range(0, len(raw), 8))
    found = ip_address(b"".join(words))
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def taken_by(lead: Lead, found: Iterable[Listener]) -> Listener | None:
    """Return the listener that takes packets to a published port."""
    return next((one for one in found if one.takes(lead)), None)


def port_taken(port: PublishedPort, who: str) -> VirtbusError:
    """Return 409 `port_taken`, which names the holder. A retry may find the port free."""
    message = f"{port.place} of this host belongs to {who}; publish another port"
    return VirtbusError(Code.CONFLICT, "port_taken", message, retry=Retry.LATER, after_ms=5000)


def no_such_address(port: PublishedPort) -> VirtbusError:
    """Return 409 `address_missing`: the host does not have the address of a published port."""
    message = (
        f"this host has no address {port.host_address} for {port.place}, or it is a gateway of "
        "guests; publish on every address, or place the VM on the host that has it"
    )
    return VirtbusError(Code.CONFLICT, "address_missing", message, retry=Retry.LATER, after_ms=5000)


def _no_ipv6(port: PublishedPort) -> VirtbusError:
    message = (
        f"{port.place} is an IPv6 address, and the guest has none on its network; set subnet6 of "
        "this node's netd, or publish on an IPv4 address"
    )
    return VirtbusError(Code.UNSUPPORTED, "no_ipv6", message)
