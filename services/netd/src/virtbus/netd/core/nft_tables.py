"""Builds netlink messages that make, replace, find and remove nftables tables."""

import struct
from collections.abc import Sequence

from virtbus.netd.core.netlink import (
    NLM_F_APPEND,
    NLM_F_CREATE,
    NetlinkCall,
    attr,
    be32,
    nest,
    text,
)
from virtbus.netd.core.nft import AddressSet, Chain, Family, NftRule

_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _GETCHAIN, _NEWRULE = 0, 1, 2, 3, 4, 6
_NEWSET, _NEWELEMENTS = 9, 12
_ADDRESS_TYPES = {4: 7, 6: 8}
"""By IP version: the type of a set's keys, which only `nft list` reads."""
_ELEMENTS_A_CALL = 1000
"""Maximum elements in one message, because an attribute's length has only 16 bits."""


def _header(family: int, resource: int = 0) -> bytes:
    return struct.pack(">BBH", family, 0, resource)


def _call(name: str, kind: int, flags: int, body: bytes) -> NetlinkCall:
    return NetlinkCall(name, _SUBSYSTEM << 8 | kind, flags, body)


def _chain(family: Family, table: str, chain: Chain) -> NetlinkCall:
    hook = be32(1, chain.hook) + be32(2, chain.priority)
    if chain.device:
        hook += text(3, chain.device)
    body = _header(family) + text(1, table) + text(3, chain.name) + nest(4, hook)
    body += be32(5, int(chain.policy)) + text(7, chain.kind)
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
    """Return the transaction that makes a table that does not exist."""
    return batch(_contents(family, name, chains, rules, sets))


def replace_table(
    family: Family,
    name: str,
    chains: Sequence[Chain],
    rules: Sequence[NftRule],
    sets: Sequence[AddressSet] = (),
) -> list[NetlinkCall]:
    """Return the transaction that replaces a table.

    It waits for an RCU grace period (8-16 ms), so use `new_table` if there is no table.
    """
    emptied = [_table(family, name), delete_table(family, name)]
    return batch([*emptied, *_contents(family, name, chains, rules, sets)])


def _contents(
    family: Family,
    name: str,
    chains: Sequence[Chain],
    rules: Sequence[NftRule],
    sets: Sequence[AddressSet],
) -> list[NetlinkCall]:
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
    calls = [_call(f"add set {table} {what.name}", _NEWSET, NLM_F_CREATE, body)]
    for start in range(0, len(what.addresses), _ELEMENTS_A_CALL):
        some = what.addresses[start : start + _ELEMENTS_A_CALL]
        elements = [nest(1, nest(1, attr(1, address.packed))) for address in some]
        body = _header(family) + text(1, table) + text(2, what.name)
        body += nest(3, *elements) + be32(4, what.number)
        calls.append(_call(f"add elements {table} {what.name}", _NEWELEMENTS, NLM_F_CREATE, body))
    return calls


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
