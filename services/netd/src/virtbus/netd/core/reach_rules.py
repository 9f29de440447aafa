"""nftables rules of the host that limit the reach of guests (NET-12, ADR 0036).

`guest` is the match of packets of one IP version from guests, for example by their bridge.
"""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

from virtbus.netd.core import nft
from virtbus.netd.core.reach import METADATA, METADATA6, ReachRules, of_ipv4, of_ipv6
from virtbus.schemas.overlay import TUNNEL_PORT

Match = tuple[bytes, ...]
DNS_PORT = 53
_ECHO_REQUEST6, _NEIGHBOUR_SOLICITATION, _NEIGHBOUR_ADVERTISEMENT = 128, 135, 136


def host_sets(reach: ReachRules) -> tuple[nft.AddressSet, nft.AddressSet]:
    """Return the sets of the hosts' addresses, of IPv4 and of IPv6."""
    four = tuple(sorted(one for one in reach.hosts if isinstance(one, IPv4Address)))
    six = tuple(sorted(one for one in reach.hosts if isinstance(one, IPv6Address)))
    return nft.AddressSet("hosts", 1, four), nft.AddressSet("hosts6", 2, six, version=6)


def opened(chain: str, guest: Match, reach: ReachRules) -> Iterator[nft.NftRule]:
    """Yield the rules that accept answers, DNS queries, and packets to opened addresses.

    These rules take precedence over those of `closed`, so they must come first in the chain.
    """
    yield nft.rule(chain, guest, nft.established(), _accept())
    for server in reach.dns:
        yield from to_dns(chain, (*guest, *nft.ip_destination(server)))
    for network in of_ipv4(reach.opened):
        yield nft.rule(chain, guest, nft.ip_destination_in(network), _accept())


def opened6(chain: str, guest: Match, reach: ReachRules) -> Iterator[nft.NftRule]:
    """Yield the rules of `opened` for IPv6, without name servers, whose addresses are IPv4."""
    yield nft.rule(chain, guest, nft.established(), _accept())
    for network in of_ipv6(reach.opened):
        yield nft.rule(chain, guest, nft.ip6_destination_in(network), _accept())


def to_dns(chain: str, match: Match) -> Iterator[nft.NftRule]:
    """Yield the rules that accept DNS queries among the matched packets."""
    for protocol in (nft.UDP, nft.TCP):
        port = nft.destination_port(DNS_PORT)
        yield nft.rule(chain, match, nft.l4_protocol(protocol), port, _accept())


def pings(chain: str, match: Match) -> nft.NftRule:
    """Return the rule that accepts echo requests among the matched packets."""
    icmp = nft.l4_protocol(nft.ICMP)
    return nft.rule(chain, match, icmp, nft.is_echo_request(), _accept())


def pings6(chain: str, match: Match) -> nft.NftRule:
    """Return the rule of `pings` for IPv6."""
    icmp = nft.l4_protocol(nft.ICMP6)
    return nft.rule(chain, match, icmp, nft.icmp6_type(_ECHO_REQUEST6), _accept())


def discovery(chain: str, guest: Match) -> Iterator[nft.NftRule]:
    """Yield the rules that accept neighbour discovery."""
    icmp = (*guest, *nft.l4_protocol(nft.ICMP6))
    for kind in (_NEIGHBOUR_SOLICITATION, _NEIGHBOUR_ADVERTISEMENT):
        yield nft.rule(chain, icmp, nft.icmp6_type(kind), _accept())


def closed(
    chain: str, guest: Match, hosts: nft.AddressSet, reach: ReachRules
) -> Iterator[nft.NftRule]:
    """Yield the rules that drop packets to metadata, hosts and addresses that a setting closes."""
    yield nft.rule(chain, guest, nft.ip_destination(METADATA), _drop())
    yield nft.rule(chain, guest, nft.ip_destination_among(hosts), _drop())
    for network in of_ipv4(reach.closed):
        yield nft.rule(chain, guest, nft.ip_destination_in(network), _drop())


def closed6(
    chain: str, guest: Match, hosts: nft.AddressSet, reach: ReachRules
) -> Iterator[nft.NftRule]:
    """Yield the rules of `closed` for IPv6."""
    yield nft.rule(chain, guest, nft.ip6_destination(METADATA6), _drop())
    yield nft.rule(chain, guest, nft.ip6_destination_among(hosts), _drop())
    for network in of_ipv6(reach.closed):
        yield nft.rule(chain, guest, nft.ip6_destination_in(network), _drop())


def tunnel_frames(chain: str, hosts: nft.AddressSet, *more: bytes) -> nft.NftRule:
    """Return the rule that drops frames of overlays whose source is not a host of the fleet."""
    frames = (*nft.is_ipv4(), *nft.l4_protocol(nft.UDP), *nft.destination_port(TUNNEL_PORT))
    return nft.rule(chain, frames, nft.ip_source_not_among(hosts), more, _drop())


def _accept() -> bytes:
    return nft.verdict(nft.NftVerdict.ACCEPT)


def _drop() -> bytes:
    return nft.verdict(nft.NftVerdict.DROP)
