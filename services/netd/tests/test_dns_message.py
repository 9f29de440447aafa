"""DNS as bytes: exact answers, refusals for everything else, and no input breaks the parser."""

import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.netd.core import dns_message
from virtbus.netd.core.dns_message import BadQueryError, DnsQuery, read
from virtbus.netd.core.zone import ReverseName, VmName, Zone, ZoneName

DOMAIN = "vm.internal"
ZONE = Zone(DOMAIN, IPv4Network("10.127.0.0/16"))


def question(name: str, kind: str = "A", payload: int | None = None) -> bytes:
    """A query, with EDNS if it has a payload."""
    return dns.message.make_query(name, kind, payload=payload).to_wire()


def asked(name: str, kind: str = "A", payload: int | None = None) -> DnsQuery:
    return read(question(name, kind, payload))


def shown(answer: bytes) -> tuple[str, list[str]]:
    """The code of an answer, and its records, which are in any order."""
    message = dns.message.from_wire(answer)
    assert message.flags & dns.flags.QR
    return dns.rcode.to_text(message.rcode()), sorted(
        str(record) for records in message.answer for record in records
    )


def test_a_name_has_the_addresses_of_the_asked_type() -> None:
    addresses = (IPv4Address("10.127.0.5"), IPv4Address("10.0.0.5"), IPv6Address("fd00::5"))
    for kind, found in (
        ("A", ["10.0.0.5", "10.127.0.5"]),
        ("AAAA", ["fd00::5"]),
        ("ANY", ["10.0.0.5", "10.127.0.5", "fd00::5"]),
        ("TXT", []),
    ):
        query = asked("web.shop.vm.internal", kind)
        assert shown(dns_message.positive(query, addresses, DOMAIN)) == ("NOERROR", found)


def test_absence_is_stored_for_seconds_by_its_soa() -> None:
    for exists, code in ((True, "NOERROR"), (False, "NXDOMAIN")):
        query = asked("web.shop.vm.internal")
        answer = dns_message.negative(query, DOMAIN, exists=exists)
        message = dns.message.from_wire(answer)
        assert shown(answer) == (code, [])
        assert message.flags & dns.flags.AA
        (authority,) = message.authority
        assert str(authority.name) == "vm.internal."
        assert authority.ttl == next(iter(authority)).minimum == dns_message.TTL_S


def test_the_zone_has_an_soa_record() -> None:
    answer = dns_message.negative(asked(DOMAIN, "SOA"), DOMAIN, exists=True)
    assert len(shown(answer)[1]) == 1


def test_an_address_has_its_name() -> None:
    query = asked("5.0.127.10.in-addr.arpa", "PTR")
    name = ZONE.name_of("shop", "web")
    assert shown(dns_message.pointer(query, name, "127.10.in-addr.arpa")) == (
        "NOERROR",
        ["web.shop.vm.internal."],
    )
    other = asked("5.0.127.10.in-addr.arpa", "A")
    assert shown(dns_message.pointer(other, name, "127.10.in-addr.arpa")) == ("NOERROR", [])


def test_the_case_of_a_name_does_not_matter_and_is_returned() -> None:
    query = asked("WeB.Shop.VM.internal")
    assert ZONE.meaning(query.labels) == VmName("shop", "web")
    answer = dns_message.positive(query, [IPv4Address("10.127.0.5")], DOMAIN)
    assert str(dns.message.from_wire(answer).answer[0].name) == "WeB.Shop.VM.internal."


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("web.shop.vm.internal", VmName("shop", "web")),
        ("shop.vm.internal", ZoneName(exists=True)),
        ("vm.internal", ZoneName(exists=True)),
        ("a.web.shop.vm.internal", ZoneName(exists=False)),
        ("_x.shop.vm.internal", ZoneName(exists=False)),
        ("-.vm.internal", ZoneName(exists=False)),
        ("internal", None),
        ("xvm.internal", None),
        ("vm.internal.example", None),
        (".", None),
        (
            "5.0.127.10.in-addr.arpa",
            ReverseName(IPv4Address("10.127.0.5"), own=True, authority="127.10.in-addr.arpa"),
        ),
        (
            "5.2.0.192.in-addr.arpa",
            ReverseName(IPv4Address("192.0.2.5"), own=False, authority="2.0.192.in-addr.arpa"),
        ),
        ("127.10.in-addr.arpa", None),
        ("256.0.127.10.in-addr.arpa", None),
        ("x.0.127.10.in-addr.arpa", None),
        ("x" + ".0" * 31 + ".ip6.arpa", None),
    ],
)
def test_a_name_means(name: str, meaning: object) -> None:
    assert ZONE.meaning(asked(name).labels) == meaning


def test_the_reverse_name_of_an_ipv6_address() -> None:
    address = IPv6Address("fd00::5")
    found = ZONE.meaning(asked(address.reverse_pointer, "PTR").labels)
    assert isinstance(found, ReverseName)
    assert (found.address, found.own) == (address, False)


def refusal(wire: bytes) -> bytes | None:
    with pytest.raises(BadQueryError) as caught:
        read(wire)
    return caught.value.reply


GOOD = question("web.shop.vm.internal")


@pytest.mark.parametrize(
    ("what", "wire", "code"),
    [
        ("an answer", GOOD[:2] + b"\x81\x80" + GOOD[4:], None),
        ("no header", GOOD[:11], None),
        ("a notification", GOOD[:2] + b"\x20\x00" + GOOD[4:], "NOTIMP"),
        ("two questions", GOOD[:4] + b"\0\2" + GOOD[6:], "FORMERR"),
        ("no question", GOOD[:4] + b"\0\0" + GOOD[6:], "FORMERR"),
        ("records", GOOD[:6] + b"\0\1" + GOOD[8:], "FORMERR"),
        ("many records", GOOD[:10] + b"\0\2" + GOOD[12:], "FORMERR"),
        ("cut", GOOD[:-3], "FORMERR"),
        ("junk behind", GOOD + b"x", "FORMERR"),
        ("a pointer to itself", GOOD[:12] + b"\xc0\x0c" + b"\0\1\0\1", "FORMERR"),
        ("too long", GOOD + bytes(512), "FORMERR"),
        ("another class", GOOD[:-2] + b"\0\3", "REFUSED"),
    ],
)
def test_a_message_is_refused(what: str, wire: bytes, code: str | None) -> None:
    reply = refusal(wire)
    assert (reply is None) is (code is None), what
    if reply is not None:
        assert reply[:2] == wire[:2]
        assert shown(reply)[0] == code


def test_an_answer_that_exceeds_the_buffer_is_truncated_and_edns_makes_room() -> None:
    addresses = [IPv4Address(f"10.127.1.{number}") for number in range(40)]
    small = dns_message.positive(asked("web.shop.vm.internal"), addresses, DOMAIN)
    large = dns_message.positive(asked("web.shop.vm.internal", payload=4096), addresses, DOMAIN)
    assert len(small) <= 512
    assert dns.message.from_wire(small).flags & dns.flags.TC
    assert 512 < len(large) <= 1232
    assert len(shown(large)[1]) == 40


def test_an_answer_of_another_server_must_have_id_and_question() -> None:
    wire = dns_message.asked_again(GOOD, b"\x12\x34")
    answer = wire[:2] + b"\x81\x80" + wire[4:] + b"more"
    assert dns_message.answers(answer, wire)
    assert dns_message.answers(answer.replace(b"web", b"WEB"), wire)
    assert not dns_message.answers(answer.replace(b"web", b"wab"), wire)
    assert not dns_message.answers(b"\0\0" + answer[2:], wire)
    assert not dns_message.answers(wire, wire)
    assert not dns_message.answers(answer[:20], wire)
    assert not dns_message.answers(b"", wire)


def attempted(wire: bytes) -> None:
    try:
        query = read(wire)
    except BadQueryError as error:
        if len(error.reply or bytes(12)) != 12:
            raise
        return
    ZONE.meaning(query.labels)
    for answer in (
        dns_message.positive(query, [IPv4Address("10.127.0.5")], DOMAIN),
        dns_message.negative(query, DOMAIN, exists=False),
        dns_message.pointer(query, "web.shop.vm.internal", "127.10.in-addr.arpa"),
        dns_message.failure(query),
    ):
        assert len(answer) <= 1232
        dns.message.from_wire(answer)


@given(st.binary(max_size=600))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    attempted(data)


@given(st.binary(max_size=300), st.integers(0, 2))
def test_no_question_and_no_record_break_the_parser(data: bytes, records: int) -> None:
    attempted(struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, records) + data)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_no_changed_byte_breaks_the_parser(changes: list[tuple[int, int]]) -> None:
    wire = bytearray(question("web.shop.vm.internal", payload=1400))
    for at, value in changes:
        wire[at] = value
    attempted(bytes(wire))
