"""Finds server and credentials in flags, the environment, and the files of `virtbus up`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.cli.failures import CliError, Exit, unavailable, usage

DEFAULT_PORT = 4222
DEFAULT_RUN_DIR = "/run/virtbus"
CLIENT_CREDS = "bus.creds"


class ServerAddress(NamedTuple):
    """One server of a NATS URL."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    tls: bool = False

    @property
    def url(self) -> str:
        """Return the address as a NATS URL without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


class Access(NamedTuple):
    """The parameters of a connection.

    `source` names the flag, variable or file that gave the login; `address_source` names that of
    the servers.
    """

    servers: tuple[ServerAddress, ...]
    user: str = ""
    password: str = ""
    inbox_prefix: str = "_INBOX"
    nkey_seed: str = ""
    ca: str = ""
    source: str = ""
    address_source: str = ""


def find(server: str | None, creds: str | None, environ: Mapping[str, str]) -> Access:
    """Return the access from flags, environment variables and files, in this order.

    Raises:
        CliError: a file is unreadable or malformed, a URL is wrong, or no source names a bus.
    """
    address_source = "--server" if server else "VIRTBUS_SERVER"
    server = server or environ.get("VIRTBUS_SERVER", "")
    named = creds or environ.get("VIRTBUS_CREDS", "")
    path = Path(named) if named else default_creds(environ)
    if server and not named:
        addresses = parse_url(server)
        if addresses[0].user:
            return Access(addresses, source=address_source, address_source=address_source)
    if not named and not _exists(path):
        if server:
            return Access(parse_url(server), source=address_source, address_source=address_source)
        raise unavailable(
            f"no bus is known here: {path} does not exist",
            "start one with `virtbus up`, or name one with --server and --creds",
        )
    fields = _read(path)
    return Access(
        parse_url(server or str(fields.get("url") or f"nats://127.0.0.1:{DEFAULT_PORT}")),
        user=str(fields.get("user") or ""),
        password=str(fields.get("password") or ""),
        inbox_prefix=str(fields.get("inbox_prefix") or "_INBOX"),
        nkey_seed=str(fields.get("nkey_seed") or ""),
        ca=str(fields.get("ca") or ""),
        source=str(path),
        address_source=address_source if server else str(path),
    )


def default_creds(environ: Mapping[str, str]) -> Path:
    """Return the path of the client's credentials file that `virtbus up` writes on this host."""
    return Path(environ.get("VIRTBUS_RUN_DIR") or DEFAULT_RUN_DIR) / CLIENT_CREDS


def parse_url(text: str) -> tuple[ServerAddress, ...]:
    """Parse `nats://[user:password@]host[:port]`, or several such URLs separated by commas.

    Raises:
        CliError: a URL is invalid.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise usage("--server is empty", "for example nats://127.0.0.1:4222")
    return tuple(_address(part) for part in parts)


def _address(text: str) -> ServerAddress:
    scheme, sep, rest = text.partition("://")
    if not sep:
        scheme, rest = "nats", text
    if scheme not in {"nats", "tls"}:
        raise usage(f"the server's scheme is {scheme!r}", "use nats:// or tls://")
    identity, _, place = rest.rstrip("/").rpartition("@")
    user, _, password = identity.partition(":")
    host, port = _place(place, text if not identity else place)
    return ServerAddress(host, port, _unquote(user), _unquote(password), tls=scheme == "tls")


def _place(place: str, shown: str) -> tuple[str, int]:
    if place.startswith("["):
        host, _, tail = place[1:].partition("]")
        port = tail.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    number = int(port) if port.isascii() and port.isdigit() else (0 if port else DEFAULT_PORT)
    if not host or not 0 < number < 65536:
        raise usage(f"{shown!r} is no server address", "for example nats://127.0.0.1:4222")
    return host, number


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote  # rarely needed, and loads slowly

    return unquote(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise unavailable(
            f"the credentials file {path} does not exist",
            "start the bus with `virtbus up`, or name another file with --creds",
        ) from None
    except PermissionError:
        raise CliError(
            Exit.REFUSED,
            "denied",
            f"{path} may not be read",
            hint=f"become root, or join the group virtbus: usermod -aG virtbus {_me()}",
        ) from None
    except (OSError, ValueError) as error:
        raise usage(f"{path} cannot be read as credentials: {error}") from None
    if not isinstance(fields, dict):
        raise usage(f"{path} must hold a JSON object with url, user and password")
    return fields


def _me() -> str:
    import pwd  # only for this hint

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
