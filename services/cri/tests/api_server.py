"""An API server over HTTP that has a few objects. Each list is one path."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
TOKEN = "s3cret-token"
SYSTEM = "/apis/virtlet.k8s/v1/namespaces/kube-system"
IMAGE_MAPPINGS = f"{SYSTEM}/virtletimagemappings"
CONFIG_MAPPINGS = f"{SYSTEM}/virtletconfigmappings"
CONFIG_MAPS = "/api/v1/namespaces/kube-system/configmaps"
NODES = "/api/v1/nodes"


class ApiServer:
    """The objects by the path of their list, and single objects by their own path."""

    def __init__(self) -> None:
        self.lists: dict[str, list[Json]] = {}
        self.objects: dict[str, Json] = {}
        self.refused = False
        self.away = False
        self.asked: list[str] = []
        self.url = ""
        self._changed = asyncio.Event()
        self._version = 0

    def put(self, path: str, *objects: Json) -> None:
        """Replace a list, and end the watches."""
        self.lists[path] = list(objects)
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server."""
        path = folder / "kubeconfig"
        whole = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        path.write_text(json.dumps(whole))
        return path

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if self.away:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.refused or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"message": "forbidden"}, status=403)
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        if request.path not in self.lists:
            return web.json_response({"message": "not found"}, status=404)
        if "watch" in request.query:
            return await self._watch(request)
        meta = {"resourceVersion": str(self._version)}
        return web.json_response({"metadata": meta, "items": self.lists[request.path]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if int(request.query["resourceVersion"]) == self._version:
            await self._changed.wait()
        await response.write(b'{"type": "MODIFIED", "object": {}}\n')
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ApiServer"]:
        """Answer until the end of the block."""
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self._changed.set()
            await runner.cleanup()


def named(name: str, **parts: Any) -> Json:
    """Return an object as an API server lists it."""
    return {"metadata": {"name": name, "uid": "1", "managedFields": [{}]}, **parts}
