"""Registries that want logins, redirect, lie or refuse (SRC-12 … SRC-15, SRC-18, SRC-20)."""

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from services.imaged.tests.registry_under_test import (
    INDEX,
    MANIFEST,
    Registry,
    descriptor,
    digest_of,
    gz,
    tar,
)
from services.imaged.tests.site_under_test import NodeMaker, Web, qcow2_image, raw_server
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.edge.containers import Registries
from virtbus.schemas.errors import Retry
from virtbus.schemas.image import parse_image_ref

DISK = qcow2_image(payload=1000)
LAYER = gz(tar(("disk/a", DISK)))
LOGIN = "Basic " + base64.b64encode(b"me:pass:word").decode()


@pytest.fixture
def registry(server: Web) -> Registry:
    found = Registry(server)
    found.push("team/disk", "1", LAYER)
    return found


def logins(registry: Registry, path: Path, login: str = LOGIN, name: str = "") -> Registries:
    """Return the settings of a node with `login` in its registry-auth.json."""
    auths = {name or registry.host: {"auth": login.removeprefix("Basic ")}}
    path.write_text(json.dumps({"auths": auths, "credHelpers": {"x": "y"}}))
    return replace(registry.known, auth_file=path)


class Tokens:
    """A token server at /token; `user` may have a token."""

    def __init__(self, registry: Registry, user: str = "") -> None:
        self.registry, self.user, self.given = registry, user, 0
        self.queries: list[dict[str, str]] = []
        registry.challenge = f'Bearer realm="{registry.site.url("token")}",service="r.example"'
        registry.login = "Bearer none"
        registry.site.handlers["token"] = self._answer

    async def _answer(self, request: web.Request) -> web.Response:
        self.queries.append(dict(request.query))
        if request.headers.get("Authorization", "") != self.user:
            return web.Response(status=401)
        self.given += 1
        self.registry.login = f"Bearer token-{self.given}"
        return web.json_response({"token": f"token-{self.given}", "expires_in": 60})


async def test_a_token_is_fetched_with_or_without_a_login_and_reused_until_it_expires(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    tokens = Tokens(registry)

    async def ended(request: web.Request) -> web.StreamResponse:
        del server.handlers[request.path.lstrip("/")]
        registry.login = "Bearer another"
        return await server.answer(request)

    server.handlers[f"v2/team/disk/blobs/{digest_of(LAYER)}"] = ended
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(parse_image_ref(registry.ref("team/disk:1")))
        assert image.digest == digest_of(DISK)
    query = {"service": "r.example", "scope": "repository:team/disk:pull"}
    assert tokens.queries == [query, query]


@pytest.mark.parametrize("name", ["", "{host}/team", "https://{host}", "{host}/team/disk"])
async def test_a_private_image_is_pulled_with_the_login_of_the_file(
    make_node: NodeMaker, registry: Registry, tmp_path: Path, name: str
) -> None:
    known = logins(registry, tmp_path / "a.json", name=name.format(host=registry.host))
    for _ in ("password", "token"):
        registry.challenge, registry.login = 'Basic realm="r"', LOGIN
        if _ == "token":
            Tokens(registry, LOGIN)
        async with make_node(registries=known, state=tmp_path / _) as node:
            await node.images.ensure(parse_image_ref(registry.ref("team/disk:1")))


@pytest.mark.parametrize("token", [False, True])
async def test_a_private_image_without_a_valid_login_names_the_next_step(
    make_node: NodeMaker, registry: Registry, tmp_path: Path, token: bool
) -> None:
    registry.challenge, registry.login = 'Basic realm="r"', LOGIN
    if token:
        Tokens(registry, LOGIN)
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert (error.reason, error.body.retry) == ("image_denied", Retry.NEVER)
        assert "registry-auth.json" in str(error)
        asked = registry.asked("")
    wrong = "Basic " + base64.b64encode(b"you:secret-word").decode()
    async with make_node(registries=logins(registry, tmp_path / "a.json", wrong)) as node:
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert error.reason == "image_denied"
        assert "user you" in str(error)
        assert "secret-word" not in str(error)
        assert registry.asked("") <= asked + 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "auths"), ('{"auths": {"HOST": {"auth": "c2VjcmV0"}}}', "base64"), ("[]", "auths"),
     ('{"auths": {"HOST": {}}}', "username"), ('{"auths": []}', "auths")],
)  # fmt: skip
async def test_a_file_of_logins_that_cannot_be_read_is_named_and_not_repeated(
    make_node: NodeMaker, registry: Registry, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "auth.json"
    path.write_text(text.replace("HOST", registry.host))
    async with make_node(registries=replace(registry.known, auth_file=path)) as node:
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert error.reason == "registry_auth_invalid"
        assert str(path) in str(error)
        assert words in str(error)
        assert "secret" not in str(error)


async def test_a_password_is_sent_to_no_unknown_token_server(
    make_node: NodeMaker, registry: Registry, tmp_path: Path
) -> None:
    known = logins(registry, tmp_path / "a.json")
    async with make_node(registries=known) as node:
        registry.challenge, registry.login = 'Bearer realm="http://evil.example/t"', "x"
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert error.reason == "registry_realm_unknown"
        assert "registry_realms" in str(error)
        registry.challenge = 'Bearer realm="http://127.0.0.1:1/token"'
        assert (
            await refused(node.images, registry.ref("team/disk:1"))
        ).reason == "redirect_refused"
    async with make_node(registries=registry.known) as node:
        for realm in ("http://127.0.0.1:1/t", "file:///etc/passwd"):
            registry.challenge = f'Bearer realm="{realm}"'
            error = await refused(node.images, registry.ref("team/disk:1"))
            assert error.reason == "redirect_refused"
        registry.challenge = 'Bearer realm="http://169.254.169.254/t"'
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert error.reason == "image_unreachable"


@pytest.mark.parametrize("same", [True, False])
async def test_a_login_does_not_follow_a_redirect_to_another_server(
    make_node: NodeMaker,
    registry: Registry,
    server: Web,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    same: bool,
) -> None:
    """The other server is this one under another name, which only the test's setting allows."""
    registry.challenge, registry.login = 'Basic realm="r"', LOGIN
    elsewhere = server.base.replace("127.0.0.1", "localhost")
    server.files["cdn"] = LAYER

    async def away(_: web.Request) -> web.Response:
        where = "/cdn" if same else f"{elsewhere}/cdn"
        return web.Response(status=307, headers={"Location": where})

    server.handlers[f"v2/team/disk/blobs/{digest_of(LAYER)}"] = away
    source = parse_image_ref(registry.ref("team/disk:1"))
    async with make_node(registries=logins(registry, tmp_path / "a.json")) as node:
        if not same:
            assert (await refused(node.images, source.ref)).reason == "redirect_refused"
            monkeypatch.setattr(
                "virtbus.imaged.edge.http.redirect_target", lambda *_: f"{elsewhere}/cdn"
            )
        await node.images.ensure(source)
    sent = [r.headers.get("Authorization") for r in server.requests if r.path == "/cdn"]
    assert sent == [LOGIN if same else None]


async def test_a_mirror_replaces_its_registry_and_gets_only_its_own_login(
    make_node: NodeMaker, registry: Registry, tmp_path: Path
) -> None:
    for name in ("docker.io", registry.host):
        registry.login, registry.challenge = LOGIN, "Basic realm=x"
        known = logins(registry, tmp_path / "auth.json", name=name)
        known = replace(known, mirrors=(("docker.io", registry.host),))
        async with make_node(registries=known, attempts=1) as node:
            if name == "docker.io":
                assert (await refused(node.images, "docker://team/disk:1")).reason == "image_denied"
            else:
                await node.images.ensure(parse_image_ref("docker://team/disk:1"))
        sent = {r.headers.get("Authorization") for r in registry.site.requests}
        assert (LOGIN in sent) == (name != "docker.io")


async def test_plain_http_is_spoken_only_where_the_settings_say_so(
    make_node: NodeMaker, registry: Registry
) -> None:
    async with make_node(registries=Registries(), attempts=1) as node:
        error = await refused(node.images, registry.ref("team/disk:1"))
        assert error.reason == "image_unreachable"
        assert "insecure_registries" in str(error)
        assert registry.asked("") == 0


async def test_an_absent_image_is_named_and_a_busy_registry_is_retried(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref("team/disk:2"))
        assert error.reason == "image_not_found"
        assert registry.ref("team/disk:2") in str(error)

        async def busy(request: web.Request) -> web.StreamResponse:
            del server.handlers[request.path.lstrip("/")]
            return web.Response(status=429, headers={"Retry-After": "0"})

        server.handlers["v2/team/disk/manifests/1"] = busy
        await node.images.ensure(parse_image_ref(registry.ref("team/disk:1")))


async def test_a_tag_that_moves_meanwhile_changes_nothing(
    make_node: NodeMaker, registry: Registry, server: Web
) -> None:
    old = registry.push_index("team/disk", "1", {"amd64": (LAYER,)})
    path = f"v2/team/disk/manifests/{old}"

    async def moved(request: web.Request) -> web.StreamResponse:
        registry.push("team/disk", "1", gz(tar(("disk/b", b"no disk"))))
        del server.handlers[path]
        return await server.answer(request)

    server.handlers[path] = moved
    async with make_node(registries=registry.known) as node:
        image = await node.images.ensure(parse_image_ref(registry.ref("team/disk:1")))
        assert image.digest == digest_of(DISK)


def _big(value: dict[str, Any]) -> None:
    value["annotations"] = {"x": "y" * 1024**2}


def _set(**more: Any) -> Any:
    return lambda value: value.update(more)


def _layer(**more: Any) -> Any:
    return lambda value: value["layers"][0].update(more)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(manifests=[]), "manifest_invalid"),
        (_set(schemaVersion=1), "manifest_invalid"),
        (_set(mediaType="application/vnd.docker.distribution.manifest.v1+json"),
         "manifest_invalid"),
        (_set(mediaType=["x"]), "manifest_invalid"),
        (_set(layers=[]), "manifest_invalid"),
        (_set(layers={}), "manifest_invalid"),
        (_set(config=None), "manifest_invalid"),
        (_layer(digest="md5:00"), "manifest_invalid"),
        (_layer(digest="sha256:../../x"), "manifest_invalid"),
        (_layer(size=-1), "manifest_invalid"),
        (_layer(size="1"), "manifest_invalid"),
        (_layer(size=2**60), "image_too_large"),
        (_layer(size=10**400), "manifest_invalid"),
        (_layer(mediaType="application/vnd.cncf.helm.chart.content.v1.tar+gzip"),
         "container_disk_missing"),
        (_layer(size=5), "image_unreachable"),
        (lambda v: v.update(layers=v["layers"] * 300), "manifest_invalid"),
        (_big, "manifest_invalid"),
    ],
)  # fmt: skip
async def test_manifests_that_lie_are_refused(
    make_node: NodeMaker, registry: Registry, change: Any, reason: str
) -> None:
    value = registry.manifest("a", [LAYER])
    change(value)
    registry.push_manifest("a", "1", value, MANIFEST)
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref("a:1"))
        assert error.reason == reason
        assert node.data() == []


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"[]", b"\xff", b'{"a":' * 10_000])
async def test_a_body_that_is_no_json_object_is_refused(
    make_node: NodeMaker, registry: Registry, body: bytes
) -> None:
    registry.put("a/manifests/1", body, MANIFEST)
    async with make_node(registries=registry.known) as node:
        assert (await refused(node.images, registry.ref("a:1"))).reason == "manifest_invalid"


async def test_an_index_leads_to_no_other_index_and_to_no_other_bytes(
    make_node: NodeMaker, registry: Registry
) -> None:
    inner = registry.push_index("a", "inner", {"amd64": (LAYER,)})
    body = registry.blobs[f"a/manifests/{inner}"]
    platform = {"os": "linux", "architecture": "amd64"}
    for kind, reason in ((INDEX, "wrong_architecture"), (MANIFEST, "manifest_invalid")):
        entries = [descriptor(body, kind, platform=platform)]
        value = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        registry.push_manifest("a", "1", value, INDEX)
        async with make_node(registries=registry.known) as node:
            assert (await refused(node.images, registry.ref("a:1"))).reason == reason
    pin = registry.push_index("a", "1", {"amd64": (LAYER,)})
    registry.blobs[f"a/manifests/{pin}"] = body + b" "
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref(f"a:1@{pin}"))
        assert error.reason == "manifest_invalid"


async def test_only_the_architecture_of_a_configuration_is_read(
    make_node: NodeMaker, registry: Registry
) -> None:
    value = registry.manifest("a", [LAYER], architecture="")
    registry.push_manifest("a", "1", value, MANIFEST)
    async with make_node(registries=registry.known) as node:
        await node.images.ensure(parse_image_ref(registry.ref("a:1")))


@pytest.mark.parametrize("token", [False, True])
async def test_a_stalled_registry_is_abandoned(
    make_node: NodeMaker, registry: Registry, token: bool
) -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", hang=True) as base:
        host = base.removeprefix("http://")
        if token:
            registry.site.handlers["token"] = _hangs
            registry.challenge, host = f'Bearer realm="{registry.site.url("token")}"', registry.host
        known = Registries(insecure=frozenset({host}))
        async with make_node(registries=known, attempts=2) as node:
            error = await refused(node.images, f"docker://{host}/team/disk:1")
            assert error.reason == "image_unreachable"
            assert "in time" in str(error)


async def _hangs(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "99"})
    await response.prepare(request)
    await response.write(b"{")
    await asyncio.Event().wait()
    return response


async def test_an_endless_manifest_is_abandoned(make_node: NodeMaker) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"
    async with raw_server(head + bytes(3 * 1024**2), hang=True) as base:
        host = base.removeprefix("http://")
        known = Registries(insecure=frozenset({host}))
        async with make_node(registries=known) as node:
            error = await refused(node.images, f"docker://{host}/a:1")
            assert error.reason == "manifest_invalid"
