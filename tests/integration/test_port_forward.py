"""`vm port-forward` as a process, a real server with its accounts, the agent's own connections.

The guest is this host's loopback: the subject of the test is the transport of the bytes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli.tests.fakes import UID, environment, run, start, vm_view
from services.nodeagent.tests.pretended_node import record

from virtbus.bus.client.connection import connect
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.provisioning import server
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.guest_connections import GuestConnections
from virtbus.nodeagent.edge.libvirt_displays import LibvirtDisplays
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.subjects import api
from virtbus.schemas.vm_status import VmView

pytestmark = pytest.mark.integration

MANY = bytes(range(256)) * 4096


def guest(*addresses: str) -> VmActor:
    nic = InterfaceStatus(name="net0", mac="02:00:5e:10:00:01", addresses=addresses)
    net = SimpleNamespace(latest=SimpleNamespace(interfaces=(nic,)))
    return cast("VmActor", SimpleNamespace(vm=SimpleNamespace(net=net, record=record())))


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[server.ServerFiles]:
    """A bus with one VM, whose node reaches it at 127.0.0.1."""
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")

    async def view(_: Request) -> VmView:
        return vm_view()

    none = Consoles(lambda _uid: tmp_path / "none", lambda _uid: tmp_path / "none")
    async with (
        server.running(files, nodes=["n1"], port=-1) as running,
        connect(running.settings("controller"), name="controller") as controller,
        connect(running.settings("node-n1"), name="n1") as node,
        controller.serve(ServiceInfo("c", "0", "c"), [Endpoint("vm-get", api("vm", "get"), view)]),
        AgentRpc(
            node, "n1", none, connections=GuestConnections(cast("LibvirtDisplays", None))
        ).serve({UID: guest("127.0.0.1/8")}),
    ):
        yield files


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A service of the guest: echoes all its input once its client has closed its side."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            heard = await reader.read()
            writer.write(heard[::-1])
            await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as target:
        yield target.sockets[0].getsockname()[1]


class Mirror(asyncio.DatagramProtocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.transport.sendto(data[::-1], addr)


class Heard(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.came: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.came.put_nowait(data)


async def exchange(port: int, said: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


async def test_tcp_and_udp_ports_of_a_guest_are_here(files: server.ServerFiles, echo: int) -> None:
    loop = asyncio.get_running_loop()
    mirror, _ = await loop.create_datagram_endpoint(Mirror, local_addr=("127.0.0.1", 0))
    udp = mirror.get_extra_info("sockname")[1]
    words = ("vm", "port-forward", "web", f"0:{echo}", f"0:{udp}/udp", "0:9", "-o", "json")
    process = await start(*words, env=environment(files))
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        told = [await document(process.stdout) for _ in range(3)]
        assert [one["protocol"] for one in told] == ["tcp", "udp", "tcp"]
        ports = [int(one["local"].rpartition(":")[2]) for one in told]
        async with asyncio.TaskGroup() as group:  # several at once, each larger than any window
            asked = [group.create_task(exchange(ports[0], MANY)) for _ in range(3)]
        assert [task.result() for task in asked] == [MANY[::-1]] * 3
        ours, heard = await loop.create_datagram_endpoint(
            Heard, remote_addr=("127.0.0.1", ports[1])
        )
        ours.sendto(b"ping")
        assert await heard.came.get() == b"gnip"
        ours.sendto(b"x" * 8000)
        assert await heard.came.get() == b"x" * 8000
        assert await exchange(ports[2], b"") == b""
        assert b"nothing listens on port 9" in await process.stderr.readline()
        ours.close()
    finally:
        mirror.close()
        process.terminate()
        await process.communicate()


async def document(out: asyncio.StreamReader) -> Any:
    """Read the next JSON document, over as many lines as it takes."""
    text = b""
    while True:
        text += await out.readline()
        try:
            return json.loads(text)
        except ValueError:
            assert not out.at_eof(), text


async def test_stdio_carries_one_connection_and_ends_with_it(
    files: server.ServerFiles, echo: int
) -> None:
    done = await run(
        *("vm", "port-forward", "web", str(echo), "--stdio"), env=environment(files), stdin="abc"
    )
    assert (done.code, done.out) == (0, "cba"), done.err


async def test_stdio_reports_a_port_without_a_listener(files: server.ServerFiles) -> None:
    done = await run("vm", "port-forward", "web", "9", "--stdio", env=environment(files))
    assert done.code == 3 or done.code == 1
    assert "nothing listens on port 9 of the guest" in done.err


async def test_words_that_are_no_ports_are_refused(files: server.ServerFiles) -> None:
    for word, said in (("web:80", "is no port"), ("80000", "1 to 65535"), ("53/sctp", "no port")):
        done = await run("vm", "port-forward", "web", word, env=environment(files))
        assert done.code == 2, done
        assert said in done.err


async def test_ssh_gets_a_proxy_command_over_the_bus(
    files: server.ServerFiles, tmp_path: Path
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text(f"#!{sys.executable}\nimport sys, json\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    env = environment(files)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = await run("vm", "ssh", "root@web", "-i", "key", "--", "uname", "-a", env=env)
    words = json.loads(done.out)
    assert words[-4:] == ["--", f"root@{UID}", "uname", "-a"]
    assert any(f"port-forward {UID} 22 --stdio" in word for word in words)
