"""DHCPv6 and router advertisements: answers to valid, foreign and hostile messages."""

from dataclasses import replace
from ipaddress import IPv6Address, IPv6Interface

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.netd.tests.ipv6_guest import CLIENT_ID, ia, option

from virtbus.netd.core.dhcp6 import MessageType6, Offer6, Option6, answer6, parse6
from virtbus.netd.core.domain_names import domain_list
from virtbus.netd.core.ipv6_frame import heard
from virtbus.netd.core.router_advertisement import advertisement

ADDRESS, SECOND = IPv6Address("fd00::5"), IPv6Address("fd00::6")
OFFER = Offer6(
    mac=b"\2\0\0\0\0\1",
    addresses=(IPv6Interface(f"{ADDRESS}/64"), IPv6Interface(f"{SECOND}/64")),
    server=IPv6Address("fe80::1"),
    server_mac=b"\2\0\0\0\0\2",
    dns=(IPv6Address("fd00::53"),),
    search=("vm.internal",),
)
CLIENT, SERVER = option(Option6.CLIENT_ID, CLIENT_ID), option(Option6.SERVER_ID, OFFER.server_id)
OTHER = option(Option6.SERVER_ID, OFFER.server_id[:-1] + b"\x99")


def ask(kind: int, *options: bytes) -> bytes | None:
    request = parse6(bytes((kind,)) + b"abc" + b"".join(options))
    assert request is not None
    return answer6(request, OFFER)


@pytest.mark.parametrize(
    ("kind", "options", "reply"),
    [
        (MessageType6.SOLICIT, (CLIENT, ia()), 2),
        (MessageType6.SOLICIT, (CLIENT, SERVER, ia()), None),
        (MessageType6.SOLICIT, (ia(),), None),
        (MessageType6.REQUEST, (CLIENT, SERVER, ia()), 7),
        (MessageType6.REQUEST, (CLIENT, OTHER, ia()), None),
        (MessageType6.REQUEST, (CLIENT, ia()), None),
        (MessageType6.RENEW, (CLIENT, SERVER, ia(ADDRESS)), 7),
        (MessageType6.REBIND, (CLIENT, ia(ADDRESS)), 7),
        (MessageType6.CONFIRM, (CLIENT, ia(ADDRESS)), 7),
        (MessageType6.CONFIRM, (CLIENT, ia()), None),
        (MessageType6.RELEASE, (CLIENT, SERVER, ia(ADDRESS)), 7),
        (MessageType6.INFORMATION_REQUEST, (), 7),
        (MessageType6.INFORMATION_REQUEST, (OTHER,), None),
        (MessageType6.REPLY, (CLIENT, SERVER, ia()), None),
        (12, (CLIENT, ia()), None),
    ],
)
def test_each_message_has_its_answer(
    kind: int, options: tuple[bytes, ...], reply: int | None
) -> None:
    answer = ask(kind, *options)
    assert (answer[0] if answer is not None else None) == reply


def test_an_answer_has_all_addresses_the_servers_and_the_domains() -> None:
    answer = ask(MessageType6.REQUEST, CLIENT, SERVER, ia())
    assert answer is not None
    for part in (ADDRESS.packed, SECOND.packed, CLIENT, SERVER, OFFER.dns[0].packed):
        assert part in answer
    assert b"\2vm\x08internal\0" in answer


def test_a_foreign_address_loses_its_lifetime_and_is_not_on_the_link() -> None:
    foreign = IPv6Address("fd00::99")
    answer = ask(MessageType6.RENEW, CLIENT, SERVER, ia(foreign))
    assert answer is not None
    assert foreign.packed + bytes(8) in answer
    confirmed = ask(MessageType6.CONFIRM, CLIENT, ia(foreign))
    assert confirmed is not None
    assert option(Option6.STATUS, b"\0\4") in confirmed


def test_a_second_association_gets_no_address() -> None:
    answer = ask(MessageType6.SOLICIT, CLIENT, ia(), ia())
    assert answer is not None
    assert answer.count(ADDRESS.packed) == 1
    assert option(Option6.STATUS, b"\0\2") in answer


@given(st.binary(max_size=300))
def test_no_bytes_of_a_guest_raise(data: bytes) -> None:
    heard(data)
    for kind in MessageType6:
        request = parse6(bytes((kind,)) + data)
        if request is not None:
            answer6(request, OFFER)


def test_a_router_advertisement_forbids_autoconfiguration() -> None:
    message = advertisement(OFFER)
    assert message[5] == 0xC0
    prefix = message[24:]
    assert (prefix[0], prefix[2], prefix[3]) == (3, 64, 0x80)


def test_of_many_domains_those_are_sent_that_fit_in_a_packet() -> None:
    search = tuple(f"{'x' * 60}.{number}.example" for number in range(30))
    request = parse6(bytes((MessageType6.INFORMATION_REQUEST,)) + b"abc" + CLIENT)
    assert request is not None
    answer = answer6(request, replace(OFFER, search=search, mtu=1280))
    assert answer is not None
    assert 1280 - 48 - 72 < len(answer) <= 1280 - 48
    assert answer.endswith(domain_list(search[:16]))
