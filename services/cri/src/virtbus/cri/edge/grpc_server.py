"""Serves CRI's two gRPC services on a UNIX socket.

Only this module of virtbus-cri uses gRPC and protobuf. The handlers of calls get and return plain
values with CRI's field names. Each error becomes a gRPC status, so no request ends the process.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import grpc
from cri_api.v1 import api_pb2
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.own_socket import close_to_others, own_path
from virtbus.cri.core import stages
from virtbus.cri.core.stages import Stage
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Plain = dict[str, Any]
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, Message]"
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[bytes, Message]"
MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest message that kubelet sends and accepts."""
CALLS_AT_ONCE = 512
STOP_S = 5.0

STATUSES: Mapping[int, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    Code.GONE: grpc.StatusCode.NOT_FOUND,
    Code.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}

LISTS_AS_STREAMS: Mapping[str, str] = {
    "StreamPodSandboxes": "ListPodSandbox",
    "StreamContainers": "ListContainers",
    "StreamContainerStats": "ListContainerStats",
    "StreamPodSandboxStats": "ListPodSandboxStats",
    "StreamPodSandboxMetrics": "ListPodSandboxMetrics",
    "StreamImages": "ListImages",
}
"""By call of Kubernetes 1.36 that streams a list in parts: the call that returns the whole list.
The generated stubs lack the streaming calls. Both calls have the same types of request and answer
(ADR 0058)."""
PART_ENTRIES = 100

STAGES: Mapping[str, Stage] = {
    "RunPodSandbox": "pod",
    "PullImage": "image",
    "CreateContainer": "start",
    "StartContainer": "start",
}
"""By call whose errors kubelet shows as events of the pod: the default stage. The text of such an
error names the stage that failed. If the error's reason shows no stage, the text has the default.
"""
IMPOSSIBLE = frozenset({"no_shell", "resize_unsupported"})
"""Reasons of errors for calls that a guest cannot support. Their status is UNIMPLEMENTED."""


class Call(NamedTuple):
    """A call: the request, and the seconds until the client's deadline; None without a deadline."""

    request: Plain
    left_s: float | None


Handler = Callable[[Call], Awaitable[Plain]]
Stream = Callable[[Call], AsyncIterator[Plain]]


class Offer(NamedTuple):
    """One service: the handlers of its calls, and the reasons for refusals of other calls.

    `streams` has the handlers of calls with a stream of answers.
    """

    handlers: Mapping[str, Handler]
    refused: Mapping[str, str]
    streams: Mapping[str, Stream] = MappingProxyType({})


@asynccontextmanager
async def serving(path: Path, offers: Mapping[str, Offer]) -> AsyncIterator[None]:
    """Serve on the socket `path` while the context is open. Only the socket's owner may connect.

    Raises:
        VirtbusError: 409 `socket_taken`: the path is no socket, or cannot be bound.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=CALLS_AT_ONCE,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
        ],
    )
    server.add_generic_rpc_handlers([_service(name, offer) for name, offer in offers.items()])
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


def _service(name: str, offer: Offer) -> grpc.GenericRpcHandler:
    described = api_pb2.DESCRIPTOR.services_by_name[name]
    methods = {method.name: _method(method, offer) for method in described.methods}
    for stream, listed in LISTS_AS_STREAMS.items():
        if listed in offer.handlers:
            methods[stream] = _in_parts(stream, described.methods_by_name[listed], offer)
    return grpc.method_handlers_generic_handler(described.full_name, methods)


def _method(method: MethodDescriptor, offer: Offer) -> RpcHandler:
    make = _streaming if method.server_streaming else _single
    why = offer.refused.get(method.name, f"{method.name} is unknown to this version of virtbus")
    return make(method, offer, why)


def _single(method: MethodDescriptor, offer: Offer, why: str) -> RpcHandler:
    asked, answered = _types(method)
    handler = offer.handlers.get(method.name)

    async def call(request: bytes, context: Context) -> Message:
        if handler is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)
        try:
            return answered(**await handler(_call(asked, request, context)))
        except Exception as error:  # noqa: BLE001  each error has a status; none ends the service
            await context.abort(*_status(method.name, error))

    return grpc.unary_unary_rpc_method_handler(call, None, answered.SerializeToString)


def _streaming(method: MethodDescriptor, offer: Offer, why: str) -> RpcHandler:
    asked, answered = _types(method)
    source = offer.streams.get(method.name)

    async def stream(request: bytes, context: Context) -> None:
        if source is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)
        try:
            async for one in source(_call(asked, request, context)):
                await context.write(answered(**one))
        except Exception as error:  # noqa: BLE001  each error has a status; none ends the service
            await context.abort(*_status(method.name, error))

    return grpc.unary_stream_rpc_method_handler(stream, None, answered.SerializeToString)


def _in_parts(name: str, method: MethodDescriptor, offer: Offer) -> RpcHandler:
    """Return the handler that streams the answer of a list call in parts.

    The answer of a list call must have exactly one field.
    """
    asked, answered = _types(method)
    handler = offer.handlers[method.name]

    async def stream(request: bytes, context: Context) -> None:
        try:
            ((field, entries),) = (await handler(_call(asked, request, context))).items()
            for at in range(0, len(entries), PART_ENTRIES):
                await context.write(answered(**{field: entries[at : at + PART_ENTRIES]}))
        except Exception as error:  # noqa: BLE001  each error has a status; none ends the service
            await context.abort(*_status(name, error))

    return grpc.unary_stream_rpc_method_handler(stream, None, answered.SerializeToString)


def _types(method: MethodDescriptor) -> tuple[type[Message], type[Message]]:
    asked: type[Message] = getattr(api_pb2, method.input_type.name)
    answered: type[Message] = getattr(api_pb2, method.output_type.name)
    return asked, answered


def _call(asked: type[Message], request: bytes, context: Context) -> Call:
    """Return a request as plain values.

    Raises VirtbusError 400 `request_unreadable`.
    """
    try:
        message = asked.FromString(request)
    except DecodeError:
        text = f"the request is no {asked.__name__} of runtime.v1; compare the versions of the CRI"
        raise VirtbusError(Code.INVALID, "request_unreadable", text) from None
    plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return Call(plain, _left_s(context))


def _status(name: str, error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the status and text for a handler's error.

    Only the log has the text of an unexpected error.
    """
    if isinstance(error, VirtbusError):
        if name in STAGES:
            error = stages.staged(error, STAGES[name])
        log.info("%s: %s", name, error, extra={"code": error.reason})
        impossible = error.reason in IMPOSSIBLE
        status = grpc.StatusCode.UNIMPLEMENTED if impossible else STATUSES[error.code]
        return status, str(error)
    if isinstance(error, BusError):
        log.info("%s: %s", name, error, extra={"code": "bus_away"})
        text = stages.text(STAGES[name], "bus_away", str(error)) if name in STAGES else str(error)
        return grpc.StatusCode.UNAVAILABLE, text
    log.error("%s failed", name, exc_info=error, extra={"code": "call_failed"})
    return grpc.StatusCode.INTERNAL, f"{name} failed; the log of virtbus-cri has details"


def _left_s(context: Context) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None else float(left_s)
