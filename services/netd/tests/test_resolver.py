"""Names with real packets: guests ask their gateway, and nobody else gets an answer."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import pytest
from services.netd.tests.dns_clients import (
    GATEWAY,
    Client,
    asking,
    by_tcp,
    controllers,
    netd,
    upstream,
)
from services.netd.tests.pretended_host import Host, Node
from services.netd.tests.test_filters import wire

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.netd.core.query_limits import CONNECTIONS, LOOKUP_BURST
from virtbus.netd.edge.dns_forwarder import ANSWER_S
from virtbus.schemas.names import NameAnswer

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
C = "0192f0c1-2d3e-7abc-8def-00000000000c"
WEB = {"namespace": "shop", "name": "web"}
DB = {"namespace": "shop", "name": "db"}
OTHER = {"namespace": "bank", "name": "db"}


@asynccontextmanager
async def resolving(host: Host) -> AsyncIterator[tuple[Node, MemoryServer]]:
    """A host whose netd resolves names; afterwards the host is unchanged."""
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with netd(node, server):
        yield node, server
        for uid in list(node.attachments.resources()):
            await node.attachments.release(uid, 1_000)
        await node.attachments.tidy()
    await host.returns_to(before)


async def client(node: Node, uid: str, **more: Any) -> Client:
    await node.attach(uid, **more)
    return await Client(node, uid).prepare()


async def test_guests_find_the_vms_of_their_namespace_and_no_others(host: Host) -> None:
    async with resolving(host) as (node, server), controllers(server):
        web = await client(node, A, **WEB)
        db = await client(node, B, **DB)
        other = await client(node, C, **OTHER)
        assert await web.found("db.shop.vm.internal") == [str(db.ip)]
        assert await other.found("db.bank.vm.internal") == [str(other.ip)]
        assert await web.found("db.shop.vm.internal", "AAAA") == "NOERROR"
        assert await web.found(db.ip.reverse_pointer, "PTR") == ["db.shop.vm.internal."]
        for name, kind in (
            ("db.bank.vm.internal", "A"),
            ("db.bank.vm.internal", "AAAA"),
            ("none.shop.vm.internal", "A"),
            (other.ip.reverse_pointer, "PTR"),
            ("77.77.127.10.in-addr.arpa", "PTR"),
        ):
            assert await web.found(name, kind) == "NXDOMAIN"


async def test_names_of_other_hosts_have_the_addresses_that_are_valid_here(host: Host) -> None:
    elsewhere = NameAnswer(
        found=True,
        node="n2",
        namespace="shop",
        name="db",
        addresses=("10.127.0.77", "10.9.0.5", "127.0.0.1", "rubbish"),
    )
    nowhere = elsewhere.model_copy(update={"addresses": ("10.127.0.78",)})
    async with resolving(host) as (node, server):
        web = await client(node, A, **WEB)
        async with controllers(server, db=elsewhere, far=nowhere) as asked:
            assert await web.found("db.shop.vm.internal") == ["10.9.0.5"]
            assert await web.found("far.shop.vm.internal") == "NOERROR"
            assert await web.found("5.0.9.10.in-addr.arpa", "PTR") == ["db.shop.vm.internal."]
            count = len(asked)
            assert await web.found("db.shop.vm.internal", "AAAA") == "NOERROR"
            assert len(asked) == count
            assert {one.uid for one in asked} == {A}
        assert await web.found("db.shop.vm.internal") == ["10.9.0.5"]
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]


async def test_other_names_go_to_the_hosts_server_by_the_same_transport(host: Host) -> None:
    async with resolving(host) as (node, _server), upstream() as other:
        web = await client(node, A, **WEB)
        assert await web.found("www.example") == ["203.0.113.7"]
        assert await web.found("8.8.8.8.in-addr.arpa", "A") == ["203.0.113.7"]
        truncated = await web.ask("big.example", "TXT")
        assert truncated.flags & dns.flags.TC
        whole = await web.ask("big.example", "TXT", tcp=True)
        assert len(whole.answer[0]) == 20
        assert await web.found("web.shop.vm.internal", tcp=True) == [str(web.ip)]
        assert not [name for name in other.names if "vm.internal" in name]


async def test_a_silent_server_is_a_failure_in_time_and_delays_no_other_query(
    host: Host,
) -> None:
    async with resolving(host) as (node, _server), upstream() as other:
        web = await client(node, A, **WEB)
        other.mute = True
        async with asyncio.TaskGroup() as group:
            silent = group.create_task(web.found("www.example"))
            begun_s = time.monotonic()
            assert await web.found("web.shop.vm.internal") == [str(web.ip)]
            assert time.monotonic() - begun_s < ANSWER_S / 2
        assert silent.result() == "SERVFAIL"


async def test_nobody_but_a_guest_gets_an_answer(host: Host) -> None:
    async with resolving(host) as (node, _server), upstream() as other:
        # A guest's socket that is bound and not yet connected would take the query.
        await client(node, A, **WEB)
        loop = asyncio.get_running_loop()
        query = dns.message.make_query("web.shop.vm.internal", "A").to_wire()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.setblocking(False)
            outside.connect((GATEWAY, 53))
            outside.send(query)
            with pytest.raises(ConnectionRefusedError):
                async with asyncio.timeout(2):
                    await loop.sock_recv(outside, 512)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as outside:
            outside.setblocking(False)
            await loop.sock_connect(outside, (GATEWAY, 53))
            with pytest.raises(ConnectionError):
                await by_tcp(outside, query)
        assert not other.names


async def test_a_flood_of_one_guest_delays_no_other(host: Host) -> None:
    async with resolving(host) as (node, server), controllers(server) as asked:
        web, db = await client(node, A, **WEB), await client(node, B, **DB)
        with await web.opened(socket.SOCK_DGRAM) as flood:
            for number in range(1000):
                name = f"x{number}.shop.vm.internal"
                with contextlib.suppress(BlockingIOError):
                    flood.send(dns.message.make_query(name, "A").to_wire())
                    flood.send(b"\xff" * 400)
            begun_s = time.monotonic()
            assert await db.found("web.shop.vm.internal") == [str(web.ip)]
            assert time.monotonic() - begun_s < 1
        assert len(asked) <= LOOKUP_BURST + 20


async def test_connections_of_one_guest_are_few_and_leave_room_for_others(host: Host) -> None:
    async with resolving(host) as (node, _server):
        web, db = await client(node, A, **WEB), await client(node, B, **DB)
        query = dns.message.make_query("db.shop.vm.internal", "A").to_wire()
        made = [await web.opened(socket.SOCK_STREAM) for _ in range(CONNECTIONS + 6)]
        answered = 0
        for one in made:
            with one:
                try:
                    await by_tcp(one, query)
                except ConnectionError:
                    continue
                answered += 1
                assert await db.found("db.shop.vm.internal", tcp=True) == [str(db.ip)]
        assert answered == CONNECTIONS


async def test_a_tap_passes_few_packets_to_the_resolvers_tcp_port(host: Host) -> None:
    async with resolving(host) as (node, _server):
        await node.attach(A, **WEB)
        async with node.guest(A) as guest:
            mac = await guest.resolve(node.gateway.ip)
            passed = 0
            with wire() as arrived:
                for number in range(1000):
                    ports = (20_000 + number).to_bytes(2, "big") + b"\0\x35"
                    syn = ports + bytes(8) + b"\x50\x02\xff\xff" + bytes(4)
                    guest.send(guest.ipv4(mac, node.gateway.ip, 6, syn))
                    passed += arrived.seen(syn)
            assert 150 <= passed <= 400


async def test_a_host_with_another_dns_server_gives_guests_the_servers_as_before(
    host: Host,
) -> None:
    before = host.census()
    node = Node(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", 53))
        async with netd(node, MemoryServer()):
            assert (node.doors.resolver.domain, node.doors.resolver.addresses) == ("", ())
            await node.attach(A, **WEB)
            await node.attachments.release(A, 1)
            await node.attachments.tidy()
    await host.returns_to(before)


async def test_a_released_vm_has_no_name_and_no_socket(host: Host) -> None:
    async with resolving(host) as (node, server), controllers(server):
        web = await client(node, A, **WEB)
        await node.attach(B, **DB)
        await node.attachments.release(B, 1)
        assert await web.found("db.shop.vm.internal") == "NXDOMAIN"
        assert asking() == {str(web.ip)}
