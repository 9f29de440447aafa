"""DHCP as bytes: exact answers, silence for everything else, and no input breaks the parser."""

import struct
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.netd.core.dhcp import (
    ANY,
    DhcpAnswer,
    MessageType,
    Offer,
    Option,
    answer,
    guest_routes,
    parse,
)
from virtbus.netd.core.dhcp_frame import payload, reply_frame, request_filter
from virtbus.netd.core.domain_names import domain_list

MAC = bytes.fromhex("020102030405")
ADDRESS = IPv4Address("10.127.3.4")
SERVER = IPv4Address("10.127.0.1")
OFFER = Offer(
    mac=MAC,
    address=IPv4Interface("10.127.3.4/16"),
    server=SERVER,
    server_mac=bytes.fromhex("02aaaaaaaaaa"),
    router=SERVER,
    dns=(IPv4Address("192.0.2.53"), IPv4Address("192.0.2.54")),
    domain="vms.example",
    search=("vms.example", "example"),
    ntp=(IPv4Address("192.0.2.123"),),
    hostname="web",
    mtu=1450,
    lease_s=3600,
)
CLONED = b"\xff" + bytes(4) + b"\0\2\0\0\xab\x11" + b"machine1"
"""The client id that systemd-networkd makes of a machine id, without the MAC (RFC 4361)."""


def request(
    kind: int | None = MessageType.DISCOVER,
    *options: tuple[int, bytes],
    mac: bytes = MAC,
    client: IPv4Address = ANY,
    relay: IPv4Address = ANY,
    flags: int = 0,
) -> bytes:
    fixed = struct.pack(
        "!BBBBIHH4s4s4s4s16s64s128s",
        *(1, 1, 6, 0, 0xDEADBEEF, 0, flags),
        *(client.packed, bytes(4), bytes(4), relay.packed, mac, b"", b""),
    )
    chosen = [(Option.MESSAGE_TYPE, bytes((kind,))), *options] if kind is not None else options
    encoded = b"".join(bytes((code, len(value))) + value for code, value in chosen)
    return fixed + b"\x63\x82\x53\x63" + encoded + b"\xff"


def answered(message: bytes, offer: Offer = OFFER) -> DhcpAnswer | None:
    parsed = parse(message)
    return answer(parsed, offer) if parsed is not None else None


def options_of(reply: DhcpAnswer) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    field, at = reply.message[240:], 0
    while field[at] != 255:
        found[field[at]] = found.get(field[at], b"") + field[at + 2 : at + 2 + field[at + 1]]
        at += 2 + field[at + 1]
    return found


def test_a_discover_gets_exactly_the_assigned_configuration() -> None:
    reply = answered(request(MessageType.DISCOVER))
    assert reply is not None
    assert (reply.kind, reply.destination, reply.unicast) == (MessageType.OFFER, ADDRESS, True)
    assert reply.message[16:20] == ADDRESS.packed
    assert options_of(reply) == {
        Option.MESSAGE_TYPE: b"\2",
        Option.SERVER_ID: SERVER.packed,
        Option.LEASE_TIME: struct.pack("!I", 3600),
        Option.RENEWAL_TIME: struct.pack("!I", 1800),
        Option.REBINDING_TIME: struct.pack("!I", 3150),
        Option.MASK: b"\xff\xff\0\0",
        Option.ROUTER: SERVER.packed,
        Option.DNS: bytes([192, 0, 2, 53, 192, 0, 2, 54]),
        Option.MTU: struct.pack("!H", 1450),
        Option.BROADCAST: bytes([10, 127, 255, 255]),
        Option.HOSTNAME: b"web",
        Option.DOMAIN: b"vms.example",
        Option.SEARCH: b"\3vms\7example\0\7example\0",
        Option.NTP: bytes([192, 0, 2, 123]),
    }


@pytest.mark.parametrize(
    ("name", "options", "client", "kind"),
    [
        ("selecting", ((54, SERVER.packed), (50, ADDRESS.packed)), ANY, MessageType.ACK),
        ("after a reboot", ((50, ADDRESS.packed),), ANY, MessageType.ACK),
        ("renewing", (), ADDRESS, MessageType.ACK),
        ("a wrong address", ((50, b"\x0a\x7f\0\x09"),), ANY, MessageType.NAK),
        ("renewing a wrong address", (), IPv4Address("10.0.0.9"), MessageType.NAK),
        ("another server's offer", ((54, b"\x0a\0\0\1"), (50, ADDRESS.packed)), ANY, None),
        ("no address at all", (), ANY, None),
    ],
)
def test_a_request_is_answered(
    name: str, options: tuple[tuple[int, bytes], ...], client: IPv4Address, kind: MessageType | None
) -> None:
    reply = answered(request(MessageType.REQUEST, *options, client=client))
    assert (reply.kind if reply else None) == kind, name


def test_a_nak_is_broadcast_and_gives_nothing() -> None:
    reply = answered(request(MessageType.REQUEST, (50, b"\x0a\0\0\7")))
    assert reply is not None
    assert not reply.unicast
    assert reply.message[12:20] == bytes(8)
    assert set(options_of(reply)) == {Option.MESSAGE_TYPE, Option.SERVER_ID}


def test_a_client_that_cannot_receive_unicast_is_answered_by_broadcast() -> None:
    reply = answered(request(MessageType.DISCOVER, flags=0x8000))
    assert reply is not None
    assert not reply.unicast


def test_inform_is_answered_without_a_lease() -> None:
    reply = answered(request(MessageType.INFORM, client=ADDRESS))
    assert reply is not None
    assert reply.message[16:20] == bytes(4)
    assert Option.LEASE_TIME not in options_of(reply)
    assert options_of(reply)[Option.ROUTER] == SERVER.packed


@pytest.mark.parametrize(
    "message",
    [
        request(MessageType.DISCOVER, mac=bytes.fromhex("020102030499")),
        request(MessageType.DISCOVER, relay=IPv4Address("10.127.0.9")),
        request(MessageType.DECLINE, (50, ADDRESS.packed)),
        request(MessageType.RELEASE, client=ADDRESS),
        request(MessageType.OFFER),
        request(77),
        request(None),
        b"\2" + request()[1:],
        request()[:-3],
        request()[:200],
        b"",
    ],
    ids=[
        "mac",
        "relay",
        "decline",
        "release",
        "offer",
        "kind",
        "bootp",
        "reply",
        "cut",
        "short",
        "empty",
    ],
)
def test_no_answer_is_sent(message: bytes) -> None:
    assert answered(message) is None


def test_the_identifiers_of_a_client_are_echoed() -> None:
    machine = b"\0" + bytes(16)
    reply = answered(request(MessageType.DISCOVER, (61, b"\x01" + MAC), (97, machine)))
    assert reply is not None
    assert options_of(reply)[Option.CLIENT_ID] == b"\x01" + MAC
    assert options_of(reply)[Option.MACHINE_ID] == machine


def test_clones_with_one_client_id_get_the_addresses_of_their_ports() -> None:
    other = replace(OFFER, mac=bytes(5) + b"\2", address=IPv4Interface("10.127.9.9/16"))
    given = []
    for offer in (OFFER, other):
        reply = answered(request(MessageType.DISCOVER, (61, CLONED), mac=offer.mac), offer)
        assert reply is not None
        given.append(reply.message[16:20])
    assert given == [OFFER.address.ip.packed, other.address.ip.packed]


def test_extra_routes_bring_the_default_route_along() -> None:
    routes = ((IPv4Network("192.0.2.0/25"), IPv4Address("10.127.0.7")),)
    reply = answered(request(), replace(OFFER, routes=routes))
    assert reply is not None
    expected = b"\x19\xc0\x00\x02\x00\x0a\x7f\x00\x07" + b"\x00\x0a\x7f\x00\x01"
    assert options_of(reply)[Option.CLASSLESS_ROUTES] == expected
    assert options_of(reply)[Option.ROUTER] == SERVER.packed


def test_a_router_outside_the_subnet_is_first_reached_on_the_link() -> None:
    offer = replace(OFFER, address=IPv4Interface("10.1.2.3/32"), router=IPv4Address("169.254.1.1"))
    assert guest_routes(offer) == (
        (IPv4Network("169.254.1.1/32"), ANY),
        (IPv4Network("0.0.0.0/0"), IPv4Address("169.254.1.1")),
    )


def test_an_answer_is_cut_at_the_end_to_fit_the_clients_buffer() -> None:
    search = tuple(f"{'x' * 60}.{number}.example" for number in range(8))
    small = answered(request(), replace(OFFER, search=search))
    large = answered(
        request(MessageType.DISCOVER, (57, b"\x05\xdc")), replace(OFFER, search=search)
    )
    assert small is not None
    assert large is not None
    assert len(small.message) <= 548
    assert options_of(small)[Option.SEARCH] == domain_list(search[:3])
    assert options_of(large)[Option.SEARCH] == domain_list(search)
    assert len(options_of(large)[Option.SEARCH]) > 255


def test_no_client_gets_more_than_a_packet_of_its_network() -> None:
    routes = tuple((IPv4Network(f"10.{n}.0.0/16"), IPv4Address("10.127.0.7")) for n in range(100))
    reply = answered(
        request(MessageType.DISCOVER, (57, b"\xff\xff")), replace(OFFER, routes=routes)
    )
    assert reply is not None
    assert Option.CLASSLESS_ROUTES in options_of(reply)
    crowded = replace(OFFER, routes=routes, search=tuple(f"x{n}.example" for n in range(99)))
    reply = answered(request(MessageType.DISCOVER, (57, b"\xff\xff")), crowded)
    assert reply is not None
    assert len(reply.message) <= OFFER.mtu - 28
    sent, whole = options_of(reply)[Option.SEARCH], domain_list(crowded.search)
    assert whole.startswith(sent)
    assert sent.endswith(b"\0")
    assert len(sent) < len(whole)
    assert Option.NTP in options_of(reply)


@given(st.binary(max_size=700))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    parse(data)
    payload(data)


@given(st.binary(max_size=312))
def test_no_options_break_the_answer(data: bytes) -> None:
    parsed = parse(request()[:-1] + data)
    reply = answer(parsed, OFFER) if parsed is not None else None
    assert reply is None or 300 <= len(reply.message) <= 65535


@given(st.integers(0, 30), st.integers(0, 300))
def test_a_frame_whose_lengths_lie_has_no_payload(cut: int, lie: int) -> None:
    udp = struct.pack("!HHHH", 68, 67, 8 + 20 + lie, 0) + bytes(20)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, bytes(4), bytes(4))
    frame = (bytes(12) + b"\x08\x00" + ip + udp)[: 62 - cut]
    expected = bytes(20) if cut == 0 and lie == 0 else None
    assert payload(frame) == expected


def test_a_reply_frame_is_addressed_to_the_guest_with_right_checksums() -> None:
    reply = answered(request())
    assert reply is not None
    frame = reply_frame(reply, SERVER, OFFER.server_mac, MAC)
    assert (frame[:6], frame[6:12], frame[12:14]) == (MAC, OFFER.server_mac, b"\x08\x00")
    assert ones_sum(frame[14:34]) == 0xFFFF
    pseudo = frame[26:34] + b"\0\x11" + frame[38:40]
    assert ones_sum(pseudo + frame[34:]) == 0xFFFF
    assert struct.unpack("!HH", frame[34:38]) == (67, 68)


def ones_sum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_the_sockets_filter_takes_only_requests_of_its_guest() -> None:
    program = request_filter(MAC)
    udp = struct.pack("!HHHH", 68, 67, 28, 0) + bytes(20)

    def frame(**change: bytes) -> bytes:
        ip = bytearray(struct.pack("!BBHHHBBH8s", 0x45, 0, 48, 0, 0, 64, 17, 0, bytes(8)))
        ip[6:8] = change.get("fragment", b"\0\0")
        ip[9:10] = change.get("protocol", b"\x11")
        return (
            b"\xff" * 6
            + change.get("mac", MAC)
            + change.get("kind", b"\x08\x00")
            + bytes(ip)
            + change.get("udp", udp)
        )

    assert run(program, frame())
    assert not run(program, frame(mac=b"\2" * 6))
    assert not run(program, frame(kind=b"\x08\x06"))
    assert not run(program, frame(protocol=b"\x06"))
    assert not run(program, frame(fragment=b"\x20\x00"))
    assert not run(program, frame(fragment=b"\x00\x10"))
    assert not run(program, frame(udp=struct.pack("!HHHH", 67, 68, 28, 0) + bytes(20)))


def run(program: list[tuple[int, int, int, int]], data: bytes) -> bool:
    """The few classic BPF instructions that the filter uses."""
    a = x = at = 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        match code:
            case 0x20 | 0x28 | 0x30:
                a = int.from_bytes(data[k : k + {0x20: 4, 0x28: 2, 0x30: 1}[code]], "big")
            case 0x48:
                a = int.from_bytes(data[x + k : x + k + 2], "big")
            case 0xB1:
                x = (data[k] & 0xF) * 4
            case 0x15:
                at += yes if a == k else no
            case 0x45:
                at += yes if a & k else no
            case _:
                return k > 0
