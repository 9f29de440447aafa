"""Defines the port of a pool's server. One module per kind of server implements the port."""

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
    """The UUID of libvirt's secret: the volume's uid, or for a shared volume a UUID from the uids
    of volume and VM. Thus no two guests share a secret.
    """


@dataclass(frozen=True, slots=True)
class FirstWords:
    """The bytes that a probe sends first, and the judgement of the answer.

    The bytes contain no login and no key. A probe therefore only proves that the server answers.
    QEMU finds out at a guest's start if a volume can be opened.
    """

    sent: bytes
    answer_bytes: int
    """The number of bytes of the answer to read."""
    is_greeting: Callable[[bytes], bool]
    """Returns True if up to `answer_bytes` bytes are from a server with this protocol."""
    why_not: Callable[[bytes], str]
    """Returns the reason for which the pool cannot use a server with this answer, or an empty
    string.
    """


class Server(ABC, Generic[P]):
    """The server of one pool.

    A *place* has the data of one volume on the server: an export, a unit, an image or a file.
    """

    tells_sizes = False
    """True if the server reports sizes of its places by NBD, without a login or key."""
    needs_qemus_user = False
    """True if only a QEMU that runs as the user of guests' QEMUs can use the server."""

    def __init__(self, pool: P) -> None:
        self.pool: P = pool

    @abstractmethod
    def source(self, place: str, login: Login | None) -> Element:
        """Return the `<source>` of a disk at a place."""

    @abstractmethod
    def first_words(self) -> FirstWords:
        """Return the bytes of a probe, and the judgement of the answer."""

    def login(self, id_: str) -> Login | None:
        """Return the login, with the UUID `id_` for its secret; None without a login."""
        del id_
        return None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The server's hosts. If one host answers, the server counts as present."""
        return (self.pool.host,)


def auth(login: Login | None) -> Element | None:
    """Return the element of a login."""
    if login is None:
        return None
    return el("auth", el("secret", type=login.kind, uuid=login.id), username=login.user)
