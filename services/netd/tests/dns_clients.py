"""Programs for the tests of the resolver: DNS clients in a VM's namespace, and another server."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from services.netd.tests.pretended_host import Node, eventually

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.netd.core import link_addresses
from virtbus.netd.core.names import netns
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge import links
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.name_questions import NameQuestions
from virtbus.schemas import subjects
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.wire import validate

GATEWAY = "10.127.0.1"
UPSTREAM = "192.0.2.53"


@asynccontextmanager
async def netd(node: Node, server: MemoryServer) -> AsyncIterator[None]:
    """One run of netd's attachments and resolver on a host."""
    node.wire()
    names = NameQuestions(MemoryBus(server, "netd"), "n1")
    async with node.doors.resolver.running(names.ask):
        node.doors.bridge.reach = ReachRules(dns=node.doors.resolver.addresses)
        await node.attachments.recover()
        node.doors.resolver.complete()
        try:
            yield
        finally:
            node.stop()


@asynccontextmanager
async def controllers(server: MemoryServer, **known: NameAnswer) -> AsyncIterator[list[NameAsk]]:
    """Controllers that know these VMs by name and by address; yields the questions."""
    asked: list[NameAsk] = []

    async def answer(request: Request) -> NameAnswer:
        want = validate(NameAsk, request.data)
        asked.append(want)
        by_address = (one for one in known.values() if want.address in one.addresses)
        return known.get(want.name) or next(by_address, NameAnswer())

    endpoint = Endpoint("names-ask", subjects.names_asks(), answer)
    async with MemoryBus(server, "controller").serve(ServiceInfo("c", "1.0.0"), [endpoint]):
        yield asked


def asking() -> set[str]:
    """Return the addresses of guests that the resolver answers, as the kernel lists its sockets."""
    found = set()
    for line in Path("/proc/net/udp").read_text().splitlines()[1:]:
        local, remote = line.split()[1:3]
        if local.endswith(":0035") and remote != "00000000:0000":
            found.add(str(IPv4Address(int(remote[:8], 16).to_bytes(4, sys.byteorder))))
    return found


class Client:
    """A DNS client in the namespace of a VM, which has the guest's address there."""

    def __init__(self, node: Node, uid: str) -> None:
        self._node = node
        self._uid = uid

    async def prepare(self) -> "Client":
        """Give the guest's address to the inner bridge."""
        attachment, taps = await self._node.attachments.take_taps(self._uid, 5.0)
        for fd in taps:
            socket.close(fd)
        address = IPv4Interface(attachment.nics[0].addresses[0])
        self.ip, self.gateway = address.ip, attachment.nics[0].gateway

        def give() -> None:
            self._node.host.namespaces.enter(netns(self._uid))
            with Netlink() as inside:
                link = links.find(inside, "br0")
                assert link is not None
                inside.do([link_addresses.add_address(link.index, address)])

        await in_thread(give)
        await eventually(lambda: str(self.ip) in asking())
        return self

    async def opened(self, kind: socket.SocketKind) -> socket.socket:
        """Return a socket of the namespace, connected to the resolver."""

        def make() -> socket.socket:
            self._node.host.namespaces.enter(netns(self._uid))
            return socket.socket(socket.AF_INET, kind)

        made = await in_thread(make)
        made.setblocking(False)
        async with asyncio.timeout(5):
            await asyncio.get_running_loop().sock_connect(made, (self.gateway, 53))
        return made

    async def ask(
        self, name: str, kind: str = "A", *, tcp: bool = False, timeout_s: float = 5.0
    ) -> dns.message.Message:
        """Return the answer to a query."""
        query = dns.message.make_query(name, kind)
        async with asyncio.timeout(timeout_s):
            with await self.opened(socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as made:
                answer = await (by_tcp if tcp else by_udp)(made, query.to_wire())
        message = dns.message.from_wire(answer)
        assert query.is_response(message)
        return message

    async def found(self, name: str, kind: str = "A", *, tcp: bool = False) -> list[str] | str:
        """Return the records of an answer, or its code without any."""
        answer = await self.ask(name, kind, tcp=tcp)
        records = [str(record) for records in answer.answer for record in records]
        return records or dns.rcode.to_text(answer.rcode())


async def by_udp(made: socket.socket, wire: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(made, wire)
    return await loop.sock_recv(made, 65535)


async def by_tcp(made: socket.socket, wire: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(made, len(wire).to_bytes(2, "big") + wire)
    data = b""
    while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
        more = await loop.sock_recv(made, 65535)
        if not more:
            raise ConnectionResetError
        data += more
    return data[2:]


class Upstream(asyncio.DatagramProtocol):
    """The DNS server of the host. `big.example` has an answer for TCP only."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.mute = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        if not self.mute:
            self._transport.sendto(self.answer(data, tcp=False), addr)

    def answer(self, data: bytes, *, tcp: bool) -> bytes:
        query = dns.message.from_wire(data)
        name = query.question[0].name
        self.names.append(str(name))
        answer = dns.message.make_response(query, recursion_available=True)
        if str(name) != "big.example.":
            answer.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "203.0.113.7"))
        elif tcp:
            texts = [f'"{number:0200}"' for number in range(20)]
            answer.answer.append(dns.rrset.from_text_list(name, 60, "IN", "TXT", texts))
        else:
            answer.flags |= dns.flags.TC
        return answer.to_wire()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(EOFError, OSError):
            size = int.from_bytes(await reader.readexactly(2), "big")
            answer = self.answer(await reader.readexactly(size), tcp=True)
            writer.write(len(answer).to_bytes(2, "big") + answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def upstream(address: str = UPSTREAM) -> AsyncIterator[Upstream]:
    """The host's DNS server, or a network's, on an address of the host's loopback."""
    with Netlink() as host:
        lo = links.find(host, "lo")
        assert lo is not None
        host.do([link_addresses.add_address(lo.index, IPv4Interface(f"{address}/32"))])
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_datagram_endpoint(Upstream, (address, 53))
    server = await asyncio.start_server(made.converse, address, 53)
    try:
        yield made
    finally:
        transport.close()
        server.close()
        with Netlink() as host:
            host.do([link_addresses.delete_address(lo.index, IPv4Interface(f"{address}/32"))])
