"""Image sources that refuse, lie, stall or redirect (SRC-01 to SRC-11)."""

import gzip

import pytest
from aiohttp import web
from services.imaged.tests.site_under_test import (
    MIB,
    NodeMaker,
    Web,
    qcow2_image,
    raw_server,
)
from services.imaged.tests.test_pulls import refused

from virtbus.schemas.errors import Retry
from virtbus.schemas.image import parse_image_ref


@pytest.mark.parametrize(
    ("status", "reason", "requests"),
    [
        (404, "image_not_found", 1),
        (410, "image_not_found", 1),
        (403, "image_denied", 1),
        (401, "image_denied", 1),
        (400, "image_source_refused", 1),
        (500, "image_unreachable", 5),
        (503, "image_unreachable", 5),
        (429, "image_unreachable", 5),
    ],
)
async def test_server_answers_become_reasons(
    make_node: NodeMaker, server: Web, status: int, reason: str, requests: int
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status)

    server.handlers["a"] = handler
    async with make_node() as node:
        error = await refused(node.images, server.url("a"))
        assert error.reason == reason
        assert len(server.requests) == requests
        assert node.tree() == []


async def test_a_server_that_recovers_is_retried(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = qcow2_image()

    async def busy(_: web.Request) -> web.Response:
        if len(server.requests) == 2:
            del server.handlers["a"]
        return web.Response(status=503, headers={"Retry-After": "0"})

    server.handlers["a"] = busy
    async with make_node() as node:
        await node.images.ensure(parse_image_ref(server.url("a")))
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "redirect_refused"),
        ("ftp://h/x", "redirect_refused"),
        ("http://127.0.0.1:1/", "redirect_refused"),
        ("http://localhost:1/", "redirect_refused"),
        ("http://169.254.169.254/latest/meta-data", "image_unreachable"),
        ("http://[::ffff:169.254.169.254]/", "image_unreachable"),
        ("http://[fe80::1]/", "image_unreachable"),
        ("http://2130706433/", "image_url_invalid"),
        ("http://0xa9fea9fe/", "image_unreachable"),
        ("http://0177.0.0.1/", "image_url_invalid"),
        ("http://127.1/", "image_url_invalid"),
        ("http://0/", "image_url_invalid"),
        ("http://user:secret@h/", "image_url_credentials"),
        ("/a", "too_many_redirects"),
    ],
)
async def test_redirects_are_checked_hop_by_hop(
    make_node: NodeMaker, server: Web, location: str, reason: str
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": location})

    server.handlers["a"] = handler
    async with make_node() as node:
        error = await refused(node.images, server.url("a"))
        assert error.reason == reason
        assert "secret" not in str(error)
        assert node.tree() == []


async def test_three_redirects_are_followed(make_node: NodeMaker, server: Web) -> None:
    server.files["3"] = qcow2_image()

    def to(path: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  an aiohttp handler
        async def handler(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": path})

        return handler

    server.handlers |= {"0": to("/1"), "1": to("2"), "2": to(server.url("3"))}
    async with make_node() as node:
        await node.images.ensure(parse_image_ref(server.url("0")))


async def test_an_encoded_body_is_refused(make_node: NodeMaker, server: Web) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(bytes(MIB)), headers={"Content-Encoding": "gzip"})

    server.handlers["a"] = handler
    async with make_node() as node:
        assert (await refused(node.images, server.url("a"))).reason == "content_encoding"


async def test_a_declared_size_over_the_limit_is_refused_unread(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    async with make_node(max_bytes=MIB) as node:
        assert (await refused(node.images, server.url("a"))).reason == "image_too_large"
        assert node.tree() == []


async def test_an_endless_body_ends_at_the_limit(make_node: NodeMaker) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"\1" * 65536 + b"\r\n"
    async with raw_server(head + chunk * 64) as url, make_node(max_bytes=2 * MIB) as node:
        assert (await refused(node.images, url + "/a")).reason == "image_too_large"
        assert node.tree() == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"x" * 5000, "image_unreachable"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\nxx", "image_unreachable"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, "image_length_unknown"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "image_unreachable"),
        (b"", "image_unreachable"),
        (
            b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n",
            "image_unreachable",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * MIB + b"\r\n\r\n", "image_unreachable"),
        (b"HTTP/1.1 302 Found\r\nLocation:\r\n\r\n", "too_many_redirects"),
    ],
)
async def test_incomplete_answers_are_refused(
    make_node: NodeMaker, answer: bytes, reason: str
) -> None:
    async with raw_server(answer) as url, make_node(attempts=2) as node:
        error = await refused(node.images, url + "/a")
        assert error.reason == reason
        assert node.tree() == []


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"x" * 300]
)
async def test_a_stalled_server_is_abandoned(make_node: NodeMaker, answer: bytes) -> None:
    async with raw_server(answer, hang=True) as url, make_node(attempts=2) as node:
        error = await refused(node.images, url + "/a")
        assert (error.reason, error.body.retry) == ("image_unreachable", Retry.LATER)
        assert node.tree() == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"x" * 5000,
            "the connection broke in the middle of the file",
        ),
    ],
)
async def test_failed_attempts_are_reported_in_words(
    make_node: NodeMaker, answer: bytes, why: str
) -> None:
    async with raw_server(answer) as url, make_node(attempts=2) as node:
        error = await refused(node.images, url + "/a")
        assert f"(2 attempts; last: {why})" in error.body.message


async def test_a_url_without_a_host_is_refused_with_an_example(make_node: NodeMaker) -> None:
    async with make_node() as node:
        error = await refused(node.images, "http://")
        assert error.reason == "image_url_invalid"
        assert "write it like https://images.example.org/disk.qcow2" in error.body.message
