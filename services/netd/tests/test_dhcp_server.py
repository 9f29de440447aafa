"""DHCP over a real tap: a guest in user space asks, netd answers, the bridge receives nothing."""

import asyncio
import contextlib
import struct
import time
from ipaddress import IPv4Address

import pytest
from services.netd.tests.pretended_host import Guest, Node
from services.netd.tests.test_dhcp import CLONED, options_of, request
from services.netd.tests.test_filters import wire

from virtbus.netd.core.dhcp import DhcpAnswer, MessageType, Option
from virtbus.netd.core.domain_names import domain_list
from virtbus.netd.edge.dhcp_server import BURST

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
BROADCAST = IPv4Address("255.255.255.255")


def ask(
    guest: Guest, kind: MessageType, *options: tuple[int, bytes], mac: bytes | None = None
) -> None:
    message = request(kind, *options, mac=mac or guest.mac)
    source = IPv4Address(0)
    guest.send(guest.udp(b"\xff" * 6, BROADCAST, (68, 67), message, source=source))


async def reply(guest: Guest, timeout_s: float = 5.0) -> bytes:
    frame = await guest.receive(lambda f: f[23] == 17 and f[34:38] == b"\0\x43\0\x44", timeout_s)
    return frame[42:]


async def answer_to(guest: Guest, kind: MessageType, *options: tuple[int, bytes]) -> bytes:
    """Ask until an answer comes: the kernel drops it while it activates a tap that was opened."""
    for _attempt in range(20):
        ask(guest, kind, *options)
        with contextlib.suppress(TimeoutError):
            return await reply(guest, 0.25)
    raise TimeoutError("no answer")


async def test_a_guest_gets_its_address_and_nobody_else_sees_its_request(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        with wire() as host:
            ask(guest, MessageType.DISCOVER)
            offer = await reply(guest)
            ask(
                guest,
                MessageType.REQUEST,
                (50, guest.ip.packed),
                (54, IPv4Address("10.127.0.1").packed),
            )
            ack = await reply(guest)
            assert not host.seen(b"\x63\x82\x53\x63")
        assert offer[16:20] == ack[16:20] == guest.ip.packed
        assert offer[240:243] == b"\x35\x01\x02"
        assert ack[240:243] == b"\x35\x01\x05"
        assert b"vms\x07example" in ack
        assert node.doors.dhcp.counts(A) == {MessageType.DISCOVER: 1, MessageType.REQUEST: 1}


async def test_clones_with_one_client_id_get_different_addresses(node: Node) -> None:
    given = []
    for uid in (A, B):
        await node.attach(uid)
        async with node.guest(uid) as guest:
            given.append((await answer_to(guest, MessageType.DISCOVER, (61, CLONED)))[16:20])
            assert given[-1] == guest.ip.packed
    assert len(set(given)) == 2


async def test_a_restarted_netd_answers_again(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await node.restart()
        ask(guest, MessageType.DISCOVER)
        assert (await reply(guest))[16:20] == guest.ip.packed


async def dns_of(guest: Guest) -> tuple[bytes, bytes]:
    """Return the options with the name servers and the search domains of the guest's answer."""
    message = await answer_to(guest, MessageType.DISCOVER)
    found = options_of(DhcpAnswer(MessageType.OFFER, message, BROADCAST, unicast=False))
    return found.get(Option.DNS, b""), found.get(Option.SEARCH, b"")


async def test_a_guest_gets_the_dns_of_its_vm_also_from_the_next_netd(node: Node) -> None:
    own = {"nameservers": ["10.96.0.10"], "searches": ["shop.svc.cluster.local"]}
    expected = IPv4Address("10.96.0.10").packed, domain_list(own["searches"])
    await node.attach(A, more_spec={"dns_config": own})
    async with node.guest(A) as guest:
        assert await dns_of(guest) == expected
        await node.restart()
        assert await dns_of(guest) == expected


async def test_another_dns_of_a_vm_reaches_its_guest_at_the_next_start(node: Node) -> None:
    own = {"nameservers": ["10.96.0.10"]}
    await node.attach(A)
    async with node.guest(A) as guest:
        before = await dns_of(guest)
        await node.attach(A, generation=2, more_spec={"dns_config": own})
        assert await dns_of(guest) == before
    await node.attach(A, generation=2, more_spec={"dns_config": own})
    async with node.guest(A) as guest:
        assert await dns_of(guest) == (IPv4Address("10.96.0.10").packed, b"")


async def test_another_hardware_address_gets_no_answer(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        for number in range(10):
            ask(guest, MessageType.DISCOVER, mac=b"\x02\0\0\0\0" + bytes((number,)))
        with pytest.raises(TimeoutError):
            await reply(guest, 0.2)


async def test_a_flood_is_answered_slowly_and_the_loop_stays_free(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        for _number in range(5000):
            ask(guest, MessageType.DISCOVER)
        await asyncio.sleep(0)
        answers = 0
        while True:
            try:
                await reply(guest, 0.01 if answers else 5.0)  # the first one comes when it can
            except TimeoutError:
                break
            answers += 1
        assert 1 <= answers <= BURST + 5
        assert sum(node.doors.dhcp.counts(A).values()) <= BURST + 5


async def test_a_flood_is_counted_and_delays_no_other_guest(node: Node) -> None:
    await node.attach(A)
    await node.attach(B)
    async with node.guest(A) as guest, node.guest(B) as other:
        await answer_to(guest, MessageType.DISCOVER)
        await answer_to(other, MessageType.DISCOVER)
        for _number in range(5000):
            ask(guest, MessageType.DISCOVER)
        begun_s = time.monotonic()
        ask(other, MessageType.DISCOVER)
        await reply(other)
        assert time.monotonic() - begun_s < 1

        def lost(uid: str) -> int:
            (nic,) = node.doors.dhcp.with_floods(node.counters(uid)).interfaces
            return nic.refused.get("dhcp_flood", 0)

        first = lost(A)
        assert 4000 < first < 5000
        assert lost(A) == first  # a reading loses none
        assert lost(B) == 0


async def test_each_interface_gets_its_own_address_and_only_one_a_default_route(node: Node) -> None:
    ready = await node.attach(A, networks=("default", "default"))
    routers = []
    for index in (0, 1):
        async with node.guest(A, index) as guest:
            message = await answer_to(guest, MessageType.DISCOVER)
            address = ready.interfaces[index].addresses[0].split("/")[0]
            assert message[16:20] == IPv4Address(address).packed
            routers.append(b"\x03\x04" + struct.pack("!4B", 10, 127, 0, 1) in message)
    assert routers == [True, False]
