"""Carries a byte stream over a websocket `plain.kubevirt.io`, in binary messages.

Each end is read only as fast as the other end accepts data. Two limits bound the buffers: the
stream's window, and aiohttp's 64 KiB in each direction.
"""

import asyncio

from aiohttp import WSMsgType, web

from virtbus.bus.client.streams import ByteStream
from virtbus.kubebridge.core.objects.status_errors import bad_request
from virtbus.kubebridge.core.runtime import subresource_effects as effects
from virtbus.kubebridge.edge.web.error_middleware import RefusedError

PROTOCOL = "plain.kubevirt.io"
MESSAGE_BYTES_MAX = 256 * 1024
"""Longest message. virtctl's messages have 32 KiB; a paste into a display may be longer."""
ALIVE_S = 30.0
"""Seconds between pings. The client of a forwarded port must answer them."""
NO_WEBSOCKET = "websocket: the client is not using the websocket protocol"
LEFT, GUEST_CLOSED = "the viewer left", "the guest closed the connection"


def _made(effect: effects.GuestStream | None = None) -> web.WebSocketResponse:
    forwards = effect is not None and effect.what == "portforward"
    return web.WebSocketResponse(
        protocols=(PROTOCOL,),  # a client that asks for no protocol gets none
        compress=False,
        max_msg_size=MESSAGE_BYTES_MAX,
        heartbeat=ALIVE_S if forwards else None,
    )


def check(request: web.Request) -> None:
    """Check the request before a stream is opened for it.

    Raises:
        RefusedError: 400, it is not a websocket request.
    """
    if not _made().can_prepare(request):
        raise RefusedError(bad_request(NO_WEBSOCKET))


async def carry(
    request: web.Request, stream: ByteStream, effect: effects.GuestStream
) -> web.StreamResponse:
    """Carry bytes, or one datagram in each message, until either end closes."""
    socket = _made(effect)
    await socket.prepare(request)
    datagrams = effect.protocol == "udp"
    await stream.while_open(
        _out(stream, socket), _back(stream, socket, datagrams=datagrams), _knock(socket)
    )
    if stream.closed == GUEST_CLOSED and effect.what == "portforward":
        await socket.close()
    elif not socket.closed and request.transport is not None:
        # As in KubeVirt, close without a code. virtctl reads this as 1006, and explains only this
        # code to users.
        request.transport.close()
    return socket


async def _out(stream: ByteStream, socket: web.WebSocketResponse) -> None:
    while data := await stream.read():
        await socket.send_bytes(data)
    stream.end(GUEST_CLOSED)


async def _back(stream: ByteStream, socket: web.WebSocketResponse, *, datagrams: bool) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            continue
        if datagrams:
            await stream.write_datagram(message.data)
        else:
            await stream.write(message.data)
    stream.end(LEFT)


async def _knock(socket: web.WebSocketResponse) -> None:
    """Detect that a client left while the guest accepts no data.

    The client's socket is then unread, but a ping to a client that left fails (OSError). This error
    ends the stream.
    """
    while True:
        await asyncio.sleep(ALIVE_S)
        await socket.ping()
