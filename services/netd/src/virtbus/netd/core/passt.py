"""passt's options for an interface, and the name of its processes (ADR 0082)."""

from ipaddress import IPv4Interface, ip_interface

from virtbus.netd.core import names
from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.schemas.publish import Protocol

KINDS = frozenset({NicKind.BRIDGE, NicKind.NAT, NicKind.ROUTED, NicKind.ISOLATED, NicKind.OVERLAY})
"""Kinds whose addresses virtbus gives. passt's namespace then has the address of the guest."""
_SOME_ROUTER6 = "fe80::1"
_OF_SYSLOG = "Failed to send "


def process_name(uid: str, index: int) -> str:
    """Return the word by which the processes of an interface are found."""
    return f"passt-{uid}-{index}"


def options(nic: Nic, uid: str) -> list[str]:
    """Return passt's options for an interface that has its addresses.

    netd itself answers DHCP and router solicitations on the guest's tap. passt only forwards TCP,
    UDP and echo requests, and answers ARP and neighbour solicitations for all addresses except the
    guest's. passt needs a gateway. On an isolated network, passt gets an unused gateway.
    """
    own = ip_interface(nic.addresses4[0])
    assert isinstance(own, IPv4Interface)  # noqa: S101  for the type checker
    other = next(one for one in own.network.hosts() if one != own.ip)
    found = ["-a", str(own.ip), "-n", str(own.network.prefixlen), "-g", nic.gateway or str(other)]
    if nic.addresses6:
        found += ["-a", str(ip_interface(nic.addresses6[0]).ip)]
        found += ["-g", nic.gateway6 or _SOME_ROUTER6]
    else:
        found.append("-4")
    found += ["-i", nic.eth, "-M", names.wire_mac(uid, nic.index), "-m", str(nic.mtu)]
    found += ["--no-map-gw", "--no-dhcp", "--no-dhcpv6", "--no-ra"]
    return [*found, "-t", _ports(nic, "tcp"), "-u", _ports(nic, "udp")]


def _ports(nic: Nic, protocol: Protocol) -> str:
    """Return the forwarded ports of a protocol: the declared and the published ports.

    If the interface declares no port, all ports are forwarded.
    """
    if not nic.ports:
        return "all"
    found = {one.range for one in nic.ports if one.protocol == protocol}
    free = {one.guest_port for one in nic.publish if one.protocol == protocol}
    found |= {(one, one) for one in free if not any(low <= one <= high for low, high in found)}
    return (
        ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in sorted(found))
        or "none"
    )


def cause(output: str) -> str:
    """Return the last line that passt printed, without lines about a missing syslog."""
    lines = [line.strip() for line in output.splitlines() if not line.startswith(_OF_SYSLOG)]
    return next((line for line in reversed(lines) if line), "it ended without a message")
