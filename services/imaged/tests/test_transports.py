"""Transports of `images.d` against real servers: HTTPS, client certificates, a proxy, logins.

The redirect matrix and the time limits are those of Virtlet's tests. Two cases differ on purpose:
three redirects are followed without a setting, not nine, and there is no `insecure`.
"""

import asyncio
import base64
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from services.imaged.tests.registry_under_test import Registry, gz, tar
from services.imaged.tests.site_under_test import Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_pulls import digest_of, refused

from virtbus.bus.provisioning.certificate_authority import ensure_ca, ensure_server
from virtbus.schemas.image import parse_image_ref

BASIC = "Basic " + base64.b64encode(b"user:pass:word").decode()


def write(node: Node, url: str, transport: str = "", name: str = "x") -> None:
    text = f"[[image]]\nname = '{name}'\nurl = '{url}'\n[transports.default]\n{transport}\n"
    (node.names_dir / "a.toml").write_text(text)


async def pulled(node: Node, url: str, transport: str = "") -> str:
    write(node, url, transport)
    return (await node.images.refresh(parse_image_ref("x"))).digest


async def reason(node: Node, url: str, transport: str = "") -> str:
    write(node, url, transport)
    return (await refused(node.images, "x")).reason


# --- redirects and time --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("redirects", "allowed", "requests"),
    [(0, 0, 1), (1, 0, -1), (1, 1, 2), (5, 5, 6), (2, 1, -2), (10, 5, -6), (3, None, 4),
     (4, None, -4)],
)  # fmt: skip
async def test_redirects_end_at_the_transports_limit(
    make_node: NodeMaker, server: Web, redirects: int, allowed: int | None, requests: int
) -> None:
    """A negative number of requests: the pull fails after so many."""
    data = qcow2_image()

    async def answer(request: web.Request) -> web.StreamResponse:
        step = int(request.path.removeprefix("/step"))
        if step < redirects:
            raise web.HTTPFound(f"/step{step + 1}")
        return web.Response(body=data)

    server.prefixes["step"] = answer
    limit = "" if allowed is None else f"max_redirects = {allowed}"
    async with make_node() as node:
        if requests < 0:
            assert await reason(node, server.url("step0"), limit) == "too_many_redirects"
        else:
            assert await pulled(node, server.url("step0"), limit) == digest_of(data)
    assert [r.path for r in server.requests] == [f"/step{n}" for n in range(abs(requests))]


@pytest.mark.parametrize(("delay_s", "fails"), [(0.05, False), (0.35, True)])
async def test_a_pull_fails_after_the_transports_time(
    make_node: NodeMaker, server: Web, delay_s: float, *, fails: bool
) -> None:
    data = qcow2_image()

    async def late(_: web.Request) -> web.Response:
        await asyncio.sleep(delay_s)
        return web.Response(body=data)

    server.handlers["a"] = late
    async with make_node() as node:
        if fails:
            assert await reason(node, server.url("a"), "timeout_s = 0.25") == "image_unreachable"
            assert node.parts() == []
        else:
            assert await pulled(node, server.url("a"), "timeout_s = 0.25") == digest_of(data)


# --- TLS -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, its servers `server` (127.0.0.1) and `named` (images.test), and a client."""
    folder = tmp_path_factory.mktemp("keys")
    for ca in ("ca", "strange"):
        ensure_ca(folder / ca)
    ensure_server(folder / "ca", folder / "server", ["127.0.0.1"])
    ensure_server(folder / "ca", folder / "named", ["images.test"])
    ensure_server(folder / "ca", folder / "other", ["other.test"])
    ensure_server(folder / "ca", folder / "client", ["client.test"])
    both = (folder / "client.crt").read_bytes() + (folder / "client.key").read_bytes()
    (folder / "client.pem").write_bytes(both)
    return folder


@contextlib.asynccontextmanager
async def https(keys: Path, data: bytes, name: str = "server", *, mutual: bool = False,
                to: str = "") -> AsyncIterator[tuple[str, list[web.Request]]]:  # fmt: skip
    """Serve `data` by TLS; `mutual`: to our client only; `to`: redirect there instead."""
    requests: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        if to:
            raise web.HTTPFound(to)
        return web.Response(body=data)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / f"{name}.crt", keys / f"{name}.key")
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(keys / "ca.crt")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/a", requests
    finally:
        await runner.cleanup()


async def test_a_server_of_an_own_authority_needs_its_file(
    make_node: NodeMaker, keys: Path
) -> None:
    data = qcow2_image()
    async with https(keys, data) as (url, requests), make_node() as node:
        assert await reason(node, url) == "image_unreachable"
        assert await reason(node, url, f"ca_file = '{keys}/strange.crt'") == "image_unreachable"
        assert requests == []
        assert await pulled(node, url, f"ca_file = '{keys}/ca.crt'") == digest_of(data)


async def test_paths_begin_at_the_folder_of_the_rules(make_node: NodeMaker, keys: Path) -> None:
    data = qcow2_image()
    async with https(keys, data) as (url, _), make_node() as node:
        (node.names_dir / "site-ca.pem").write_bytes((keys / "ca.crt").read_bytes())
        assert await pulled(node, url, "ca_file = 'site-ca.pem'") == digest_of(data)


@pytest.mark.parametrize("one_file", [True, False])
async def test_a_client_certificate_opens_a_server(
    make_node: NodeMaker, keys: Path, *, one_file: bool
) -> None:
    data = qcow2_image()
    trust = f"ca_file = '{keys}/ca.crt'\n"
    files = f"client_certificate_file = '{keys}/client.crt'\nclient_key_file = '{keys}/client.key'"
    if one_file:
        files = f"client_certificate_file = '{keys}/client.pem'"
    async with https(keys, data, mutual=True) as (url, requests), make_node() as node:
        assert await reason(node, url, trust) == "image_unreachable"
        assert await pulled(node, url, trust + files) == digest_of(data)
        assert len(requests) == 1


async def test_a_server_name_replaces_the_host_of_the_url(make_node: NodeMaker, keys: Path) -> None:
    data = qcow2_image()
    trust = f"ca_file = '{keys}/ca.crt'\n"
    async with https(keys, data, "named") as (url, _), make_node() as node:
        assert await reason(node, url, trust) == "image_unreachable"
        assert await reason(node, url, trust + "server_name = 'b.test'") == "image_unreachable"
        assert await pulled(node, url, trust + "server_name = 'images.test'") == digest_of(data)


# --- files ---------------------------------------------------------------------------------------
async def test_a_login_file_is_read_for_each_pull(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    data = qcow2_image()
    server.guard("a", data, "user:pass:word")
    login = tmp_path / "login"
    fields = f"login_file = '{login}'"
    async with make_node() as node:
        assert await reason(node, server.url("a"), fields) == "image_transport_invalid"
        login.write_text("user:wrong")
        assert await reason(node, server.url("a"), fields) == "image_denied"
        login.write_text("user:pass:word\n")
        assert await pulled(node, server.url("a"), fields) == digest_of(data)
        for path in node.state.rglob("*"):
            assert not path.is_file() or b"pass:word" not in path.read_bytes()


async def test_every_file_that_cannot_be_used_is_told_at_once(
    make_node: NodeMaker, server: Web, keys: Path, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((keys / "client.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked.key").write_bytes(locked)
    (tmp_path / "empty.pem").write_text("no certificate")
    (tmp_path / "login").write_text("nobody\n")
    fields = f"""
ca_file = "{tmp_path}/empty.pem"
client_certificate_file = "{keys}/client.crt"
client_key_file = "{tmp_path}/locked.key"
login_file = "{tmp_path}/login"
proxy = "http://127.0.0.1:1"
proxy_login_file = "{tmp_path}"
"""
    async with make_node() as node:
        write(node, server.url("a"), fields)
        error = await refused(node.images, "x")
    assert error.reason == "image_transport_invalid"
    told = [one.path.rpartition(": ")[2] for one in error.body.details]
    expected = {"ca_file", "client_certificate_file", "login_file", "proxy_login_file"}
    assert set(told) == expected
    assert len(told) == len(expected)
    assert "a.toml: image[0]" in str(error)


# --- proxy ---------------------------------------------------------------------------------------
class Proxy:
    """Answers plain requests itself, and tunnels CONNECT; keeps the heads that it received.

    `to` has the URL of the real server for each `host:port`.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.heads: list[str] = []
        self.to: dict[str, str] = {}
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            if not head.startswith("CONNECT"):
                length = len(self.data)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + self.data)
                await writer.drain()
                return
            port = int(self.to[head.split()[1]].rpartition(":")[2].partition("/")[0])
            there, back = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, back))
                group.create_task(_copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
def registry(server: Web) -> Registry:
    return Registry(server)


@pytest.fixture
def data() -> bytes:
    return qcow2_image()


@pytest.fixture
async def proxy(data: bytes) -> AsyncIterator[Proxy]:
    made = Proxy(data)
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        listener.close()


@pytest.fixture
def login(tmp_path: Path) -> str:
    (tmp_path / "proxy-login").write_text("user:pass:word")
    return f"proxy_login_file = '{tmp_path}/proxy-login'\n"


async def test_a_proxy_gets_the_whole_url_and_its_own_login(
    make_node: NodeMaker, proxy: Proxy, login: str
) -> None:
    fields = f"proxy = '{proxy.url}'\n{login}"
    async with make_node() as node:
        assert await pulled(node, "http://images.invalid/a.qcow2", fields) == digest_of(proxy.data)
    (head,) = proxy.heads
    assert head.startswith("GET http://images.invalid/a.qcow2 HTTP/1.1\r\n")
    assert f"Proxy-Authorization: {BASIC}" in head
    assert "\r\nAuthorization" not in head


async def test_https_goes_through_the_proxys_tunnel(
    make_node: NodeMaker, proxy: Proxy, keys: Path, login: str, data: bytes
) -> None:
    async with https(keys, data, "named", mutual=True) as (url, requests), make_node() as node:
        proxy.to = {"images.test:8443": url}
        fields = (
            f"proxy = '{proxy.url}'\nca_file = '{keys}/ca.crt'\n{login}"
            f"client_certificate_file = '{keys}/client.pem'\n"
        )
        assert await pulled(node, "https://images.test:8443/a", fields) == digest_of(data)
    (head,) = proxy.heads
    assert head.startswith("CONNECT images.test:8443 HTTP/1.1\r\n")
    assert f"Proxy-Authorization: {BASIC}" in head
    assert "Proxy-Authorization" not in requests[0].headers


@pytest.mark.parametrize("mutual", [True, False])
async def test_another_server_gets_neither_certificate_nor_login_nor_name(
    make_node: NodeMaker, keys: Path, proxy: Proxy, tmp_path: Path, *, mutual: bool
) -> None:
    (tmp_path / "login").write_text("user:pass:word\n")
    fields = f"""
proxy = "{proxy.url}"
ca_file = "{keys}/ca.crt"
login_file = "{tmp_path}/login"
client_certificate_file = "{keys}/client.pem"
server_name = "images.test"
"""
    first = https(keys, b"", "named", mutual=True, to="https://other.test/a")
    other = https(keys, proxy.data, "other", mutual=mutual)
    async with make_node() as node, first as (home, at_home), other as (away, elsewhere):
        proxy.to = {"first.test:443": home, "other.test:443": away}
        if mutual:
            assert await reason(node, "https://first.test/a", fields) == "image_unreachable"
            assert elsewhere == []
        else:
            digest = await pulled(node, "https://first.test/a", fields)
            assert digest == digest_of(proxy.data)
            assert "Authorization" not in elsewhere[0].headers
        assert at_home[0].headers["Authorization"] == BASIC


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "169.254.169.254", "2130706433", "0x7f000001", "127.1", "localhost",
             "[::1]", "[::ffff:10.0.0.1]"],
)  # fmt: skip
async def test_a_proxy_opens_no_forbidden_address(
    make_node: NodeMaker, proxy: Proxy, host: str
) -> None:
    async with make_node(allowed_addresses=()) as node:
        found = await reason(node, f"http://{host}/a", f"proxy = '{proxy.url}'")
        assert found == "image_unreachable"
    assert proxy.heads == []


async def test_the_setting_opens_private_addresses_behind_a_proxy_too(
    make_node: NodeMaker, proxy: Proxy
) -> None:
    allowed = (ipaddress.ip_network("10.0.0.0/8"),)
    async with make_node(allowed_addresses=allowed) as node:
        digest = await pulled(node, "http://10.0.0.1/a", f"proxy = '{proxy.url}'")
        assert digest == digest_of(proxy.data)


async def test_a_transport_without_a_proxy_reaches_no_forbidden_address(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    async with make_node(allowed_addresses=()) as node:
        assert await reason(node, server.url("a"), "max_redirects = 1") == "image_unreachable"
    assert server.requests == []


# --- registries ----------------------------------------------------------------------------------
async def test_a_registry_is_reached_by_the_transport(
    make_node: NodeMaker, registry: Registry, data: bytes
) -> None:
    registry.push("a", "1", gz(tar(("disk/a", data))))
    async with make_node(registries=registry.known) as node:
        ref = registry.ref("a:1")
        fields = "proxy = 'http://127.0.0.1:1'"
        assert await reason(node, ref, fields) == "image_unreachable"
        assert await pulled(node, ref, "timeout_s = 10") == digest_of(data)


async def test_a_registry_takes_no_login_of_a_transport(
    make_node: NodeMaker, registry: Registry
) -> None:
    async with make_node(registries=registry.known) as node:
        write(node, registry.ref("a:1"), "login_file = 'x'")
        error = await refused(node.images, "x")
        assert error.reason == "image_names_invalid"
        assert "registry_auth_file" in str(error)


async def test_two_transports_to_one_url_are_two_transfers(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    """Nobody gets an image by another's login."""
    data = qcow2_image()

    async def closed(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        if request.headers.get("Authorization") != BASIC:
            raise web.HTTPForbidden
        return web.Response(body=data)

    server.handlers["a"] = closed
    (tmp_path / "login").write_text("user:pass:word")
    async with make_node() as node:
        rule = "[[image]]\nname = '{}'\nurl = '" + server.url("a") + "'\n"
        (node.names_dir / "a.toml").write_text(
            rule.format("with") + "transport = 'in'\n" + rule.format("without")
            + f"[transports.in]\nlogin_file = '{tmp_path}/login'\n"
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            task = group.create_task(node.images.refresh(parse_image_ref("with")))
            await asyncio.sleep(0.03)
            assert (await refused(node.images, "without")).reason == "image_denied"
        assert task.result().digest == digest_of(data)
