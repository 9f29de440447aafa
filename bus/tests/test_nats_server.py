"""The embedded server and a real connection: restarts, permissions, discovery, raw clients."""

import asyncio
import json
import stat
import sys
from pathlib import Path
from typing import Any

import nats.aio.client
import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.jetstream_errors import ApiError
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Bus, Endpoint, Entry, Request, ServiceInfo, WatchMark
from virtbus.bus.errors import BusError, DeniedError, FullError, UnavailableError
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = f"$KV.vm.n1.{UID}"
SUBJECT = "virtbus.api.v1.vm.get"
AT_ONCE = 100
"""Writes in progress. Each has a time limit, and on a busy machine thousands would exceed it."""
INFO = ServiceInfo("controller", "1.2.3", "tests", {"node": "n1"})


async def echo(request: Request) -> Any:
    return {"data": request.data}


async def raw_client(nats_server: server.Server, files: server.ServerFiles) -> Any:
    """Connect a plain NATS client with the client's printed credentials."""
    creds = json.loads(files.creds("client").read_text())
    client = nats.aio.client.Client()
    await client.connect(nats_server.url, user=creds["user"], password=creds["password"])
    return client


async def test_cancelled_subscriptions_leave_the_connection_whole(controller: NatsBus) -> None:
    """A cancelled flush of nats-py ends its read loop when the PONG comes."""

    async def subscribe() -> None:
        async with controller.subscribe("virtbus.node.n1.ready.>"):
            await asyncio.sleep(60)

    for turns in range(40):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(subscribe())
            for _ in range(turns % 8):
                await asyncio.sleep(0)
            task.cancel()
    assert await controller.put(KEY, b"x") == 2 + 1
    assert controller.generation == 1


async def test_a_client_sends_its_login_in_one_write(
    nats: server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses the login closes, so a second write fails and hides the refusal."""
    written, write = list[bytes](), asyncio.StreamWriter.write

    def spy(self: asyncio.StreamWriter, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", spy)
    async with connect(nats.settings("client"), name="c"):
        pass
    (login,) = [one for one in written if one.startswith(b"CONNECT ")]
    assert login.endswith(b"\r\nPING\r\n")


async def test_a_slow_reader_of_a_watch_loses_no_key(controller: NatsBus) -> None:
    async with controller.watch("$KV.vm.n3.>") as watch:
        items = aiter(watch)
        assert [await anext(items), await anext(items)] == [WatchMark.RESET, WatchMark.SYNCED]
        keys = [f"$KV.vm.n3.{UID[:-4]}{number:04d}" for number in range(3000)]
        for first in range(0, len(keys), AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for key in keys[first : first + AT_ONCE]:
                    group.create_task(controller.put(key, b"x"))
        seen: set[str] = set()
        while seen != set(keys):
            item = await anext(items)
            if isinstance(item, Entry):
                seen.add(item.key)


async def test_an_answer_over_the_limit_is_413(controller: NatsBus) -> None:
    async def huge(_: Request) -> Any:
        return b"x" * 2_000_000

    async with controller.serve(INFO, [Endpoint("get", SUBJECT, huge)]):
        with pytest.raises(VirtbusError) as caught:
            await controller.request(SUBJECT, {}, timeout_s=5)
    assert caught.value.code == 413


async def test_a_nats_bus_is_a_bus(controller: NatsBus) -> None:
    typed: Bus = controller
    assert typed.connected


# --- permissions ------------------------------------------------------------------------------


async def test_a_node_does_its_own_things_and_is_denied_others(
    node: NatsBus, controller: NatsBus
) -> None:
    await controller.put(KEY, b"mine")
    await controller.put(f"$KV.vm.n2.{UID}", b"not mine")
    await controller.put(f"$KV.sec.n1.{UID}", b"secret")
    assert (entry := await node.get(KEY)) is not None
    assert entry.value == b"mine"
    assert (entry := await node.get(f"$KV.sec.n1.{UID}")) is not None
    assert entry.value == b"secret"
    assert await node.get(f"$KV.st.n1.{UID}") is None
    first = await node.put(f"$KV.st.n1.{UID}", b"s", expect=0)
    await node.put(f"$KV.st.n1.{UID}", b"s", expect=first)
    await node.put("$KV.node.n1", b"alive", ttl_s=15)
    for denied in (f"$KV.vm.n1.{UID}", f"$KV.st.n2.{UID}", "$KV.node.n2", "$KV.lease.gc"):
        with pytest.raises(DeniedError):
            await node.put(denied, b"x")
    for hidden in (f"$KV.vm.n2.{UID}", f"$KV.sec.n2.{UID}"):
        with pytest.raises(DeniedError):
            await node.get(hidden)
    for verb in ("STREAM.INFO.KV_vm", "CONSUMER.CREATE.KV_vm.x", "STREAM.DELETE.KV_vm"):
        with pytest.raises(DeniedError):
            await node.js_api(verb, {})
    with pytest.raises(DeniedError):
        async with node.watch("$KV.vm.>") as watch:
            await anext(aiter(watch))
    with pytest.raises(DeniedError):
        async with node.subscribe("virtbus.node.n2.>"):
            pass
    with pytest.raises(DeniedError):
        async with node.node_watch("n2", "agent") as watch:
            await anext(aiter(watch))


async def test_a_node_answers_requests_and_streams_to_clients(
    nats: server.Server, node: NatsBus
) -> None:
    subject = "virtbus.node.n1.rpc.agent.logs"

    async def logs(request: Request) -> Any:
        for number in range(100):
            await request.stream(number)

    async with (
        node.serve(ServiceInfo("agent", "1.0.0"), [Endpoint("logs", subject, logs)]),
        connect(nats.settings("client"), name="cli") as client,
        client.request_stream(subject, {}, idle_timeout_s=5) as replies,
    ):
        items = aiter(replies)
        assert [await anext(items) for _ in range(100)] == list(range(100))


async def test_a_client_may_use_the_api_and_nothing_below(nats: server.Server) -> None:
    async with connect(nats.settings("client"), name="cli") as client:
        for denied in (KEY, "virtbus.cmd.n1.restart.u.o", "virtbus.evt.n1.u.vm.accepted"):
            with pytest.raises(DeniedError):
                await client.put(denied, b"x")
        with pytest.raises(DeniedError):
            await client.request("virtbus.node.n1.rpc.netd.release", {}, timeout_s=5)


async def test_a_controller_cannot_delete_a_stream(controller: NatsBus) -> None:
    with pytest.raises(DeniedError):
        await controller.js_api("STREAM.DELETE.KV_vm")


async def test_unknown_credentials_are_denied_at_once(nats: server.Server) -> None:
    settings = BusSettings(url=nats.url, user="client", password="wrong")
    with pytest.raises(DeniedError, match="credentials"):
        async with connect(settings, name="x"):
            pass


async def test_no_server_is_unavailable_after_the_given_time() -> None:
    settings = BusSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.5)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        async with connect(settings, name="x"):
            pass


async def test_the_bodys_own_exception_leaves_the_connection_unwrapped(
    nats: server.Server,
) -> None:
    with pytest.raises(LookupError):
        async with connect(nats.settings("client"), name="x"):
            raise LookupError


# --- wire for others --------------------------------------------------------------------------


async def test_any_nats_client_may_speak_json(
    nats: server.Server, controller: NatsBus, files: server.ServerFiles
) -> None:
    async with controller.serve(INFO, [Endpoint("get", SUBJECT, echo)]):
        client = await raw_client(nats, files)
        try:
            answer = await client.request(SUBJECT, b'{"name":"web"}', timeout=5)
            assert json.loads(answer.data) == {"data": {"name": "web"}}
            assert answer.headers["Content-Type"] == "application/json"
            answer = await client.request(SUBJECT, b"", timeout=5)
            answer = await client.request(SUBJECT, b'{"name"', timeout=5)
            assert json.loads(answer.data)["error"]["code"] == 400
            assert answer.headers["Nats-Service-Error-Code"] == "400"
            answer = await client.request(SUBJECT, b"\xc1", timeout=5)
            assert answer.headers["Nats-Service-Error-Code"] == "400"
        finally:
            await client.close()


async def test_discovery_answers_ping_info_and_stats(
    nats: server.Server, controller: NatsBus, files: server.ServerFiles
) -> None:
    async with controller.serve(INFO, [Endpoint("get", SUBJECT, echo)]):
        client = await raw_client(nats, files)
        try:
            for _ in range(3):
                await client.request(SUBJECT, b"{}", timeout=5)
            ping = json.loads((await client.request("$SRV.PING", b"", timeout=5)).data)
            assert ping["type"] == "io.nats.micro.v1.ping_response"
            info = json.loads((await client.request("$SRV.INFO.controller", b"", timeout=5)).data)
            assert info["endpoints"] == [
                {"name": "get", "subject": SUBJECT, "queue_group": "q", "metadata": {}}
            ]
            subject = f"$SRV.STATS.controller.{ping['id']}"
            stats = json.loads((await client.request(subject, b"", timeout=5)).data)
            assert stats["endpoints"][0]["num_requests"] == 3
            assert stats["endpoints"][0]["average_processing_time"] > 0
        finally:
            await client.close()


# --- declaration and server -------------------------------------------------------------------


async def test_ensuring_twice_changes_nothing_and_drift_is_repaired(
    nats: server.Server,
) -> None:
    async with connect(nats.settings("admin"), name="admin") as admin:
        before = await admin.js_api("STREAM.INFO.EVT")
        await stream_setup.ensure(admin)
        assert await stream_setup.ensure_node(admin, "n1", b"another") == b"nonce-1"
        assert (await admin.js_api("STREAM.INFO.EVT"))["config"] == before["config"]
        sizes = stream_setup.Sizes(evt=512 * 1024 * 1024)
        await stream_setup.ensure(admin, sizes=sizes)
        after = await admin.js_api("STREAM.INFO.EVT")
        assert after["config"]["max_bytes"] == sizes.evt
        assert after["state"] == before["state"]


async def test_facts_are_not_synced_one_by_one_and_a_stream_that_exists_stays(
    nats: server.Server,
) -> None:
    async with connect(nats.settings("admin"), name="admin") as admin:
        made = (await admin.js_api("STREAM.INFO.EVT"))["config"]
        assert made["persist_mode"] == "async"
        assert (await admin.js_api("STREAM.INFO.KV_vm"))["config"].get("persist_mode") is None
        await admin.js_api("STREAM.DELETE.EVT")
        older = {**made, "persist_mode": "default", "max_bytes": 1024 * 1024}
        await admin.js_api("STREAM.CREATE.EVT", older)
        await stream_setup.ensure(admin)
        now = (await admin.js_api("STREAM.INFO.EVT"))["config"]
        assert now["max_bytes"] == made["max_bytes"]
        assert now.get("persist_mode", "default") == "default"


async def test_a_full_bucket_refuses_the_write_and_reports_its_fill(
    nats: server.Server, controller: NatsBus
) -> None:
    async with connect(nats.settings("admin"), name="admin") as admin:
        await stream_setup.ensure(admin, sizes=stream_setup.Sizes(st=40 * 1024))
    for number in range(3):
        await controller.put(f"$KV.st.n1.{UID[:-1]}{number}", b"x" * 12_000)
    assert 0.8 < await controller.fill("st") <= 1.0
    with pytest.raises(FullError):
        await controller.put(f"$KV.st.n1.{UID}", b"x" * 12_000)


async def test_a_stream_that_does_not_exist_is_unavailable_in_time(nats: server.Server) -> None:
    settings = nats.settings("admin", write_timeout_s=0.3)
    async with connect(settings, name="admin") as admin:
        with pytest.raises(UnavailableError):
            await admin.put("$KV.nothing.here", b"x")
        with pytest.raises(ApiError):
            await admin.get("$KV.nothing.here")


async def test_credentials_are_private_and_survive_a_restart(files: server.ServerFiles) -> None:
    async with server.running(files, port=-1):
        first = json.loads(files.creds("client").read_text())
        for path in (files.passwords, files.config, files.creds("admin")):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with server.running(files, port=-1):
        assert json.loads(files.creds("client").read_text())["password"] == first["password"]


async def test_an_orphaned_server_gives_way(files: server.ServerFiles) -> None:
    async with server.running(files, port=-1) as first, server.running(files, port=-1) as second:
        assert await first.wait() is not None
        async with connect(second.settings("admin"), name="admin") as admin:
            assert admin.connected


_OWNER = """
import asyncio, sys
from pathlib import Path
from virtbus.bus.provisioning import server
async def main():
    files = server.ServerFiles(Path(sys.argv[1]), Path(sys.argv[2]))
    async with server.running(files, port=-1) as running:
        print(running.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.integration
async def test_a_server_ends_when_its_owner_is_killed(files: server.ServerFiles) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OWNER, files.state_dir, files.run_dir, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(20):
        while _has_memory(pid):
            await asyncio.sleep(0.01)


def _has_memory(pid: int) -> bool:
    """Return True if the process runs. A process that PID 1 has not reaped yet has no memory."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_node_joins_a_running_server(nats: server.Server, controller: NatsBus) -> None:
    settings = await nats.add_node("n9")
    async with connect(nats.settings("admin"), name="admin") as admin:
        await stream_setup.ensure_node(admin, "n9", b"n")
    async with (
        connect(settings, name="n9") as joined,
        joined.node_watch("n9", "netd") as watch,
    ):
        items = aiter(watch)
        assert await anext(items) is WatchMark.RESET
        entry = await anext(items)
        assert isinstance(entry, Entry)
        assert (entry.key, entry.value) == ("$KV.vm.n9._join", b"n")
    assert controller.generation == 1


async def test_no_consumer_is_left_when_a_watch_ends(controller: NatsBus) -> None:
    async with controller.watch("$KV.vm.>") as watch:
        await anext(aiter(watch))
    reports = {report.name: report for report in await controller.report()}
    assert all(one.name.startswith("n-") for one in reports["KV_vm"].consumers)


async def test_a_port_that_is_taken_gives_another(tmp_path: Path) -> None:
    one = server.ServerFiles(tmp_path / "s1", tmp_path / "r1")
    two = server.ServerFiles(tmp_path / "s2", tmp_path / "r2")
    async with server.running(one, port=-1) as first:
        with pytest.raises(BusError, match="did not start"):
            async with server.running(two, port=first.port):
                pass
