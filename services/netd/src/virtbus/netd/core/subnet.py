"""Chooses a VM's address in the subnet of a bridge."""

from collections.abc import Collection

from virtbus.schemas.address_pool import Address, AddressPool
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network_object import BUILT_IN


def choose_address(
    pool: AddressPool, key: str, taken: Collection[str], network_name: str = BUILT_IN
) -> Address:
    """Return a free address of a pool, if possible the same for the same `key`.

    The search starts at a hash of the key. So addresses are spread, and a released one is not
    reused while neighbours still have it in their ARP caches. `taken` has texts, because parsing
    300 addresses at each attach took 2 ms.

    Raises:
        VirtbusError: 429 if every address is taken.
    """
    address = pool.choose(key, taken)
    if address is not None:
        return address
    way_out = "set a larger `subnet` for netd"
    if network_name != BUILT_IN:
        way_out = f"move some off the node: the network '{network_name}' cannot grow"
    raise VirtbusError(
        Code.EXHAUSTED,
        "addresses_exhausted",
        f"all {pool.size} addresses of {pool.subnet} are in use on this node; delete VMs or "
        f"{way_out}",
        after_ms=5_000,
    )
