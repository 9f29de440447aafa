"""The real process on a real bus: started, killed, started again."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from services.imaged.tests.records import NODE, UID, record, uid, volume
from services.imaged.tests.site_under_test import MIB, Web, qcow2_image

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.provisioning import server as bus_server
from virtbus.bus.provisioning import stream_setup
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.events import EventKind
from virtbus.schemas.hosts import HostMarks, Instance
from virtbus.schemas.node_rpc import ImageReady, Release
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

pytestmark = pytest.mark.integration


@pytest.fixture
def files(tmp_path: Path) -> bus_server.ServerFiles:
    return bus_server.ServerFiles(tmp_path / "bus", tmp_path / "run")


@pytest.fixture
async def controller(files: bus_server.ServerFiles) -> AsyncIterator[NatsBus]:
    async with bus_server.running(files, nodes=[NODE], port=-1) as running:
        async with connect(running.settings("admin"), name="admin") as admin:
            await stream_setup.ensure(admin)
            await stream_setup.ensure_node(admin, NODE, b"nonce")
        async with connect(running.settings("controller"), name="controller") as bus:
            yield bus


@pytest.fixture
async def node_bus(controller: NatsBus, files: bus_server.ServerFiles) -> AsyncIterator[NatsBus]:
    """The nodeagent's side."""
    assert controller.connected
    settings = BusSettings(creds=files.creds(f"node-{NODE}"))
    async with connect(settings, name="agent") as bus:
        yield bus


@contextlib.asynccontextmanager
async def imaged(tmp_path: Path, creds: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VIRTBUS_")}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "virtbus.imaged",
        "--node", NODE, "--creds", str(creds), "--state-dir", str(tmp_path / "state"),
        "--run-dir", str(tmp_path / "run"), "--allowed-roots", str(tmp_path / "source"),
        "--image-addresses", "127.0.0.0/8",
        "--min-free-bytes", "0", "--min-free-ratio", "0",
        env=environment,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


async def held(bus: NatsBus, run_dir: Path) -> None:
    """The agent of this host holds the node, and has reported it."""
    one = Instance(node=NODE, instance="life", host=HostMarks(key="k"))
    await bus.put(subjects.node_instance(NODE), encode(one))
    run_dir.mkdir(exist_ok=True)
    (run_dir / "instance").write_text("held life\n")


async def put(bus: NatsBus, wanted: VmRecord) -> None:
    await bus.put(subjects.vm_record(NODE, wanted.uid), encode(wanted))


async def test_records_become_disks_across_kill_9(
    tmp_path: Path,
    files: bus_server.ServerFiles,
    controller: NatsBus,
    node_bus: NatsBus,
    server: Web,
) -> None:
    data, begun = qcow2_image(payload=8 * MIB), asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(data[: 4 * MIB])
        begun.set()
        await asyncio.Event().wait()
        return response

    server.handlers["a"] = stall
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    creds = files.creds(f"node-{NODE}")
    async with node_bus.subscribe(subjects.ready_all(NODE)) as messages:

        async def ready() -> ImageReady:
            message = await anext(messages)
            return ImageReady.model_validate(open_envelope(message.body).data)

        async with imaged(tmp_path, creds) as child:
            await put(controller, record(volume("tiny")))
            with pytest.raises(TimeoutError):  # it serves no node that its host does not hold
                async with asyncio.timeout(3):
                    await ready()
            await held(node_bus, tmp_path / "run")
            first = await ready()
            assert first.error is None
            await put(controller, record(volume(server.url("a")), uid=uid(2)))
            await begun.wait()
            child.send_signal(signal.SIGKILL)
            await child.wait()
        server.handlers.clear()
        server.files["a"] = data
        (tmp_path / "source/tiny.qcow2").unlink()
        async with imaged(tmp_path, creds) as child:
            both = {one.uid: one for one in (await ready(), await ready())}
            assert both[UID] == first
            assert both[uid(2)].error is None
            subject = subjects.rpc(NODE, "imaged", "release")
            for one in (UID, uid(2)):
                await node_bus.request(subject, Release(uid=one, epoch=1), timeout_s=5)
            child.terminate()
            assert await child.wait() == 0
    assert not list((tmp_path / "state/disks").iterdir())
    assert not list((tmp_path / "state/images/part").iterdir())
    stored = await controller.history(subjects.events(UID))
    kinds = [open_envelope(message.body).data.get("kind") for message in stored]
    assert kinds.count(EventKind.DISKS_RELEASED) == 1
    assert kinds.count(EventKind.IMAGE_READY) == 1
