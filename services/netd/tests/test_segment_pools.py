"""Segments with a subnet: addresses of a pool by DHCP, DHCPv6 and advertisements of netd."""

from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import ALL_ROUTERS, ICMP6, Frames6, Guest6, ia
from services.netd.tests.pretended_host import Frames, Guest, Host, Node
from services.netd.tests.segment import (
    BRIDGE,
    BROADCAST,
    HOST,
    OUTSIDE,
    SERVER,
    SERVER_MAC,
    Segment,
    ping_from_outside,
    run,
    sent,
    wanted,
)
from services.netd.tests.test_ipv6 import forbidden
from services.netd.tests.test_network_objects import NET, A, B, target

from virtbus.netd.core.dhcp6 import MessageType6
from virtbus.netd.core.dhcp_frame import CLIENT_PORT, payload
from virtbus.netd.core.reach import ReachRules
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

SERVER6, HOST6 = IPv6Address("2001:db8:5::1"), IPv6Address("2001:db8:5::99")
ROUTER6 = IPv6Address("fe80::abcd")
ALL_NODES = IPv6Address("ff02::1")
POOL = {"subnet": "192.0.2.0/24", "gateway": str(SERVER), "dns": ["192.0.2.53"]}
POOL6 = {"subnet6": "2001:db8:5::/64", "gateway6": str(ROUTER6)}


@pytest.fixture(params=["bridge", "macvtap"])
async def wired(
    request: pytest.FixtureRequest, lan_node: Node, lan: Segment
) -> AsyncIterator[tuple[Node, str, str]]:
    """A host with a bridge, or with an interface that is on the segment by a cable."""
    kind = str(request.param)
    link = BRIDGE
    if kind == "macvtap":
        link = "lan2"
        run(f"ip link add {link} type veth peer name lan3")
        run(f"ip link set lan3 master {BRIDGE} up")
        run(f"ip link set {link} up")
    run(f"ip -n {OUTSIDE} addr add {SERVER6}/64 dev lan1 nodad")
    lan_node.links_allowed = lan_node.doors.attachers.segments._allowed = (link,)
    yield lan_node, kind, link
    for uid in list(lan_node.attachments.resources()):
        await lan_node.attachments.release(uid, 1_000)
    if kind == "macvtap":
        run(f"ip link del {link}")


def claimed(kind: str, link: str, number: int = 10, **spec: Any) -> dict[str, Any]:
    """The network, with the addresses that a controller claimed."""
    found = target(kind, link=link, **{**POOL, **POOL6, **spec})
    addresses = [f"192.0.2.{number}", f"2001:db8:5::{number}"]
    return found | {"address_claims": {"net0": {"network": NET, "addresses": addresses}}}


def six(guest: Guest, number: int = 10) -> Guest6:
    return Guest6(guest, IPv6Address(f"2001:db8:5::{number}"))


async def test_guests_have_their_claimed_addresses_at_once_and_reach_the_segment(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    ready = await node.attach(A, **claimed(kind, link))
    await node.attach(B, **claimed(kind, link, 11))
    (nic,) = ready.interfaces
    assert nic.addresses == ("192.0.2.10/24", "2001:db8:5::10/64")
    assert (nic.gateway, nic.gateway6) == (str(SERVER), str(ROUTER6))
    async with node.guest(A) as plain, node.guest(B) as other:
        guest = six(plain)
        await plain.ping(SERVER)
        await plain.ping(other.ip)
        await guest.ping(SERVER6)
        assert await ping_from_outside(plain.ip)
        await node.restart()
        await guest.ping(SERVER6)
        await plain.ping(SERVER)


async def test_netd_answers_dhcp_dhcp6_and_router_solicitations(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    await node.attach(A, **claimed(kind, link))
    async with node.guest(A) as plain:
        guest = six(plain)
        await plain.ping(SERVER)
        plain.send(wanted(plain, IPv4Interface("192.0.2.10/24")))
        frame = await plain.receive(lambda f: payload(f, CLIENT_PORT) is not None)
        reply = payload(frame, CLIENT_PORT)
        assert reply is not None
        assert reply[16:20] == IPv4Address("192.0.2.10").packed
        assert b"\3\4" + SERVER.packed in reply  # the router of the segment
        assert b"\6\4" + IPv4Address("192.0.2.53").packed in reply
        kind6, options = await guest.ask(MessageType6.SOLICIT, ia())
        assert (kind6, guest.address.packed in options) == (MessageType6.ADVERTISE, True)
        asked = bytes((133, *bytes(7)))
        own = guest.link_local
        plain.send(guest.frame(b"\x33\x33\0\0\0\2", ALL_ROUTERS, ICMP6, asked, source=own))
        told = await plain.receive(lambda f: f[20] == ICMP6 and f[54] == 134)
        assert told[22:38] == ROUTER6.packed
        assert int.from_bytes(told[60:62], "big") >= 3600
        plain.send(plain.udp(BROADCAST, SERVER, (1, 1), b"the-end"))
        seen = await lan.marks(b"the-end")
        assert "\x63\x82\x53\x63" not in seen  # no DHCP request left the tap


async def test_the_servers_of_the_segment_do_not_reach_the_guest(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    await node.attach(A, **claimed(kind, link))
    (nic,) = node.attachments.ready()[0].nics
    async with node.guest(A) as plain:
        await plain.ping(SERVER)
        guest, far = six(plain), Frames6(SERVER_MAC, SERVER6)
        other = Frames("02:00:00:00:00:01", f"{SERVER}/24")
        while not plain.frames.empty():
            plain.frames.get_nowait()

        def foreign(data: bytes) -> list[bytes]:
            everybody, to = b"\x33\x33\0\0\0\1", plain.mac
            router = bytes((134, 0, 0, 0, 64, 0, 7, 8, *bytes(8)))
            ports = (67, 68)
            return [
                far.frame(everybody, ALL_NODES, ICMP6, router + data, source=ROUTER6),
                far.udp((547, 546), data, guest.link_local),
                other.udp(to, plain.ip, ports, data),
                other.udp(to, plain.ip, (1000, 1000), b"the-end"),
            ]

        for frame in foreign(b"of-the-segment"):
            lan.packets.send(frame)
        await plain.receive(lambda f: b"the-end" in f)
        assert not any(b"of-the-segment" in f for f in _queued(plain))
        # without its rules on the wire, the comparison says so and restores them
        node.inside(A, f"nft flush chain netdev virtbus {nic.eth}")
        (finding,) = await node.attachments.compare()
        assert "has other rules" in finding.message
        assert await node.attachments.compare() == []


async def test_crafted_frames_of_both_versions_are_dropped_and_counted(
    wired: tuple[Node, str, str], lan: Segment
) -> None:
    node, kind, link = wired
    node.doors.bridge.reach = ReachRules(hosts=frozenset({HOST, HOST6}))
    await node.attach(A, **claimed(kind, link))
    async with node.guest(A) as plain:
        await plain.ping(SERVER)
        guest = six(plain)
        result = await sent(plain, lan)
        assert result.pop("passed") == []
        # a guest with IPv6 has rules of its own for these two; netd answers DHCP, uncounted
        other_rules = {"router-adv": "ra", "neighbour-adv": "nd", "dhcp-to-a-host": ""}
        names = [other_rules.get(name, rule) for rule, found in result.items() for name in found]
        for name, (frame, rule) in forbidden(guest).items():
            plain.send(frame + f"<{name}>".encode())
            names.append(rule)
        echo = bytes((128, 0, 0, 0, 0, 7, 0, 1)) + b"to-a-host"
        names.append("reach")
        plain.send(guest.frame(BROADCAST, HOST6, ICMP6, echo))
        plain.send(plain.udp(BROADCAST, SERVER, (1, 1), b"the-end"))
        assert "<" not in (passed := await lan.marks(b"the-end")), passed
        assert "to-a-host" not in passed
        (nic,) = node.counters(A).interfaces
        assert nic.refused == {rule: names.count(rule) for rule in names if rule}


async def test_an_address_of_a_host_is_refused_before_anything_is_made(
    host: Host, wired: tuple[Node, str, str]
) -> None:
    node, kind, link = wired
    before = host.census()
    node.doors.bridge.reach = ReachRules(hosts=frozenset({IPv4Address("192.0.2.10")}))
    with pytest.raises(VirtbusError, match=r"or a host, has 192\.0\.2\.10") as refused:
        await node.attach(A, **claimed(kind, link))
    (detail,) = refused.value.body.details
    assert (refused.value.reason, detail.path) == (
        "address_in_use",
        "spec.domain.devices.interfaces[0].addresses",
    )
    assert host.census() == before


def _queued(guest: Guest) -> list[bytes]:
    found = []
    while not guest.frames.empty():
        found.append(guest.frames.get_nowait())
    return found
