"""Segments with IPv6 alone: claimed addresses, the router, what is dropped, status, restart."""

from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import ALL_ROUTERS, ICMP6, UDP, Frames6, ia, option
from services.netd.tests.machine import machine
from services.netd.tests.pretended_host import Host, Node
from services.netd.tests.segment import (
    BROADCAST,
    FIRST,
    SERVER_MAC,
    Segment,
    ping_from_outside,
    wanted,
)
from services.netd.tests.test_ipv6 import MARK, forbidden
from services.netd.tests.test_network_objects import NET, A, B, target
from services.netd.tests.test_path_check import look
from services.netd.tests.test_segment_pools import ROUTER6, SERVER6, six
from services.netd.tests.test_segment_pools import wired as wired

from virtbus.netd.core.dhcp6 import MessageType6, Option6
from virtbus.netd.core.reach import ReachRules
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

DNS6 = IPv6Address("2001:db8:53::1")
SPEC: dict[str, Any] = {"subnet6": "2001:db8:5::/64", "gateway6": str(ROUTER6), "dns": [str(DNS6)]}


def claimed(kind: str, link: str, number: int = 10) -> dict[str, Any]:
    found = target(kind, link=link, **SPEC)
    addresses = [f"2001:db8:5::{number}"]
    return found | {"address_claims": {"net0": {"network": NET, "addresses": addresses}}}


async def test_guests_have_ipv6_alone_and_reach_the_segment(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    ready = await node.attach(A, **claimed(kind, link))
    await node.attach(B, **claimed(kind, link, 11))
    (nic,) = ready.interfaces
    assert nic.addresses == ("2001:db8:5::10/64",)
    assert (nic.gateway, nic.gateway6) == ("", str(ROUTER6))
    async with node.guest(A) as plain, machine(node, B):
        guest = six(plain)
        await guest.ping(SERVER6)
        await guest.ping(IPv6Address("2001:db8:5::11"))
        assert await ping_from_outside(IPv6Address("2001:db8:5::11"))
        await node.restart()
        await guest.ping(SERVER6)
        assert await ping_from_outside(IPv6Address("2001:db8:5::11"))
        assert (await node.attachments.compare()) == []
        view = await look(node)
        assert view.faults == ()
        assert view.interfaces[0].status.addresses == nic.addresses
        assert not view.interfaces[0].leased


async def test_netd_tells_address_router_and_name_server_and_answers_no_dhcp_of_ipv4(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    await node.attach(A, **claimed(kind, link))
    async with node.guest(A) as plain:
        guest = six(plain)
        await guest.ping(SERVER6)
        answer, options = await guest.ask(MessageType6.SOLICIT, ia())
        assert (answer, guest.address.packed in options) == (MessageType6.ADVERTISE, True)
        assert option(Option6.DNS, DNS6.packed) in options
        asked, own = bytes((133, *bytes(7))), guest.link_local
        plain.send(guest.frame(b"\x33\x33\0\0\0\2", ALL_ROUTERS, ICMP6, asked, source=own))
        told = await plain.receive(lambda f: f[20] == ICMP6 and f[54] == 134)
        assert told[22:38] == ROUTER6.packed
        plain.send(wanted(plain, FIRST))
        await guest.ping(SERVER6)
        router = bytes((134, 0, 0, 0, 64, 0, 7, 8, *bytes(8))) + MARK
        far = Frames6(SERVER_MAC, ROUTER6)
        lan.packets.send(far.frame(plain.mac, guest.link_local, ICMP6, router))
        with pytest.raises(TimeoutError):  # neither an answer, nor that advertisement
            await plain.receive(
                lambda f: (f[12:14] == b"\x08\0" and f[23] == UDP) or MARK in f, 0.5
            )


async def test_what_a_guest_with_ipv6_alone_forges_is_dropped_and_counted(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    host6 = IPv6Address("2001:db8:5::99")
    node.doors.bridge.reach = ReachRules(hosts=frozenset({host6}))
    await node.attach(A, **claimed(kind, link))
    async with node.guest(A) as plain:
        guest = six(plain)
        mac = await guest.resolve(SERVER6)
        outside = IPv4Address("192.0.2.7")
        frames = [(frame, rule) for frame, rule in forbidden(guest).values()]
        frames += [
            (plain.udp(BROADCAST, outside, (1, 1), b"", source=outside), "address"),
            (plain.arp(1, BROADCAST, outside, sender=(plain.mac, outside)), "arp"),
            (plain.arp(1, BROADCAST, outside, sender=(plain.mac, IPv4Address(0))), "arp"),
            (guest.frame(mac, host6, ICMP6, bytes((128, 0, 0, 0, 0, 7, 0, 1))), "reach"),
        ]
        for frame, _rule in frames:
            plain.send(frame.ljust(60, b"\0") + b"<forged>")
        plain.send(guest.frame(mac, SERVER6, 17, b"\0\1\0\1\0\x0f\0\0the-end"))
        assert "<forged>" not in await lan.marks(b"the-end")
        (nic,) = node.counters(A).interfaces
        rules = [rule for _frame, rule in frames]
        assert nic.refused == {rule: rules.count(rule) for rule in rules if rule}


async def test_an_address_of_a_host_is_refused_before_anything_is_made(
    host: Host, wired: tuple[Node, str, str]
) -> None:
    node, kind, link = wired
    before = host.census()
    node.doors.bridge.reach = ReachRules(hosts=frozenset({IPv6Address("2001:db8:5::10")}))
    with pytest.raises(VirtbusError) as refused:
        await node.attach(A, **claimed(kind, link))
    (detail,) = refused.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].addresses"
    assert host.census() == before
