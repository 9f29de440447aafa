"""Lists of nftables rules, and their counters in netlink messages."""

import struct

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_DUMP,
    NetlinkCall,
    attributes,
    find_attr,
    text,
)
from virtbus.netd.core.nft import Family

_GETRULE = 10 << 8 | 7
_FAMILY_HEADER = struct.Struct(">BBH")
_TABLE, _CHAIN, _EXPRESSIONS = 1, 2, 4
_NAME, _DATA, _PACKETS = 1, 2, 2


def list_rules(family: Family, table: str, chain: str = "") -> NetlinkCall:
    """Return the call that lists the rules of a table, or only of `chain`, in their order."""
    body = _FAMILY_HEADER.pack(family, 0, 0) + text(_TABLE, table)
    body += text(_CHAIN, chain) if chain else b""
    return NetlinkCall(f"list {table} {chain}", _GETRULE, NLM_F_DUMP, body, acked=False)


def counted_packets(message: bytes) -> int | None:
    """Return the packets that the counter of a listed rule has seen; None without a counter."""
    expressions = find_attr(message, HEADER_BYTES + _FAMILY_HEADER.size, _EXPRESSIONS)
    for element in attributes(expressions):
        if find_attr(element, 0, _NAME) == b"counter\0":
            return int.from_bytes(find_attr(find_attr(element, 0, _DATA), 0, _PACKETS), "big")
    return None
