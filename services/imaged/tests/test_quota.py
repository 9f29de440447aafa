"""The quota of the image store: what is removed for room, and what never is (IMG-24)."""

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from services.imaged.tests.records import NODE, UID, record, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_pulls import refused
from services.imaged.tests.test_service import serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged.core.eviction import StoredImage, evicted
from virtbus.imaged.core.header import inspect
from virtbus.imaged.core.links import file_name
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.image import parse_image_ref
from virtbus.schemas.node_rpc import HeldImages, ListImages, Release, ServiceReport
from virtbus.schemas.quarantine import QuarantineRequest

QUOTA = 8 * MIB
"""Room for two images of `serve` and a bit."""


def serve(server: Web, *names: str, payload: int = 3 * MIB) -> None:
    for name in names:
        server.files[name] = qcow2_image(payload=payload)


async def pull(node: Node, ref: str) -> str:
    return (await node.images.ensure(parse_image_ref(ref))).digest


def names(node: Node, server: Web) -> set[str]:
    refs = {name for image in node.store.images() for name in image.names}
    return {ref.removeprefix(f"{server.base}/") for ref in refs}


def disk_bytes(node: Node) -> int:
    files = (path for path in (node.state / "images").rglob("*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files if "links" not in path.parts)


# --- the choice --------------------------------------------------------------------------------
images = st.builds(
    StoredImage,
    st.uuids().map(str),
    st.integers(0, 100),
    st.floats(0, 100),
    held=st.booleans(),
    plain=st.booleans(),
)


@given(st.lists(images, max_size=20), st.integers(1, 500))
def test_enough_is_removed_or_nothing_and_never_what_is_held(
    stored: list[StoredImage], need_bytes: int
) -> None:
    chosen = evicted(stored, need_bytes)
    free = {image.digest: image for image in stored if not image.held}
    assert set(chosen) <= set(free)
    freed_bytes = sum(free[digest].disk_bytes for digest in chosen)
    if chosen:
        assert freed_bytes >= need_bytes
        assert freed_bytes - free[chosen[-1]].disk_bytes < need_bytes, "none too many"
    else:
        assert sum(image.disk_bytes for image in free.values()) < need_bytes


def test_the_least_recently_used_goes_first_and_plain_names_last() -> None:
    stored = [
        StoredImage("plain", 5, 1.0, held=False, plain=True),
        StoredImage("new", 5, 3.0, held=False),
        StoredImage("old", 5, 2.0, held=False),
    ]
    assert evicted(stored, 5) == ("old",)
    assert evicted(stored, 11) == ("old", "new", "plain")


# --- on a node ---------------------------------------------------------------------------------
async def test_the_least_recently_used_images_make_room(make_node: NodeMaker, server: Web) -> None:
    serve(server, *"abcd")
    async with make_node(quota_bytes=QUOTA) as node:
        for name in "ab":
            await pull(node, server.url(name))
        assert node.images.cached(parse_image_ref(server.url("a"))), "a use"
        await pull(node, server.url("c"))
        assert names(node, server) == {"a", "c"}
        await pull(node, server.url("d"))
        assert names(node, server) == {"c", "d"}
        assert disk_bytes(node) <= QUOTA
        assert len(node.data()) == 2
    async with make_node(quota_bytes=QUOTA) as node:
        assert names(node, server) == {"c", "d"}


async def test_without_a_quota_all_images_stay(make_node: NodeMaker, server: Web) -> None:
    serve(server, *"abcd")
    async with make_node() as node:
        for name in "abcd":
            await pull(node, server.url(name))
        assert names(node, server) == set("abcd")


@pytest.mark.parametrize("holder", ["disk", "quarantine", "record", "pin", "lease"])
async def test_what_is_used_stays_and_the_pull_is_refused(
    make_node: NodeMaker, server: Web, holder: str
) -> None:
    serve(server, *"abc")
    wanted: set[str] = set()
    async with make_node(quota_bytes=QUOTA, wanted=lambda: frozenset(wanted)) as node:
        rule = "[[image]]\nname = '{0}'\nurl = '" + server.base + "/{0}'\npin = true\n"
        (node.names_dir / "a.toml").write_text(rule.format("a") + rule.format("b"))
        refs = [server.url(name) if holder != "pin" else name for name in "ab"]
        digests = [await pull(node, ref) for ref in refs]
        if holder in {"disk", "quarantine"}:
            for number, ref in enumerate(refs):
                await node.disks.ensure(record(volume(ref), uid=uid(number)))
                if holder == "quarantine":
                    with node.files.path(uid(number), "root").open("ab") as disk:
                        disk.write(bytes(4096))  # a guest's write: an unwritten disk is not kept
                    await node.disks.release(uid(number), 1, QuarantineRequest(why="test"))
        elif holder == "record":
            wanted |= set(refs)
        leases = [node.store.lease(digest) for digest in digests if holder == "lease"]
        for lease in leases:
            lease.__enter__()
        before = node.tree()
        error = await refused(node.images, server.url("c"))
        assert (error.reason, error.body.code, error.body.retry) == (
            "image_quota",
            503,
            Retry.LATER,
        )
        assert "quota_bytes" in str(error)
        assert node.tree() == before


async def test_an_image_larger_than_the_quota_is_refused_for_good(
    make_node: NodeMaker, server: Web
) -> None:
    serve(server, "a", payload=MIB)
    serve(server, "big", payload=9 * MIB)
    async with make_node(quota_bytes=QUOTA) as node:
        await pull(node, server.url("a"))
        error = await refused(node.images, server.url("big"))
        assert (error.reason, error.body.retry) == ("image_too_large", Retry.NEVER)
        assert names(node, server) == {"a"}
        assert node.parts() == []


async def test_nothing_is_removed_before_all_records_are_known(
    make_node: NodeMaker, server: Web
) -> None:
    serve(server, *"abc")
    async with make_node(quota_bytes=QUOTA, wanted=lambda: None) as node:
        for name in "ab":
            await pull(node, server.url(name))
        assert (await refused(node.images, server.url("c"))).reason == "image_quota"
        assert names(node, server) == {"a", "b"}


async def test_nothing_is_removed_while_the_image_of_a_disk_is_unknown(
    make_node: NodeMaker, server: Web
) -> None:
    serve(server, *"abc")
    async with make_node(quota_bytes=QUOTA) as node:
        for name in "ab":
            await pull(node, server.url(name))
        await node.disks.ensure(record(volume(server.url("a"))))
        disk = node.files.path(record().uid, "root")
        disk.chmod(0o644)
        disk.write_bytes(b"\0" * disk.stat().st_size)
        assert (await refused(node.images, server.url("c"))).reason == "image_quota"
        assert names(node, server) == {"a", "b"}


async def test_a_running_pull_keeps_the_room_that_it_needs(
    make_node: NodeMaker, server: Web
) -> None:
    serve(server, *"abcd")
    body, arrived, go_on = server.files["c"], asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[:MIB])
        arrived.set()
        await go_on.wait()
        await response.write(body[MIB:])
        return response

    server.handlers["c"] = slow
    async with (
        make_node(quota_bytes=QUOTA, rate_window_s=600) as node,
        asyncio.TaskGroup() as group,
    ):
        await pull(node, server.url("a"))
        task = group.create_task(pull(node, server.url("c")))
        await arrived.wait()
        while not node.parts():
            await asyncio.sleep(0.01)
        await node.disks.ensure(record(volume(server.url("a"))))
        assert (await refused(node.images, server.url("b"))).reason == "image_quota"
        go_on.set()
        await task
        assert names(node, server) == {"a", "c"}
        await pull(node, server.url("d"))
        assert names(node, server) == {"a", "d"}


async def test_a_part_that_waits_for_another_attempt_gives_its_room(
    make_node: NodeMaker, server: Web
) -> None:
    serve(server, *"ab", payload=7 * MIB)
    body = server.files["a"]

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(body)), "ETag": '"v"'})
        await response.prepare(request)
        await response.write(body[: 6 * MIB])
        assert request.transport is not None
        request.transport.abort()
        return response

    server.handlers["a"] = cut
    async with make_node(quota_bytes=QUOTA) as node:
        assert (await refused(node.images, server.url("a"))).reason == "image_unreachable"
        assert len(node.parts()) == 2
        await pull(node, server.url("b"))
        assert node.parts() == []


async def test_bytes_that_came_without_a_check_count_before_they_are_stored(
    make_node: NodeMaker, server: Web
) -> None:
    """A reflink, or the output of another program."""
    serve(server, "a")
    async with make_node(quota_bytes=QUOTA) as node:
        await pull(node, server.url("a"))
        for size, room in ((6 * MIB, True), (9 * MIB, False)):
            part = node.store.part(f"x{size}")
            data = qcow2_image(payload=size)
            path = node.state / "images/part" / file_name(f"x{size}")
            path.write_bytes(data)
            while part.hash_more():
                pass
            header = inspect(*part.head_and_tail(), len(data), 1 << 40)
            if room:
                await asyncio.to_thread(node.store.adopt, part, header)
                assert names(node, server) == set(), "it has made room for itself"
            else:
                with pytest.raises(VirtbusError, match="quota_bytes"):
                    await asyncio.to_thread(node.store.adopt, part, header)
            part.close(keep=False)


async def test_the_floor_of_free_space_evicts_as_the_quota_does(
    make_node: NodeMaker, server: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is full but for the images: it has 8 MiB for them."""
    import os

    serve(server, *"abc")
    async with make_node(min_free_bytes=MIB) as node:
        real = os.statvfs(node.state)

        def full(_: Any) -> os.statvfs_result:
            used = disk_bytes(node) // 4096
            free = (9 * MIB) // 4096 - used
            return os.statvfs_result((4096, 4096, 1000, free, free, *real[5:10]))

        monkeypatch.setattr(os, "statvfs", full)
        for name in "abc":
            await pull(node, server.url(name))
        assert names(node, server) == {"b", "c"}


# --- the service -----------------------------------------------------------------------------
async def test_the_service_keeps_its_quota_and_reports_it(tmp_path: Path, server: Web) -> None:
    serve(server, *"abcd")
    (tmp_path / "images.d").mkdir()
    rule = f"[[image]]\nname = 'b'\nurl = '{server.url('b')}'\n"
    (tmp_path / "images.d/a.toml").write_text(rule + "pin = true\n")
    async with serving(tmp_path, MemoryServer(), quota_bytes=QUOTA, max_names=1) as desk:
        await desk.put(record(volume("b")))
        assert (await desk.ready()).error is None
        await desk.bus.purge(subjects.vm_record(NODE, UID))
        await desk.ask("release", Release(uid=UID, epoch=1))
        for name in "acd":
            await desk.ask("pull", {"ref": server.url(name), "job": uid(1)})
        async with (
            asyncio.timeout(20),
            desk.bus.subscribe(subjects.service_report(NODE, "imaged")) as reports,
        ):
            async for message in reports:
                report = ServiceReport.model_validate(open_envelope(message.body).data)
                assert report.image_quota_bytes == QUOTA
                if 6 * MIB <= report.image_bytes <= QUOTA:
                    break
        page = HeldImages.model_validate(await desk.ask("list", ListImages()))
        assert "b" in {name for image in page.images for name in image.names}


# --- races and crashes ---------------------------------------------------------------------------
async def test_disks_made_while_images_are_evicted_have_their_images(
    make_node: NodeMaker, server: Web
) -> None:
    """30 VMs of 8 images at random, in room for four: refused, or complete."""
    chance = random.Random(7)
    serve(server, *"abcdefgh", payload=MIB)
    refusals: list[str] = []

    async def live(node: Node, number: int) -> None:
        await asyncio.sleep(chance.random())
        ref = server.url(chance.choice("abcdefgh"))
        try:
            made = await node.disks.ensure(record(volume(ref), uid=uid(number)))
        except VirtbusError as error:
            refusals.append(error.reason)
            return
        assert node.store.path(made.ready.digest).exists()
        await asyncio.sleep(chance.random() / 4)
        assert node.store.path(made.ready.digest).exists()
        await node.disks.release(uid(number), 1)

    async with make_node(quota_bytes=6 * MIB) as node:
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(live(node, number))
        assert disk_bytes(node) <= 6 * MIB
        assert set(refusals) <= {"image_quota"}
        assert len(refusals) < 25


_crash_at: list[int] = []


def _hook(event: str, _args: object) -> None:
    if event == "os.remove" and _crash_at:
        _crash_at[0] -= 1
        if _crash_at[0] < 0:
            raise OSError("killed here")


@pytest.fixture(scope="module")
def killed() -> Iterator[list[int]]:
    """A number in this list ends all removals of files after so many."""
    sys.addaudithook(_hook)
    yield _crash_at
    _crash_at.clear()


@pytest.mark.parametrize("removals", range(5))
async def test_a_crash_in_an_eviction_leaves_a_store_that_works(
    make_node: NodeMaker, server: Web, removals: int, killed: list[int]
) -> None:
    serve(server, *"abc")
    same = server.files["b"]
    server.files |= {"b2": same, "b3": same}
    async with make_node(quota_bytes=QUOTA) as node:
        await node.disks.ensure(record(volume(server.url("a"))))
        for name in ("b", "b2", "b3"):
            await pull(node, server.url(name))
        killed.append(removals)
        with pytest.raises((VirtbusError, OSError)):
            await pull(node, server.url("c"))
    killed.clear()
    async with make_node(quota_bytes=QUOTA) as node:
        for image in node.store.images():
            assert node.store.path(image.digest).stat().st_size == image.size_bytes
        await node.disks.ensure(record(volume(server.url("a"))))
        await pull(node, server.url("c"))
        assert names(node, server) == {"a", "c"}
        assert node.parts() == []
        await pull(node, server.url("b3"))
        assert names(node, server) == {"a", "b3"}
