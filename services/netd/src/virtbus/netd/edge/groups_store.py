"""Stores the security groups of this node's VMs, one file each.

With these files, netd can start without the bus.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from virtbus.netd.edge.namespaces import opened
from virtbus.schemas.ids import token_name
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.security_group import NodeGroup

log = logging.getLogger(__name__)


class StoredGroup(LenientModel):
    """A group, and the nonce of the bus on which netd last saw the group."""

    schema_version: int = SCHEMA_VERSION
    nonce: str
    group: NodeGroup


class GroupsStore:
    """The directory `<state_dir>/netd/groups`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def all(self) -> list[StoredGroup]:
        """Skip unreadable files: the bus sends their groups again."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(StoredGroup.model_validate_json(path.read_bytes()))
            except (ValidationError, ValueError) as error:
                extra = {"code": "bad_group_file"}
                log.error("%s cannot be used; the bus repeats it: %s", path, error, extra=extra)
        return found

    def writer(self, stored: StoredGroup) -> Callable[[], None]:
        """Return a function that writes and syncs a group's file. The function raises OSError."""
        return partial(self._write, stored)

    def remover(self, key: str) -> Callable[[], None]:
        *_, namespace, token = key.split(".")
        return partial(self._path(namespace, token_name(token)).unlink, missing_ok=True)

    def _write(self, stored: StoredGroup) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(stored.group.namespace, stored.group.name)
        part = path.with_suffix(".part")
        part.write_bytes(stored.model_dump_json().encode())
        with opened(part) as fd:
            os.fsync(fd)
        part.replace(path)
        with opened(self._directory) as fd:
            os.fsync(fd)

    def _path(self, namespace: str, name: str) -> Path:
        return self._directory / f"{namespace}.{name}.json"
