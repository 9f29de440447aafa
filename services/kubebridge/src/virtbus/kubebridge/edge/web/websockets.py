"""`plain.kubevirt.io`: a stream of bytes as binary messages of a websocket, both ways.

Neither side is read faster than the other takes, so what waits is bounded: the stream's window, and
what aiohttp holds (64 KiB each way) before it lets its sender wait.
"""

import asyncio

from aiohttp import WSMsgType, web

from virtbus.bus.streams import Stream
from virtbus.kubebridge.core import deeds
from virtbus.kubebridge.core.refusals import bad_request
from virtbus.kubebridge.edge.web.answers import RefusedError

PROTOCOL = "plain.kubevirt.io"
MESSAGE_BYTES_MAX = 256 * 1024
"""virtctl's are of 32 KiB; what is pasted into a display may be longer."""
ALIVE_S = 30.0
"""How often a client is asked whether it is there; that of a port has to say so."""
NO_WEBSOCKET = "websocket: the client is not using the websocket protocol"
LEFT, GUEST_CLOSED = "the viewer left", "the guest closed the connection"


def _made(deed: deeds.Stream | None = None) -> web.WebSocketResponse:
    forwards = deed is not None and deed.what == "portforward"
    return web.WebSocketResponse(
        protocols=(PROTOCOL,),  # who asks for none gets none
        compress=False,
        max_msg_size=MESSAGE_BYTES_MAX,
        heartbeat=ALIVE_S if forwards else None,
    )


def check(request: web.Request) -> None:
    """Before anything is opened for it.

    Raises:
        RefusedError: 400, it is no websocket.
    """
    if not _made().can_prepare(request):
        raise RefusedError(bad_request(NO_WEBSOCKET))


async def carry(request: web.Request, stream: Stream, deed: deeds.Stream) -> web.StreamResponse:
    """Carry bytes, or a datagram a message, until either end is gone."""
    socket = _made(deed)
    await socket.prepare(request)
    datagrams = deed.protocol == "udp"
    await stream.while_open(
        _out(stream, socket), _back(stream, socket, datagrams=datagrams), _knock(socket)
    )
    if stream.closed == GUEST_CLOSED and deed.what == "portforward":
        await socket.close()
    elif not socket.closed and request.transport is not None:
        # As KubeVirt: virtctl tells people what 1006 may mean, and nothing of any other code.
        request.transport.close()
    return socket


async def _out(stream: Stream, socket: web.WebSocketResponse) -> None:
    while data := await stream.read():
        await socket.send_bytes(data)
    stream.end(GUEST_CLOSED)


async def _back(stream: Stream, socket: web.WebSocketResponse, *, datagrams: bool) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            continue
        if datagrams:
            await stream.write_datagram(message.data)
        else:
            await stream.write(message.data)
    stream.end(LEFT)


async def _knock(socket: web.WebSocketResponse) -> None:
    """Notice a client that left while its guest takes no more: nobody reads then what would tell.

    What is sent to it breaks the connection (OSError), and so ends the stream.
    """
    while True:
        await asyncio.sleep(ALIVE_S)
        await socket.ping()
