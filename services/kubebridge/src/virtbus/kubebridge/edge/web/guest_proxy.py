"""Access to guests over the bus: verbs, guest agent questions, byte streams (ADR 0023)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.streams import ByteStream, opening
from virtbus.kubebridge.core.objects.status_errors import of_http
from virtbus.kubebridge.core.runtime import subresource_effects as effects
from virtbus.kubebridge.edge.web import websockets
from virtbus.kubebridge.edge.web.error_middleware import RefusedError
from virtbus.schemas import subjects
from virtbus.schemas.api import VmFreeze, VmRef
from virtbus.schemas.guest import GuestAsk, GuestInfo, GuestQuestion
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.streams import ConsoleOpen, PortOpen, StreamOpen
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

ANSWER_S = 10.0
GUEST_S = 10.0
"""Timeout of KubeVirt's guest agent commands."""
WINDOW_BYTES = 64 * 1024
"""Maximum bytes from the guest that wait unread on a stream. 200 streams need 13 MB."""
STREAMS_MAX = 200
"""Maximum number of streams. Each needs another 300 KB for TLS and the websocket."""
VERBS = {"console": "console", "vnc": "vnc", "portforward": "port", "screenshot": "screenshot"}
END_OF_PICTURE = "end of picture"


class Guests:
    """Sends the aggregated API's requests to the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._open = 0

    async def ask(self, verb: str, uid: str, for_s: int | None = None) -> Any:
        """Send a verb of virtbus' API for VMs, such as `pause`; return the answer.

        `for_s` is the duration of a freeze.
        """
        want = VmRef(uid=uid) if for_s is None else VmFreeze(uid=uid, timeout_s=for_s)
        return await self._bus.request(subjects.api("vm", verb), want, timeout_s=ANSWER_S)

    async def tell(self, uid: str, questions: Sequence[GuestQuestion]) -> GuestInfo:
        want = GuestAsk(uid=uid, about=tuple(questions), timeout_s=GUEST_S)
        subject = subjects.rpc(await self._node(uid), "agent", "guest")
        answer = await self._bus.request(subject, want, timeout_s=GUEST_S + ANSWER_S)
        return validate(GuestInfo, answer)

    async def stream(
        self, request: web.Request, effect: effects.GuestStream, owner: str
    ) -> web.StreamResponse:
        if effect.what == "screenshot":
            async with self._opened(effect, owner) as stream:
                return await _picture(request, stream)
        websockets.check(request)
        async with self._opened(effect, owner) as stream:
            return await websockets.carry(request, stream, effect)

    @asynccontextmanager
    async def _opened(self, effect: effects.GuestStream, owner: str) -> AsyncIterator[ByteStream]:
        if self._open >= STREAMS_MAX:
            raise RefusedError(of_http(429, f"{STREAMS_MAX} streams are open; close one"))
        self._open += 1
        try:
            node = await self._node(effect.uid)
            subject = subjects.rpc(node, "agent", VERBS[effect.what])
            async with opening(
                self._bus,
                subject,
                _want(effect, owner[:128]),
                window=WINDOW_BYTES,
                datagrams=effect.protocol == "udp",
            ) as stream:
                yield stream
        finally:
            self._open -= 1

    async def _node(self, uid: str) -> str:
        view = validate(VmView, await self.ask("get", uid))
        if view.node == UNPLACED:
            raise RefusedError(of_http(409, "the VM is not on a node yet"))
        return view.node


def _want(effect: effects.GuestStream, owner: str) -> StreamOpen:
    if effect.what == "console":
        return ConsoleOpen(uid=effect.uid, owner=owner)
    if effect.what == "portforward":
        values = {
            "uid": effect.uid,
            "port": effect.port,
            "protocol": effect.protocol,
            "owner": owner,
        }
        return PortOpen.model_validate(values)
    return StreamOpen(uid=effect.uid, owner=owner)


async def _picture(request: web.Request, stream: ByteStream) -> web.StreamResponse:
    """Stream the picture as it arrives. If it is incomplete, abort the connection.

    Raises:
        RefusedError: 500, there is no picture.
    """
    data = await stream.read()
    if not data:
        raise RefusedError(of_http(500, f"there is no picture: {stream.closed}"))
    response = web.StreamResponse(headers={"Content-Type": "image/png"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    while data:
        await response.write(data)
        data = await stream.read()
    if stream.closed != END_OF_PICTURE and request.transport is not None:
        request.transport.abort()
    return response
