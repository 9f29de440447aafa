"""Derives the directories of a pod's VM: the node's folders that the guest mounts by virtiofs."""

import hashlib
import posixpath
import re
from collections.abc import Iterator
from typing import NamedTuple

from virtbus.cri.core import pod_volumes
from virtbus.cri.core.configs import ContainerConfig, Mount
from virtbus.schemas.errors import Detail
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.guest_files import GuestMount
from virtbus.schemas.wire import reason_of

_NAME_CHARS = 20


class PodDirectory(NamedTuple):
    """A folder of the node, and its mounts in the guest."""

    filesystem: Filesystem
    mounts: tuple[GuestMount, ...]


def directories(config: ContainerConfig) -> tuple[PodDirectory, ...]:
    """Return the directories of a container, one for each folder of the node.

    A directory is read-only if all of its mounts are read-only. Raises ValueError.
    """
    found: dict[str, PodDirectory] = {}
    for mount in filter(pod_volumes.is_directory, config.mounts):
        one = _directory(mount)
        known = found.setdefault(one.filesystem.name, one)
        if known is not one:
            readonly = known.filesystem.readonly and mount.readonly
            filesystem = known.filesystem.model_copy(update={"readonly": readonly})
            found[one.filesystem.name] = PodDirectory(filesystem, known.mounts + one.mounts)
    return tuple(found.values())


def _directory(mount: Mount) -> PodDirectory:
    """Return the directory of one mount.

    Raises ValueError.
    """
    path = posixpath.normpath(mount.host_path)
    tag = _tag(path)
    options = "defaults,nofail,ro" if mount.readonly else "defaults,nofail"
    return PodDirectory(
        Filesystem(name=tag, directory=path, readonly=mount.readonly),
        (GuestMount(volume=tag, path=mount.container_path, options=options),),
    )


def _tag(path: str) -> str:
    """Return the virtiofs tag of a folder. A hash of the path makes the tag unique in the VM."""
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9-]", "-", posixpath.basename(path).lower())[:_NAME_CHARS].strip("-")
    return f"{plain or 'folder'}-{digest}-dir"


def problems(config: ContainerConfig) -> Iterator[Detail]:
    """Yield the problems of the folders that are to become directories of the VM."""
    for index, mount in enumerate(config.mounts):
        if not pod_volumes.is_directory(mount):
            continue
        try:
            _directory(mount)
        except ValueError as error:
            message = f"the folder {mount.host_path!r:.200}: {reason_of(error)}"
            yield Detail(path=f"mounts[{index}]", message=message)
