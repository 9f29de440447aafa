"""Reads a file, and replaces a file in one step.

A create does both several times. So the paths are plain strings where `pathlib` costs more than the
system calls.
"""

import os
from pathlib import Path


def content(path: str) -> bytes:
    """Return the content of a file. Raises OSError."""
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()


def replace(path: Path, new: bytes) -> None:
    """Replace a file, readable by its owner only, so that no reader or crash sees a part of it.

    It is not synced: a power loss may leave the old content, or a damaged file. The unfinished file
    is hidden and ends in `.part`.
    """
    folder, name = os.path.split(path)
    part = f"{folder}/.{name}.part"
    with open(part, "wb", opener=_private) as file:
        file.write(new)
    os.replace(part, path)  # noqa: PTH105


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
