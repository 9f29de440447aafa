"""Serves CRI's calls on kubelet's socket. The messages of calls are bytes here.

A call that the proxy does not know is refused by gRPC itself with UNIMPLEMENTED. Every error
becomes a gRPC status, so no request of a client ends the process.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import grpc

from virtbus.bus.runtime.own_socket import close_to_others, own_path
from virtbus.criproxy.edge.messages import UnreadableError
from virtbus.criproxy.edge.runtime_client import MESSAGE_BYTES, CallFailedError, Metadata
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
CALLS_AT_ONCE = 512
CALLS_OF_A_CONNECTION = 256
"""Maximum open calls of one connection. It is lower than CALLS_AT_ONCE, so that a stalled client
leaves calls for other clients."""
STOP_S = 5.0
OWN_KEYS = frozenset({"user-agent", "content-type", "te"})
OWN_PREFIXES = ("grpc-", ":")
"""Keys of metadata, and beginnings of keys, that gRPC writes itself. They are not passed on."""

STATUSES: Mapping[int, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    Code.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}
"""By code of the proxy's own errors: the status in gRPC."""


class Call(NamedTuple):
    """A call. `left_s` is the time until the client's deadline, in seconds; None without one."""

    name: str
    body: bytes
    left_s: float | None
    metadata: Metadata = ()


Handler = Callable[[Call], Awaitable[bytes]]
Stream = Callable[[Call], AsyncGenerator[bytes, None]]


@asynccontextmanager
async def serving(
    path: Path, handlers: Mapping[str, Handler], streams: Mapping[str, Stream]
) -> AsyncIterator[None]:
    """Serve on the socket `path` while the context is open; only the socket's owner may connect.

    The keys of both mappings are the calls' paths in gRPC.

    Raises:
        VirtbusError: 409 `socket_taken`: the path is no socket, or cannot be bound.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=CALLS_AT_ONCE,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", CALLS_OF_A_CONNECTION),
        ],
    )
    methods = {one: _single(one, handler) for one, handler in handlers.items()}
    methods |= {one: _streaming(one, stream) for one, stream in streams.items()}
    server.add_generic_rpc_handlers([_Methods(methods)])
    with own_path(path):
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            message = f"cannot listen on {path}: {error}"
            raise VirtbusError(Code.CONFLICT, "socket_taken", message) from error
        await server.start()
        close_to_others(path)
        try:
            yield
        finally:
            await server.stop(STOP_S)


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, "grpc.RpcMethodHandler[bytes, bytes]"]) -> None:
        self._methods = methods

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._methods.get(handler_call_details.method)


def _single(path: str, handler: Handler) -> "grpc.RpcMethodHandler[bytes, bytes]":
    name = path.rpartition("/")[2]

    async def single(body: bytes, context: Context) -> bytes:
        try:
            return await handler(_call(name, body, context))
        except Exception as error:  # noqa: BLE001  each error has a status; none ends the service
            await _abort(context, name, error)

    return grpc.unary_unary_rpc_method_handler(single)


def _streaming(path: str, stream: Stream) -> "grpc.RpcMethodHandler[bytes, bytes]":
    name = path.rpartition("/")[2]

    async def streaming(body: bytes, context: Context) -> None:
        try:
            # aclosing: a client that leaves while a write waits must end the stream in this task
            async with aclosing(stream(_call(name, body, context))) as answers:
                async for one in answers:
                    await context.write(one)
        except Exception as error:  # noqa: BLE001  each error has a status; none ends the service
            await _abort(context, name, error)

    return grpc.unary_stream_rpc_method_handler(streaming)


def _call(name: str, body: bytes, context: Context) -> Call:
    left_s = context.time_remaining()
    told = context.invocation_metadata() or ()
    metadata = tuple(
        (key, value)
        for key, value in told
        if key not in OWN_KEYS and not key.startswith(OWN_PREFIXES)
    )
    return Call(name, body, None if left_s is None else float(left_s), metadata)


async def _abort(context: Context, name: str, error: Exception) -> NoReturn:
    match error:
        case CallFailedError():
            status = grpc.StatusCode[error.code]
            await context.abort(status, error.text, error.trailing)
        case VirtbusError():
            log.info("%s: %s", name, error, extra={"code": error.reason})
            await context.abort(STATUSES[error.code], str(error))
        case UnreadableError():
            log.warning("%s: %s", name, error, extra={"code": "answer_unreadable"})
            await context.abort(grpc.StatusCode.INTERNAL, f"{name}: {error}")
        case _:
            log.error("%s failed", name, exc_info=error, extra={"code": "call_failed"})
            text = f"{name} failed; the log of virtbus-criproxy has details"
            await context.abort(grpc.StatusCode.INTERNAL, text)
