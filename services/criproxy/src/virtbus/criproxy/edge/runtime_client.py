"""Calls one container runtime over its UNIX socket; messages are bytes.

The error of a failed call has the runtime's own status, so that kubelet gets this status unchanged.
"""

from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc

MESSAGE_BYTES = 16 * 1024 * 1024
"""Size of the largest message that kubelet sends and accepts."""
_NOT_CONNECTED = "failed to connect to all addresses"
"""The beginning of gRPC's text about a failed connection. The rest names the path twice."""
RECONNECT_MS = (100, 250)
"""The first and the longest pause between two attempts to connect."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
_Many: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"
_Single: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


class CallFailedError(Exception):
    """A call of a runtime failed. `code` is the name of a gRPC status."""

    def __init__(self, code: str, text: str, trailing: Metadata = ()) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.trailing = trailing


class RuntimeClient:
    """A connection that is made when it is needed, and made again after a loss."""

    def __init__(self, endpoint: str) -> None:
        first_ms, longest_ms = RECONNECT_MS
        self._endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(
            endpoint,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
                ("grpc.initial_reconnect_backoff_ms", first_ms),
                ("grpc.min_reconnect_backoff_ms", first_ms),
                ("grpc.max_reconnect_backoff_ms", longest_ms),
                ("grpc.enable_retries", 0),
                # The socket is on this node; HTTP proxies of the environment are for other hosts.
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._singles: dict[str, _Single] = {}

    async def call(
        self, path: str, body: bytes, left_s: float | None, metadata: Metadata = ()
    ) -> bytes:
        """Return the answer of a call. A cancelled call is cancelled in the runtime, too.

        Raises:
            CallFailedError: with the runtime's status, or with UNAVAILABLE or DEADLINE_EXCEEDED if
                the runtime does not answer.
        """
        single = self._singles.get(path)
        if single is None:
            single = self._singles[path] = self._channel.unary_unary(path)
        try:
            answer: bytes = await single(body, timeout=left_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        return answer

    async def stream(
        self, path: str, body: bytes, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers of a call with many answers; raises CallFailedError."""
        method: _Many = self._channel.unary_stream(path)
        call = method(body, metadata=metadata)
        try:
            async for one in call:
                yield one
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        finally:
            call.cancel()

    def _failed(self, error: grpc.aio.AioRpcError) -> CallFailedError:
        trailing = tuple((key, value) for key, value in error.trailing_metadata() or ())
        text = error.details() or ""
        if text.startswith(_NOT_CONNECTED):
            text = f"nobody answers on {self._endpoint}"
        return CallFailedError(error.code().name, text, trailing)

    async def aclose(self) -> None:
        await self._channel.close()
