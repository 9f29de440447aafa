"""DNS queries of guests and the answers to them (RFC 1035, 2308, 6891), with dnspython.

A query has one question, at most one further record (EDNS), and at most MAX_QUERY_BYTES. These
bounds are checked before dnspython reads the query, so a query costs at most 1 ms of CPU.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from virtbus.netd.core.reach import Address

MAX_QUERY_BYTES = 512
TTL_S = 5
"""Lifetime of names and of negative answers. A VM may move, or get its name, at any time."""
_HEADER = struct.Struct("!HHHHHH")
_RESPONSE, _OPCODES, _RECURSION = 0x8000, 0x7800, 0x0100
_PLAIN_BYTES, _MOST_BYTES = 512, 1232
"""Maximum bytes of a UDP answer: without EDNS, and with it (DNS flag day 2020)."""


class BadQueryError(Exception):
    """A message that is not a query, or cannot be answered. `reply` is the refusal.

    If `reply` is None, the message gets no answer.
    """

    def __init__(self, reply: bytes | None) -> None:
        super().__init__("not a query that can be answered")
        self.reply = reply


@dataclass(frozen=True, slots=True)
class DnsQuery:
    """A question. `labels` are in lower case and without the root; `kind` is a type such as A."""

    wire: bytes
    labels: tuple[str, ...]
    kind: str
    message: dns.message.Message


def read(wire: bytes) -> DnsQuery:
    """Return the question of a message; raise BadQueryError if it cannot be answered."""
    if len(wire) < _HEADER.size:
        raise BadQueryError(None)
    _id, flags, questions, answers, authorities, additional = _HEADER.unpack_from(wire)
    if flags & _RESPONSE:
        raise BadQueryError(None)
    if flags & _OPCODES:
        raise BadQueryError(_refused(wire, dns.rcode.NOTIMP))
    if len(wire) > MAX_QUERY_BYTES or (questions, answers, authorities) != (1, 0, 0):
        raise BadQueryError(_refused(wire, dns.rcode.FORMERR))
    if additional > 1:
        raise BadQueryError(_refused(wire, dns.rcode.FORMERR))
    try:
        message = dns.message.from_wire(wire)
        (question,) = message.question
    except (dns.exception.DNSException, ValueError) as error:
        raise BadQueryError(_refused(wire, dns.rcode.FORMERR)) from error
    if question.rdclass != dns.rdataclass.IN:
        raise BadQueryError(_refused(wire, dns.rcode.REFUSED))
    labels = [label.decode("ascii", "replace").lower() for label in question.name.labels]
    kind = dns.rdatatype.to_text(question.rdtype)
    return DnsQuery(wire, tuple(labels[:-1]), kind, message)


def _refused(wire: bytes, code: dns.rcode.Rcode) -> bytes:
    """Return an answer without the question, because the question may be unreadable."""
    flags = int.from_bytes(wire[2:4], "big") & (_OPCODES | _RECURSION) | _RESPONSE | int(code)
    return wire[:2] + struct.pack("!HHHHH", flags, 0, 0, 0, 0)


def positive(query: DnsQuery, addresses: Sequence[Address], authority: str) -> bytes:
    """Return the addresses of the queried type; without any, a negative answer."""
    answer = _answer(query)
    for version, kind in ((4, "A"), (6, "AAAA")):
        texts = [str(address) for address in addresses if address.version == version]
        if texts and query.kind in {kind, "ANY"}:
            name = query.message.question[0].name
            answer.answer.append(dns.rrset.from_text_list(name, TTL_S, "IN", kind, texts))
    return _encoded(query, answer) if answer.answer else negative(query, authority, exists=True)


def pointer(query: DnsQuery, name: str, authority: str) -> bytes:
    """Return the name of the queried address; for types other than PTR, a negative answer."""
    if query.kind not in {"PTR", "ANY"}:
        return negative(query, authority, exists=True)
    answer = _answer(query)
    asked = query.message.question[0].name
    answer.answer.append(dns.rrset.from_text(asked, TTL_S, "IN", "PTR", f"{name}."))
    return _encoded(query, answer)


def negative(query: DnsQuery, authority: str, *, exists: bool) -> bytes:
    """Return a negative answer with the SOA record of the zone `authority`.

    If `exists`, the name exists, but has no record of the queried type.
    """
    answer = _answer(query)
    if not exists:
        answer.set_rcode(dns.rcode.NXDOMAIN)
    times = f"1 3600 600 86400 {TTL_S}"
    start = f"names.{authority}. hostmaster.{authority}. {times}"
    soa = dns.rrset.from_text(f"{authority}.", TTL_S, "IN", "SOA", start)
    at_zone = query.kind == "SOA" and ".".join(query.labels) == authority
    (answer.answer if at_zone else answer.authority).append(soa)
    return _encoded(query, answer)


def failure(query: DnsQuery) -> bytes:
    """Return a temporary error. Clients repeat the query and cache nothing."""
    answer = _response(query)
    answer.set_rcode(dns.rcode.SERVFAIL)
    return _encoded(query, answer)


def _answer(query: DnsQuery) -> dns.message.Message:
    answer = _response(query)
    answer.flags |= dns.flags.AA
    return answer


def _response(query: DnsQuery) -> dns.message.Message:
    return dns.message.make_response(
        query.message, recursion_available=True, our_payload=_MOST_BYTES
    )


def _encoded(query: DnsQuery, answer: dns.message.Message) -> bytes:
    """Return the bytes of an answer.

    If the answer exceeds the client's buffer, return an empty answer with the bit TC.
    """
    offered = query.message.payload if query.message.edns >= 0 else _PLAIN_BYTES
    most_bytes = min(max(offered, _PLAIN_BYTES), _MOST_BYTES)
    try:
        return answer.to_wire(max_size=most_bytes)
    except dns.exception.TooBig:
        answer.answer.clear()
        answer.authority.clear()
        answer.flags |= dns.flags.TC
        return answer.to_wire(max_size=_MOST_BYTES)


def asked_again(wire: bytes, number: bytes) -> bytes:
    """Return a query with the id `number` of two bytes, for another server."""
    return number + wire[2:]


def answers(response: bytes, query: bytes) -> bool:
    """Return True if `response` has the id and the question of `query`."""
    question = query[_HEADER.size : _question_end(query)].lower()
    return (
        len(response) >= _HEADER.size + len(question)
        and response[:2] == query[:2]
        and bool(response[2] & 0x80)
        and response[_HEADER.size : _HEADER.size + len(question)].lower() == question
    )


def _question_end(query: bytes) -> int:
    """Return the offset behind the one question of a query that `read` accepted."""
    offset = _HEADER.size
    while offset < len(query) and query[offset] and query[offset] < 0xC0:
        offset += 1 + query[offset]
    return offset + 5
