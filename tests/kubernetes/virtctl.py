"""Makes the same calls as KubeVirt's virtctl."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from tests.kubernetes.certificates import Authority, Pair

VM, VMI = "virtualmachines", "virtualmachineinstances"
PROTOCOL = "plain.kubevirt.io"
WRITE_BYTES = 32 * 1024
"""The size of one message of virtctl."""


class Virtctl:
    """One user of one namespace, through the API server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, namespace: str, version: str = "v1"
    ) -> None:
        self._session = session
        self._group = f"{url}/apis/subresources.kubevirt.io"
        self._base = f"{self._group}/{version}/namespaces/{namespace}"

    async def put(
        self, resource: str, name: str, verb: str, body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        """Return the code, and the Status of a refusal."""
        return await self.ask("PUT", f"{self._base}/{resource}/{name}/{verb}", body)

    async def get(self, resource: str, name: str, verb: str) -> tuple[int, dict[str, Any]]:
        """Return the code and the body."""
        return await self.ask("GET", f"{self._base}/{resource}/{name}/{verb}")

    async def expand(self, vm: Any) -> tuple[int, dict[str, Any]]:
        """Call `expand --file`."""
        return await self.ask("PUT", f"{self._base}/expand-vm-spec", vm)

    async def version(self) -> dict[str, Any]:
        """Call `version`, by the version that the group prefers."""
        _, group = await self.ask("GET", self._group)
        preferred = group["preferredVersion"]["groupVersion"]
        url = self._group.rpartition("/")[0]
        return (await self.ask("GET", f"{url}/{preferred}/version"))[1]

    async def screenshot(self, name: str) -> tuple[int, bytes]:
        """Call `vnc screenshot`."""
        url = f"{self._base}/{VMI}/{name}/vnc/screenshot?moveCursor=false"
        async with self._session.get(url) as answer:
            return answer.status, await answer.read()

    async def ask(self, method: str, url: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """Make any call; an answer without a body is an empty object."""
        data = body if isinstance(body, str) else None
        json = None if isinstance(body, str) else body
        async with self._session.request(method, url, json=json, data=data) as answer:
            return answer.status, (await answer.json() if await answer.read() else {})

    @asynccontextmanager
    async def stream(
        self, resource: str, name: str, verb: str, protocol: str = PROTOCOL
    ) -> AsyncIterator["Socket"]:
        """Open `console`, `vnc` or `portforward/…`; raise WSServerHandshakeError if refused."""
        protocols = (protocol,) if protocol else ()
        async with self._session.ws_connect(
            f"{self._base}/{resource}/{name}/{verb}", protocols=protocols, max_msg_size=0
        ) as socket:
            assert socket.protocol == (PROTOCOL if protocol == PROTOCOL else None)
            yield Socket(socket)


class Socket:
    """A stream of bytes, in binary messages."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._came = b""

    @property
    def code(self) -> int | None:
        """The close code; 1006 if there was none."""
        return self._socket.close_code

    async def write(self, data: bytes) -> None:
        for begin in range(0, len(data), WRITE_BYTES):
            await self._socket.send_bytes(data[begin : begin + WRITE_BYTES])

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()

    async def read(self) -> bytes:
        """Return the next message, or nothing at the end."""
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            return b""
        return bytes(message.data)

    async def until(self, word: bytes) -> bytes:
        """Read everything up to and including `word`."""
        while word not in self._came:
            data = await self.read()
            assert data, f"{word!r} did not come: {self._came[-2000:]!r}"
            self._came += data
        found, _, self._came = self._came.partition(word)
        return found + word

    async def exactly(self, size: int) -> bytes:
        """Read this many bytes."""
        while len(self._came) < size:
            data = await self.read()
            assert data, f"{size} bytes did not come: {self._came!r}"
            self._came += data
        found, self._came = self._came[:size], self._came[size:]
        return found


def login(authority: Authority, pair: Pair) -> ssl.SSLContext:
    """TLS of a user signed by `authority`, to servers that it signed."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.load_cert_chain(*pair)
    return context


@asynccontextmanager
async def session(context: ssl.SSLContext) -> AsyncIterator[aiohttp.ClientSession]:
    """HTTP by `context`; at its end no connection waits for its peer's close."""
    connector = aiohttp.TCPConnector(ssl=context, enable_cleanup_closed=True)
    async with aiohttp.ClientSession(connector=connector) as made:
        yield made
