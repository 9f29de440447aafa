"""The port's certificate and its client CA change while it is open."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.kubernetes.certificates import Authority, Pair

from virtbus.kubebridge.edge.web.tls import TlsListener, serving


async def who(request: web.Request) -> web.Response:
    shown = request.get_extra_info("peercert") or {}
    names = [value for part in shown.get("subject", ()) for _, value in part]
    return web.Response(text="".join(names))


class Visitors:
    """Two authorities, and the door."""

    def __init__(self, folder: Path, door: TlsListener, port: int) -> None:
        self.door = door
        self._port = port
        self.old, self.new = Authority(folder, "old"), Authority(folder, "new")

    def resumes(self, showing: Pair, highest: ssl.TLSVersion) -> bool:
        """Return True if the session of a first connection is used by a second one."""
        context = ssl.create_default_context(cafile=str(self.old.certificate))
        context.maximum_version = highest
        context.load_cert_chain(*showing)
        session: ssl.SSLSession | None = None
        reused: bool | None = None
        for _ in range(2):
            plain = socket.create_connection(("127.0.0.1", self._port), 10)
            made = context.wrap_socket(plain, server_hostname="localhost", session=session)
            with made:
                made.sendall(b"GET /who HTTP/1.0\r\n\r\n")
                assert made.recv(4096).startswith(b"HTTP")
                session, reused = made.session, made.session_reused
        return bool(reused)

    async def ask(self, trusting: Authority, showing: Pair | None = None) -> str:
        context = ssl.create_default_context(cafile=str(trusting.certificate))
        if showing is not None:
            context.load_cert_chain(*showing)
        connector = aiohttp.TCPConnector(ssl=context)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"https://localhost:{self._port}/who") as answer,
        ):
            return await answer.text()


@pytest.fixture
async def visitors(tmp_path: Path) -> AsyncIterator[Visitors]:
    door, app = TlsListener(), web.Application()
    app.add_routes([web.get("/who", who)])
    async with asyncio.timeout(30), serving(app, "127.0.0.1", 0, door) as (_, port):
        yield Visitors(tmp_path, door, port)


async def test_without_a_certificate_connections_fail(visitors: Visitors) -> None:
    with pytest.raises(aiohttp.ClientError):
        await visitors.ask(visitors.old)


async def test_certificate_and_client_ca_can_be_replaced(visitors: Visitors) -> None:
    old, new, door = visitors.old, visitors.new, visitors.door
    ann, bob = old.sign("ann", "ann"), new.sign("bob", "bob")
    door.show(*old.sign("one", "one", hosts=["localhost"]))
    assert await visitors.ask(old) == ""
    door.trust(old.certificate.read_text())
    assert await visitors.ask(old) == ""
    assert await visitors.ask(old, ann) == "ann"
    with pytest.raises(aiohttp.ClientError):
        await visitors.ask(old, bob)
    door.show(*new.sign("two", "two", hosts=["localhost"]))
    door.trust(new.certificate.read_text())
    assert await visitors.ask(new, bob) == "bob"
    for trusting, showing in ((new, ann), (old, None)):
        with pytest.raises(aiohttp.ClientError):
            await visitors.ask(trusting, showing)


async def test_no_session_outlives_the_check_of_its_certificate(visitors: Visitors) -> None:
    ann = visitors.old.sign("ann", "ann")
    visitors.door.show(*visitors.old.sign("one", "one", hosts=["localhost"]))
    visitors.door.trust(visitors.old.certificate.read_text())
    assert not await asyncio.to_thread(visitors.resumes, ann, ssl.TLSVersion.TLSv1_3)
    with pytest.raises(ssl.SSLError):  # it could resume one
        await asyncio.to_thread(visitors.resumes, ann, ssl.TLSVersion.TLSv1_2)


async def test_an_invalid_certificate_changes_nothing(visitors: Visitors, tmp_path: Path) -> None:
    old, new, door = visitors.old, visitors.new, visitors.door
    door.show(*old.sign("one", "one", hosts=["localhost"]))
    other = new.sign("two", "two", hosts=["localhost"])
    with pytest.raises(ssl.SSLError):
        door.trust("nothing")
    with pytest.raises(OSError, match="No such file"):
        door.show(tmp_path / "none", other.key)
    with pytest.raises(ssl.SSLError):
        door.show(old.sign("three", "three").certificate, other.key)
    assert await visitors.ask(old) == ""
