"""Defines the settings of a connection to the bus, and reads its credentials file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from virtbus.bus.errors import BusError

DEFAULT_URL = "nats://127.0.0.1:4222"


def creds_file(run_dir: Path, user: str) -> Path:
    """Return the path of a user's credentials file. The file of `client` is `bus.creds`."""
    return run_dir / ("bus.creds" if user == "client" else f"{user}.creds")


@dataclass(frozen=True, slots=True)
class BusSettings:
    """Settings of one connection. `creds` is a file with URL and login, read at each connect."""

    url: str = ""
    """NATS URLs, separated by commas. If empty, `creds` has the URL; its default is DEFAULT_URL."""
    user: str = ""
    password: str = ""
    nkey_seed: str = ""
    """The seed of an nkey, `SU…`, instead of user and password."""
    ca: str = ""
    """PEM text of the CA that signs the servers' certificates. If set, connections require TLS."""
    creds: Path | None = None
    inbox_prefix: str = "_INBOX"
    """Prefix of reply subjects. A user's permissions allow only the user's own prefix."""
    node: str = ""
    """Node id of a node's user; empty for other users. A node's users read by DIRECT.GET only."""
    connect_timeout_s: float = 10.0
    """Time limit of the first connect."""
    write_timeout_s: float = 5.0
    """Time limit of one write or read of a record, including retries."""

    @classmethod
    def found(
        cls, run_dir: Path, user: str, *, server: str = "", creds: Path | None = None
    ) -> "BusSettings":
        """Return the settings of a user, with `creds` or the credentials file of `virtbus up`.

        `user` is `admin`, `controller`, `client` or `node-<id>`. With `server` and without a
        credentials file, the settings have no credentials.
        """
        path = creds or creds_file(run_dir, user)
        if creds is None and server and not path.exists():
            return cls(url=server)
        return cls(url=server, creds=path)

    @property
    def servers(self) -> list[str]:
        return [part.strip() for part in (self.url or DEFAULT_URL).split(",") if part.strip()]

    def resolved(self) -> "BusSettings":
        """Return the settings with the current content of the credentials file.

        Raises:
            BusError: the file is missing, unreadable or malformed.
        """
        if self.creds is None:
            return self
        return _merge(self, self.creds)


def _merge(settings: BusSettings, path: Path) -> BusSettings:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        msg = f"{path} does not exist: start the bus, or name the file with --creds"
        raise BusError(msg) from None
    except PermissionError:
        msg = f"{path} may not be read: become root or a member of group virtbus"
        raise BusError(msg) from None
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise BusError(msg) from None
    if not isinstance(content, Mapping):
        msg = f"{path} must hold a JSON object with url, user and password"
        raise BusError(msg)
    return replace(
        settings,
        url=settings.url or str(content.get("url", "")),
        user=str(content.get("user", "")),
        password=str(content.get("password", "")),
        nkey_seed=str(content.get("nkey_seed", "")),
        ca=str(content.get("ca", "")),
        inbox_prefix=str(content.get("inbox_prefix", settings.inbox_prefix)),
        node=str(content.get("node", settings.node)),
    )
