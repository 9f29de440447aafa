"""Implements `Server` for Ceph clusters. A volume's data is in a Ceph image, named `pool/image`."""

from virtbus.bus.runtime.pool_settings import RbdPool
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.servers.port import FirstWords, Login, Server, auth

# Both versions of Ceph's messenger begin with a banner: "ceph v027" or "ceph v2".
_WORDS = FirstWords(b"", 8, lambda answer: answer.startswith(b"ceph v"), lambda _answer: "")


class RbdServer(Server[RbdPool]):
    """The monitors of a cluster."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.pool.monitors

    def source(self, place: str, login: Login | None) -> Element:
        hosts = [el("host", name=one, port=self.pool.port) for one in self.pool.monitors]
        return el("source", *hosts, auth(login), protocol="rbd", name=place)

    def first_words(self) -> FirstWords:
        """Return empty words, because a monitor speaks first."""
        return _WORDS

    def login(self, id_: str) -> Login | None:
        pool = self.pool
        return Login("ceph", pool.user, pool.secret_file, id_) if pool.user else None
