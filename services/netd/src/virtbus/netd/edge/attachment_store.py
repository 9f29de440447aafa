"""State files, one per VM, with the VM's addresses and the input of a CNI DEL.

The file is written before any part of the network is made, and removed after all parts are gone.
Every namespace that a crash leaves on the host therefore has a file.
"""

import fcntl
import json
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from virtbus.netd.core.attachment import Attachment
from virtbus.netd.edge.namespaces import opened
from virtbus.netd.edge.release_journal import ReleaseJournal
from virtbus.netd.edge.whole_file import replace
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.version import check_version

log = logging.getLogger(__name__)
_SUFFIX = ".json"
_IF_NEWER = "install the newer virtbus again, or delete the VM with it first"


class AttachmentStore:
    """The directory `<state_dir>/netd/vms`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.releases = ReleaseJournal(directory.with_name("releases"))
        self._lock = -1

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def prepare(self) -> None:
        """Make the directory and lock it. Remove unfinished writes.

        Raises:
            VirtbusError: 409 `netd_running` if another process has locked it.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock < 0:
            self._lock = _locked(self._directory)
        for leftover in self._directory.glob("*.part"):
            leftover.unlink(missing_ok=True)

    def write(self, attachment: Attachment) -> None:
        """Replace the file. Until `sync`, a power loss may leave the old file or a damaged file."""
        replace(self._path(attachment.uid), attachment.model_dump_json().encode())

    def sync(self, uid: str) -> None:
        for path in (self._path(uid), self._directory):
            with opened(path) as fd:
                os.fsync(fd)

    def remove(self, uid: str) -> None:
        self._path(uid).unlink(missing_ok=True)

    def all(self) -> list[Attachment]:
        """Return the attachments of all readable files.

        A damaged file is removed: the power failed before `sync`. netd had then not yet reported
        the network to the agent.

        Raises:
            VirtbusError: 422 `state_newer` or `state_older` if a file has another version.
        """
        found = []
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            attachment = _read(path)
            if attachment is None:
                log.warning("removed a torn state file", extra={"code": "torn", "uid": path.stem})
                path.unlink(missing_ok=True)
            else:
                found.append(attachment)
        return found

    def _path(self, uid: str) -> Path:
        return self._directory / f"{check_uid(uid)}{_SUFFIX}"


def _locked(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise VirtbusError(
            Code.CONFLICT,
            "netd_running",
            f"another virtbus-netd works in {directory}; stop it first",
        ) from None
    return fd


def _read(path: Path) -> Attachment | None:
    """Return the attachment in a file; None if the file is damaged.

    A later release may write values that this release does not know, such as a new kind of network.
    """
    raw = path.read_bytes()
    try:
        version = json.loads(raw).get("schema_version", SCHEMA_VERSION)
    except (ValueError, AttributeError):
        return None
    check_version(str(path), version, reasons=("state_older", "state_newer"), next_step=_IF_NEWER)
    try:
        attachment = Attachment.model_validate_json(raw)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        message = f"{path} has a value at {where} that this program does not know; {_IF_NEWER}"
        raise VirtbusError(Code.UNSUPPORTED, "state_newer", message) from None
    return attachment if attachment.uid == path.stem else None
