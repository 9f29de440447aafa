"""Disks of VMs: made once, kept, released; IMG-12, IMG-22, IMG-23, kill -9 in a pull (F4)."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from services.imaged.tests.records import UID, empty, record, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.imaged.core.overlay import Overlay, build
from virtbus.imaged.disks import Disks
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref
from virtbus.schemas.node_rpc import ANY_EPOCH
from virtbus.schemas.vm import Devices, Disk, DiskBus, Domain, VmRecord


def disk_path(node: Node, volume: str = "root") -> Path:
    return node.state / "disks" / UID / f"{volume}.qcow2"


async def refused(disks: Disks, wanted: VmRecord) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await disks.ensure(wanted)
    return caught.value


async def test_an_empty_disk_has_whole_mebibytes_as_kubevirts(make_node: NodeMaker) -> None:
    async with make_node() as node:
        made = await node.disks.ensure(record(empty(2_000_000_000)))
        assert made.ready.disks["data"].virtual_size_bytes == 1907 * MIB


async def test_ensure_makes_overlay_and_empty_disk_that_qemu_img_accepts(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    wanted = record(volume(server.url("a"), 32 * MIB), empty(8 * MIB))
    async with make_node() as node:
        done = await node.disks.ensure(wanted)
        assert done.made
        root, data = done.ready.disks["root"], done.ready.disks["data"]
        assert (root.virtual_size_bytes, data.virtual_size_bytes) == (32 * MIB, 8 * MIB)
        assert done.ready.digest == root.digest
        assert (root.image_format, data.digest, data.image_format) == ("qcow2", "", None)
        paths = [disk_path(node, name) for name in ("root", "data")]
        assert done.ready.digest.startswith("sha256:")
        assert (node.state / "disks" / UID).stat().st_mode & 0o777 == 0o711
        assert paths[0].stat().st_mode & 0o777 == 0o600
        if shutil.which("qemu-img"):
            for path in paths:
                subprocess.run(["qemu-img", "check", "-q", str(path)], check=True)
            out = subprocess.run(
                ["qemu-img", "info", "--backing-chain", "--output=json", str(paths[0])],
                check=True, capture_output=True,
            ).stdout  # fmt: skip
            assert len(json.loads(out)) == 2


async def test_an_existing_disk_is_kept_and_needs_no_source(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    wanted = record(volume(server.url("a")))
    async with make_node() as node:
        first = await node.disks.ensure(wanted)
        path = disk_path(node)
        with path.open("r+b") as file:
            file.seek(100_000)
            file.write(b"guest")
        del server.files["a"]
        before = path.stat()
        again = await node.disks.ensure(wanted)
        assert (again.ready, again.made) == (first.ready, False)
        assert path.stat().st_ino == before.st_ino
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        assert len(server.requests) == 1


async def test_a_moved_name_leaves_existing_disks_on_their_image(make_node: NodeMaker) -> None:
    async with make_node() as node:
        source = node.source_dir / "tiny.qcow2"
        source.write_bytes(qcow2_image())
        first = await node.disks.ensure(record(volume("tiny")))
        source.write_bytes(qcow2_image())
        await node.images.refresh(parse_image_ref("tiny"))
        again = await node.disks.ensure(record(volume("tiny")))
        other = await node.disks.ensure(record(volume("tiny"), uid=uid(2)))
        assert again.ready.digest == first.ready.digest != other.ready.digest
        assert await node.disks.collect_garbage(0) == ()
        await node.disks.release(UID, 1)
        assert await node.disks.collect_garbage(0) == (first.ready.digest,)
        assert len(node.data()) == 1


async def test_a_drive_gets_the_medium_that_its_record_pins(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"], server.files["b"] = qcow2_image(), qcow2_image()
    url, other = server.url("a"), server.url("b")
    drive = Disk(name="cd", bus=DiskBus.SATA, device="cdrom")

    def wanted(ref: str, disk: Disk = drive) -> VmRecord:
        made = record(volume(ref, name="cd"))
        domain = Domain(devices=Devices(disks=(disk,)))
        return made.model_copy(update={"spec": made.spec.model_copy(update={"domain": domain})})

    async with make_node() as node:
        first = await node.disks.ensure(wanted(url))
        before = disk_path(node, "cd").stat().st_ino
        digest = (await node.images.ensure(parse_image_ref(other))).digest
        same = await node.disks.ensure(wanted(url))
        assert (same.ready, same.made) == (first.ready, False)
        kept = await refused(node.disks, wanted(f"{other}@{digest}", Disk(name="cd")))
        assert kept.reason == "disk_mismatch", "a disk may have writes"
        changed = await node.disks.ensure(wanted(f"{other}@{digest}"))
        assert changed.ready.disks["cd"].digest == digest != first.ready.disks["cd"].digest
        assert disk_path(node, "cd").stat().st_ino != before
        again = await node.disks.ensure(wanted(f"{other}@{digest}"))
        assert (again.ready, again.made) == (changed.ready, False)
        assert sorted(file.name for file in disk_path(node).parent.iterdir()) == ["cd.qcow2"]
        lost = "sha256:" + "1" * 64
        with pytest.raises(VirtbusError):
            await node.disks.ensure(wanted(f"{other}@{lost}"))
        assert (await node.disks.ensure(wanted(url))).ready.disks["cd"].digest == digest


async def test_a_lost_base_image_is_fetched_again_with_the_same_bytes(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        source = node.source_dir / "tiny.qcow2"
        source.write_bytes(qcow2_image())
        wanted = record(volume("tiny"))
        digest = (await node.disks.ensure(wanted)).ready.digest
        node.store.path(digest).unlink()
        assert (await node.disks.ensure(wanted)).ready.digest == digest
        assert node.store.path(digest).exists()
        node.store.path(digest).unlink()
        source.write_bytes(qcow2_image())
        assert (await refused(node.disks, wanted)).reason == "digest_mismatch"


async def test_recently_used_and_leased_images_are_not_collected(make_node: NodeMaker) -> None:
    async with make_node() as node:
        (node.source_dir / "tiny.qcow2").write_bytes(qcow2_image())
        source = parse_image_ref("tiny")
        image = await node.images.refresh(source)
        (node.source_dir / "tiny.qcow2").write_bytes(qcow2_image())
        await node.images.refresh(source)  # nothing names the first one now
        assert await node.disks.collect_garbage(3600) == ()
        with node.store.lease(image.digest):
            assert await node.disks.collect_garbage(0) == ()
        assert await node.disks.collect_garbage(0) == (image.digest,)


@pytest.mark.parametrize(
    ("size", "reason"), [(8 * MIB, "disk_too_small"), (3 * 1024**4, "disk_too_large")]
)
async def test_impossible_sizes_are_refused(make_node: NodeMaker, size: int, reason: str) -> None:
    async with make_node() as node:
        (node.source_dir / "tiny.qcow2").write_bytes(qcow2_image())
        error = await refused(node.disks, record(volume("tiny", size)))
        assert (error.reason, error.code) == (reason, 400)
        assert not any(name.startswith("disks/") for name in node.tree())


async def test_release_removes_all_and_fences_late_requests(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(record(empty(MIB), epoch=3))
        assert (await refused(node.disks, record(empty(MIB), epoch=2))).reason == "stale_epoch"
        with pytest.raises(VirtbusError, match="older"):
            await node.disks.release(UID, 2)
        assert await node.disks.held() == {UID: (str(node.state / "disks" / UID / "data.qcow2"),)}
        assert (await node.disks.release(UID, 3)).found
        assert not (await node.disks.release(UID, 3)).found
        assert await node.disks.held() == {}
        assert not (node.state / "disks" / UID).exists()
        assert (await refused(node.disks, record(empty(MIB), epoch=3))).reason == "released"
        await node.disks.ensure(record(empty(MIB), epoch=4))
        assert (await node.disks.release(UID, ANY_EPOCH)).found
        await node.disks.ensure(record(empty(MIB), epoch=4))  # an audit fences nobody


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (empty(MIB, "root"), volume("tiny")),
        (volume("tiny"), empty(MIB, "root")),
        (volume("tiny"), volume(f"tiny@sha256:{'0' * 64}")),
    ],
)
async def test_a_disk_other_than_requested_is_left_alone(
    make_node: NodeMaker, before: object, after: object
) -> None:
    async with make_node() as node:
        (node.source_dir / "tiny.qcow2").write_bytes(qcow2_image())
        await node.disks.ensure(record(before))  # type: ignore[arg-type]  # parametrized
        tree = node.tree()
        error = await refused(node.disks, record(after, generation=2))  # type: ignore[arg-type]
        assert error.reason == "disk_mismatch"
        assert node.tree() == tree


@pytest.mark.parametrize("damage", ["empty", "foreign", "symlink", "other_base"])
async def test_a_damaged_or_foreign_disk_is_reported_and_left_alone(
    make_node: NodeMaker, damage: str
) -> None:
    async with make_node() as node:
        (node.source_dir / "tiny.qcow2").write_bytes(qcow2_image())
        wanted = record(volume("tiny"))
        await node.disks.ensure(wanted)
        path = disk_path(node)
        if damage == "symlink":
            path.unlink()
            path.symlink_to("/etc/passwd")
        elif damage == "other_base":
            path.write_bytes(path.read_bytes().replace(b"/images/data/", b"/images/dbta/"))
        else:
            path.write_bytes(b"" if damage == "empty" else b"x" * 5000)
        error = await refused(node.disks, wanted)
        assert error.reason in {"disk_damaged", "store_error", "disk_mismatch"}
        assert path.is_symlink() or path.exists()
        assert (await node.disks.release(UID, 1)).found


async def test_a_disk_half_made_by_a_killed_process_is_made_again(make_node: NodeMaker) -> None:
    async with make_node() as node:
        wanted = record(empty(MIB))
        directory = node.state / "disks" / UID
        directory.mkdir()
        (directory / ".tmp-data.qcow2").write_bytes(b"half")
        assert list(await node.disks.held()) == [UID]
        await node.disks.ensure(wanted)
        assert not (directory / ".tmp-data.qcow2").exists()


async def test_many_at_once_are_made_from_one_image(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = qcow2_image()
    async with make_node() as node, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(node.disks.ensure(record(volume(server.url("a")), uid=uid(n))))
            for n in range(64)
        ]
        await asyncio.wait(tasks)
        assert len(server.requests) == 1
        assert len(await node.disks.held()) == 64


_CHILD = """
import asyncio, ipaddress, sys
from pathlib import Path
from virtbus.imaged.core.limits import SpaceLimits, TransferLimits
from virtbus.imaged.core.sources import Validators
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.edge.store import ImageStore

async def main(state, url):
    threads = DiskThreads()
    store = ImageStore(Path(state) / "images", SpaceLimits(0), checkpoint_bytes=65536)
    part = store.part(url + "\\n")
    limits = TransferLimits(allowed_addresses=(ipaddress.ip_network("127.0.0.0/8"),))
    await Downloads(limits, threads).fetch(url, part, Validators(), lambda *_: None)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.integration
async def test_kill_9_in_the_middle_of_a_pull_is_resumed_by_the_next_process(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    data = qcow2_image(payload=8 * MIB)

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(data[: 4 * MIB])
        await asyncio.Event().wait()
        return response

    server.handlers["a"] = stall
    state = tmp_path / "state"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, str(state), server.url("a")
    )
    try:
        deadline = time.monotonic() + 15
        while not list(state.glob("images/part/[0-9a-f]*.json")) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    del server.handlers["a"]
    server.files["a"] = data
    async with make_node(state=state) as node:
        assert len(node.parts()) == 2
        image = await node.images.ensure(parse_image_ref(server.url("a")))
        assert node.store.path(image.digest).read_bytes() == data
        assert "Range" in server.requests[-1].headers
        assert node.parts() == []


async def test_parts_that_cannot_resume_are_swept_at_start(make_node: NodeMaker) -> None:
    async with make_node() as node:
        parts = node.state / "images" / "part"
        (parts / ("a" * 64)).write_bytes(b"no note")
        (parts / ("b" * 64 + ".json")).write_bytes(b"{}")
        (parts / "junk").write_bytes(b"")
    async with make_node() as node:
        assert node.parts() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.integration
@pytest.mark.parametrize("declared", [True, False])
async def test_a_full_disk_fails_that_pull_and_leaves_nothing(
    make_node: NodeMaker, server: Web, small_disk: Path, *, declared: bool
) -> None:
    data = qcow2_image(payload=6 * MIB)
    small = qcow2_image(payload=MIB)

    async def big(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Length": str(len(data))} if declared else {}
        response = web.StreamResponse(headers={**headers, "ETag": '"v1"'})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(data)
        return response

    server.handlers["big"] = big
    server.files["small"] = small
    async with make_node(state=small_disk / "state") as node:
        with pytest.raises(VirtbusError) as caught:
            await node.images.ensure(parse_image_ref(server.url("big")))
        assert (caught.value.reason, caught.value.body.retry) == ("disk_full", Retry.LATER)
        assert node.tree() == []
        await node.disks.ensure(record(volume(server.url("small"))))


@pytest.mark.integration
def test_an_imaged_of_its_own_user_knows_disks_that_qemu_holds() -> None:
    if os.geteuid() != 0:
        pytest.skip("changing owners needs root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chown(directory, 65534, 65534)
        os.seteuid(65534)
        try:
            files = DiskFolders(Path(directory) / "disks")
            made = Overlay(MIB, "/images/data/x", "qcow2")
            files.make(UID, "root", build(MIB, "/images/data/x", ImageFormat.QCOW2), made)
            os.seteuid(0)
            os.chown(files.path(UID, "root"), 64055, 64055)  # as libvirt does at start
            os.seteuid(65534)
            assert files.read(UID, "root") == made
            assert [found.overlay for found in files.find()] == [made]
            image, inode = (
                Overlay(1, "/images/data/y", "raw"),
                files.path(UID, "root").stat().st_ino,
            )
            files.note_merged(UID, "root", inode + 1, image)  # of another file
            assert files.read(UID, "root") == made
            files.note_merged(UID, "root", inode, image)
            assert files.read(UID, "root") == Overlay(MIB, "/images/data/y", "raw")
            (Path(directory) / "disks" / UID / "root.json").write_text("{")
            with pytest.raises(VirtbusError, match="Permission denied"):
                files.read(UID, "root")
            assert files.remove(UID)
            files.close()
        finally:
            os.seteuid(0)
