"""Disks out of container images: the choice of file and layer, and the refusals."""

import asyncio
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from services.imaged.tests.registry_under_test import Registry, digest_of, gz, tar, zst
from services.imaged.tests.site_under_test import (
    MIB,
    NodeMaker,
    Web,
    qcow2_image,
    qcow2_with_backing,
)
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.edge.containers import Registries
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref

DISK = qcow2_image(payload=MIB)
OTHER = qcow2_image(payload=1000)


@pytest.fixture
def registry(server: Web) -> Registry:
    return Registry(server)


def estargz(data: bytes) -> bytes:
    """Each half a gzip member of its own."""
    return gz(data[: len(data) // 2]) + gz(data[len(data) // 2 :])


def chunked_zstd(data: bytes) -> bytes:
    """Frames, followed by a skippable frame, as in podman's zstd:chunked."""
    return zst(data[:100_000]) + zst(data[100_000:]) + b"\x50\x2a\x4d\x18\x03\0\0\0abc"


@pytest.mark.parametrize("pack", [bytes, gz, zst, estargz, chunked_zstd])
@pytest.mark.parametrize("name", ["disk/a.qcow2", "./disk/a.qcow2", "/disk/a.qcow2"])
async def test_the_file_in_slash_disk_is_the_image(
    make_node: NodeMaker, registry: Registry, pack: Callable[[bytes], bytes], name: str
) -> None:
    manifest = registry.push("team/fedora", "40", pack(tar(("disk/", b""), (name, DISK))))
    source = parse_image_ref(registry.ref("team/fedora:40"))
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(source)
        assert (image.digest, image.format) == (digest_of(DISK), ImageFormat.QCOW2)
        assert node.store.path(image.digest).read_bytes() == DISK
        link = node.store.link(source.ref)
        assert link is not None
        assert link.etag == manifest
        assert node.parts() == []
        assert node.images.cached(source) == image
    async with make_node(registries=registry.known) as node:
        assert node.images.cached(source) == image
        assert node.store.images()[0].names == (registry.ref("team/fedora:40"),)


async def test_a_raw_disk_is_stored_sparse(make_node: NodeMaker, registry: Registry) -> None:
    raw = os.urandom(MIB) + bytes(16 * MIB)
    registry.push("raw", "1", gz(tar(("disk/disk.img", raw))))
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(parse_image_ref(registry.ref("raw:1")))
        assert (image.format, image.digest) == (ImageFormat.RAW, digest_of(raw))
        assert node.store.path(image.digest).stat().st_blocks * 512 < 8 * MIB


BASE = tar(("etc/", b""), ("etc/passwd", b"root"), ("bin/sh", b"elf"), ("dev/x", "null"))
GONE = tar(("disk/.wh.old.qcow2", b""))
LAYERS: dict[str, tuple[tuple[bytes, ...], str]] = {
    "above a base system": ((BASE, tar(("disk/a", DISK))), ""),
    "below layers without it": ((tar(("disk/a", DISK)), BASE, tar(("label", b""))), ""),
    "replaced by an upper layer": ((tar(("disk/a", OTHER)), tar(("disk/a", DISK))), ""),
    "the old one removed above": (
        (tar(("disk/old.qcow2", OTHER)), GONE, tar(("disk/a", DISK))),
        "",
    ),
    "removed in its own layer": (
        (tar(("disk/old.qcow2", OTHER)), tar(("disk/a", DISK), ("disk/.wh.old.qcow2", b""))),
        "",
    ),
    "folder made again": (
        (tar(("disk/old", OTHER)), tar(("disk/.wh..wh..opq", b""), ("disk/a", DISK))),
        "",
    ),
    "all made again": (
        (tar(("disk/old", OTHER)), tar((".wh..wh..opq", b""), ("disk/a", DISK))),
        "",
    ),
    "folder removed": (
        (tar(("disk/old", OTHER)), tar((".wh.disk", b"")), tar(("disk/a", DISK))),
        "",
    ),
    "a file that a folder hides": (
        (tar(("disk/x", OTHER)), tar(("disk/x/", b""), ("disk/a", DISK))),
        "",
    ),
    "by path": ((tar(("disk/a", DISK), ("disk/b", OTHER)),), "/disk/a"),
    "by path elsewhere": ((tar(("images/x/y.img", DISK), ("disk/b", OTHER)),), "/images/x/y.img"),
    "by path, in a lower layer": ((tar(("disk/a", DISK)), tar(("disk/b", OTHER))), "/disk/a"),
    "links elsewhere": ((tar(("lib", "/usr/lib"), ("disk/a", DISK)),), ""),
}


@pytest.mark.parametrize(("layers", "path"), LAYERS.values(), ids=LAYERS)
async def test_layers_are_merged_as_a_container_runtime_would(
    make_node: NodeMaker, registry: Registry, layers: tuple[bytes, ...], path: str
) -> None:
    registry.push("a", "1", *(gz(layer) for layer in layers))
    ref = registry.ref("a:1") + (f"#{path}" if path else "")
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(parse_image_ref(ref))
        assert image.digest == digest_of(DISK)
        assert node.data() == [f"images/data/{digest_of(DISK)[7:]}"]
        assert node.parts() == []


MANY, MISSING, ODD = "container_disk_many", "container_disk_missing", "container_disk_irregular"
REFUSED: dict[str, tuple[tuple[bytes, ...], str, str, str]] = {
    "two files": ((tar(("disk/a", DISK), ("disk/b", OTHER)),), "", MANY, "/disk/a and b"),
    "two layers": ((tar(("disk/a", DISK)), tar(("disk/b", OTHER))), "", MANY, "give the path"),
    "named twice": ((tar(("disk/a", DISK), ("disk/a", OTHER)),), "", MANY, ""),
    "none": ((BASE,), "", MISSING, "FROM scratch"),
    "only deeper ones": ((tar(("disk/x/a", DISK)),), "", MISSING, "no file in /disk"),
    "none at the path": ((tar(("disk/a", DISK)),), "/disk/b", MISSING, "/disk/b"),
    "removed": ((tar(("disk/old.qcow2", DISK)), GONE), "", MISSING, ""),
    "removed at the path": ((tar(("disk/old.qcow2", DISK)), GONE), "/disk/old.qcow2", MISSING, ""),
    "a symlink": ((tar(("disk/a", "/etc/shadow")),), "", ODD, "symlink"),
    "a symlink for the folder": ((tar(("disk", "/images")),), "", ODD, "symlink"),
    "a symlink on the path": ((tar(("x", "/"), ("x/y", DISK)),), "/x/y", ODD, "symlink"),
    "a hard link": ((tar(("disk/a", b""), kind=tarfile.LNKTYPE),), "", ODD, "hard link"),
    "a device": ((tar(("disk/a", b""), kind=tarfile.BLKTYPE),), "", ODD, "device"),
    "a pipe": ((tar(("disk/a", b""), kind=tarfile.FIFOTYPE),), "", ODD, "pipe"),
    "a folder at the path": ((tar(("disk/a/", b"")),), "/disk/a", ODD, "folder"),
    "a name outside": ((tar(("disk/../../x", DISK)),), "", "layer_invalid", "outside"),
    "no tar": ((os.urandom(2048),), "", "layer_invalid", "no tar"),
    "cut": ((tar(("disk/a", DISK))[:5000],), "", "layer_invalid", "cut short"),
    "a backing file": ((tar(("disk/a", qcow2_with_backing())),), "", "backing_file", ""),
    "an archive": ((tar(("disk/a", tar(("b", DISK)))),), "", "unlisted_format", "tar"),
    "too short": ((tar(("disk/a", b"x")),), "", "header_invalid", ""),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "path", "reason", "words"), REFUSED.values(), ids=REFUSED)
async def test_a_file_that_is_no_disk_is_refused_and_nothing_stays(
    make_node: NodeMaker,
    registry: Registry,
    layers: tuple[bytes, ...],
    path: str,
    reason: str,
    words: str,
) -> None:
    registry.push("a", "1", *(gz(layer) for layer in layers))
    ref = registry.ref("a:1") + (f"#{path}" if path else "")
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, ref)
        assert (error.reason, words in str(error)) == (reason, True), str(error)
        assert node.tree() == []


async def test_layers_that_expand_beyond_reason_are_refused(
    make_node: NodeMaker, registry: Registry
) -> None:
    bomb = bytes(128 * MIB)
    registry.push("zeros", "1", zst(tar(("x", bomb), ("disk/a", DISK))))
    registry.push("large", "1", gz(tar(("disk/a", os.urandom(3 * MIB)))))
    registry.push("cut", "1", gz(tar(("disk/a", DISK)))[:-100])
    registry.push("garbage", "1", gz(tar(("disk/a", DISK))) + b"garbage")
    async with make_node(registries=registry.known, max_bytes=1024 * MIB) as node:
        error = await refused(node.images, registry.ref("zeros:1"))
        assert (error.reason, "100-fold" in str(error)) == ("layer_invalid", True)
        for name in ("cut", "garbage"):
            assert (await refused(node.images, registry.ref(f"{name}:1"))).reason == "layer_invalid"
    async with make_node(registries=registry.known, max_bytes=2 * MIB) as node:
        error = await refused(node.images, registry.ref("large:1"))
        assert error.reason == "image_too_large"
        assert node.tree() == []


async def test_a_broken_download_resumes_also_in_the_next_process(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    layer, small = gz(tar(("disk/a", DISK))), gz(BASE)
    registry.push("a", "1", layer, small)
    blob = f"v2/a/blobs/{digest_of(layer)}"
    half, arrived = len(layer) // 2, asyncio.Event()

    async def listen(done: int, _: int | None) -> None:
        if done >= len(small) + half:
            arrived.set()

    async def broken(request: web.Request) -> web.StreamResponse:
        begin = int(request.headers.get("Range", "bytes=0-")[6:-1])
        headers = {"Content-Length": str(len(layer) - begin), "ETag": '"v1"'}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(layer) - 1}/{len(layer)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if not begin:
            await response.write(layer[:half])
            await arrived.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    server.handlers[blob] = broken
    async with make_node(registries=registry.known, attempts=2) as node:
        with pytest.raises(VirtbusError) as caught:
            await node.images.ensure(parse_image_ref(registry.ref("a:1")), Asker(listen))
        assert caught.value.reason == "image_unreachable"
    del server.handlers[blob]
    asked = len(server.requests)
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(parse_image_ref(registry.ref("a:1")))
        assert image.digest == digest_of(DISK)
        assert node.parts() == []
    blobs = [r for r in server.requests[asked:] if digest_of(layer) in r.path]
    assert [r.headers.get("Range") for r in blobs] == [f"bytes={half}-"]
    assert not [r for r in server.requests[asked:] if digest_of(small) in r.path]


async def test_a_layer_with_a_wrong_digest_is_fetched_again_next_time(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    layer = gz(tar(("disk/a", DISK)))
    registry.push("a", "1", layer)
    path = f"a/blobs/{digest_of(layer)}"
    registry.blobs[path] = layer[:-1] + bytes([layer[-1] ^ 1])
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref("a:1"))
        assert error.reason == "layer_digest_mismatch"
        assert node.tree() == []
        registry.blobs[path] = layer
        await node.images.ensure(parse_image_ref(registry.ref("a:1")))


async def test_a_hundred_requests_share_one_download_and_its_progress(
    make_node: NodeMaker, registry: Registry
) -> None:
    layer = gz(tar(("disk/a", DISK)))
    registry.push("a", "1", layer, gz(BASE))
    heard: list[tuple[int, int | None]] = []

    async def listen(done: int, total: int | None) -> None:
        heard.append((done, total))

    source = parse_image_ref(registry.ref("a:1"))
    async with make_node(registries=registry.known) as node:
        async with asyncio.TaskGroup() as group:
            askers = [
                group.create_task(node.images.ensure(source, Asker(listen))) for _ in range(100)
            ]
        assert {asker.result().digest for asker in askers} == {digest_of(DISK)}
        assert registry.asked(digest_of(layer)) == 1
        total = len(layer) + len(gz(BASE))
        assert heard[-1] == (total, total)


async def test_the_last_cancelled_request_removes_the_layers(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    layer, begun = gz(tar(("disk/a", DISK))), asyncio.Event()
    registry.push("a", "1", layer)

    async def hangs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(layer)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(layer[:200_000])
        begun.set()
        await asyncio.Event().wait()
        return response

    server.handlers[f"v2/a/blobs/{digest_of(layer)}"] = hangs
    source = parse_image_ref(registry.ref("a:1"))
    async with (
        make_node(registries=registry.known, rate_window_s=30) as node,
        asyncio.TaskGroup() as group,
    ):
        asker = group.create_task(node.images.ensure(source))
        await begun.wait()
        asker.cancel()
        await asyncio.wait({asker})
        while node.tree():
            await asyncio.sleep(0.01)


async def test_a_name_may_stand_for_a_container_image(
    make_node: NodeMaker, registry: Registry
) -> None:
    manifest = registry.push("a", "1", gz(tar(("disk/a", DISK))))
    async with make_node(registries=registry.known) as node:
        text = f"[[image]]\nname = 'fedora'\nurl = '{registry.ref('a:1')}'\ndigest = '{manifest}'\n"
        (node.names_dir / "a.toml").write_text(text)
        image = await node.images.ensure(parse_image_ref("fedora"))
        assert image.digest == digest_of(DISK)
        error = await refused(node.images, f"fedora@{manifest}")
        assert error.reason == "container_name_pinned"


async def test_a_node_of_another_architecture_takes_its_own(
    make_node: NodeMaker, registry: Registry, tmp_path: Path
) -> None:
    images = {"amd64": (gz(tar(("disk/a", DISK))),), "arm64": (gz(tar(("disk/a", OTHER))),)}
    pin = registry.push_index("a", "1", images)
    for architecture, disk in (("amd64", DISK), ("arm64", OTHER)):
        known: Registries = replace(registry.known, architecture=architecture)
        async with make_node(registries=known, state=tmp_path / architecture) as node:
            for ref in ("a:1", f"a:1@{pin}", f"a@{pin}"):
                image = await node.images.refresh(parse_image_ref(registry.ref(ref)))
                assert image.digest == digest_of(disk)
    known = replace(registry.known, architecture="s390x")
    async with make_node(registries=known) as node:
        error = await refused(node.images, registry.ref("a:1"))
        assert error.reason == "wrong_architecture"
        assert "amd64, arm64" in str(error)
        registry.push("b", "1", gz(tar(("disk/a", DISK))))
        assert (await refused(node.images, registry.ref("b:1"))).reason == "wrong_architecture"
