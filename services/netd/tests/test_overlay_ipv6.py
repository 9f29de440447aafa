"""IPv6 in overlays: a guest here, and guests of another host behind a tunnel."""

import asyncio
import struct
from ipaddress import IPv6Address, IPv6Interface

import pytest
from services.netd.tests.ipv6_guest import ICMP6, UDP, Guest6
from services.netd.tests.pretended_host import Guest, Node
from services.netd.tests.segment import Segment, run
from services.netd.tests.test_network_objects import A, B
from services.netd.tests.test_overlay_networks import (
    FAR,
    FAR_MAC,
    PEER,
    far,
    overlay,
    sent_to_peer,
    spanning,
    told,
    underlay,
)

from virtbus.netd.core.host_table import ROUTER
from virtbus.schemas.overlay import OverlayMember

pytestmark = pytest.mark.integration
__all__ = ["spanning", "underlay"]

FAR6, GATEWAY6 = IPv6Address("fd00:200::99"), IPv6Address("fd00:200::1")
MEMBER = OverlayMember(mac=FAR_MAC, addresses=(str(FAR), str(FAR6)))


async def joined(node: Node, uid: str = A, number: int = 5) -> IPv6Address:
    """Attach a guest with both versions, and tell the other host of it; return its address."""
    spec = overlay(address=f"10.200.0.{number}", subnet6="fd00:200::/64")
    spec["address_claims"]["net0"]["addresses"].append(f"fd00:200::{number}")
    ready = await node.attach(uid, **spec)
    (nic,) = ready.interfaces
    found = [IPv6Interface(text).ip for text in nic.addresses if ":" in text]
    run(f"bridge -n {PEER} fdb append {nic.mac} dev vx dst 198.51.100.1")
    run(f"ip -n {PEER} addr replace {FAR6}/64 dev vx nodad")
    run(f"ip -n {PEER} neigh replace {found[0]} lladdr {nic.mac} dev vx nud permanent")
    return found[0]


def six(node: Node, uid: str, guest: Guest) -> Guest6:
    (one,) = [each for each in node.attachments.ready() if each.uid == uid]
    return Guest6(guest, IPv6Interface(one.nics[0].addresses6[0]).ip)


async def test_guests_of_two_hosts_reach_each_other_by_ipv6(
    spanning: Node, underlay: Segment
) -> None:
    address = await joined(spanning)
    await joined(spanning, B, 6)
    told(spanning, far(MEMBER))
    async with spanning.guest(A) as guest, spanning.guest(B) as other:
        one, two = six(spanning, A, guest), six(spanning, B, other)
        await one.ping(FAR6)
        await one.ping(GATEWAY6)
        await one.ping(ROUTER.ip)
        await two.ping(GATEWAY6)  # its tap forwards only some time after it was opened
        other.send(two.solicitation(one.address))  # they are on one bridge
        await guest.receive(lambda f: f[20] == ICMP6 and f[54] == 135)
        send = (
            "import socket,sys; s=socket.socket(socket.AF_INET6,socket.SOCK_DGRAM);"
            "s.sendto(b'from afar',(sys.argv[1],4000))"
        )
        argv = ("ip", "netns", "exec", PEER, "python3", "-c", send, str(address))
        process = await asyncio.create_subprocess_exec(*argv)
        assert await process.wait() == 0
        await guest.receive(lambda f: f[20] == UDP and b"from afar" in f)


async def test_the_tunnel_answers_solicitations_itself_and_floods_nothing(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    async with spanning.guest(A) as guest:
        one = six(spanning, A, guest)
        await one.ping(FAR6)
        sent_to_peer(underlay)
        assert (await one.resolve(FAR6)).hex(":") == FAR_MAC
        nobody, group = IPv6Address("fd00:200::55"), IPv6Address("ff02::1")
        guest.send(one.solicitation(nobody))
        guest.send(one.frame(bytes.fromhex("333300000001"), group, ICMP6, _echo()))
        guest.send(one.frame(bytes.fromhex("020000000055"), nobody, ICMP6, _echo()))
        await one.ping(FAR6)
        assert sent_to_peer(underlay) == 1  # the second ping
        told(spanning)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await one.resolve(FAR6)  # without the peer, nobody answers for it


def _echo() -> bytes:
    return struct.pack("!BBHHH", 128, 0, 0, 7, 1) + b"flood"
