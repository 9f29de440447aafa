"""Values damaged in the streams of a real server: everything else is served, nothing restarts.

Each bucket and each kind of value, with real controllers and a real agent without a host.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, uid

from virtbus.bus.client.connection import connect
from virtbus.bus.client.jetstream_errors import answer_of
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.provisioning import server, stream_setup
from virtbus.schemas import bounds, subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

A = uid(1)
RECORD, STATUS = subjects.vm_record(NODE, A), subjects.vm_status(NODE, A)
DAMAGES: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda _key: b"\xc1\xff no msgpack",
    "over-size": lambda key: encode({"a": "x" * _over(key)}),
    "a list": lambda _key: b"\x93\x01\x02\x03",
    "wrong types": lambda _key: encode({"uid": 7, "node": [], "nonce": {}, "holder": 1}),
    "newer": lambda _key: encode({"schema_version": 99, "uid": A, "node": NODE}),
}
KEYS = {
    "claim": subjects.name_claim("default", "web"),
    "claim of no vm": subjects.name_claim("default", "nobody"),
    "node_spec": subjects.node_spec(NODE),
    "sum": subjects.node_reserved(NODE),
    "join": subjects.join_nonce(NODE),
    "host": subjects.node_host(NODE),
    "hosts": subjects.node_hosts(NODE),
    "secret": subjects.vm_secret(NODE, A),
    "secret of no vm": subjects.vm_secret(NODE, uid(8)),
    "status": STATUS,
    "status of no vm": subjects.vm_status(NODE, uid(8)),
    "signing key": subjects.signing_key("damaged"),
    "instance": subjects.node_instance(NODE),
    "rival": subjects.node_rival(NODE),
    "images": subjects.node_images(NODE),
    "heartbeat": subjects.node_record("n9"),
    "lease": subjects.lease("fleet"),
    "record": RECORD,
    "record without a node": subjects.vm_record("_", uid(7)),
}


def _over(key: str) -> int:
    """Larger than any reader's limit, and no larger than the stream's limit."""
    stream = "KV_" + key.split(".")[1]
    return min(bounds.bound_of(key).read_bytes, bounds.STORED_BYTES[stream] - 1000)


@dataclass
class Stage:
    """A server, two controllers as processes, an agent, and connections to write and to request."""

    admin: NatsBus
    client: NatsBus
    node: Node
    controllers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    async def damage(self, key: str, body: bytes) -> None:
        """Write without the checks of our own programs."""
        answer_of(await self.admin._records._persist(key, body, {}))

    async def ask(self, verb: str, **data: Any) -> Any:
        return await self.client.request(f"virtbus.api.v1.{verb}", data, timeout_s=10)

    async def alarms(self) -> str:
        return "\n".join((await self.ask("bus.status"))["alarms"])

    async def other_vms_are_served(self, number: int) -> None:
        """Run a life of another VM, with secrets, a name and a node; and read a whole list."""
        other, name = uid(number), f"vm-{number}"
        made = await self.ask(
            "vm.create", name=name, image="tiny", uid=other, user_data="#!/bin/sh"
        )
        assert made["created"]
        await eventually(lambda: ("start", other) in self.node.domains.done, 20)
        assert name in {vm["name"] for vm in (await self.ask("vm.list"))["items"]}
        assert (await self.ask("vm.delete", uid=other, grace_s=0))["deleting"]

        async def gone() -> bool:
            entry = await self.admin.get(subjects.vm_anywhere(other))
            return entry is not None and entry.kind is EntryKind.PURGE

        await eventually(gone, 20)

    def nothing_restarted(self) -> bool:
        return all(process.poll() is None for process in self.controllers)


def controller(files: server.ServerFiles, log: Path) -> "subprocess.Popen[bytes]":
    environ = {
        **os.environ,
        "VIRTBUS_NODE": "ctl",
        "VIRTBUS_CREDS": str(files.creds("controller")),
        "VIRTBUS_SWEEP_INTERVAL_S": "1",
        "VIRTBUS_ORPHAN_GRACE_S": "1",
    }
    with log.open("ab") as out:
        argv = [sys.executable, "-m", "virtbus.controller"]
        return subprocess.Popen(argv, env=environ, stdout=out, stderr=out)


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[tuple[Stage, server.ServerFiles]]:
    files = server.ServerFiles(tmp_path / "bus", tmp_path / "bus-run")
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.running(files, nodes=[NODE], port=-1))
        buses = [
            await stack.enter_async_context(connect(running.settings(who), name=who))
            for who in ("admin", "client", f"node-{NODE}")
        ]
        admin, client, host = buses
        await stream_setup.ensure(admin)
        await stream_setup.ensure_node(admin, NODE, encode(JoinNonce(nonce="bus-1")))
        node = Node(tmp_path, resync_s=1.0, orphan_grace_s=3)
        made = Stage(admin, client, node)
        made.controllers = [controller(files, tmp_path / f"c{n}.log") for n in range(2)]
        try:
            await stack.enter_async_context(node.agent(host))  # type: ignore[arg-type]  # a Bus, too
            yield made, files
        finally:
            for process in made.controllers:
                process.kill()
                process.wait()


async def settled(made: Stage) -> None:
    """The VM runs, and both controllers have read the bus."""

    async def created() -> bool:
        try:
            request = {"name": "web", "image": "tiny", "uid": A, "user_data": "#!/bin/sh"}
            await made.ask("vm.create", **request)
        except VirtbusError:
            return False
        return True

    await eventually(created, 30)
    await eventually(lambda: ("start", A) in made.node.domains.done, 20)


@pytest.mark.parametrize("how", DAMAGES)
async def test_every_damaged_value_leaves_all_others_served(tmp_path: Path, how: str) -> None:
    async with stage(tmp_path) as (made, files):
        await settled(made)
        for number, (kind, key) in enumerate(KEYS.items(), start=20):
            await made.damage(key, DAMAGES[how](key))
            await asyncio.sleep(0.3)
            await made.other_vms_are_served(number)
            assert made.nothing_restarted(), (kind, tmp_path)
        told = await made.alarms()
        assert "more values on the bus cannot be read" in told or RECORD in told
        await asyncio.sleep(4)  # sweeps, and the grace of an orphan
        # it never had a newer record
        made.controllers.append(controller(files, tmp_path / "c3.log"))
        await made.other_vms_are_served(90)
        await asyncio.sleep(2)
        assert made.nothing_restarted()
        assert [deed for deed in made.node.domains.done if deed[1] == A] == [("start", A)]
        by = {"uid": A} if how in {"garbage", "newer"} else {"name": "web"}
        assert (await made.ask("vm.delete", **by))["deleting"]
        await eventually(lambda: A not in made.node.domains.there, 20)
        for other in ({"uid": uid(7)}, {"uid": uid(8)}, {"name": "nobody"}):
            assert (await made.ask("vm.delete", **other))["deleting"]
        await made.ask("node.unfence", node=NODE)
        again = await made.ask("vm.create", name="web", image="tiny", uid=uid(2))
        assert again["created"]
        assert RECORD not in await made.alarms()
        assert made.nothing_restarted()
