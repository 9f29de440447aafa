"""Decides from the first bytes of a server if a pool can use it, by one function for each protocol.

The words need no login and no key. So a probe proves that the server answers, and not that each of
its volumes can be opened; QEMU says that at the start of a guest.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.bus.runtime.pool_settings import (
    IscsiPool,
    NbdPool,
    NfsPool,
    RbdPool,
    ServerPool,
)


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
    match pool:
        case NbdPool():
            return _nbd(pool)
        case IscsiPool():
            return _ISCSI
        case RbdPool():
            return _CEPH
        case NfsPool():
            return _NFS


def hosts(pool: ServerPool) -> tuple[str, ...]:
    """Return the hosts of a pool's server. One that answers is enough."""
    return pool.monitors if isinstance(pool, RbdPool) else (pool.host,)


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


# RFC 7143, 11.12 and 11.13: a login for discovery, as each target must understand it.
_ISCSI_LOGIN, _ISCSI_LOGIN_ANSWER = 0x43, 0x23
_ISCSI_TO_OPERATIONAL = 0x81
_ISCSI_HEAD = struct.Struct(">BB2xBBH8s28x4x")
_ISCSI_KEYS = (
    b"InitiatorName=iqn.2026-01.net.virtbus:probe\0SessionType=Discovery\0AuthMethod=None\0"
)


def _iscsi_login() -> bytes:
    data = _ISCSI_KEYS + bytes(-len(_ISCSI_KEYS) % 4)
    isid = bytes((0x80, 0, 0, 0, 0, 0, 0, 0))  # a random one, for one session
    head = (_ISCSI_LOGIN, _ISCSI_TO_OPERATIONAL, 0, 0, len(_ISCSI_KEYS), isid)
    return _ISCSI_HEAD.pack(*head) + data


_ISCSI = FirstWords(
    _iscsi_login(),
    _ISCSI_HEAD.size,
    lambda answer: answer[0] & 0x3F == _ISCSI_LOGIN_ANSWER,
    lambda _answer: "",  # it answers, also if it refuses a discovery without a login
)

# Both versions of Ceph's messenger begin with a banner: "ceph v027" and "ceph v2".
_CEPH = FirstWords(b"", 8, lambda answer: answer.startswith(b"ceph v"), lambda _answer: "")

# RFC 5531: a call of the procedure NULL of NFS (RFC 1813), in one record.
_NFS_CALL = struct.pack(">11I", 2**31 + 40, 1, 0, 2, 100003, 3, 0, 0, 0, 0, 0)
_NFS_REPLY = struct.Struct(">7I")
"""The record's mark; then number, direction, acceptance, verifier (two words) and result."""


def _nfs_why_not(answer: bytes) -> str:
    *_, accepted, _flavor, _length, result = _NFS_REPLY.unpack(answer)
    return "" if accepted == result == 0 else "does not serve version 3 of NFS; enable it"


_NFS = FirstWords(
    _NFS_CALL,
    _NFS_REPLY.size,
    lambda answer: answer[4:12] == struct.pack(">II", 1, 1),
    _nfs_why_not,
)
