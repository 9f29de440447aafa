"""The host's nftables table `inet virtbus…`: masquerade, what guests may not reach (NET-12)."""

from ipaddress import IPv4Address, IPv4Interface

from virtbus.netd.core import nft
from virtbus.netd.core.netlink import Call

_DEFAULT_BRIDGE, _DEFAULT_TABLE = "virtbus0", "virtbus"
_FAMILY = nft.Family.INET
_LOCAL_IN, _FORWARD, _POSTROUTING = 1, 2, 4
_FILTER, _SOURCE_NAT = 0, 100

CLOSED_TCP_PORTS = (4222, 6222, 8222, 16509, 16514, 10250)
"""NATS (client, cluster, monitoring), libvirt (tcp, tls), kubelet: control planes of the host."""

METADATA = IPv4Address("169.254.169.254")
"""Cloud metadata of the host itself holds credentials that no guest may read."""


def table_of(bridge: str) -> str:
    """The table of a bridge: each has its own, so that two instances on a host do not meet."""
    return _DEFAULT_TABLE if bridge == _DEFAULT_BRIDGE else f"{_DEFAULT_TABLE}_{bridge}"


def host_table(bridge: str, gateway: IPv4Interface) -> list[Call]:
    """The transaction that makes the table what it shall be, whatever was there."""
    drop, accept = nft.verdict(nft.Verdict.DROP), nft.verdict(nft.Verdict.ACCEPT)
    guest, ipv4 = nft.came_from(bridge), nft.is_ipv4()
    chains = [
        nft.Chain("input", _LOCAL_IN, _FILTER),
        nft.Chain("forward", _FORWARD, _FILTER),
        nft.Chain("postrouting", _POSTROUTING, _SOURCE_NAT, kind="nat"),
    ]
    rules = [
        nft.rule("input", guest, nft.l4_protocol(nft.TCP), nft.destination_port(port), drop)
        for port in CLOSED_TCP_PORTS
    ]
    rules += [
        nft.rule(chain, guest, ipv4, nft.ip_destination(METADATA), drop)
        for chain in ("input", "forward")
    ]
    rules += [
        nft.rule("forward", guest, accept),
        nft.rule("forward", nft.goes_to(bridge), nft.established(), accept),
        nft.rule(
            "postrouting",
            ipv4,
            nft.ip_source_in(gateway.network),
            nft.goes_elsewhere_than(bridge),
            nft.masquerade(),
        ),
    ]
    return nft.replace_table(_FAMILY, table_of(bridge), chains, rules)


def has_host_table(bridge: str) -> Call:
    """Ask the kernel whether the table is there."""
    return nft.get_table(_FAMILY, table_of(bridge))


def no_host_table(bridge: str) -> list[Call]:
    """The transaction that removes the table (ENOENT where there is none)."""
    return nft.batch([nft.delete_table(_FAMILY, table_of(bridge))])
