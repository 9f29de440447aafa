"""Comparison of sent nftables rules with the rules that the kernel lists.

The kernel lists a rule as it was sent, and adds attributes that it chose itself, such as flags and
the values of counters. Two rules therefore count as equal if their expressions have the same names,
and if all attributes that both rules have are equal.
"""

import functools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from virtbus.netd.core.netlink import HEADER_BYTES, NetlinkCall, find_attr

_ATTR = struct.Struct("=HH")
_KIND = 0x3FFF
"""The mask of an attribute's kind. It clears the flags for nesting and byte order."""
_FAMILY_BYTES = 4
_CHAIN, _EXPRESSIONS, _SENT_EXPRESSIONS = 2, 4, 4 | 0x8000
_NAME, _DATA = 1, 2
_NESTED = {"cmp": {3}, "immediate": {2}, "bitwise": {4, 5}}
"""The attributes of each expression that contain a nested value. A verdict is one level deeper."""
_UNEQUAL = frozenset({"counter"})
"""Expressions whose attributes are not compared."""


def listed_rule(message: bytes) -> tuple[str, bytes]:
    """Return the chain and the expressions of a rule in a list of the kernel."""
    offset = HEADER_BYTES + _FAMILY_BYTES
    chain = find_attr(message, offset, _CHAIN).rstrip(b"\0").decode()
    return chain, find_attr(message, offset, _EXPRESSIONS)


def sent_rule(call: NetlinkCall) -> tuple[str, bytes]:
    """Return the chain and the expressions of a rule in a call that adds it."""
    chain = find_attr(call.body, _FAMILY_BYTES, _CHAIN).rstrip(b"\0").decode()
    return chain, find_attr(call.body, _FAMILY_BYTES, _SENT_EXPRESSIONS)


def by_chain(rules: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """Return the expressions of the rules of each chain, in their order."""
    found: dict[str, list[bytes]] = {}
    for chain, expressions in rules:
        found.setdefault(chain, []).append(expressions)
    return found


def have_equal_rules(
    sent: Mapping[str, Sequence[bytes]], listed: Mapping[str, Sequence[bytes]]
) -> bool:
    """Return True if the same chains have equal rules."""
    return sent.keys() == listed.keys() and all(
        are_equal(rules, listed[chain]) for chain, rules in sent.items()
    )


def are_equal(sent: Sequence[bytes], listed: Sequence[bytes]) -> bool:
    """Return True if the rules of a chain are equal and in the same order."""
    return len(sent) == len(listed) and all(map(_equal, sent, listed))


def _equal(sent: bytes, listed: bytes) -> bool:
    ours, theirs = ([_expression(one) for _, one in _attributes(rule)] for rule in (sent, listed))
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return False
    return all(
        name in _UNEQUAL or all(one[kind] == other[kind] for kind in one.keys() & other.keys())
        for (name, one), (_, other) in zip(ours, theirs, strict=True)
    )


@functools.lru_cache(maxsize=512)
def _expression(element: bytes) -> tuple[str, Mapping[int, object]]:
    """Return the name and the attributes of an expression. Taps share most expressions."""
    parts = dict(_attributes(element))
    name = parts[_NAME].rstrip(b"\0").decode()
    nested = _NESTED.get(name, set())
    return (
        name,
        {
            kind: _value(value) if kind in nested else value
            for kind, value in _attributes(parts.get(_DATA, b""))
        },
    )


def _value(body: bytes) -> object:
    ((kind, value),) = _attributes(body)
    return dict(_attributes(value)) if kind == _DATA else value


def _attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTR.size <= len(body):
        length, kind = _ATTR.unpack_from(body, offset)
        if length < _ATTR.size:
            return
        yield kind & _KIND, body[offset + _ATTR.size : offset + length]
        offset += (length + 3) & ~3
