"""Defines the port of a pool's server. Each kind of server has one module that implements it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from virtbus.bus.runtime.pool_settings import IscsiPool, NbdPool, NfsPool, RbdPool
from virtbus.nodeagent.core.element import Element, el

P = TypeVar("P", NbdPool, IscsiPool, RbdPool, NfsPool)


@dataclass(frozen=True, slots=True)
class Login:
    """A login of a disk at its server. The secret is in a file of the node."""

    kind: str
    """libvirt's type of the secret: `iscsi`, `ceph`."""
    user: str
    secret_file: str
    id: str
    """The UUID of libvirt's secret. For a guest's volume it is the volume's uid. If the volume is
    shared, the UUID is made of the uids of volume and VM. So no two guests share a secret."""


@dataclass(frozen=True, slots=True)
class FirstWords:
    """The bytes that a client sends first, and the judgement of the answer.

    The bytes contain no login and no key. So a probe proves that the server answers, but not that
    each of its volumes can be opened. Only QEMU finds that out, at the start of a guest.
    """

    sent: bytes
    answer_bytes: int
    """The bytes of the answer that are read."""
    is_greeting: Callable[[bytes], bool]
    """Return True if the bytes, at most `answer_bytes`, are from a server with this protocol."""
    why_not: Callable[[bytes], str]
    """Return why the pool cannot use a server with this answer; empty if it can."""


class Server(ABC, Generic[P]):
    """The server of one pool.

    A place is the data of one volume there: an export, a unit, an image or a file.
    """

    tells_sizes = False
    """True if the server reports the sizes of its places by NBD, without a login or a key."""
    needs_qemus_user = False
    """True if a QEMU can use the server only if it runs as the user that guests' QEMUs run as."""

    def __init__(self, pool: P) -> None:
        self.pool: P = pool

    @abstractmethod
    def source(self, place: str, login: Login | None) -> Element:
        """Return the `<source>` of a disk at a place."""

    @abstractmethod
    def first_words(self) -> FirstWords:
        """Return the words that a probe sends, and the judgement of the answer."""

    def login(self, id_: str) -> Login | None:
        """Return the login, whose secret has the UUID `id_`; None if the server needs no login."""
        del id_
        return None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the server's hosts. If one of them answers, the server counts as present."""
        return (self.pool.host,)


def auth(login: Login | None) -> Element | None:
    """Return the element of a login."""
    if login is None:
        return None
    return el("auth", el("secret", type=login.kind, uuid=login.id), username=login.user)
