"""Writes credentials files: a user's login on the bus as JSON, with mode 0600 or 0640."""

import grp
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from virtbus.bus.provisioning.permissions import CLIENT, Role

GROUP = "virtbus"


def write_secret(path: Path, text: str, *, mode: int = 0o600, group: str = "") -> None:
    """Replace a file atomically. For root and an existing `group`, the mode is always 0640."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if group and os.geteuid() == 0:
            with suppress(KeyError):
                os.fchown(descriptor, -1, grp.getgrnam(group).gr_gid)
                os.fchmod(descriptor, 0o640)
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)


def write_creds(path: Path, role: Role, url: str, identity: Mapping[str, str]) -> bool:
    """Write a role's credentials file; return False if the content is unchanged.

    `identity` has `user` and `password`, or `nkey_seed` and `ca` (the PEM text of the servers' CA).
    The group `virtbus` may read the file of the user `client`, if root writes the file.
    """
    content: dict[str, Any] = {"url": url, **identity, "inbox_prefix": role.inbox_prefix}
    if role.node:
        content["node"] = role.node
    text = json.dumps(content, indent=1)
    with suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return False
    write_secret(path, text, group=GROUP if role.user == CLIENT else "")
    return True


def passwords(path: Path, users: Iterable[str]) -> dict[str, str]:
    """Return the passwords in a file by user. Users without a password first get a new one."""
    known: dict[str, str] = {}
    with suppress(FileNotFoundError):
        known = json.loads(path.read_text(encoding="utf-8"))
    missing = {user: secrets.token_urlsafe(24) for user in users if user not in known}
    if missing:
        known |= missing
        write_secret(path, json.dumps(known, indent=1))
    return known


def forget(path: Path, users: Iterable[str]) -> None:
    """Remove users' passwords from a file, so that servers refuse their credentials."""
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    gone = set(users)
    write_secret(path, json.dumps({u: p for u, p in known.items() if u not in gone}, indent=1))
