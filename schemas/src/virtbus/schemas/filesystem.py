"""Directories of a node that a guest mounts by virtiofs (ADR 0076)."""

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from virtbus.schemas.errors import Detail
from virtbus.schemas.model import StrictModel

FILESYSTEMS_MAX = 16
PATH_CHARS = 512
FILESYSTEMS = "spec.domain.devices.filesystems"


def check_host_path(path: str) -> str:
    """Return an absolute path below `/` without `.`, `..` and empty parts; raises ValueError."""
    parts = path.split("/")
    if parts[0] or len(parts) == 1 or {"", ".", ".."}.intersection(parts[1:]):
        msg = "must be an absolute path other than /, without `.`, `..` and empty parts"
        raise ValueError(msg)
    return path


HostPath = Annotated[
    str,
    StringConstraints(pattern=r"^/[^\x00-\x1F\x7F]*$", max_length=PATH_CHARS),
    AfterValidator(check_host_path),
]
"""A path of a node."""
Tag = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,35}$")]
"""A tag of virtiofs has at most 36 bytes (virtio 1.2, 5.11.4)."""


class Filesystem(StrictModel):
    """A directory of the node, which the guest mounts by virtiofs with `name` as the tag.

    The node's agent accepts only directories at or below those of its setting
    `directories_allowed`. The guest's root may set any owner and mode of the files in `directory`.
    """

    name: Tag
    directory: HostPath
    readonly: bool = False


def is_below(path: str, root: str) -> bool:
    """Return True if `path` is `root`, or is below it."""
    return path == root or path.startswith(f"{root}/")


def root_of(directory: str, roots: Iterable[str]) -> str:
    """Return the longest of the roots at or above a directory; empty if there is none."""
    return max((root for root in roots if is_below(directory, root)), key=len, default="")


def filesystem_problems(given: Iterable[Filesystem], volumes: Collection[str]) -> Iterator[Detail]:
    """Yield the conflicts between a VM's directories, or with the names of its `volumes`.

    The mounts of a seed refer to volumes and directories by name, so each needs a name of its own.
    Directories may overlap only if both are readonly.
    """
    seen: dict[str, Filesystem] = {}
    for index, one in enumerate(given):
        path = f"{FILESYSTEMS}[{index}].name"
        for other in seen.values():
            if (near := _near(one, other)) and not (one.readonly and other.readonly):
                message = f"{near} of {other.name!r}; mount the upper one only, or both readonly"
                yield Detail(path=f"{FILESYSTEMS}[{index}].directory", message=message)
        if one.name in seen:
            yield Detail(path=path, message=f"{one.name!r} is used twice")
        elif one.name in volumes:
            yield Detail(path=path, message=f"{one.name!r} is the name of a volume, too")
        seen.setdefault(one.name, one)


def _near(one: Filesystem, other: Filesystem) -> str:
    """Return how two directories overlap; empty if they do not."""
    if is_below(one.directory, other.directory):
        return f"is at or below {other.directory}"
    return f"is above {other.directory}" if is_below(other.directory, one.directory) else ""
