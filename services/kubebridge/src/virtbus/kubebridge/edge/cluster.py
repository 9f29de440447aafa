"""Client of the API server. Requests and answers are plain JSON.

Only the HTTP client of kubernetes_asyncio is used (`login.py`, ADR 0024), not its models.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import aiohttp

from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.runtime.controller import Kind
from virtbus.kubebridge.edge import login
from virtbus.kubebridge.edge.login import ApiClient

Json = dict[str, Any]
Query = list[tuple[str, str]]
Headers = Mapping[str, str]

PAGE = 50
"""Objects in a page of a list. An object may have 1.5 MiB, and a page is parsed at once (ADR 0028).
"""
TIMEOUT_S = 35.0
"""Timeout of a request. If etcd is away, the API server itself ends most requests after 34 s."""
WATCH_S = (55.0, 75.0)
"""Shortest and longest duration that a watch requests, in seconds.

The duration bounds the time until a silent server is noticed.
"""
SILENT_S = 10.0
"""Seconds beyond the duration of a watch after which its server counts as silent.

The connection of a watch has the same timeout.
"""
LINE_BYTES_MAX = 8 * 1024 * 1024
"""Longest line of a watch. An object has at most 1.5 MiB (etcd), and JSON may escape each byte."""
MESSAGE_MAX = 4096
"""Longest message of a refusal, in characters. The API server may quote a megabyte."""
MANAGER = "virtbus-kubebridge"
"""Name of the bridge in managedFields and Events."""
JSON = "application/json"
_REQUEST = aiohttp.ClientTimeout(total=TIMEOUT_S)
_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
}


class StatusError(Exception):
    """A Status of a failed request, with Kubernetes' `code` and `reason`.

    `retry_after_s` is the delay that the server requests, or 0. `status` is the whole object.
    """

    def __init__(self, status: Mapping[str, Any], code: int = 0, retry_after_s: float = 0) -> None:
        self.code = int(status.get("code") or code)
        self.reason = str(status.get("reason") or "")
        self.message = str(status.get("message") or f"HTTP {self.code}")[:MESSAGE_MAX]
        self.retry_after_s = retry_after_s
        self.status = status
        super().__init__(f"{self.code} {self.reason}: {self.message}")

    @property
    def transient(self) -> bool:
        return self.code == 429 or self.code >= 500


class UnreachableError(StatusError):
    """There was no readable answer. A write may or may not have been executed."""

    def __init__(self, why: str) -> None:
        super().__init__({"code": 503, "reason": "Unreachable", "message": why})


class WatchEvent(NamedTuple):
    """An event of a watch. `type` is ADDED, MODIFIED, DELETED or BOOKMARK.

    The object of a BOOKMARK has only a resource version.
    """

    type: str
    object: Json


class Listing(NamedTuple):
    """A page of a list, and the resource version of the whole list."""

    items: list[Json]
    resource_version: str


class Scope(NamedTuple):
    """Selects the objects of a list or a watch by namespace and labels. The default is all objects.

    With `metadata_only`, the objects contain only their metadata.
    """

    namespace: str = ""
    selector: str = ""
    metadata_only: bool = False

    def accept(self, kind: str) -> str:
        metadata = f";as={kind};g=meta.k8s.io;v=v1" if self.metadata_only else ""
        return f"application/json{metadata}"


EVERYTHING = Scope()


class KubernetesApi:
    """The API of one cluster. Every method raises `StatusError` if its request fails."""

    def __init__(self, client: ApiClient, sources: Sources = REAL) -> None:
        self._client = client
        self._sources = sources
        self.written = 0
        """Number of requests other than GET."""

    # --- reading --------------------------------------------------------------------------
    async def get(self, kind: Kind, name: str, namespace: str = "") -> Json | None:
        try:
            return await self._json("GET", _place(kind, name, namespace))
        except StatusError as answer:
            if answer.code == 404:
                return None
            raise

    async def pages(self, kind: Kind, scope: Scope = EVERYTHING) -> AsyncIterator[Listing]:
        """Yield all objects in pages that have the same resource version.

        Raises:
            StatusError: 410, the list took too long, and the server no longer knows its version.
        """
        query = [("limit", str(PAGE))]
        if scope.selector:
            query.append(("labelSelector", scope.selector))
        token, path = "", kind.path(namespace=scope.namespace)
        headers = {"Accept": scope.accept("PartialObjectMetadataList")}
        while True:
            asked = [*query, ("continue", token)] if token else query
            page = await self._json("GET", path, query=asked, headers=headers)
            meta = page.get("metadata") or {}
            yield Listing(page.get("items") or [], str(meta.get("resourceVersion", "")))
            token = str(meta.get("continue") or "")
            if not token:
                return

    async def watch(
        self, kind: Kind, resource_version: str, scope: Scope = EVERYTHING
    ) -> AsyncIterator[WatchEvent]:
        """Yield the changes since a version. The server ends the watch after about a minute.

        Raises:
            StatusError: 410, the server no longer knows the version. Only a new list shows which
                objects were deleted meanwhile.
        """
        lasts_s = self._sources.uniform(*WATCH_S)
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(int(lasts_s))),
            *([("labelSelector", scope.selector)] if scope.selector else []),
        ]
        quiet = aiohttp.ClientTimeout(
            total=None, sock_connect=SILENT_S, sock_read=lasts_s + SILENT_S
        )
        path = kind.path(namespace=scope.namespace)
        headers = {"Accept": scope.accept("PartialObjectMetadata")}
        response = await self._send("GET", path, query=query, timeout=quiet, headers=headers)
        try:
            async for line in _lines(response):
                event = WatchEvent(str(line.get("type")), line.get("object") or {})
                if event.type == "ERROR":
                    raise StatusError(event.object)
                yield event
        finally:
            response.close()

    # --- writing --------------------------------------------------------------------------
    async def create(self, kind: Kind, body: Json, namespace: str = "") -> Json:
        """Create an object and return it; 409 if an object of this name exists."""
        return await self._json("POST", kind.path(namespace=namespace), body=body)

    async def replace(self, kind: Kind, body: Json, sub: str = "") -> Json:
        """Replace an object; 409 if its current version is not the version in `body`."""
        meta = body["metadata"]
        path = _place(kind, meta["name"], meta.get("namespace", ""), sub)
        return await self._json("PUT", path, body=body)

    async def patch(  # noqa: PLR0913  the parameters of a patch
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
        """Patch an object; 409 if `body` has a resourceVersion that is not the current one."""
        query = [("dryRun", "All")] if dry_run else []
        path = _place(kind, name, namespace, sub)
        return await self._json(
            "PATCH", path, query=query, body=body, headers={"Content-Type": _PATCHES[how]}
        )

    async def delete(
        self, kind: Kind, name: str, namespace: str = "", uid: str = "", version: str = ""
    ) -> None:
        """Delete an object. A missing object counts as success.

        With `uid`, an object with another uid stays, and the call succeeds. With `version`, an
        object with another uid or version is a conflict (409).
        """
        wanted = {"uid": uid, "resourceVersion": version}
        body: Json = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {key: value for key, value in wanted.items() if value},
        }
        try:
            await self._json("DELETE", _place(kind, name, namespace), body=body)
        except StatusError as answer:
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
        headers: Headers = {},  # noqa: B006  never changed
    ) -> Json:
        self.written += method != "GET"
        response = await self._send(method, path, query=query or [], body=body, headers=headers)
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
        timeout: aiohttp.ClientTimeout = _REQUEST,  # noqa: ASYNC109  aiohttp's own
        body: Any = None,
        headers: Headers = {},  # noqa: B006  never changed
    ) -> aiohttp.ClientResponse:
        """Return the response with an unread body. A status of 300 or more raises `StatusError`."""
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=query,
                header_params={"Accept": JSON, "Content-Type": JSON, **headers},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
            if response.status < 300:
                return response
            error_body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(_why(error)) from error
        response.release()
        raise StatusError(_status(error_body), response.status, _retry_after_s(response))


def _place(kind: Kind, name: str, namespace: str, sub: str = "") -> str:
    """Return the path of one object. Users choose names, so a name must not change the path.

    Raises:
        StatusError: 404, no object in Kubernetes can have this name.
    """
    for part in (name, namespace or name):
        if part in {"", ".", ".."} or not {"/", "%"}.isdisjoint(part):
            message = f"{kind.plural} {name!r:.80} not found"
            raise StatusError({"code": 404, "reason": "NotFound", "message": message})
    return kind.path(quote(name), quote(namespace), sub)


# --- responses ---------------------------------------------------------------------------------
async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """Yield one JSON object for each line. An incomplete last line is dropped."""
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
        raise UnreachableError(f"an answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnreachableError("an answer is not an object")
    return found


def _status(body: bytes) -> Json:
    """Parse the Status of a refusal. If a proxy answered, its text becomes the message."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.get("kind") == "Status":
        return found
    return {"message": body[:500].decode(errors="replace")}


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    header = response.headers.get("Retry-After", "")
    return min(float(header), 60.0) if header.isdigit() else 0.0


def _why(error: BaseException) -> str:
    return f"the API server: {str(error) or type(error).__name__}"


@asynccontextmanager
async def connect(kubeconfig: Path | None) -> AsyncIterator[KubernetesApi]:
    """Connect to the cluster of a kubeconfig, or of this pod. Raises as `login.client`."""
    async with login.client(kubeconfig, MANAGER) as client:
        yield KubernetesApi(client)
