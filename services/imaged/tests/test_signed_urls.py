"""Queries of URLs are secrets of their VMs: used for the pull, never revealed or stored (L4)."""

import asyncio
import hashlib
import logging

import pytest
from aiohttp import web
from services.imaged.tests.records import UID, record, uid
from services.imaged.tests.site_under_test import Node, NodeMaker, Web, qcow2_image

from virtbus.imaged.core.disk_requests import brings_secret, refs_of
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref, sealed_ref
from virtbus.schemas.vm import ImageVolume, VmRecord, Volume

DISK = qcow2_image(payload=1000)
DIGEST = f"sha256:{hashlib.sha256(DISK).hexdigest()}"
QUERY, OTHER = "X-Amz-Signature=hunter2", "X-Amz-Signature=hunter3"


@pytest.fixture
def bucket(server: Web) -> Web:
    """Serves its file to requests with a signature."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.query_string not in {QUERY, OTHER}:
            raise web.HTTPForbidden
        return server.sent(request, DISK, {})

    server.handlers["disk.qcow2"] = answer
    return server


def wanted(bucket: Web, *, query: str = QUERY, one: str = UID, pin: str = "") -> VmRecord:
    """A record as a controller writes it."""
    volume = ImageVolume(ref=bucket.url(f"disk.qcow2?{query}{pin}"))
    return record(Volume(name="root", image=volume.without_secrets()), uid=one)


def on_disk(node: Node) -> bytes:
    """Return all names and contents of imaged's files."""
    files = [path for path in node.state.rglob("*") if path.is_file()]
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


def our_log(caplog: pytest.LogCaptureFixture) -> str:
    """Without the log of the server under test."""
    return repr([one.getMessage() for one in caplog.records if one.name != "aiohttp.access"])


async def refused(node: Node, one: VmRecord, secret: str) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await node.disks.ensure(one, None, {"root": secret} if secret else {})
    return caught.value


@pytest.mark.parametrize("pin", ["", f"@{DIGEST}"], ids=["no pin", "pinned"])
async def test_an_image_is_pulled_with_a_query_that_is_stored_nowhere(
    make_node: NodeMaker, bucket: Web, caplog: pytest.LogCaptureFixture, pin: str
) -> None:
    caplog.set_level(logging.DEBUG)
    one = wanted(bucket, pin=pin)
    assert brings_secret(one.spec)
    async with make_node() as node:
        error = await refused(node, one, "")
        assert error.reason == "image_query_missing"
        assert "hunter" not in str(error)
        done = await node.disks.ensure(one, None, {"root": QUERY})
        assert done.ready.digest == DIGEST
        await node.disks.ensure(one)  # an existing disk needs no query
        await node.disks.ensure(wanted(bucket, one=uid(2), pin=pin))  # nor does an existing image
        asked = [request.query_string for request in bucket.requests]
        assert asked == [QUERY], "one transfer"
        assert b"hunter" not in on_disk(node)
        assert refs_of(one) == {next(iter(node.store.uses(frozenset()))).name}
        (image,) = node.store.images()
        assert image.names == (bucket.url(f"disk.qcow2{pin}"),)
        assert "hunter" not in repr(node.store.images()) + done.ready.model_dump_json()
    assert "hunter" not in our_log(caplog)


async def test_a_pull_that_was_cut_off_leaves_the_query_in_no_file_and_resumes(
    make_node: NodeMaker, bucket: Web
) -> None:
    whole = bucket.handlers["disk.qcow2"]
    cut = asyncio.Event()

    async def stalls(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"v1"', "Content-Length": str(len(DISK))})
        await response.prepare(request)
        await response.write(DISK[: len(DISK) // 2])
        await cut.wait()
        return response

    bucket.handlers["disk.qcow2"] = stalls
    async with make_node() as node, asyncio.TaskGroup() as group:
        pull = group.create_task(node.disks.ensure(wanted(bucket), None, {"root": QUERY}))
        while len(bucket.requests) < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert b"hunter" not in on_disk(node)
        bucket.handlers["disk.qcow2"] = whole
        cut.set()
        await pull
        assert bucket.requests[-1].headers.get("Range"), "it resumed"
        assert b"hunter" not in on_disk(node)


async def test_a_refusal_shows_no_query(
    make_node: NodeMaker, bucket: Web, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with make_node() as node:
        error = await refused(node, wanted(bucket, query="sig=hunter4"), "sig=hunter4")
        assert error.reason == "image_denied"
        assert "hunter" not in str(error)
        assert b"hunter" not in on_disk(node)
    assert "hunter" not in our_log(caplog)


async def test_another_signature_of_a_pinned_file_transfers_it_once(
    make_node: NodeMaker, bucket: Web
) -> None:
    one = wanted(bucket, pin=f"@{DIGEST}")
    two = wanted(bucket, query=OTHER, one=uid(2), pin=f"@{DIGEST}")
    async with make_node() as node:
        async with asyncio.TaskGroup() as group:
            group.create_task(node.disks.ensure(one, None, {"root": QUERY}))
            group.create_task(node.disks.ensure(two, None, {"root": OTHER}))
        assert len(bucket.requests) == 1
        (image,) = node.store.images()
        assert image.names == (bucket.url(f"disk.qcow2@{DIGEST}"),)


async def test_without_a_digest_other_queries_are_other_images(
    make_node: NodeMaker, server: Web
) -> None:
    other = qcow2_image(payload=2000)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=DISK if request.query_string == "id=1" else other)

    server.handlers["disk.qcow2"] = answer
    async with make_node() as node:
        first = await node.disks.ensure(wanted(server, query="id=1"), None, {"root": "id=1"})
        second = await node.disks.ensure(
            wanted(server, query="id=2", one=uid(2)), None, {"root": "id=2"}
        )
        assert first.ready.digest == DIGEST != second.ready.digest
        digests, names = node.store.named(server.url("disk.qcow2"))
        assert len(digests) == len(names) == 2, "a list shows both so"


async def test_a_record_of_an_older_controller_is_still_pulled(
    make_node: NodeMaker, bucket: Web
) -> None:
    volume = Volume(name="root", image=ImageVolume(ref=bucket.url(f"disk.qcow2?{QUERY}")))
    async with make_node() as node:
        done = await node.disks.ensure(record(volume))
        assert done.ready.digest == DIGEST
        assert b"hunter" not in on_disk(node)


async def test_names_stored_with_a_query_are_removed_at_the_next_start(
    make_node: NodeMaker, bucket: Web
) -> None:
    ref = bucket.url(f"disk.qcow2?{QUERY}")
    async with make_node() as node:
        sealed, query = sealed_ref(ref)
        await node.images.refresh(parse_image_ref(sealed), Asker(pull_secret=query))
        link = node.store.link(sealed)
        assert link is not None
        assert link.format is ImageFormat.QCOW2
        node.store.write_link(link.model_copy(update={"name": ref, "url": ref}))
        assert b"hunter" in on_disk(node)
        root = node.state / "images"
    store = ImageStore(root, SpaceLimits(0, 0.0))
    try:
        assert [use.name for use in store.uses(frozenset())] == [sealed]
        assert b"hunter" not in on_disk(node)
    finally:
        store.close()
