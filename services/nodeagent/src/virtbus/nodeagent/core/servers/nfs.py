"""Implements `Server` for NFS, version 3. A volume's data is in a raw file."""

import struct

from virtbus.bus.runtime.pool_settings import NfsPool
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.servers.port import FirstWords, Login, Server

# A call of NFS' procedure NULL (RFC 5531, RFC 1813), in one record.
_NFS_CALL = struct.pack(">11I", 2**31 + 40, 1, 0, 2, 100003, 3, 0, 0, 0, 0, 0)
_NFS_REPLY = struct.Struct(">7I")
"""The record's mark; then number, direction, acceptance, verifier (two words), result."""


def _why_not(answer: bytes) -> str:
    *_, accepted, _flavor, _length, result = _NFS_REPLY.unpack(answer)
    return "" if accepted == result == 0 else "does not serve version 3 of NFS; enable it"


_WORDS = FirstWords(
    _NFS_CALL,
    _NFS_REPLY.size,
    lambda answer: answer[4:12] == struct.pack(">II", 1, 1),
    _why_not,
)


class NfsServer(Server[NfsPool]):
    """An NFS server. It knows users only by their ids."""

    def __init__(self, pool: NfsPool) -> None:
        super().__init__(pool)
        self.needs_qemus_user = pool.user is None

    def source(self, place: str, login: Login | None) -> Element:
        del login
        pool, ids = self.pool, None
        if pool.user is not None:
            ids = el("identity", user=f"+{pool.user}", group=f"+{pool.group}")
        return el("source", el("host", name=pool.host), ids, protocol="nfs", name=place)

    def first_words(self) -> FirstWords:
        return _WORDS
