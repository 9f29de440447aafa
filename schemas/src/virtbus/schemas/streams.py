"""Streams of bytes between a client and a VM, through its node (ADR 0023).

A request that opens a stream (`StreamOpen`) gets many answers (`StreamData`). The first answer has
the subject to which the client sends its own `StreamData`. Each end counts bytes from 0 and
announces up to which byte the other end may send.
"""

import base64
from typing import Any, Literal

from pydantic import Field, field_validator

from virtbus.schemas.model import LenientModel

WINDOW_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 16 * 1024 * 1024


class StreamOpen(LenientModel):
    """The common fields of a request that opens a stream.

    `window` is the number of bytes that the node may send before the client grants more by `upto`.
    `owner` names the client, for people.
    """

    uid: str
    window: int = Field(WINDOW_BYTES, ge=0, le=MAX_WINDOW_BYTES)
    owner: str = Field("", max_length=128)


class ConsoleOpen(StreamOpen):
    """`rpc.agent.console`: open a VM's serial console, shared with other clients.

    `tail_bytes` of earlier output come first. Only the latest client with `write` can type; the
    input of other clients is dropped.
    """

    write: bool = True
    tail_bytes: int = Field(0, ge=0, le=MAX_WINDOW_BYTES)


class LogsRead(StreamOpen):
    """`rpc.agent.logs`: read the last `tail_bytes` of a console log; with `follow`, new output."""

    tail_bytes: int = 65_536
    follow: bool = False


class PortOpen(StreamOpen):
    """`rpc.agent.port`: open a connection from the VM's node to a port of the guest.

    Each `StreamData` of a `udp` stream is one datagram. A datagram that is empty or too large is
    lost.
    """

    port: int = Field(ge=1, le=65_535)
    protocol: Literal["tcp", "udp"] = "tcp"


class ExportRead(StreamOpen):
    """`rpc.agent.export`: read the file of the export `uid` (the operation's id).

    The bytes begin at `offset`. The operation's result has the size and the digest.
    """

    offset: int = Field(0, ge=0)


class DisksRead(StreamOpen):
    """`rpc.agent.nbd`: one connection to the NBD server of the reading `uid` (the operation's id).

    The server's exports are the VM's disks, with their names in the spec (`backup.serve`).
    """


class StreamData(LenientModel):
    """A piece of a stream, in either direction. A piece without `data` is a keep-alive.

    `at` is the number of bytes that its sender sent before. `upto` is the total number of bytes
    that the other end may send. With `eof`, the sender sends no more data. `closed` says why the
    stream ended in both directions. `note` is a text for people. `input_subject`, only in the first
    piece, is the subject for the client's pieces.
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
