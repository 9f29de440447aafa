"""A hostile image server: URLs and a registry on loopback; each path is another attack."""

import asyncio
import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from services.imaged.tests.site_under_test import qcow2_image, qcow2_with_backing
from tests.fuzz.pool import IMAGES_PORT

MIB = 1024**2
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


class ImageServer:
    """Answers by the first part of the path; `asked` counts the requests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/images")
        self._good = qcow2_image(payload=0)
        self._over = asyncio.Event()
        self.asked = 0
        self._ways: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "good": self._plain,
            "slow": self._slow,
            "hang": self._hang,
            "garbage": self._garbage,
            "huge": self._huge,
            "redirect": self._redirect,
            "short": self._short,
            "lies": self._lies,
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self._app(), shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", IMAGES_PORT, reuse_address=True).start()
        try:
            yield
        finally:
            self._over.set()
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        parts = request.path.strip("/").split("/")
        with suppress(ConnectionError):  # the client has disconnected
            if parts[0] == "v2":
                return await self._registry(request, parts[1:])
            return await self._ways.get(parts[0], self._garbage)(request)
        return web.Response(status=500)

    # --- URLs -----------------------------------------------------------------------------
    async def _plain(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._good)

    async def _slow(self, request: web.Request) -> web.StreamResponse:
        """Sends just fast enough to avoid the stall limit, for a long while."""
        return await self._stream(request, MIB, 16 * 1024, 0.4)

    async def _hang(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, MIB, 1, 1000.0)

    async def _huge(self, request: web.Request) -> web.StreamResponse:
        """Announces a terabyte, and sends some of it."""
        return await self._stream(request, 2**40, 64 * 1024, 0.02, pieces=64)

    async def _short(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, MIB, 1000, 0.0, pieces=3)

    async def _stream(
        self, request: web.Request, length: int, piece: int, pause_s: float, pieces: int = 2**30
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": str(length)})
        await answer.prepare(request)
        sent = 0
        while sent < min(length, piece * pieces) and not self._over.is_set():
            part = self._good[sent : sent + piece].ljust(piece, b"\0")[: length - sent]
            await answer.write(part)
            sent += len(part)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._over.wait()
        if request.transport is not None:
            request.transport.close()
        return answer

    async def _garbage(self, _request: web.Request) -> web.StreamResponse:
        bodies = (
            *(b"", b"QFI\xfb", b"QFI\xfb" + b"\xff" * 5000, self._good[:4096] + b"\xff" * 100_000),
            *(qcow2_with_backing(), gzip.compress(b"\0" * 50 * MIB), b"\x1f\x8b" + b"\0" * 5000),
            *(self._rng.randbytes(70_000), b"KDMV" + b"\0" * 9000, b"<html>" * 500),
        )
        return web.Response(body=self._rng.choice(bodies))

    async def _redirect(self, request: web.Request) -> web.StreamResponse:
        places = ("/redirect/1", "file:///etc/shadow", "http://127.0.0.1:1/", "//x", "\x01", "")
        raise web.HTTPFound(self._rng.choice(places) or str(request.url))

    async def _lies(self, _request: web.Request) -> web.StreamResponse:
        headers = {"ETag": "e" * 4000, "Content-Encoding": "gzip", "Last-Modified": "\u00e9"}
        return web.Response(body=self._good, headers=headers, status=self._rng.choice((200, 206)))

    # --- a registry -----------------------------------------------------------------------
    async def _registry(self, request: web.Request, parts: list[str]) -> web.StreamResponse:
        kind = parts[0] if parts else ""
        if "manifests" in parts:
            return web.Response(body=self._manifest(kind), content_type=MANIFEST)
        if "blobs" in parts:
            if kind in {"slow", "hang", "huge"}:
                return await self._ways[kind](request)
            return web.Response(body=self._layer(kind))
        return web.json_response({})

    def _manifest(self, kind: str) -> bytes:
        layer = self._layer(kind)
        digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
        size = len(layer) if kind != "lies" else 2**50
        one = {"mediaType": LAYER, "digest": digest, "size": size}
        config: dict[str, object] = {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest,
        }
        config |= {"size": 2}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [one]}
        hostile: tuple[object, ...] = (
            manifest | {"layers": [one] * 20_000},
            manifest | {"layers": [one | {"digest": "sha256:../../etc/shadow"}]},
            manifest | {"layers": [one | {"size": -1}]},
            {"schemaVersion": 2, "manifests": [{"digest": digest, "size": 1}] * 30_000},
            [[]],
            "x" * 4_000_000,
        )
        if kind in {"garbage", "short"}:
            return json.dumps(self._rng.choice(hostile)).encode()
        if kind == "redirect":
            return b'{"a":' * 100_000
        return json.dumps(manifest).encode()

    def _layer(self, kind: str) -> bytes:
        return _tar("disk/disk.img", self._good) if kind != "garbage" else _tar("../x", b"\0" * MIB)


def _tar(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)
