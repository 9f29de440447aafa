"""nftables expressions that rewrite an address and keep the port, for nat chains."""

from ipaddress import IPv4Address, IPv6Address

from virtbus.netd.core.netlink import be32
from virtbus.netd.core.nft import REGISTER, expression, immediate

_SOURCE, _DESTINATION = 0, 1
_NF_FAMILIES = {4: 2, 6: 10}

Address = IPv4Address | IPv6Address


def destination_becomes(address: Address) -> tuple[bytes, ...]:
    """Rewrite the destination of a connection. Only for the hook prerouting."""
    return _rewritten(_DESTINATION, address)


def source_becomes(address: Address) -> tuple[bytes, ...]:
    """Rewrite the source of a connection. Only for the hook postrouting.

    If the source port is in use, the kernel chooses another port.
    """
    return _rewritten(_SOURCE, address)


def _rewritten(end: int, address: Address) -> tuple[bytes, ...]:
    family = _NF_FAMILIES[address.version]
    nat = expression("nat", be32(1, end), be32(2, family), be32(3, REGISTER))
    return immediate(REGISTER, address.packed), nat
