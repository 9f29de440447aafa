"""Images as gzip, xz and zstd: stored as their content, and hostile ones refused (IMG-14)."""

import asyncio
import lzma
import os
from collections.abc import Callable

import pytest
from aiohttp import web
from services.imaged.tests.records import record, volume
from services.imaged.tests.registry_under_test import Registry, digest_of, gz, tar, xz, zst
from services.imaged.tests.site_under_test import FAST, MIB, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.core.sources import Validators
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref

DISK = qcow2_image(payload=MIB)
SKIPPED = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
"""A zstd frame without data; pzstd writes one first."""

Pack = Callable[[bytes], bytes]


def xz_of_dictionary(dict_bytes: int) -> bytes:
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": dict_bytes}]
    return lzma.compress(DISK, filters=chain)


PACKED: dict[str, Pack] = {
    "gzip": gz,
    "xz": xz,
    "zstd": zst,
    "gzip members": lambda data: gz(data[:1000]) + gz(data[1000:]),
    "xz streams, padded": lambda data: xz(data[:1000]) + bytes(8) + xz(data[1000:]) + bytes(4),
    "zstd frames": lambda data: SKIPPED + zst(data[:1000]) + zst(data[1000:]),
}


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED)
async def test_a_compressed_body_is_stored_as_its_content(
    make_node: NodeMaker, server: Web, pack: Pack
) -> None:
    packed = server.files["a"] = pack(DISK)
    source = parse_image_ref(server.url("a"))
    async with make_node() as node:
        image = await node.images.ensure(source)
        assert (image.digest, image.format) == (digest_of(DISK), ImageFormat.QCOW2)
        assert node.store.path(image.digest).read_bytes() == DISK
        assert node.parts() == []
        assert await node.images.refresh(source) == image  # 304
        link = node.store.link(source.name)
        assert link is not None
        assert link.fetched == digest_of(packed)
    async with make_node() as node:
        assert node.images.cached(source) == image


@pytest.mark.parametrize("pack", [gz, xz, zst])
async def test_files_and_disks_in_containers_may_be_compressed(
    make_node: NodeMaker, server: Web, pack: Pack
) -> None:
    registry = Registry(server)
    registry.push("a", "1", gz(tar(("disk/a.img", pack(DISK)))))
    async with make_node(registries=registry.known) as node:
        (node.source_dir / "a").write_bytes(pack(DISK))
        for ref in (f"file://{node.source_dir}/a", registry.ref("a:1")):
            image = await node.images.ensure(parse_image_ref(ref))
            assert image.digest == digest_of(DISK)
        assert node.parts() == []


async def test_a_raw_disk_keeps_its_holes(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = gz(os.urandom(MIB) + bytes(16 * MIB))
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("a")))
        assert image.format is ImageFormat.RAW
        assert node.store.path(image.digest).stat().st_blocks * 512 < 8 * MIB


# --- the digest that a user pins ---------------------------------------------------------------
async def test_the_pin_is_the_digest_of_the_download_or_of_its_content(
    make_node: NodeMaker, server: Web
) -> None:
    packed = server.files["a"] = xz(DISK)
    download, content = digest_of(packed), digest_of(DISK)
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(f"{server.url('a')}@{download}"))
        assert image.digest == content
        assert await node.images.ensure(parse_image_ref(f"{server.url('a')}@{content}")) == image
        assert len(server.requests) == 1  # the second one took it from the store
        other = parse_image_ref(f"{server.url('elsewhere')}@{download}")
        assert node.images.cached(other) == image
    async with make_node() as node:
        assert (await node.images.refresh(other)).digest == content
        error = await refused(node.images, f"{server.url('a')}@{digest_of(b'else')}")
        assert error.reason == "digest_mismatch"
        assert download in str(error)
        assert content in str(error)
        assert node.parts() == []


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_lost_image_of_a_disk_is_made_again(
    make_node: NodeMaker, server: Web, *, pinned: bool
) -> None:
    packed = server.files["a"] = zst(DISK)
    pin = f"@{digest_of(packed)}" if pinned else ""
    wanted = record(volume(server.url("a") + pin))
    async with make_node() as node:
        digest = (await node.disks.ensure(wanted)).ready.digest
        assert (await node.disks.ensure(wanted)).made is False
        assert digest == digest_of(DISK)
        node.store.path(digest).unlink()
    async with make_node() as node:
        assert (await node.disks.ensure(wanted)).ready.digest == digest
        assert node.store.path(digest).read_bytes() == DISK
        assert (await node.disks.ensure(wanted)).ready.digest == digest


async def test_a_disk_of_another_download_is_no_disk_of_this_pin(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = gz(DISK)
    async with make_node() as node:
        await node.disks.ensure(record(volume(server.url("a"))))
        with pytest.raises(VirtbusError) as caught:
            await node.disks.ensure(record(volume(f"{server.url('a')}@{digest_of(b'else')}")))
        assert caught.value.reason == "disk_mismatch"


# --- hostile bodies ----------------------------------------------------------------------------
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip of zeros": (lambda: gz(bytes(200 * MIB)), "-fold"),
    "xz of zeros": (lambda: xz(bytes(200 * MIB)), "-fold"),
    "zstd of zeros": (lambda: zst(bytes(200 * MIB)), "-fold"),
    "a cut gzip": (lambda: gz(DISK)[:-9], "cut short"),
    "a cut xz": (lambda: xz(DISK)[:-9], "cut short"),
    "a cut zstd": (lambda: zst(DISK)[:-9], "cut short"),
    "a damaged gzip": (lambda: gz(DISK)[:-8] + bytes(8), "cannot be decompressed"),
    "a damaged xz": (lambda: xz(DISK)[:-30] + bytes(30), "cannot be decompressed"),
    "text after it": (lambda: gz(DISK) + b"more", "cannot be decompressed"),
    "a huge dictionary": (lambda: xz_of_dictionary(512 * MIB), "emory"),
    "a huge window": (lambda: b"\x28\xb5\x2f\xfd\x00\xb0" + bytes(64), "cannot be decompressed"),
}


@pytest.mark.parametrize(("make", "why"), HOSTILE.values(), ids=HOSTILE)
async def test_hostile_bodies_are_refused_and_leave_nothing(
    make_node: NodeMaker, server: Web, make: Callable[[], bytes], why: str
) -> None:
    server.files["a"] = make()
    async with make_node(max_bytes=1 << 40) as node:
        error = await refused(node.images, server.url("a"))
        assert error.reason == "compressed_invalid"
        assert why in str(error)
        assert node.tree() == []


async def test_the_content_has_the_limits_of_an_image(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = gz(os.urandom(MIB) + bytes(63 * MIB + 1))
    server.files["twice"] = gz(gz(DISK))
    server.files["tar"] = xz(tar(("disk", DISK)))
    async with make_node() as node:
        assert "max_bytes" in str(await refused(node.images, server.url("a")))
        for path, what in (("twice", "gzip"), ("tar", "tar")):
            error = await refused(node.images, server.url(path))
            assert error.reason == "unlisted_format"
            assert what in str(error)
        assert node.tree() == []
    async with make_node(max_virtual_bytes=MIB) as node:
        server.files["a"] = gz(DISK)
        assert (await refused(node.images, server.url("a"))).reason == "virtual_size_too_large"
    async with make_node(free_decode_s=0.0, least_decode_bytes_s=1 << 40) as node:
        assert "CPU time" in str(await refused(node.images, server.url("a")))


async def test_the_event_loop_is_free_while_a_bomb_is_read(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = gz(bytes(200 * MIB))
    async with (
        make_node(max_bytes=1 << 40, max_expansion=150) as node,
        asyncio.TaskGroup() as group,
    ):
        pull = group.create_task(refused(node.images, server.url("a")))
        rounds = 0
        while not pull.done():
            await asyncio.sleep(0.001)
            rounds += 1
        assert pull.result().reason == "compressed_invalid"
    assert rounds > 10


# --- resume ------------------------------------------------------------------------------------
async def test_a_cut_body_is_resumed_before_it_is_decompressed(
    make_node: NodeMaker, server: Web
) -> None:
    packed = server.files["a"] = xz(qcow2_image())
    some = asyncio.Event()

    async def arrived(done_bytes: int, _total_bytes: int | None) -> None:
        if done_bytes:
            some.set()

    async def cut_once(request: web.Request) -> web.StreamResponse:
        del server.handlers["a"]
        headers = {"Content-Length": str(len(packed)), "ETag": '"v1"'}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(packed[: 2 * MIB])
        await some.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    server.handlers["a"] = cut_once
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("a")), Asker(arrived))
        assert image.digest == digest_of(lzma.decompress(packed))
        assert int(server.requests[1].headers["Range"][6:-1]) > 0


async def test_a_process_that_ends_before_it_decompressed_fetches_one_byte_again(
    make_node: NodeMaker, server: Web, threads: DiskThreads
) -> None:
    packed = server.files["a"] = gz(qcow2_image())
    url = server.url("a")
    async with make_node() as node:
        part = node.store.part(f"{url}\n")
        await Downloads(FAST, threads).fetch(url, part, Validators(), lambda *_: None)
        part.close(keep=True)
    async with make_node() as node:
        assert len(node.parts()) == 2
        await node.images.ensure(parse_image_ref(url))
        assert server.requests[-1].headers["Range"] == f"bytes={len(packed) - 1}-"
        assert node.parts() == []
