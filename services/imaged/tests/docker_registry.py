"""Debian's registry on loopback, and pushes as container tools do them."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from services.imaged.tests.registry_under_test import INDEX, Registry

from virtbus.imaged.edge.containers import Registries
from virtbus.schemas.registry_login import Login

USER = "me:$2b$04$UMQ3yuKh9CcPG7.zOvgdxubwuVh6I5ZIsbTKdn199lddVurzeeq0i"
"""The password is `secret`."""


class Debian:
    """`docker-registry` on a free port of loopback, its files below `place`."""

    def __init__(self, place: Path, *, private: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{probe.getsockname()[1]}"
        self.headers = {"Authorization": Login("me", "secret").header} if private else {}
        config = {
            "version": 0.1,
            "log": {"accesslog": {"disabled": True}, "level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(place / "registry")}},
            "http": {"addr": self.host},
        }
        if private:
            (place / "htpasswd").write_text(f"{USER}\n")
            config["auth"] = {"htpasswd": {"realm": "r", "path": str(place / "htpasswd")}}
        self._config = place / "config.json"
        self._config.write_text(json.dumps(config))
        self.process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        argv = ["docker-registry", "serve", str(self._config)]
        self.process = subprocess.Popen(argv, env={"PATH": os.environ["PATH"]})
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Wait until it answers."""
        async with aiohttp.ClientSession(f"http://{self.host}", headers=self.headers) as session:
            while True:
                try:
                    async with session.get("/v2/"):
                        break
                except aiohttp.ClientConnectionError:
                    assert self.process is not None
                    assert self.process.poll() is None
                    await asyncio.sleep(0.05)
            yield session

    async def push(self, images: Registry) -> None:
        """Push everything in `images`, as `docker push` does."""
        async with self.client() as session:
            for path, data in sorted(
                images.blobs.items(), key=lambda item: self._turn(images, *item)
            ):
                repository, kind, name = path.rsplit("/", 2)
                if kind == "blobs":
                    async with session.post(f"/v2/{repository}/blobs/uploads/") as begun:
                        assert begun.status == 202, await begun.text()
                        where = begun.headers["Location"]
                    mark = "&" if "?" in where else "?"
                    put = session.put(f"{where}{mark}digest={name}", data=io.BytesIO(data))
                else:
                    headers = {"Content-Type": images.kinds[path]}
                    put = session.put(f"/v2/{path}", data=io.BytesIO(data), headers=headers)
                async with put as done:
                    assert done.status == 201, (path, await done.text())

    def _turn(self, images: Registry, path: str, _: bytes) -> int:
        """A manifest comes after those that it names."""
        return 0 if "/blobs/" in path else 2 if images.kinds[path] == INDEX else 1

    def ref(self, name: str) -> str:
        return f"docker://{self.host}/{name}"

    @property
    def known(self) -> Registries:
        return Registries(insecure=frozenset({self.host}), architecture="amd64")


@dataclass
class Wire:
    """A link to a registry; it forwards `most` bytes of answers and drops the rest."""

    target: str
    most: int
    host: str = ""
    carried: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    joined: set["asyncio.Task[object]"] = field(default_factory=set)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in self.joined:
                task.cancel()
            if self.joined:
                await asyncio.wait(self.joined)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        self.joined.add(own)
        host, _, port = self.target.partition(":")
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            answers, asks = await asyncio.open_connection(host, int(port))
            with contextlib.closing(asks):
                await self._between(reader, writer, answers, asks)

    async def _between(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        asks: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_carry(reader, asks))
            cut = False
            while data := await answers.read(64 * 1024):
                cut = cut or self.carried >= self.most
                if cut:
                    self.full.set()
                    continue
                writer.write(data)
                await writer.drain()
                self.carried += len(data)
            asking.cancel()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
