"""Implements `Server` for network block devices. A volume's data is in an export."""

import struct

from virtbus.bus.runtime.pool_settings import NbdPool
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.servers.port import FirstWords, Login, Server

# The NBD protocol, "Newstyle negotiation" (doc/proto.md of NetworkBlockDevice/nbd).
_NBD_GREETING = b"NBDMAGICIHAVEOPT"
"""The first bytes of a server with the newer handshake. Named exports need this handshake."""
_NBD_OPTION = struct.Struct(">8sII")
_NBD_FIXED_NEWSTYLE = struct.pack(">I", 1)
_NBD_STARTTLS, _NBD_INFO = 5, 6
_NBD_ACK, _NBD_TLS_REQUIRED, _NBD_UNKNOWN = 1, 2**31 + 5, 2**31 + 6
_NBD_ANSWER = struct.Struct(">16sHQIII")
"""The greeting and its flags; then magic, option, type and length of the first reply."""


class NbdServer(Server[NbdPool]):
    """A server of NBD, with or without TLS."""

    def __init__(self, pool: NbdPool) -> None:
        super().__init__(pool)
        self.tells_sizes = not pool.tls
        self.needs_qemus_user = pool.tls  # only that user may read the keys

    def source(self, place: str, login: Login | None) -> Element:
        """Always set `tls`, because libvirt has a default."""
        del login
        host = el("host", name=self.pool.host, port=self.pool.port)
        tls = "yes" if self.pool.tls else "no"
        return el("source", host, protocol="nbd", name=place, tls=tls)

    def first_words(self) -> FirstWords:
        """Ask for TLS, or, in a pool without TLS, for facts about an export."""
        name = min(self.pool.volumes.values(), default="")
        option, data = _NBD_STARTTLS, b""
        if not self.pool.tls:
            option, data = _NBD_INFO, struct.pack(">I", len(name)) + name.encode() + bytes(2)
        wrong = {
            _NBD_TLS_REQUIRED: "requires TLS; set `tls = true`",
            _NBD_UNKNOWN: f"has no export {name!r}; make it",
        }

        def why_not(answer: bytes) -> str:
            reply = _NBD_ANSWER.unpack(answer)[4]
            if not self.pool.tls:
                return wrong.get(reply, "")
            no_tls = "offers no TLS; give it certificates, or set `tls = false`"
            return "" if reply == _NBD_ACK else no_tls

        return FirstWords(
            _NBD_FIXED_NEWSTYLE + _NBD_OPTION.pack(b"IHAVEOPT", option, len(data)) + data,
            _NBD_ANSWER.size,
            lambda answer: answer.startswith(_NBD_GREETING),
            why_not,
        )
