"""A fake API server that keeps ConfigMaps in memory and injects faults on demand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

Json = dict[str, Any]
Fault = Callable[[web.Request], "web.StreamResponse | None"]


class Served(Protocol):
    """A server of HTTP."""

    async def open(self) -> int: ...

    async def close(self) -> None: ...


class Faulty:
    """Lists in pages and watches from a version. Each request takes one of the `faults` first.

    `forget` makes every earlier version a 410, like a compacted etcd.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.version = 1
        self.floor = 0
        self.faults: list[tuple[str, int, dict[str, str]]] = []
        """(list or watch, status, headers).

        Status 0 closes the connection, 1 ends within a line, and 200 ends at once.
        """
        self.asked: list[str] = []
        self.accepted: set[str] = set()
        """The media types that clients asked for."""
        self._log: list[tuple[int, str, Json]] = []
        self._news = asyncio.Event()
        self._open: list[web.Request] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    # --- life cycle ---------------------------------------------------------------------------
    async def open(self) -> int:
        """Serve on the previous port, if there was one."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]
        return self._port

    async def close(self) -> None:
        """Close all connections, and answer no requests."""
        self.hang_up()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def watches(self) -> int:
        """Return the number of open watches."""
        return len(self._open)

    # --- changes ------------------------------------------------------------------------------
    def put(self, name: str, value: str = "") -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        meta = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(self.version)}
        self.objects[name] = {"metadata": meta, "data": {"value": value}}
        self._tell(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.objects.pop(name)
        gone["metadata"] = {**gone["metadata"], "resourceVersion": str(self.version)}
        self._tell("DELETED", gone)

    def forget(self) -> None:
        self.version += 1
        self.floor = self.version

    def restore(self, objects: dict[str, Json], version: int) -> None:
        """Continue from a backup: versions begin after its version."""
        self.objects, self.version = objects, version
        self._log.clear()
        self.hang_up()

    def hang_up(self) -> None:
        """End every open watch."""
        for request in tuple(self._open):
            if request.transport is not None:
                request.transport.abort()

    def _tell(self, kind: str, obj: Json) -> None:
        self._log.append((self.version, kind, json.loads(json.dumps(obj))))
        news, self._news = self._news, asyncio.Event()
        news.set()

    # --- answers ------------------------------------------------------------------------------
    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = "watch" if "watch" in request.query else "list"
        self.asked.append(what)
        self.accepted.add(request.headers["Accept"])
        if self.faults and self.faults[0][0] == what:
            _, status, headers = self.faults.pop(0)
            return await self._faulty(request, status, headers)
        return await (self._watch if what == "watch" else self._list)(request)

    async def _faulty(
        self, request: web.Request, status: int, headers: dict[str, str]
    ) -> web.StreamResponse:
        if status >= 300:
            return web.json_response(_status(status), status=status, headers=headers)
        response = web.StreamResponse()
        if status == 0:
            assert request.transport is not None
            request.transport.close()
            return response
        await response.prepare(request)
        if status == 1:
            await response.write(b'{"type":"ADDED","object":{"metadata":{"na')
            assert request.transport is not None
            request.transport.close()
        return response

    async def _list(self, request: web.Request) -> web.StreamResponse:
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", "0"))
        names = sorted(self.objects)
        meta = {"resourceVersion": str(self.version)}
        if begin + limit < len(names):
            meta["continue"] = str(begin + limit)
        items = [self.objects[name] for name in names[begin : begin + limit]]
        return web.json_response({"metadata": meta, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"] or self.version)
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.floor:
            await _line(response, "ERROR", _status(410))
            return response
        self._open.append(request)
        if not request.query["resourceVersion"]:
            for obj in tuple(self.objects.values()):
                await _line(response, "ADDED", obj)
        try:
            while request.transport is not None and not request.transport.is_closing():
                news = self._news
                for version, kind, obj in self._log:
                    if version > since:
                        await _line(response, kind, obj)
                        since = version
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), 0.1)
        except ConnectionError:
            pass
        finally:
            self._open.remove(request)
        return response


def _status(code: int) -> Json:
    return {"kind": "Status", "code": code, "reason": "Asked", "message": "as the test wants it"}


async def _line(response: web.StreamResponse, kind: str, obj: Json) -> None:
    await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


@asynccontextmanager
async def served(faulty: Served, folder: Path) -> AsyncIterator[Path]:
    """Serve while the context is open, and yield a kubeconfig."""
    port = await faulty.open()
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "t", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "t", "user": {}}],
        "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
        "current-context": "t",
    }
    path.write_text(json.dumps(config))
    try:
        yield path
    finally:
        await faulty.close()
