"""Writes the cluster's image names into a folder of files that imaged reads.

deploy/systemd/tmpfiles.conf makes the folder of this boot for imaged's group, because rules may
contain secrets. A folder that this process makes would be closed to imaged.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

_PART = ".part"


async def write_names(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder have these files and no others; raises OSError, also without a folder."""
    await asyncio.to_thread(_write, folder, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    group = folder.stat().st_gid
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, body in files.items():
        path = folder / name
        # A file of another group is from a time when the folder was not for imaged yet.
        if path.is_file() and path.read_bytes() == body and path.stat().st_gid == group:
            continue
        part = folder / f"{name}{_PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o640)
            file.write(body)
        part.replace(path)
