"""Streams of bytes between a client and a VM, through its node (ADR 0023).

A request that opens a stream (`StreamOpen`) is answered by many `StreamData`. The first names the
subject for the client's own data. Both ends count bytes from 0 and announce how far the other may
send.
"""

import base64
from typing import Any, Literal

from pydantic import Field, field_validator

from virtbus.schemas.model import LenientModel

WINDOW_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 16 * 1024 * 1024


class StreamOpen(LenientModel):
    """The common fields of a request that opens a stream.

    `window` is how many bytes the node may send before the client grants more; a client that never
    grants more reads so many. `owner` names the opener, for people.
    """

    uid: str
    window: int = Field(WINDOW_BYTES, ge=0, le=MAX_WINDOW_BYTES)
    owner: str = Field("", max_length=128)


class ConsoleOpen(StreamOpen):
    """`rpc.agent.console`: open a VM's serial console, shared with other clients.

    `tail_bytes` of earlier output come first. Of the clients that `write`, the latest one does;
    input of the others is dropped.
    """

    write: bool = True
    tail_bytes: int = Field(0, ge=0, le=MAX_WINDOW_BYTES)


class LogsRead(StreamOpen):
    """`rpc.agent.logs`: a VM's console log: the last `tail_bytes`, then more if `follow`."""

    tail_bytes: int = 65_536
    follow: bool = False


class PortOpen(StreamOpen):
    """`rpc.agent.port`: a connection to a port of the guest, made by its node.

    Each `StreamData` of a `udp` stream is one datagram. A datagram that is empty or too large is
    lost.
    """

    port: int = Field(ge=1, le=65_535)
    protocol: Literal["tcp", "udp"] = "tcp"


class StreamData(LenientModel):
    """A piece of a stream, in either direction; without `data` it is a keep-alive.

    `at` is how many bytes its sender sent before. `upto` is how many bytes the other end may have
    sent in total. `eof`: the sender sends no more. `closed` says why the stream ended, in both
    directions. `note` is for people. `input_subject` is only in the first piece; it takes the
    client's pieces.
    """

    data: bytes = b""
    at: int = Field(0, ge=0)
    upto: int = Field(0, ge=0)
    eof: bool = False
    note: str = ""
    closed: str = ""
    input_subject: str = ""

    @field_validator("data", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Decode base64, the form of bytes in JSON."""
        return base64.b64decode(value) if isinstance(value, str) else value
