"""Netlink messages that make, replace, find and remove nftables tables."""

import struct
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NetlinkCall,
    attr,
    attributes,
    be32,
    find_attr,
    nest,
    text,
)
from virtbus.netd.core.nft import AddressSet, Chain, Family, NftRule

Address = IPv4Address | IPv6Address

_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _GETCHAIN, _NEWRULE = 0, 1, 2, 3, 4, 6
_NEWSET, _NEWELEMENTS, _GETELEMENTS, _DELELEMENTS = 9, 12, 13, 14
_ELEMENTS_LISTED, _KEY, _VALUE = 3, 1, 1
_ADDRESS_TYPES = {4: 7, 6: 8}
"""By IP version: the type of a set's keys, which only `nft list` reads."""
_ELEMENTS_A_CALL = 1000
"""Maximum elements in one message, because an attribute's length has only 16 bits."""


def _header(family: int, resource: int = 0) -> bytes:
    return struct.pack(">BBH", family, 0, resource)


def _call(name: str, kind: int, flags: int, body: bytes) -> NetlinkCall:
    return NetlinkCall(name, _SUBSYSTEM << 8 | kind, flags, body)


def _chain(family: Family, table: str, chain: Chain) -> NetlinkCall:
    body = _header(family) + text(1, table) + text(3, chain.name)
    if chain.hook is not None:
        hook = be32(1, chain.hook) + be32(2, chain.priority)
        if chain.device:
            hook += text(3, chain.device)
        body += nest(4, hook) + be32(5, int(chain.policy)) + text(7, chain.kind)
    return _call(f"add chain {table} {chain.name}", _NEWCHAIN, NLM_F_CREATE, body)


def _rule(family: Family, table: str, what: NftRule) -> NetlinkCall:
    body = _header(family) + text(1, table) + text(2, what.chain) + nest(4, *what.expressions)
    return _call(f"add rule {table} {what.chain}", _NEWRULE, NLM_F_CREATE | NLM_F_APPEND, body)


def _table(family: Family, name: str) -> NetlinkCall:
    return _call(f"add table {name}", _NEWTABLE, NLM_F_CREATE, _header(family) + text(1, name))


def batch(calls: Sequence[NetlinkCall]) -> list[NetlinkCall]:
    """Return the messages of one transaction: the kernel executes all of `calls` or none."""
    marks = _header(0, _SUBSYSTEM)
    begin = NetlinkCall("begin", _BATCH_BEGIN, 0, marks, acked=False)
    end = NetlinkCall("commit", _BATCH_END, 0, marks, acked=False)
    return [begin, *calls, end]


def new_table(
    family: Family,
    name: str,
    chains: Sequence[Chain],
    rules: Sequence[NftRule],
    sets: Sequence[AddressSet] = (),
) -> list[NetlinkCall]:
    """Return the transaction that makes a table. No table of this name may exist."""
    return batch(contents(family, name, chains, rules, sets))


def replace_table(
    family: Family,
    name: str,
    chains: Sequence[Chain],
    rules: Sequence[NftRule],
    sets: Sequence[AddressSet] = (),
) -> list[NetlinkCall]:
    """Return the transaction that replaces a table.

    The kernel waits for an RCU grace period (8-16 ms) in this transaction. `new_table` avoids the
    wait if no table exists yet.
    """
    return batch([*ended(family, name), *contents(family, name, chains, rules, sets)])


def rules_in(calls: Sequence[NetlinkCall]) -> list[NetlinkCall]:
    """Return the calls of a transaction that add rules."""
    return [call for call in calls if call.type == _SUBSYSTEM << 8 | _NEWRULE]


def ended(family: Family, name: str) -> list[NetlinkCall]:
    """Return the calls that remove a table, if it exists, for use inside `batch`."""
    return [_table(family, name), delete_table(family, name)]


def contents(
    family: Family,
    name: str,
    chains: Sequence[Chain],
    rules: Sequence[NftRule],
    sets: Sequence[AddressSet] = (),
) -> list[NetlinkCall]:
    """Return the calls that make a table with its content, for use inside `batch`."""
    return [
        _table(family, name),
        *(call for one in sets for call in _set(family, name, one)),
        *(_chain(family, name, chain) for chain in chains),
        *(_rule(family, name, each) for each in rules),
    ]


def _set(family: Family, table: str, what: AddressSet) -> list[NetlinkCall]:
    body = _header(family) + text(1, table) + text(2, what.name) + be32(3, 0)
    length = 4 if what.version == 4 else 16
    body += be32(4, _ADDRESS_TYPES[what.version]) + be32(5, length) + be32(10, what.number)
    made = _call(f"add set {table} {what.name}", _NEWSET, NLM_F_CREATE, body)
    return [made, *_elements(family, table, what, what.addresses)]


def _elements(
    family: Family,
    table: str,
    what: AddressSet,
    addresses: Sequence[Address],
    kind: int = _NEWELEMENTS,
) -> list[NetlinkCall]:
    calls = []
    verb, flags = ("add", NLM_F_CREATE) if kind == _NEWELEMENTS else ("delete", 0)
    for start in range(0, len(addresses), _ELEMENTS_A_CALL):
        some = addresses[start : start + _ELEMENTS_A_CALL]
        elements = [nest(1, nest(1, attr(1, address.packed))) for address in some]
        body = _header(family) + text(1, table) + text(2, what.name)
        body += nest(3, *elements) + be32(4, what.number)
        calls.append(_call(f"{verb} elements {table} {what.name}", kind, flags, body))
    return calls


def list_elements(family: Family, table: str, what: AddressSet) -> NetlinkCall:
    """Return the call that lists the elements of a set."""
    body = _header(family) + text(1, table) + text(2, what.name)
    name = f"list elements {table} {what.name}"
    return NetlinkCall(name, _SUBSYSTEM << 8 | _GETELEMENTS, NLM_F_DUMP, body, acked=False)


def listed_elements(message: bytes) -> set[bytes]:
    """Return the packed addresses in one message of a list."""
    listed = find_attr(message, HEADER_BYTES + len(_header(0)), _ELEMENTS_LISTED)
    return {find_attr(find_attr(one, 0, _KEY), 0, _VALUE) for one in attributes(listed)}


def changed_elements(
    family: Family, table: str, what: AddressSet, there: Collection[bytes]
) -> list[NetlinkCall]:
    """Return the calls that give a set in the kernel the addresses of `what`.

    `there` are the packed addresses that the kernel's set has now.
    """
    wanted = {address.packed for address in what.addresses}
    over = [ip_address(packed) for packed in there if packed not in wanted]
    new = [address for address in what.addresses if address.packed not in there]
    return [
        *_elements(family, table, what, over, _DELELEMENTS),
        *_elements(family, table, what, new),
    ]


def delete_table(family: Family, name: str) -> NetlinkCall:
    """Return the call that removes a table with its content, for use inside `batch`."""
    return _call(f"delete table {name}", _DELTABLE, 0, _header(family) + text(1, name))


def get_table(family: Family, name: str) -> NetlinkCall:
    """Return the query for a table."""
    return _call(f"get table {name}", _GETTABLE, 0, _header(family) + text(1, name))


def get_chain(family: Family, table: str, name: str) -> NetlinkCall:
    """Return the query for a chain."""
    body = _header(family) + text(1, table) + text(3, name)
    return _call(f"get chain {table} {name}", _GETCHAIN, 0, body)
