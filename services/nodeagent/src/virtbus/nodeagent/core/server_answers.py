"""Decides from the first bytes of a server if a pool can use it, by one function for each protocol.

The words need no login and no key. So a probe proves that the server answers, and not that each of
its volumes can be opened; QEMU says that at the start of a guest.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.bus.runtime.pool_settings import NbdPool, ServerPool


@dataclass(frozen=True, slots=True)
class FirstWords:
    """The bytes that a client sends first, and the judgement of the answer."""

    sent: bytes
    answer_bytes: int
    """The bytes of the answer that are read."""
    is_greeting: Callable[[bytes], bool]
    """Return True if the bytes, which may be fewer, are of a server with this protocol."""
    why_not: Callable[[bytes], str]
    """Return why the pool cannot use a server with this answer; empty if it can."""


def first_words(pool: ServerPool) -> FirstWords:
    """Return what a probe of the pool's server sends and expects."""
    return _nbd(pool)


# The NBD protocol, "Newstyle negotiation" (doc/proto.md of NetworkBlockDevice/nbd).
_NBD_GREETING = b"NBDMAGICIHAVEOPT"
"""The first bytes of a server with the newer handshake, which named exports need."""
_NBD_OPTION = struct.Struct(">8sII")
_NBD_FIXED_NEWSTYLE = struct.pack(">I", 1)
_NBD_STARTTLS, _NBD_INFO = 5, 6
_NBD_ACK, _NBD_TLS_REQUIRED, _NBD_UNKNOWN = 1, 2**31 + 5, 2**31 + 6
_NBD_ANSWER = struct.Struct(">16sHQIII")
"""Greeting and flags; then of the first reply: magic, option, type and length."""


def _nbd(pool: NbdPool) -> FirstWords:
    """Ask for TLS, or for facts about the first export."""
    name = min(pool.volumes.values(), default="")
    option, data = _NBD_STARTTLS, b""
    if not pool.tls:
        option, data = _NBD_INFO, struct.pack(">I", len(name)) + name.encode() + bytes(2)
    wrong = {
        _NBD_TLS_REQUIRED: "requires TLS; set `tls = true`",
        _NBD_UNKNOWN: f"has no export {name!r}; make it",
    }

    def why_not(answer: bytes) -> str:
        reply = _NBD_ANSWER.unpack(answer)[4]
        if not pool.tls:
            return wrong.get(reply, "")
        no_tls = "offers no TLS; give it certificates, or set `tls = false`"
        return "" if reply == _NBD_ACK else no_tls

    return FirstWords(
        _NBD_FIXED_NEWSTYLE + _NBD_OPTION.pack(b"IHAVEOPT", option, len(data)) + data,
        _NBD_ANSWER.size,
        lambda answer: answer.startswith(_NBD_GREETING),
        why_not,
    )
