"""The API server, JSON in and JSON out: all that the bridge asks of it goes through here.

Of kubernetes_asyncio it uses the HTTP (`login.py`, ADR 0024); no model of it is ever made.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import aiohttp

from virtbus.bus.sources import REAL, Sources
from virtbus.kubebridge.edge import login
from virtbus.kubebridge.edge.kinds import Kind
from virtbus.kubebridge.edge.login import ApiClient

Json = dict[str, Any]
Query = list[tuple[str, str]]

PAGE = 50
"""Objects a page of a list. One may have 1.5 MiB, and a page is parsed whole (ADR 0028)."""
TIMEOUT_S = 35.0
"""Of a request; the API server itself ends most after 34 s where etcd is away."""
WATCH_S = (55.0, 75.0)
"""A watch asks to be ended after this long: a server that fell silent is noticed soon after."""
SILENT_S = 10.0
"""Longer than a watch that asked to be ended may stay open."""
LINE_BYTES_MAX = 8 * 1024 * 1024
"""An object is 1.5 MiB at most (etcd), and JSON may escape each of its bytes."""
MESSAGE_MAX = 4096
"""Characters of a refusal: the API server quotes what is wrong, which may be a megabyte."""
MANAGER = "virtbus-kubebridge"
"""How the bridge calls itself: managedFields and Events bear it."""
_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
}


class Answer(Exception):  # noqa: N818  what the API server answered, error or not
    """A Status that is no success: `code` and `reason` as Kubernetes has them.

    `retry_after_s` is what the server asked for, or 0. `status` is the whole object.
    """

    def __init__(self, status: Mapping[str, Any], code: int = 0, retry_after_s: float = 0) -> None:
        self.code = int(status.get("code") or code)
        self.reason = str(status.get("reason") or "")
        self.message = str(status.get("message") or f"HTTP {self.code}")[:MESSAGE_MAX]
        self.retry_after_s = retry_after_s
        self.status = status
        super().__init__(f"{self.code} {self.reason}: {self.message}")

    @property
    def passing(self) -> bool:
        """True where the same may succeed later: too many requests, or a server in trouble."""
        return self.code == 429 or self.code >= 500


class UnreachableError(Answer):
    """No answer at all: whether a write was done is not known."""

    def __init__(self, why: str) -> None:
        super().__init__({"code": 503, "reason": "Unreachable", "message": why})


class Event(NamedTuple):
    """Of a watch; `type` is ADDED, MODIFIED, DELETED or BOOKMARK (of which only the version)."""

    type: str
    object: Json


class Listing(NamedTuple):
    """All objects, or a page of them, as they were at one version."""

    items: list[Json]
    resource_version: str


class Cluster:
    """One cluster's API. Every method raises `Answer` for what is no success."""

    def __init__(self, client: ApiClient, sources: Sources = REAL) -> None:
        self._client = client
        self._sources = sources
        self.written = 0
        """Writes that were asked for."""

    # --- reading --------------------------------------------------------------------------
    async def get(self, kind: Kind, name: str, namespace: str = "") -> Json | None:
        """The object, or None where there is none."""
        try:
            return await self._json("GET", _place(kind, name, namespace))
        except Answer as answer:
            if answer.code == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Listing:
        """All objects, from all pages."""
        items: list[Json] = []
        version = ""
        async for page in self.pages(kind, namespace, selector):
            items += page.items
            version = page.resource_version
        return Listing(items, version)

    async def pages(
        self, kind: Kind, namespace: str = "", selector: str = ""
    ) -> AsyncIterator[Listing]:
        """All objects, page by page, all of one version; 410 where that took too long."""
        query = [("limit", str(PAGE))]
        if selector:
            query.append(("labelSelector", selector))
        token = ""
        while True:
            asked = [*query, ("continue", token)] if token else query
            page = await self._json("GET", kind.path(namespace=namespace), query=asked)
            meta = page.get("metadata") or {}
            yield Listing(page.get("items") or [], str(meta.get("resourceVersion", "")))
            token = str(meta.get("continue") or "")
            if not token:
                return

    async def watch(
        self, kind: Kind, resource_version: str, selector: str = ""
    ) -> AsyncIterator[Event]:
        """What changed since a version, until the server ends it (each minute or so it does).

        Raises:
            Answer: 410 where the version is too old; then only a list tells what was deleted.
        """
        lasts_s = self._sources.uniform(*WATCH_S)
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(int(lasts_s))),
            *([("labelSelector", selector)] if selector else []),
        ]
        quiet = aiohttp.ClientTimeout(
            total=None, sock_connect=SILENT_S, sock_read=lasts_s + SILENT_S
        )
        response = await self._send("GET", kind.path(), query=query, timeout=quiet)
        try:
            async for line in _lines(response):
                event = Event(str(line.get("type")), line.get("object") or {})
                if event.type == "ERROR":
                    raise Answer(event.object)
                yield event
        finally:
            response.close()

    # --- writing --------------------------------------------------------------------------
    async def create(self, kind: Kind, body: Json, namespace: str = "") -> Json:
        """The object as it was made; 409 where there is one of its name."""
        self.written += 1
        return await self._json("POST", kind.path(namespace=namespace), body=body)

    async def replace(self, kind: Kind, body: Json, sub: str = "") -> Json:
        """Write over the version that `body` has; 409 where it is not the last any more."""
        meta = body["metadata"]
        self.written += 1
        path = _place(kind, meta["name"], meta.get("namespace", ""), sub)
        return await self._json("PUT", path, body=body)

    async def patch(  # noqa: PLR0913  what there is to say of a patch
        self,
        kind: Kind,
        name: str,
        body: Any,
        namespace: str = "",
        sub: str = "",
        how: Literal["merge", "json"] = "merge",
        *,
        dry_run: bool = False,
    ) -> Json:
        """Change an object; with a resourceVersion in `body`, only at that one (else 409)."""
        query = [("dryRun", "All")] if dry_run else []
        path = _place(kind, name, namespace, sub)
        self.written += 1
        return await self._json("PATCH", path, query=query, body=body, content=_PATCHES[how])

    async def delete(
        self, kind: Kind, name: str, namespace: str = "", uid: str = "", version: str = ""
    ) -> None:
        """Delete it, if it is still the one of `uid`; what is not there is done.

        With a `version`, another one is a conflict (409).
        """
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if version:
            body["preconditions"]["resourceVersion"] = version
        self.written += 1
        try:
            await self._json("DELETE", _place(kind, name, namespace), body=body)
        except Answer as answer:
            if answer.code != 404 and not (uid and not version and answer.code == 409):
                raise

    # --- the wire -------------------------------------------------------------------------
    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        response = await self._send(
            method, path, query=query or [], body=body, content=content, timeout=timeout
        )
        try:
            found = _parsed(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(_why(error)) from error
        finally:
            response.release()
        return found

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Query,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  aiohttp's own
        body: Any = None,
        content: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """The response, its body unread; `Answer` for any status but 2xx."""
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=query,
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
            if response.status < 300:
                return response
            said = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(_why(error)) from error
        response.release()
        raise Answer(_status(said), response.status, _retry_after_s(response))


def _place(kind: Kind, name: str, namespace: str, sub: str = "") -> str:
    """The path of one object. Users name objects: none of a name that leads elsewhere is there.

    Raises:
        Answer: 404, no object of Kubernetes can have such a name.
    """
    for part in (name, namespace or name):
        if part in {"", ".", ".."} or not {"/", "%"}.isdisjoint(part):
            message = f"{kind.plural} {name!r:.80} not found"
            raise Answer({"code": 404, "reason": "NotFound", "message": message})
    return kind.path(quote(name), quote(namespace), sub)


# --- what comes back ---------------------------------------------------------------------------
async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """A JSON object a line; one that was cut off is not there."""
    rest = bytearray()
    try:
        async for chunk in response.content.iter_any():
            begin = 0
            while (end := chunk.find(b"\n", begin)) >= 0:
                rest += chunk[begin:end]
                begin = end + 1
                if rest:
                    yield _parsed(bytes(rest))
                rest.clear()
            rest += chunk[begin:]
            if len(rest) > LINE_BYTES_MAX:
                raise UnreachableError(f"a line of a watch is longer than {LINE_BYTES_MAX} bytes")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnreachableError(_why(error)) from error


def _parsed(body: bytes) -> Json:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"an answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnreachableError("an answer is no object")
    return found


def _status(body: bytes) -> Json:
    """The Status of a refusal; a proxy on the way may say anything."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.get("kind") == "Status":
        return found
    return {"message": body[:500].decode(errors="replace")}


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    said = response.headers.get("Retry-After", "")
    return min(float(said), 60.0) if said.isdigit() else 0.0


def _why(error: BaseException) -> str:
    return f"the API server: {str(error) or type(error).__name__}"


@asynccontextmanager
async def connect(kubeconfig: Path | None, context: str = "") -> AsyncIterator[Cluster]:
    """The cluster of a kubeconfig, or the one whose pod this is; ValueError: `login.client`."""
    async with login.client(kubeconfig, context, MANAGER) as client:
        yield Cluster(client)
