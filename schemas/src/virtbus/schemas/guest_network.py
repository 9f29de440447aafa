"""Defines the networks inside a VM's network namespace, for guests behind NAT as in KubeVirt."""

from ipaddress import ip_network
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

GUEST_NETWORK, GUEST_NETWORK6 = "10.0.2.0/24", "fd10:0:2::/120"
_LEAST_ADDRESSES = 4
"""The network, its gateway, the guest, and IPv4's broadcast address."""


def _checked(text: str, version: int, example: str) -> str:
    network = ip_network(text)  # its error says that host bits are set
    if network.version != version or network.num_addresses < _LEAST_ADDRESSES:
        msg = f"must be an IPv{version} network of at least four addresses, such as {example}"
        raise ValueError(msg)
    odd = network.is_multicast or network.is_loopback or network.is_link_local
    if odd or network.network_address.is_unspecified:
        msg = f"must not have loopback, link-local or multicast addresses; use {example}"
        raise ValueError(msg)
    return str(network)


def _four(text: str) -> str:
    return _checked(text, 4, GUEST_NETWORK)


def _six(text: str) -> str:
    return _checked(text, 6, GUEST_NETWORK6)


GuestNetwork = Annotated[str, StringConstraints(max_length=18), AfterValidator(_four)]
GuestNetwork6 = Annotated[str, StringConstraints(max_length=43), AfterValidator(_six)]
