"""Reads objects of a Kubernetes cluster. Only this module of virtbus-cri talks to an API server.

The followed lists are short, so each change causes a read of the complete list. Thus no change is
lost, and no cache is needed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from virtbus.cri.edge.kubeconfig import read_login
from virtbus.schemas.errors import Code, VirtbusError

Json = dict[str, Any]

ANSWER_S = 20.0
WATCH_S = 300
"""Duration of a watch. After its end, the list is read again."""
SILENT_S = 15.0
"""Time after WATCH_S without the watch's end. After this time, the API server counts as silent."""
MOST_BYTES = 16 * 1024 * 1024
"""Maximum bytes of one answer, and of a connection's buffer."""
CHANGE_PAUSE_S = 1.0
"""Minimum time between two reads of the same list."""
ABSENT_PAUSE_S = 60.0
"""Time between two reads of a list whose kind the cluster does not have."""
_REQUEST = aiohttp.ClientTimeout(total=ANSWER_S)
_WATCH = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=WATCH_S + SILENT_S)


class Cluster:
    """The API server that a kubeconfig names."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    async def get(self, path: str) -> Json | None:
        """Return the object at a path; None if the object does not exist.

        Raises:
            VirtbusError: 400 `kubeconfig_invalid`; 403 `cluster_refused`; 503 `cluster_away`.
        """
        async with self._session() as session:
            return await _get(session, path, {})

    async def lists(self, path: str, query: Mapping[str, str]) -> AsyncIterator[list[Json]]:
        """Yield the list of all objects below a path, now and after each change.

        If the cluster does not have the kind, the list is empty. Raises the errors of `get`.
        """
        while True:
            async with self._session() as session:
                found = await _get(session, path, query)
                yield [one for one in (found or {}).get("items") or () if isinstance(one, dict)]
                if found is not None:
                    version = str((found.get("metadata") or {}).get("resourceVersion", ""))
                    await _until_change(session, path, {**query, "resourceVersion": version})
            await asyncio.sleep(ABSENT_PAUSE_S if found is None else CHANGE_PAUSE_S)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        login = await asyncio.to_thread(read_login, self._kubeconfig)
        connector = aiohttp.TCPConnector(ssl=login.trust)
        async with aiohttp.ClientSession(
            login.server, connector=connector, headers=login.headers, read_bufsize=MOST_BYTES
        ) as session:
            try:
                yield session
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                why = str(error) or type(error).__name__
                message = f"the API server {login.server} does not answer: {why}"
                raise VirtbusError(Code.UNAVAILABLE, "cluster_away", message) from error


async def _get(session: aiohttp.ClientSession, path: str, query: Mapping[str, str]) -> Json | None:
    async with session.get(path, params=query, timeout=_REQUEST, allow_redirects=False) as answer:
        if answer.status == 404:
            return None
        await _check(answer, path)
        body = await answer.content.read(MOST_BYTES)
        while len(body) < MOST_BYTES and (more := await answer.content.read(MOST_BYTES)):
            body += more
        found = json.loads(body)
        return found if isinstance(found, dict) else {}


async def _until_change(
    session: aiohttp.ClientSession, path: str, query: Mapping[str, str]
) -> None:
    """Wait for the first event of a watch, or for the end of the watch."""
    asked = {**query, "watch": "true", "timeoutSeconds": str(WATCH_S)}
    async with session.get(path, params=asked, timeout=_WATCH, allow_redirects=False) as answer:
        if answer.status != 410:  # the resource version is too old, and the caller lists again
            await _check(answer, path)
            await answer.content.readany()


async def _check(answer: aiohttp.ClientResponse, path: str) -> None:
    if answer.status < 300:
        return
    text = (await answer.content.read(2000)).decode(errors="replace")
    if answer.status in {401, 403}:
        message = f"the cluster refuses to show {path}; give the kubeconfig's user that right"
        raise VirtbusError(Code.DENIED, "cluster_refused", f"{message}: {text}")
    message = f"the API server answers {answer.status} for {path}: {text}"
    raise VirtbusError(Code.UNAVAILABLE, "cluster_away", message)
