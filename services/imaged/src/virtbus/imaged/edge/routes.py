"""Reads the files that a transport names: logins, certificates and certificate authorities."""

import base64
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from virtbus.imaged.core.transports import PLAIN, Transport
from virtbus.schemas.errors import Code, Detail, VirtbusError

T = TypeVar("T")
_MAX_LOGIN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Route:
    """The proxy, TLS contexts and logins of requests to an image server.

    `own_tls`, `server_name` and `authorization` are for the server of the image's URL only. The
    other fields are for all servers of the pull.
    """

    proxy: str | None = None
    proxy_authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | bool = True
    own_tls: ssl.SSLContext | bool = True
    server_name: str | None = None
    authorization: str = field(default="", repr=False)


DIRECT = Route()


def route_of(transport: Transport, where: str, folder: Path) -> Route:
    """Read the files that a transport names, relative to `folder`.

    `where` names the transport's rule in errors. Each pull reads the files, so they can be replaced
    at any time. Blocks on the disk.

    Raises:
        VirtbusError: 503 `image_transport_invalid` with every file that cannot be used.
    """
    if transport == PLAIN:
        return DIRECT
    files = _Files(folder, where)
    route = Route(
        proxy=transport.proxy,
        proxy_authorization=files.basic("proxy_login_file", transport.proxy_login_file),
        tls=files.tls(transport, own=False),
        own_tls=files.tls(transport, own=True),
        server_name=transport.server_name,
        authorization=files.basic("login_file", transport.login_file),
    )
    if files.problems:
        first = files.problems[0]
        raise VirtbusError(
            Code.UNAVAILABLE,
            "image_transport_invalid",
            f"{first.path}: {first.message}; mend that file, it is read again for each pull",
            details=tuple(dict.fromkeys(files.problems)),
        )
    return route


class _Files:
    """The files of one transport, and their problems."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self._where = where
        self.problems: list[Detail] = []

    def basic(self, name: str, file: str | None) -> str:
        if file is None:
            return ""
        return self._read(name, lambda: _basic(self._folder / file)) or ""

    def tls(self, transport: Transport, *, own: bool) -> ssl.SSLContext | bool:
        authorities = transport.ca_file
        certificate = transport.client_certificate_file if own else None
        if authorities is None and certificate is None:
            return True
        context = ssl.create_default_context()
        if authorities is not None:
            self._read(
                "ca_file", lambda: context.load_verify_locations(cafile=self._path(authorities))
            )
        if certificate is not None:
            key = transport.client_key_file or certificate
            # The empty password keeps OpenSSL from asking for a password at the terminal.
            self._read(
                "client_certificate_file",
                lambda: context.load_cert_chain(
                    self._path(certificate), self._path(key), password=""
                ),
            )
        return context

    def _path(self, file: str) -> str:
        path = self._folder / file
        _regular(path, 0)
        return str(path)

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError) as error:
            self.problems.append(Detail(path=f"{self._where}: {name}", message=_why(error)))
            return None


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"OpenSSL does not accept it: {error.reason or 'it is no PEM of that kind'}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _basic(path: Path) -> str:
    body = _regular(path, _MAX_LOGIN_BYTES).rstrip(b"\r\n")
    user, colon, _ = body.partition(b":")
    if not user or not colon or any(byte < 0x20 or byte == 0x7F for byte in body):
        msg = f"{path} must hold one line user:password"
        raise ValueError(msg)
    return f"Basic {base64.b64encode(body).decode()}"


def _regular(path: Path, most: int) -> bytes:
    """Return up to `most` bytes of a file. Refuse a FIFO, which would block the reader."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            msg = f"{path} is no regular file"
            raise ValueError(msg)
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)
