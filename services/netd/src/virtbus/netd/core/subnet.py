"""Chooses a VM's address in the subnet of a bridge."""

import hashlib
from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Interface

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network_object import BUILT_IN


def choose_address(
    gateway: IPv4Interface, key: str, taken: Collection[str], network_name: str = BUILT_IN
) -> IPv4Interface:
    """Return a free address of the gateway's subnet, if possible the same for the same `key`.

    The search starts at a hash of the key. So addresses are spread, and a released one is not
    reused while neighbours still have it in their ARP caches. `taken` has texts, because parsing
    300 addresses at each attach took 2 ms.

    Raises:
        VirtbusError: 429 if every address is taken.
    """
    network = gateway.network
    hosts = network.num_addresses - 2
    first = int(network.network_address) + 1
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    for step in range(hosts):
        address = IPv4Address(first + (start + step) % hosts)
        if address != gateway.ip and str(address) not in taken:
            return IPv4Interface((address, network.prefixlen))
    way_out = "set a larger `subnet` for netd"
    if network_name != BUILT_IN:
        way_out = f"move some off the node: the network '{network_name}' cannot grow"
    raise VirtbusError(
        Code.EXHAUSTED,
        "addresses_exhausted",
        f"all {max(hosts - 1, 0)} addresses of {network} are in use on this node; delete VMs or "
        f"{way_out}",
        after_ms=5_000,
    )
