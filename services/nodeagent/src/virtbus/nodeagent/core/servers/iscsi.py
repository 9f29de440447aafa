"""Implements `Server` for iSCSI portals. A volume's data is in a unit, named `target/number`."""

import struct

from virtbus.bus.runtime.pool_settings import IscsiPool
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.servers.port import FirstWords, Login, Server, auth

# RFC 7143, 11.12 and 11.13: every target must understand a login for discovery.
_ISCSI_LOGIN, _ISCSI_LOGIN_ANSWER = 0x43, 0x23
_ISCSI_TO_OPERATIONAL = 0x81
_ISCSI_HEAD = struct.Struct(">BB2xBBH8s28x4x")
_ISCSI_KEYS = (
    b"InitiatorName=iqn.2026-01.net.virtbus:probe\0SessionType=Discovery\0AuthMethod=None\0"
)


def _iscsi_login() -> bytes:
    data = _ISCSI_KEYS + bytes(-len(_ISCSI_KEYS) % 4)
    isid = bytes((0x80, 0, 0, 0, 0, 0, 0, 0))  # type "random", for a new session
    head = (_ISCSI_LOGIN, _ISCSI_TO_OPERATIONAL, 0, 0, len(_ISCSI_KEYS), isid)
    return _ISCSI_HEAD.pack(*head) + data


_WORDS = FirstWords(
    _iscsi_login(),
    _ISCSI_HEAD.size,
    lambda answer: answer[0] & 0x3F == _ISCSI_LOGIN_ANSWER,
    lambda _answer: "",  # a refusal without a login is an answer, too
)


class IscsiServer(Server[IscsiPool]):
    """An iSCSI portal, with CHAP if there is a login."""

    def source(self, place: str, login: Login | None) -> Element:
        host = el("host", name=self.pool.host, port=self.pool.port)
        return el("source", host, auth(login), protocol="iscsi", name=place)

    def first_words(self) -> FirstWords:
        return _WORDS

    def login(self, id_: str) -> Login | None:
        pool = self.pool
        return Login("iscsi", pool.user, pool.secret_file, id_) if pool.user else None
