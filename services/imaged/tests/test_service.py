"""The service over the bus: records in, ready events and events out; the repair path."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from services.imaged.tests.records import NODE, UID, empty, named, record, ref, uid, volume
from services.imaged.tests.site_under_test import LOOPBACK, MIB, Web, qcow2_image

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.imaged import requests
from virtbus.imaged.disks import Disks
from virtbus.imaged.service import Imaged
from virtbus.imaged.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.node_rpc import (
    ANY_EPOCH,
    Ensure,
    ForgetImage,
    HeldImages,
    ImageReady,
    Inspect,
    PullImage,
    Release,
    ServiceReport,
    VolumeRelease,
)
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.wire import encode

JOB = uid(0xABC)


@dataclass
class Desk:
    """A client's side of the bus, with imaged's messages so far."""

    bus: MemoryBus
    state: Path
    told: "asyncio.Queue[ImageReady]"

    def disk(self, volume: str) -> Path:
        return self.state / "disks" / UID / f"{volume}.qcow2"

    async def put(self, wanted: VmRecord) -> None:
        await self.bus.put(subjects.vm_record(NODE, wanted.uid), encode(wanted))

    async def ask(self, verb: str, value: Any, timeout_s: float = 10) -> Any:
        subject = subjects.rpc(NODE, "imaged", verb)
        return await self.bus.request(subject, value, timeout_s=timeout_s)

    async def ready(self) -> ImageReady:
        async with asyncio.timeout(15):
            return await self.told.get()

    async def kinds(self, of: str = UID) -> list[str]:
        stored = await self.bus.history(subjects.events(of))
        return [Event.model_validate(open_envelope(message.body).data).kind for message in stored]


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, server: MemoryServer, **knobs: Any) -> AsyncIterator[Desk]:
    settings = Settings(
        node=NODE,
        state_dir=tmp_path / "state",
        names_dir=tmp_path / "images.d",
        allowed_roots=(tmp_path / "source",),
        min_free_bytes=0,
        min_free_ratio=0,
        image_addresses=(LOOPBACK,),
        **knobs,
    )
    (tmp_path / "source").mkdir(exist_ok=True)
    desk = Desk(MemoryBus(server, "desk"), tmp_path / "state", asyncio.Queue())
    async with (
        desk.bus.subscribe(subjects.ready_all(NODE)) as messages,
        desk.bus.subscribe(subjects.service_report(NODE, "imaged")) as teles,
        asyncio.TaskGroup() as group,
    ):

        async def hear() -> None:
            async for message in messages:
                data = open_envelope(message.body).data
                desk.told.put_nowait(ImageReady.model_validate(data))

        hearing = group.create_task(hear())
        service = group.create_task(Imaged(MemoryBus(server, "imaged"), settings).run())
        async with asyncio.timeout(10):
            async for message in teles:
                service_report = ServiceReport.model_validate(open_envelope(message.body).data)
                if service_report.state.state == "ready":
                    break
        try:
            yield desk
        finally:
            hearing.cancel()
            service.cancel()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with serving(tmp_path, MemoryServer()) as made:
        yield made


async def test_a_record_becomes_disks_a_ready_event_and_events(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    await desk.put(record(volume("tiny", 64 * MIB), empty(MIB)))
    ready = await desk.ready()
    assert ready.error is None
    assert set(ready.disks) == {"root", "data"}
    assert desk.disk("root").exists()
    assert await desk.kinds() == [EventKind.IMAGE_PULLING, EventKind.IMAGE_READY]


async def test_a_second_vm_of_the_image_pulls_nothing(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    await desk.put(record(volume("tiny")))
    await desk.ready()
    (tmp_path / "source/tiny.qcow2").unlink()
    await desk.put(record(volume("tiny"), uid=uid(2)))
    assert (await desk.ready()).uid == uid(2)
    assert await desk.kinds(uid(2)) == [EventKind.IMAGE_READY]


async def test_a_refusal_is_a_ready_event_with_the_error(desk: Desk) -> None:
    await desk.put(record(volume("nosuch")))
    ready = await desk.ready()
    assert ready.error is not None
    assert ready.error.reason == "image_unknown"
    assert await desk.kinds() == [EventKind.IMAGE_FAILED]
    answer = await desk.ask("ensure", Ensure(record=record(volume("nosuch"))))
    assert answer["error"]["reason"] == "image_unknown"


async def test_a_temporary_failure_is_retried(tmp_path: Path, server: Web) -> None:
    async def busy(_: web.Request) -> web.Response:
        del server.handlers["a"]
        return web.Response(status=503)

    server.handlers["a"] = busy
    server.files["a"] = qcow2_image()
    async with serving(tmp_path, MemoryServer(), pull_timeout_s=0.4) as desk:
        await desk.put(record(volume(server.url("a"))))
        first, second = await desk.ready(), await desk.ready()
        assert first.error is not None
        assert first.error.reason == "image_unreachable"
        assert (second.error, set(second.disks)) == (None, {"root"})


async def test_a_permanent_failure_is_retried_on_request(desk: Desk, tmp_path: Path) -> None:
    wanted = record(volume("tiny"))
    await desk.put(wanted)
    assert (await desk.ready()).error is not None
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    answer = await desk.ask("ensure", Ensure(record=wanted))
    assert ImageReady.model_validate(answer).disks["root"].digest.startswith("sha256:")
    assert desk.disk("root").exists()


async def test_a_repaired_record_replaces_the_failing_one(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    await desk.put(record(volume("nosuch")))
    assert (await desk.ready()).error is not None
    await desk.put(record(volume("tiny"), generation=2))
    ready = await desk.ready()
    assert (ready.generation, ready.error) == (2, None)


async def test_ensure_is_answered_with_the_disks(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    answer = await desk.ask("ensure", Ensure(record=record(volume("tiny"))))
    assert ImageReady.model_validate(answer).disks["root"].digest.startswith("sha256:")
    assert desk.disk("root").exists()


async def test_ensure_answers_pulling_when_its_deadline_comes_first(
    desk: Desk, server: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ANSWER_BEFORE_S", 3.0)  # a busy machine may lose a second
    release = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response(body=qcow2_image())

    server.handlers["a"] = slow
    wanted = record(volume(server.url("a")))
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("ensure", Ensure(record=wanted), timeout_s=3.2)
    assert (caught.value.reason, caught.value.code) == ("image_pulling", 503)
    release.set()  # the pull continued meanwhile
    assert (await desk.ready()).error is None
    assert len(server.requests) == 1


async def test_release_is_by_request_only(desk: Desk) -> None:
    await desk.put(record(empty(MIB)))
    assert "data" in (await desk.ready()).disks
    path = desk.disk("data")
    await desk.put(record(empty(MIB), generation=2, deleting=True))
    await desk.bus.purge(subjects.vm_record(NODE, UID))
    held = await desk.ask("inspect", Inspect())
    assert held["things"][UID] == [str(path)]
    assert path.exists()
    for _ in range(2):
        answer = await desk.ask("release", Release(uid=UID, epoch=1))
        assert answer["uid"] == UID
    assert not path.parent.exists()
    assert await desk.kinds() == [EventKind.IMAGE_READY, EventKind.DISKS_RELEASED]
    assert not (await desk.ask("inspect", Inspect())).get("things")


async def test_a_volume_stays_unless_the_node_has_the_data_that_is_kept(desk: Desk) -> None:
    here = ref(MIB)
    await desk.put(record(named(), refs={"data": here}))
    assert "data" in (await desk.ready()).disks
    await desk.bus.purge(subjects.vm_record(NODE, UID))
    await desk.ask("release", Release(uid=UID, epoch=1))
    path = desk.state / "disks" / "volumes" / here.folder / "disk.qcow2"
    other = here.model_copy(update={"uid": uid(78)})
    assert await desk.ask("volume-release", VolumeRelease(ref=here, kept=other)) == {}
    assert path.exists()
    assert await desk.ask("volume-release", VolumeRelease(ref=here, kept=here)) == {"found": True}
    assert not path.exists()


async def test_an_audit_removes_nothing_that_belongs_to_a_record(desk: Desk) -> None:
    await desk.put(record(empty(MIB)))
    assert "data" in (await desk.ready()).disks
    path = desk.disk("data")
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("release", Release(uid=UID, epoch=ANY_EPOCH))
    assert caught.value.reason == "record_stands"
    assert path.exists()
    await desk.bus.purge(subjects.vm_record(NODE, UID))
    async with asyncio.timeout(5):
        while path.exists():
            with contextlib.suppress(VirtbusError):
                await desk.ask("release", Release(uid=UID, epoch=ANY_EPOCH))


async def test_pulls_from_a_hanging_server_keep_no_other_pull_waiting(
    desk: Desk, server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "WAITS_S", 1.0)
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response(body=qcow2_image())

    async def pulled() -> str:
        ref = server.url("a")
        with pytest.raises(VirtbusError) as caught:
            await desk.ask("pull", PullImage(ref=ref, job=JOB), timeout_s=3600)
        assert caught.value.body.after_ms is not None  # clients repeat it
        return caught.value.reason

    server.handlers["a"] = hang
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(pulled()) for _ in range(100)]
        await asyncio.sleep(0)
        image = await desk.ask("pull", PullImage(ref="tiny", job=JOB))
        assert image["digest"].startswith("sha256:")
        assert not any(task.done() for task in tasks)
    assert {task.result() for task in tasks} == {"image_pulling"}
    release.set()  # the pull continued meanwhile
    assert (await desk.ask("pull", PullImage(ref=server.url("a"), job=JOB)))["digest"]


async def test_a_delete_ends_the_pull_and_its_bytes(desk: Desk, server: Web) -> None:
    begun = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"1"'})
        await response.prepare(request)
        await response.write(b"x" * 5 * MIB)
        begun.set()
        await asyncio.Event().wait()
        return response

    server.handlers["a"] = slow
    await desk.put(record(volume(server.url("a"))))
    await begun.wait()
    await desk.put(record(volume(server.url("a")), generation=2, deleting=True))
    await desk.ask("release", Release(uid=UID, epoch=1))
    parts = desk.state / "images" / "part"
    async with asyncio.timeout(10):
        while list(parts.iterdir()):
            await asyncio.sleep(0.01)


async def test_a_stop_keeps_the_bytes_of_a_pull(tmp_path: Path, server: Web) -> None:
    data = qcow2_image()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"1"', "Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: 2 * MIB])
        await asyncio.Event().wait()
        return response

    server.handlers["a"] = half
    async with serving(tmp_path, MemoryServer()) as desk:
        await desk.put(record(volume(server.url("a"))))
        parts = desk.state / "images" / "part"
        async with asyncio.timeout(10):
            while not any(path.stat().st_size for path in parts.iterdir()):
                await asyncio.sleep(0.01)
    (note,) = parts.glob("*.json")
    assert json.loads(note.read_text())["done_bytes"] >= MIB


async def test_pull_and_list(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    seen = []
    async with desk.bus.subscribe(subjects.progress(NODE, JOB, "image")) as progress:
        image = await desk.ask("pull", PullImage(ref="tiny", job=JOB))
        async with asyncio.timeout(5):
            async for message in progress:
                seen.append(open_envelope(message.body).data)
                if seen[-1].get("done_bytes") == image["size_bytes"]:
                    break
    listed = await desk.ask("list", {})
    assert listed["images"][0]["digest"] == image["digest"]
    assert list(listed["images"][0]["names"]) == ["tiny"]
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("pull", PullImage(ref="nosuch", job=JOB))
    assert caught.value.reason == "image_unknown"


async def test_a_deleted_image_is_removed_with_its_last_disk(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    image = await desk.ask("pull", PullImage(ref="tiny", job=JOB))
    await desk.ask("ensure", Ensure(record=record(volume("tiny"))))
    first = await desk.ask("delete", ForgetImage(ref="tiny"))
    assert (list(first["names"]), first.get("freed_bytes", 0)) == (["tiny"], 0)
    assert list(first["used_by"]) == [UID]
    assert not (await desk.ask("list", {}))["images"][0].get("names")
    await desk.put(record(volume("tiny"), generation=2, deleting=True))
    await desk.ask("release", Release(uid=UID, epoch=1))
    second = await desk.ask("delete", ForgetImage(ref=image["digest"]))
    assert second["freed_bytes"] == image["size_bytes"]
    assert not (await desk.ask("list", {})).get("images")
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("delete", ForgetImage(ref="tiny"))
    assert caught.value.reason == "image_unknown"


@pytest.mark.parametrize(
    ("verb", "value"),
    [
        ("pull", {"ref": "ftp://h/x", "job": JOB}),
        ("pull", {"ref": "a\nb", "job": JOB}),
        ("pull", {"ref": "..", "job": JOB}),
        ("pull", {"ref": "tiny", "job": "../x"}),
        ("pull", {}),
        ("release", {"uid": "../../etc", "epoch": 1}),
        ("inspect", {"uid": ".."}),
        ("ensure", {"record": {"uid": "x"}}),
    ],
)
async def test_malformed_requests_are_refused_and_the_service_stays_up(
    desk: Desk, verb: str, value: dict[str, object]
) -> None:
    with pytest.raises(VirtbusError) as caught:
        await desk.ask(verb, value)
    assert caught.value.code == 400
    assert await desk.ask("list", {}) == HeldImages().model_dump(exclude_defaults=True)


async def test_a_failure_of_the_regular_work_does_not_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def failing(name: str) -> Callable[..., Awaitable[None]]:
        async def fail(*_: object) -> None:
            calls.append(name)
            raise VirtbusError(Code.UNAVAILABLE, "store_error", "the disk cannot be read")

        return fail

    for name in ("collect_garbage", "quarantined"):
        monkeypatch.setattr(Disks, name, failing(name))
    monkeypatch.setattr("virtbus.imaged.service.GC_INTERVAL_S", 0.01)
    async with serving(tmp_path, MemoryServer()) as desk, asyncio.timeout(10):
        while calls.count("collect_garbage") < 2 or "quarantined" not in calls:
            await asyncio.sleep(0.01)
        assert HeldImages.model_validate(await desk.ask("list", {})).images == ()


async def test_keys_other_than_records_are_skipped(desk: Desk) -> None:
    await desk.bus.put(subjects.join_nonce(NODE), encode({"nonce": "x"}))
    await desk.bus.put(subjects.vm_record(NODE, uid(3)), encode(Tombstone(uid=uid(3))))
    await desk.bus.put(subjects.vm_record(NODE, uid(4)), b"\xc1garbage")
    await desk.put(record(empty(MIB)))
    assert (await desk.ready()).uid == UID


async def test_a_restarted_service_finds_all_again(tmp_path: Path) -> None:
    server = MemoryServer()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tiny.qcow2").write_bytes(qcow2_image())
    async with serving(tmp_path, server) as desk:
        await desk.put(record(volume("tiny")))
        first = await desk.ready()
    (tmp_path / "source/tiny.qcow2").unlink()
    async with serving(tmp_path, server) as desk:
        assert await desk.ready() == first
        assert await desk.kinds() == [EventKind.IMAGE_PULLING, EventKind.IMAGE_READY]
        assert (await desk.ask("list", {}))["images"]
