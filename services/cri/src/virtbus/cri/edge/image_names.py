"""Writes the cluster's image names into a folder of files that imaged reads.

The image names may contain secrets, so only imaged's group may read the folder. systemd-tmpfiles
makes the folder for this group at each boot (deploy/systemd/tmpfiles.conf). imaged could not read a
folder that this process makes.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

TMPFILES = "deploy/systemd/tmpfiles.conf: systemd-tmpfiles --create /etc/tmpfiles.d/virtbus.conf"
_PART = ".part"


async def write_names(folder: Path, files: Mapping[str, bytes]) -> list[OSError]:
    """Write these files, and remove all other files of the folder; return errors of single files.

    Raises:
        OSError: the folder is missing, or cannot be read.
    """
    return await asyncio.to_thread(_write, folder, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> list[OSError]:
    try:
        group = folder.stat().st_gid
    except FileNotFoundError:
        msg = f"it is missing; apply {TMPFILES}"
        raise FileNotFoundError(msg) from None
    errors = []
    for path in folder.iterdir():
        if path.name not in files:
            try:
                path.unlink()
            except OSError as error:
                errors.append(error)
    for name, body in files.items():
        try:
            _ensure(folder / name, body, group)
        except OSError as error:
            errors.append(error)
    return errors


def _ensure(path: Path, body: bytes, group: int) -> None:
    # A file with another group is written again: it is older than the folder's present group.
    if path.is_file() and path.read_bytes() == body and path.stat().st_gid == group:
        return
    part = path.with_name(f"{path.name}{_PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o640)
        file.write(body)
    part.replace(path)
