"""An API server in memory, for objects of any kind."""

import asyncio
import copy
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from services.kubebridge.tests.faulty import served

Json = dict[str, Any]


class Name(NamedTuple):
    plural: str
    namespace: str = ""
    name: str = ""


class RefusedError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class ApiServer:
    """The objects by name, and a log of their changes for watches."""

    def __init__(self) -> None:
        self.objects: dict[Name, Json] = {}
        self.reads: list[Name] = []
        self.version = 0
        self._log: list[tuple[int, str, Name, Json]] = []
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def open(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # --- objects --------------------------------------------------------------------------
    def create(self, at: Name, obj: Json) -> Json:
        meta = obj.setdefault("metadata", {})
        at = at._replace(name=meta["name"])
        if at in self.objects:
            raise RefusedError(409, "AlreadyExists")
        made = {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": _now()}
        obj["metadata"] = made | {"namespace": at.namespace} | meta
        return self._store("ADDED", at, obj)

    def change(self, at: Name, obj: Json) -> Json:
        """Store a changed object at the version that it has. Without finalizers, it may end."""
        before = self._found(at)
        version = obj["metadata"].get("resourceVersion") or before["metadata"]["resourceVersion"]
        if version != before["metadata"]["resourceVersion"]:
            raise RefusedError(409, "Conflict")
        meta = obj["metadata"]
        if obj == before:
            return before
        if obj.get("spec") != before.get("spec"):
            meta["generation"] = meta.get("generation", 0) + 1
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            del self.objects[at]
            return self._log_change("DELETED", at, obj)
        return self._store("MODIFIED", at, obj)

    def delete(self, at: Name) -> Json:
        obj = copy.deepcopy(self._found(at))
        obj["metadata"].setdefault("deletionTimestamp", _now())
        obj["metadata"].pop("resourceVersion")
        return self.change(at, obj)

    def _found(self, at: Name) -> Json:
        if at not in self.objects:
            raise RefusedError(404, "NotFound")
        return self.objects[at]

    def _store(self, kind: str, at: Name, obj: Json) -> Json:
        self.objects[at] = obj
        return self._log_change(kind, at, obj)

    def _log_change(self, kind: str, at: Name, obj: Json) -> Json:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._log.append((self.version, kind, at, copy.deepcopy(obj)))
        news, self._news = self._news, asyncio.Event()
        news.set()
        return obj

    # --- requests -------------------------------------------------------------------------
    async def _answer(self, request: web.Request) -> web.StreamResponse:
        at = _name(request.path)
        body = await request.json() if request.can_read_body else {}
        try:
            if request.method == "GET" and not at.name:
                return await self._listed(request, at)
            return web.json_response(self._done(request, at, body))
        except RefusedError as refused:
            status = {"kind": "Status", "code": refused.code, "reason": refused.reason}
            return web.json_response(status, status=refused.code)

    def _done(self, request: web.Request, at: Name, body: Any) -> Json:
        match request.method:
            case "GET":
                self.reads.append(at)
                return self._found(at)
            case "POST":
                return self.create(at, body)
            case "PUT":
                return self.change(at, body)
            case "DELETE":
                return self.delete(at)
            case _:
                return self._patch(at, body)

    def _patch(self, at: Name, body: Any) -> Json:
        obj = copy.deepcopy(self._found(at))
        if isinstance(body, dict):
            obj["metadata"].pop("resourceVersion")
            return self.change(at, _merged(obj, body))
        for one in body:
            *way, last = [part.replace("~1", "/") for part in one["path"].split("/")[1:]]
            here = obj
            for part in way:
                here = here[part]
            here[last] = one["value"]
        return self.change(at, obj)

    async def _listed(self, request: web.Request, at: Name) -> web.StreamResponse:
        label = request.query.get("labelSelector", "").partition("=")[0]

        def chosen(name: Name, obj: Json) -> bool:
            same = name.plural == at.plural and at.namespace in {"", name.namespace}
            return same and (not label or label in obj["metadata"].get("labels", {}))

        if "watch" not in request.query:
            items = [obj for name, obj in self.objects.items() if chosen(name, obj)]
            meta = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": meta, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        since = int(request.query["resourceVersion"] or 0)  # without a version: everything
        while True:
            news = self._news
            for version, kind, name, obj in tuple(self._log):
                if version > since and chosen(name, obj):
                    await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
            since = self.version
            await news.wait()


def _name(path: str) -> Name:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    return Name(parts[0], namespace, parts[1] if len(parts) > 1 else "")


def _merged(here: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(here, dict):
        return patch
    whole = here | {key: _merged(here.get(key), value) for key, value in patch.items()}
    return {key: value for key, value in whole.items() if value is not None}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[tuple[ApiServer, Path]]:
    """Serve while the context is open. Yield the server and a kubeconfig."""
    server = ApiServer()
    async with served(server, folder) as kubeconfig:
        yield server, kubeconfig
