"""Security groups and published ports of guests behind passt and masquerade, with real TCP.

The guest is a namespace with a kernel of its own. So its connections are those of Linux.
"""

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_interface
from typing import Any

import pytest
from services.netd.tests.machine import Machine, machine
from services.netd.tests.pretended_host import Node
from services.netd.tests.test_ipv6 import FAR6, HOST6, world6
from services.netd.tests.test_ipv6 import node6 as node6
from services.netd.tests.test_network_objects import target
from services.netd.tests.test_network_path import OUTER
from services.netd.tests.test_security_groups import WEB, A, B, put

from virtbus.schemas.node_rpc import NetReady

pytestmark = pytest.mark.integration

WORLD, HOST = "198.51.100.2", "198.51.100.1"
GATEWAYS = {4: "10.127.0.1", 6: "fd00:127::1"}
HOST_ENDS = (GATEWAYS[4], 32), (GATEWAYS[6], 128)
ENDS = {4: (WORLD, HOST), 6: (str(FAR6), str(HOST6))}
"""The outside, and the host, by version of IP."""
SERVER = """
import contextlib, socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
      with contextlib.suppress(OSError):
        while data := self.request.recv(100):
            self.request.sendall(self.client_address[0].encode() + b" says " + data + b"\\n")
class Server(socketserver.ThreadingTCPServer):
    address_family, allow_reuse_address, daemon_threads = 10, True, True
servers = [Server(("::", int(port)), Echo) for port in sys.argv[1:]]
import threading
for one in servers: threading.Thread(target=one.serve_forever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
"""Tells each client of TCP its address, at the ports of the arguments, until its input ends."""
TALK = """
import socket, sys
patience = float(sys.argv[3])
try:
    end = socket.create_connection((sys.argv[1], int(sys.argv[2])), patience)
    end.sendall(b"hello"); end.settimeout(patience)
    print(end.recv(200).decode().strip(), flush=True)
except OSError as error: print(type(error).__name__, flush=True)
for line in sys.stdin:
    try:
        end.sendall(line.encode())
        print(end.recv(200).decode().strip() or "end", flush=True)
    except OSError as error: print(type(error).__name__, flush=True)
"""
"""Says hello to an address and a port, then each line of its input; prints what it hears."""
DATAGRAMS = """
import socket, sys, threading
end = socket.socket(10, 2); end.bind(("::", 53))
def serve():
    while True:
        data, peer = end.recvfrom(100)
        end.sendto(peer[0].encode() + b" says " + data, peer)
threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
"""As SERVER, for datagrams to port 53."""
ASK = """
import socket, sys
address, port = sys.argv[1], int(sys.argv[2])
end = socket.socket(10 if ":" in address else 2, 2); end.settimeout(1)
for attempt in range(2):
    try:
        end.sendto(b"hello", (address, port))
        print(end.recvfrom(100)[0].decode())
        break
    except OSError as error:
        if attempt: print(type(error).__name__)
"""
"""Sends datagrams to an address and a port, and prints the answer."""
LOST = "TimeoutError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "end"


def bound(binding: str, **nic: Any) -> dict[str, Any]:
    return {"nics": ({"binding": binding, **nic},)}


class Talk:
    """A connection of TCP that a program keeps open."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def hears(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(15):
            return (await self._process.stdout.readline()).decode().strip()

    async def again(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(b"more\n")
        with suppress(ConnectionError):
            await self._process.stdin.drain()
        return await self.hears()


@asynccontextmanager
async def talking(
    where: Machine, address: str, port: int, patience_s: float = 5.0
) -> AsyncIterator[tuple[Talk, str]]:
    process = await where.starts(TALK, address, str(port), str(patience_s))
    talk = Talk(process)
    try:
        yield talk, await talk.hears()
    finally:
        await process.communicate(b"")


async def heard(where: Machine, address: str, port: int) -> str:
    """Return what a client hears of a server."""
    async with talking(where, address, port) as (_talk, answer):
        return answer


async def is_lost(where: Machine, address: str, port: int) -> bool:
    """Return True if a client hears nothing of a server. passt accepts before it asks the guest."""
    async with talking(where, address, port, 1.0) as (_talk, answer):
        return answer in LOST


@asynccontextmanager
async def serving(where: Machine, *ports: int) -> AsyncIterator[None]:
    process = await where.starts(SERVER, *map(str, ports))
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        await process.communicate(b"")


def of(ready: NetReady, version: int) -> str:
    found = (ip_interface(one).ip for one in ready.interfaces[0].addresses)
    return next(str(one) for one in found if one.version == version)


def said(address: str, word: str = "hello") -> str:
    """Return the answer of SERVER to a client with an address."""
    return f"{address if ':' in address else '::ffff:' + address} says {word}"


OPEN = [{"port": 80}, {"port": 81}, {"port": 82}]


@pytest.mark.parametrize("binding", ["passt", "masquerade"])
async def test_groups_hold_for_real_connections_of_both_versions(node6: Node, binding: str) -> None:
    ingress = {"direction": "ingress", "protocol": "tcp"}
    egress = {"direction": "egress", "protocol": "tcp", "ports": ["7000"]}
    of_lb = ingress | {"ports": ["80"], "groups": ["lb"]}
    by_host = ingress | {"ports": ["81"], "cidrs": [f"{one}/{n}" for one, n in HOST_ENDS]}
    to_world = egress | {"cidrs": [f"{WORLD}/32", f"{FAR6}/128"]}
    both = {"isolates": ["ingress", "egress"]}
    with world6():
        peer = await node6.attach(B)
        lb = [of(peer, 4), of(peer, 6)]
        await put(node6, "web", both | {"rules": [of_lb, by_host, to_world]}, lb=lb)
        web = await node6.attach(A, labels=WEB, **bound(binding, ports=OPEN))
        host, world = Machine(""), Machine(OUTER)
        async with (
            machine(node6, A) as guest,
            machine(node6, B) as other,
            serving(guest, 80, 81, 82),
            serving(world, 7000, 7001),
        ):
            for version in (4, 6):
                here, own = of(web, version), of(peer, version)
                far = ENDS[version][0]
                assert await heard(host, here, 81) == said(GATEWAYS[version])
                assert await is_lost(other, here, 81)
                assert await is_lost(other, here, 82)
                assert await is_lost(host, here, 80)
                assert await is_lost(guest, far, 7001)
                async with (
                    talking(other, here, 80) as (inward, first),
                    talking(guest, far, 7000) as (outward, second),
                ):
                    assert first == said(own)
                    assert second == said(ENDS[version][1])
                    await put(node6, "web", both | {"rules": [by_host]}, lb=lb)
                    assert await inward.again() in LOST
                    assert await outward.again() in LOST
                    assert await is_lost(other, here, 80)
                assert await heard(host, here, 81) == said(GATEWAYS[version])
                await put(node6, "web", both | {"rules": [of_lb, by_host, to_world]}, lb=lb)
                assert await heard(other, here, 80) == said(own)
                assert await is_lost(other, here, 82)
                assert await is_lost(guest, far, 7001)
            counted = node6.counters(A).interfaces[0].refused
            assert counted["ingress"] > 0
            assert counted["egress"] > 0
            await node6.restart()
            assert await heard(other, of(web, 4), 80) == said(of(peer, 4))
            assert await is_lost(other, of(web, 4), 82)


@pytest.mark.parametrize("binding", ["passt", "masquerade"])
async def test_a_network_that_denies_by_default_denies_real_connections(
    node: Node, binding: str
) -> None:
    to_80 = {"direction": "ingress", "protocol": "tcp", "ports": ["80"]}
    closed = target("nat", default_deny=True)
    web = await node.attach(A, labels=WEB, **closed, **bound(binding, ports=OPEN))
    async with machine(node, A) as guest, serving(guest, 80):
        assert await is_lost(Machine(""), of(web, 4), 80)
        await put(node, "web", {"rules": [to_80]})
        assert await heard(Machine(""), of(web, 4), 80) == said("10.200.0.1")
        await put(node, "web", {"rules": []})
        assert await is_lost(Machine(""), of(web, 4), 80)


@pytest.mark.parametrize("binding", ["passt", "masquerade"])
async def test_published_ports_lead_real_connections_to_the_guest(
    node6: Node, binding: str
) -> None:
    publish = [
        {"host_port": 8080, "guest_port": 80},
        {"host_port": 8443, "guest_port": 81, "host_address": HOST},
        {"host_port": 8444, "guest_port": 81, "host_address": str(HOST6)},
    ]
    with world6():
        ready = await node6.attach(A, **bound(binding, ports=OPEN, publish=publish))
        assert "0.0.0.0:8080->80/tcp" in ready.interfaces[0].published
        assert "[::]:8080->80/tcp" in ready.interfaces[0].published
        world = Machine(OUTER)
        async with machine(node6, A) as guest, serving(guest, 80, 81, 82, 83):
            for far, host in ENDS.values():
                assert await heard(world, host, 8080) == said(far)
                assert await is_lost(world, host, 82)
                assert await heard(Machine(""), host, 8080) != ""
            assert await heard(world, HOST, 8443) == said(WORLD)
            assert await heard(world, str(HOST6), 8444) == said(str(FAR6))
            assert await is_lost(world, HOST, 8444)
            assert await is_lost(Machine(""), of(ready, 4), 83), "neither listed nor published"
            await node6.restart()
            assert await heard(world, HOST, 8080) == said(WORLD)
        await node6.attachments.release(A, 1)
        assert "virtbus_ports" not in node6.host.census()["tables"]


async def test_passt_accepts_a_published_port_that_is_not_listed(node: Node) -> None:
    publish = [{"host_port": 8080, "guest_port": 80}]
    with world6():
        await node.attach(A, **bound("passt", ports=[{"port": 22}], publish=publish))
        async with machine(node, A) as guest, serving(guest, 80):
            assert await heard(Machine(OUTER), HOST, 8080) == said(WORLD)


@pytest.mark.parametrize("binding", ["passt", "masquerade"])
async def test_datagrams_obey_groups_and_published_ports(node6: Node, binding: str) -> None:
    udp = {"direction": "ingress", "protocol": "udp", "ports": ["53"]}
    peers = {"cidrs": [f"{WORLD}/32", f"{FAR6}/128"]}
    closed = {"isolates": ["ingress"]}
    ports = [{"port": 53, "protocol": "udp"}]
    publish = [{"host_port": 5300, "guest_port": 53, "protocol": "udp"}]
    with world6():
        await put(node6, "web", closed | {"rules": [udp | peers]})
        ready = await node6.attach(A, labels=WEB, **bound(binding, ports=ports, publish=publish))
        async with machine(node6, A) as guest:
            server = await guest.starts(DATAGRAMS)
            assert server.stdout is not None
            assert await server.stdout.readline() == b"ready\n"
            for version, (far, host) in ENDS.items():
                assert await asked(Machine(OUTER), host, 5300) == said(far)
                assert await asked(Machine(""), of(ready, version), 53) == "TimeoutError"
            await put(node6, "web", closed | {"rules": []})
            for _far, host in ENDS.values():
                assert await asked(Machine(OUTER), host, 5300) == "TimeoutError"
            await server.communicate(b"")


async def asked(where: Machine, address: str, port: int) -> str:
    """Return the answer to a datagram."""
    process = await where.starts(ASK, address, str(port))
    output, _errors = await process.communicate(b"")
    return output.decode().strip()
