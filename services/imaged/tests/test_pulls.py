"""Transfers from real servers, good and bad: SRC-01 … SRC-11, IMG-16 … IMG-23."""

import asyncio
import contextlib
import hashlib
import os
import time

import pytest
from aiohttp import web
from services.imaged.tests.site_under_test import (
    MIB,
    NodeMaker,
    Web,
    qcow2_image,
    qcow2_with_backing,
    raw_server,
)

from virtbus.imaged.images import Images
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def refused(images: Images, ref: str) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await images.ensure(parse_image_ref(ref))
    return caught.value


async def test_pull_stores_by_digest_and_answers_from_the_store_afterwards(
    make_node: NodeMaker, server: Web
) -> None:
    data = server.files["a.qcow2"] = qcow2_image()
    source = parse_image_ref(server.url("a.qcow2"))
    async with make_node() as node:
        image = await node.images.ensure(source)
        again = await node.images.ensure(source)
        assert image == again
        assert (image.digest, image.format) == (digest_of(data), ImageFormat.QCOW2)
        assert node.store.path(image.digest).read_bytes() == data
        assert len(server.requests) == 1
        assert server.requests[0].headers["Accept-Encoding"] == "identity"
        assert node.parts() == []
        assert node.store.path(image.digest).stat().st_mode & 0o777 == 0o444
    async with make_node() as node:
        assert node.images.cached(source) == image
        assert node.store.images()[0].names == (server.url("a.qcow2"),)


async def test_raw_zeros_are_stored_sparse(make_node: NodeMaker, server: Web) -> None:
    data = server.files["raw"] = os.urandom(MIB) + bytes(16 * MIB)
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("raw")))
        status = node.store.path(image.digest).stat()
        assert (image.format, image.digest) == (ImageFormat.RAW, digest_of(data))
        assert status.st_size == len(data)
        assert status.st_blocks * 512 < 8 * MIB


async def test_refresh_of_an_unchanged_image_transfers_nothing(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    source = parse_image_ref(server.url("a"))
    async with make_node() as node:
        first = await node.images.refresh(source)
        assert await node.images.refresh(source) == first
        assert server.requests[1].headers["If-None-Match"] == '"v1"'
        data = server.files["a"] = qcow2_image()
        server.etags["a"] = '"v2"'
        assert (await node.images.refresh(source)).digest == digest_of(data)
        assert len(node.data()) == 2


async def test_a_hundred_requests_share_one_download_though_half_are_cancelled(
    make_node: NodeMaker, server: Web
) -> None:
    data, release = qcow2_image(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[:MIB])
        await release.wait()
        await response.write(data[MIB:])
        return response

    server.handlers["a"] = slow
    source = parse_image_ref(server.url("a"))
    async with make_node(rate_window_s=30) as node, asyncio.TaskGroup() as group:
        askers = [group.create_task(node.images.ensure(source)) for _ in range(100)]
        while not server.requests:
            await asyncio.sleep(0)
        for asker in askers[::2]:
            asker.cancel()
        release.set()
        done, _ = await asyncio.wait(askers)
        assert sum(task.cancelled() for task in done) == 50
        assert {task.result().digest for task in askers[1::2]} == {digest_of(data)}
        assert len(server.requests) == 1


async def test_the_last_cancelled_request_ends_the_download_and_removes_its_bytes(
    make_node: NodeMaker, server: Web
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"v1"'})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes([1]) * 4096)
                begun.set()
        ended.set()
        return response

    server.handlers["a"] = endless
    server.files["b"] = qcow2_image()
    source = parse_image_ref(server.url("a"))
    async with make_node(max_bytes=1 << 40) as node, asyncio.TaskGroup() as group:
        for _ in range(3):  # a storm: leave, come back, leave
            begun.clear()
            askers = [group.create_task(node.images.ensure(source)) for _ in range(10)]
            await begun.wait()
            for asker in askers:
                asker.cancel()
            await asyncio.wait(askers)
        server.handlers["a"] = _serve(server.files["b"])
        image = await node.images.ensure(source)
        assert image.digest == digest_of(server.files["b"])
        assert node.parts() == []


def _serve(data: bytes):  # type: ignore[no-untyped-def]  # noqa: ANN202  an aiohttp handler
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=data)

    return handler


async def test_a_pinned_digest_is_enforced_and_nothing_is_kept(
    make_node: NodeMaker, server: Web
) -> None:
    data = server.files["a"] = qcow2_image()
    async with make_node() as node:
        wrong = await refused(node.images, f"{server.url('a')}@sha256:{'0' * 64}")
        assert (wrong.reason, wrong.body.retry) == ("digest_mismatch", Retry.NEVER)
        assert node.tree() == []
        pinned = parse_image_ref(f"{server.url('a')}@{digest_of(data)}")
        assert (await node.images.ensure(pinned)).digest == digest_of(data)


async def test_a_pin_never_changes_the_plain_name(make_node: NodeMaker, server: Web) -> None:
    old = server.files["a"] = qcow2_image()
    async with make_node() as node:
        plain = parse_image_ref(server.url("a"))
        await node.images.ensure(parse_image_ref(f"{server.url('a')}@{digest_of(old)}"))
        new = server.files["a"] = qcow2_image()
        assert (await node.images.ensure(plain)).digest == digest_of(new)
        pinned = parse_image_ref(f"{server.url('a')}@{digest_of(old)}")
        assert (await node.images.ensure(pinned)).digest == digest_of(old)
        assert (await node.images.ensure(plain)).digest == digest_of(new)


async def test_an_image_with_a_backing_file_is_refused_and_leaves_nothing(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_with_backing()
    async with make_node() as node:
        assert (await refused(node.images, server.url("a"))).reason == "backing_file"
        assert node.tree() == []


async def test_a_body_cut_short_is_resumed_by_range(make_node: NodeMaker, server: Web) -> None:
    data = server.files["a"] = qcow2_image()
    some = asyncio.Event()

    async def arrived(done_bytes: int, _total_bytes: int | None) -> None:
        if done_bytes:
            some.set()

    async def cut_once(request: web.Request) -> web.StreamResponse:
        del server.handlers["a"]
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(data[: 2 * MIB])
        await some.wait()  # bytes in the client's buffer are lost with the connection
        assert request.transport is not None
        request.transport.close()
        return response

    server.handlers["a"] = cut_once
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("a")), Asker(arrived))
        assert image.digest == digest_of(data)
        assert server.requests[1].headers["If-Range"] == '"v1"'
        assert int(server.requests[1].headers["Range"][6:-1]) > 0


@pytest.mark.parametrize("lie", ["etag", "offset", "total", "ignored", "416"])
async def test_a_resume_that_is_not_a_continuation_starts_over(
    make_node: NodeMaker, server: Web, lie: str
) -> None:
    data = server.files["a"] = qcow2_image()

    async def handler(request: web.Request) -> web.StreamResponse:
        if len(server.requests) == 1:
            response = web.StreamResponse(
                headers={"Content-Length": str(len(data)), "ETag": '"v1"'}
            )
            await response.prepare(request)
            await response.write(os.urandom(2 * MIB))  # of another file
            assert request.transport is not None
            request.transport.close()
            return response
        if "Range" not in request.headers or lie == "ignored":
            return web.Response(body=data, headers={"ETag": '"v2"'})
        if lie == "416":
            return web.Response(status=416)
        start = int(request.headers["Range"][6:-1])
        total = len(data) + 1 if lie == "total" else len(data)
        first = start + 1 if lie == "offset" else start
        return web.Response(
            status=206,
            body=data[start:],
            headers={
                "ETag": '"v2"' if lie == "etag" else '"v1"',
                "Content-Range": f"bytes {first}-{total - 1}/{total}",
            },
        )

    server.handlers["a"] = handler
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("a")))
        assert image.digest == digest_of(data)


@pytest.mark.parametrize(
    ("limit", "reason"), [("max_bytes", "image_too_large"), ("quota_bytes", "image_quota")]
)
async def test_a_length_that_only_the_resumed_answer_tells_is_within_the_limits(
    make_node: NodeMaker, server: Web, limit: str, reason: str
) -> None:
    some = asyncio.Event()

    async def arrived(done_bytes: int, _total_bytes: int | None) -> None:
        if done_bytes:
            some.set()

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"ETag": '"v1"'}
        if "Range" in request.headers:
            start = int(request.headers["Range"][6:-1])
            headers["Content-Range"] = f"bytes {start}-{5 * MIB - 1}/{5 * MIB}"
            return web.Response(status=206, headers=headers, body=b"and no more")
        response = web.StreamResponse(headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(os.urandom(2 * MIB))
        await some.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    server.handlers["a"] = handler
    async with make_node(**{limit: 5 * MIB - 1}) as node:
        source = parse_image_ref(server.url("a"))
        with pytest.raises(VirtbusError) as caught:
            await node.images.ensure(source, Asker(arrived))
        assert caught.value.reason == reason
        assert len(server.requests) == 2


async def test_a_stop_in_the_middle_is_resumed_by_the_next_process(
    make_node: NodeMaker, server: Web
) -> None:
    data = server.files["a"] = qcow2_image(payload=8 * MIB)
    stalled = asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(data[: 5 * MIB])
        stalled.set()
        await asyncio.Event().wait()
        return response

    server.handlers["a"] = stall
    source = parse_image_ref(server.url("a"))
    async with make_node(rate_window_s=30) as node, asyncio.TaskGroup() as group:
        asker = group.create_task(node.images.ensure(source))
        await stalled.wait()
        while len(node.parts()) < 2:  # the bytes, and the note with their source
            await asyncio.sleep(0.01)
        node.images.stop()
        asker.cancel()
    del server.handlers["a"]
    async with make_node() as node:
        assert len(node.parts()) == 2
        assert (await node.images.ensure(source)).digest == digest_of(data)
        assert "Range" in server.requests[-1].headers
        assert node.parts() == []


async def test_the_free_space_floor_is_never_crossed(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = qcow2_image()
    async with make_node(min_free_bytes=1 << 60) as node:
        error = await refused(node.images, server.url("a"))
        assert (error.reason, error.body.retry) == ("disk_full", Retry.LATER)
        assert node.tree() == []


async def test_one_byte_chunks_do_not_stall_the_loop(make_node: NodeMaker) -> None:
    """A turn of the loop is measured in its thread's CPU, which other load does not stretch."""
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300_000
    turns_s: list[float] = []

    async def watch_loop() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            turns_s.append(time.thread_time() - before)

    async with raw_server(body + b"0\r\n\r\n") as url, make_node(rate_window_s=30) as node:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch_loop())
            image = await node.images.ensure(parse_image_ref(url + "/a"))
            watcher.cancel()
        assert image.size_bytes == 300_000
    assert max(turns_s) < sum(turns_s) / 3


async def test_progress_is_reported_for_each_request(make_node: NodeMaker, server: Web) -> None:
    data = server.files["a"] = qcow2_image()
    seen: list[tuple[int, int | None]] = []

    async def listen(done: int, total: int | None) -> None:
        seen.append((done, total))

    async with make_node() as node:
        await node.images.ensure(parse_image_ref(server.url("a")), Asker(listen))
    assert seen[-1] == (len(data), len(data))
