"""A real HTTP server on loopback, and imaged's parts wired as in the service."""

import asyncio
import base64
import contextlib
import ipaddress
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from virtbus.imaged.core import overlay
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disks import Disks
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.images import Images

MIB = 1024**2
LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
"""Networks of the tests' servers; the product connects to them only with a setting."""
FAST = TransferLimits(
    max_bytes=64 * MIB,
    min_rate_bytes_s=1024,
    rate_window_s=0.4,
    connect_timeout_s=2,
    header_timeout_s=1,
    total_timeout_s=15,
    slow_turn_s=0.2,
    backoff_s=0.01,
    max_backoff_s=0.02,
    allowed_addresses=(LOOPBACK,),
)


def qcow2_image(virtual_bytes: int = 16 * MIB, payload: int = 3 * MIB) -> bytes:
    """A valid qcow2 file: its tables, then `payload` unique bytes."""
    layout = overlay.build(virtual_bytes)
    data = bytearray(layout.length_bytes)
    for offset, piece in layout.pieces:
        data[offset : offset + len(piece)] = piece
    return bytes(data) + os.urandom(payload)


def qcow2_with_backing() -> bytes:
    data = bytearray(qcow2_image(payload=0))
    struct.pack_into(">QI", data, 8, 512, 11)
    data[512:523] = b"/etc/shadow"
    return bytes(data)


@dataclass
class Web:
    """A server with the test's answers; `requests` are those it received."""

    base: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    handlers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(
        default_factory=dict
    )
    prefixes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(
        default_factory=dict
    )
    """Answer all paths with this prefix."""
    requests: list[web.Request] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"

    def guard(self, path: str, data: bytes, login: str) -> None:
        """Serve `data` at `path` to requests with this Basic login only."""
        basic = f"Basic {base64.b64encode(login.encode()).decode()}"

        async def closed(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization") != basic:
                raise web.HTTPUnauthorized
            return web.Response(body=data)

        self.handlers[path] = closed

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        path = request.path.lstrip("/")
        if path in self.handlers:
            return await self.handlers[path](request)
        for prefix, handler in self.prefixes.items():
            if path.startswith(prefix):
                return await handler(request)
        if path not in self.files:
            raise web.HTTPNotFound
        return self.sent(request, self.files[path], {})

    def sent(
        self, request: web.Request, data: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Answer with `data`, or the requested range of it."""
        etag = self.etags.get(request.path.lstrip("/"), '"v1"')
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304)
        headers = headers | {"ETag": etag}
        wanted = request.headers.get("Range", "")
        if wanted and request.headers.get("If-Range") == etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return web.Response(status=206, body=data[start:], headers=headers)
        return web.Response(body=data, headers=headers)


@contextlib.asynccontextmanager
async def raw_server(body: bytes, *, hang: bool = False) -> AsyncIterator[str]:
    """Answers each connection with exactly these bytes, even if they violate HTTP."""
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError, asyncio.IncompleteReadError),
        ):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            await writer.drain()
            if hang:
                await gone.wait()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        gone.set()
        listener.close()


@dataclass
class Node:
    """imaged without its bus."""

    state: Path
    source_dir: Path
    store: ImageStore
    files: DiskFolders
    images: Images
    disks: Disks
    names_dir: Path

    def tree(self) -> list[str]:
        """Return all files of the state folder except locks."""
        return sorted(
            str(path.relative_to(self.state)) for path in self.state.rglob("*") if path.is_file()
        )

    def parts(self) -> list[str]:
        return [name for name in self.tree() if name.startswith("images/part/")]

    def data(self) -> list[str]:
        return [name for name in self.tree() if name.startswith("images/data/")]


NodeMaker = Callable[..., contextlib.AbstractAsyncContextManager[Node]]
