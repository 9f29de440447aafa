"""Writes the cluster's image names into a folder of files that imaged reads.

The folder is of this boot. systemd makes it for imaged's group, because rules may contain secrets.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

_PART = ".part"


async def write_names(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder have these files and no others; raises OSError."""
    await asyncio.to_thread(_write, folder, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, body in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == body:
            continue
        part = folder / f"{name}{_PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o640)
            file.write(body)
        part.replace(path)
