"""Streams of bytes between a client and a VM, by way of its node (ADR 0023).

A request that opens one (`StreamOpen`) is answered by many `StreamData`; the first names the
subject that takes the client's own. Both ends count bytes from 0 and say up to which they may come.
"""

import base64
from typing import Any, Literal

from pydantic import Field, field_validator

from virtbus.schemas.model import Fact

MAX_WINDOW_BYTES = 16 * 1024 * 1024


class StreamOpen(Fact):
    """What every stream's opening says.

    `window` is how many bytes may come before the client grants more; 0: it takes what comes, as
    clients did before there was flow control. `owner` names who opens it, for people.
    """

    uid: str
    window: int = Field(0, ge=0, le=MAX_WINDOW_BYTES)
    owner: str = Field("", max_length=128)


class ConsoleOpen(StreamOpen):
    """`rpc.agent.console`: look at a VM's serial console, with any number of others.

    `tail_bytes` of what was written before come first. Of those who `write`, the one who came last
    does; what the others type is dropped. `session` is for agents of 0.1.0, which name the stream
    by it.
    """

    session: str = ""
    write: bool = True
    tail_bytes: int = Field(0, ge=0, le=MAX_WINDOW_BYTES)


class LogsRead(StreamOpen):
    """`rpc.agent.logs`: a VM's console log: the last `tail_bytes`, then more if `follow`."""

    tail_bytes: int = 65_536
    follow: bool = False


class PortOpen(StreamOpen):
    """`rpc.agent.port`: a connection to a port of the guest, made by its node.

    Each `StreamData` of a `udp` stream is one datagram; one that does not fit, or is empty, is
    lost, as any may be.
    """

    port: int = Field(ge=1, le=65_535)
    protocol: Literal["tcp", "udp"] = "tcp"


class StreamData(Fact):
    """A piece of a stream, either way; without `data` it is a sign that its sender is there.

    `at` is how many bytes its sender sent before; `upto` how many the other may have sent, ever.
    `eof`: no more of them follow. `closed` says why the stream is over, in both directions. `note`
    is for people. `input_subject` is in the first only, and takes the client's pieces.
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
        """JSON has no bytes: base64 there, as we write it."""
        return base64.b64decode(value) if isinstance(value, str) else value
