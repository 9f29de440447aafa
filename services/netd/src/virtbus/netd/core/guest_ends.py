"""The addresses of a guest behind NAT and of its gateway, from the guest's network."""

from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface, ip_network


@dataclass(frozen=True, slots=True)
class GuestEnds:
    """The two hosts of a guest's own network: the VM's namespace as the gateway, and the guest."""

    gateway: IPv4Interface | IPv6Interface
    guest: IPv4Interface | IPv6Interface


def ends_of(network: str) -> GuestEnds:
    """Return the first two host addresses of a network: gateway and guest, as in KubeVirt."""
    found = ip_network(network)
    gateway, guest = (ip_interface(f"{found[at]}/{found.prefixlen}") for at in (1, 2))
    return GuestEnds(gateway, guest)
