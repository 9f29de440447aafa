"""Prepares the host directories that guests mount, and finds directories whose virtiofsd ended.

<run_dir>/vms/<uid>/fs/<tag>/        an empty folder: the source that libvirt gives virtiofsd
<run_dir>/vms/<uid>/fs/<tag>.json    the directory to share, for the program in `virtiofsd.py`
<run_dir>/vms/<uid>/fs/<tag>.lock    a file that is locked while virtiofsd runs
<run_dir>/vms/<uid>/fs/<tag>.failed  the reason why the program refused the directory
"""

import contextlib
import fcntl
import json
import os
from collections.abc import AsyncIterator, Collection, Mapping
from importlib.resources import files
from pathlib import Path

from virtbus.bus.client.owners import node_of
from virtbus.nodeagent.core.disk_sources import lent_name
from virtbus.nodeagent.core.shares import NO_SHARES, Shares
from virtbus.nodeagent.edge.atomic_file import in_thread, replace, writing
from virtbus.nodeagent.edge.host_disks import open_disk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.filesystem import Filesystem, root_of
from virtbus.schemas.vm import VmRecord

PROGRAM = "virtiofsd"
EVERY = "*"
_FILES = frozenset({".json", ".lock", ".failed"})


class HostDirectories:
    """The `SharedDirectories` port."""

    def __init__(
        self,
        run_dir: Path,
        program_dir: Path,
        node: str,
        allowed: Mapping[str, tuple[str, ...]],
    ) -> None:
        """`program_dir` is a folder from which libvirt may run programs.

        `allowed` maps a directory to the namespaces whose VMs may mount it, or directories below.
        """
        self._vms = run_dir / "vms"
        self._program = program_dir / PROGRAM
        self._node = node
        self._allowed = allowed

    async def prepare(self, record: VmRecord) -> Shares:
        shared = record.spec.domain.devices.filesystems
        if not shared and not self._prepared(record.uid):
            return NO_SHARES
        roots = {one.name: self._root(record, one.directory) for one in shared}

        def make() -> Shares:
            self._install()
            self._drop_others(record.uid, roots)
            for one in shared:
                point = self._point(record.uid, one)
                point.mkdir(mode=0o700, parents=True, exist_ok=True)
                point.with_suffix(".failed").unlink(missing_ok=True)
                wanted = {
                    "directory": one.directory,
                    "root": roots[one.name],
                    "readonly": one.readonly,
                }
                replace(point.with_suffix(".json"), json.dumps(wanted).encode(), durable=False)
            points = {one.name: self._point(record.uid, one) for one in shared}
            return Shares(self._program, points)

        with writing(self._vms):
            return await in_thread(make)

    def _root(self, record: VmRecord, path: str) -> str:
        """Return the allowed directory at or above a path of the spec.

        A client of this node may use all allowed directories, for a VM of any namespace.

        Raises:
            VirtbusError: 403 `directory_closed`: no allowed directory contains the path, or the
                directory is not open to the VM's namespace.
        """
        root = root_of(path, self._allowed)
        opened = {record.namespace, EVERY}.intersection(self._allowed.get(root, ()))
        if not root or not (opened or node_of(record.owner) == self._node):
            message = (
                f"{path} is not below the directories of this node that VMs of the namespace "
                f"{record.namespace} may use; its operator adds one to directories_allowed in "
                "nodeagent.toml"
            )
            raise VirtbusError(Code.DENIED, "directory_closed", message)
        return root

    def _drop_others(self, uid: str, tags: Collection[str]) -> None:
        """Remove files of earlier runs for tags not in `tags`, because `lost` would report them."""
        for path in (self._vms / uid / "fs").glob("*.*"):
            if path.stem not in tags and path.suffix in _FILES:
                path.unlink(missing_ok=True)

    def _install(self) -> None:
        text = (files("virtbus.nodeagent.edge") / "virtiofsd.py").read_bytes()
        with contextlib.suppress(FileNotFoundError):
            if self._program.read_bytes() == text:
                return
        self._program.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace(self._program, text)
        self._program.chmod(0o755)

    @contextlib.asynccontextmanager
    async def disks(self, record: VmRecord) -> AsyncIterator[Mapping[str, int]]:
        found: dict[str, int] = {}
        fixed = {one.name for one in record.spec.domain.devices.disks if one.readonly}

        def take() -> None:
            for volume in record.spec.volumes:
                if (disk := volume.host_disk) is not None:
                    root = self._root(record, disk.path)
                    opened = open_disk(root, disk, readonly=volume.name in fixed)
                    found[lent_name(volume.name)] = opened

        try:
            if any(volume.host_disk for volume in record.spec.volumes):
                await in_thread(take)
            yield found
        finally:
            for descriptor in found.values():
                os.close(descriptor)

    async def explained(self, record: VmRecord, error: VirtbusError) -> VirtbusError:
        def read() -> VirtbusError:
            for one in record.spec.domain.devices.filesystems:
                with contextlib.suppress(OSError):
                    why = self._point(record.uid, one).with_suffix(".failed").read_text()
                    message = f"the directory {one.directory} ({one.name}) is refused: {why}"
                    return VirtbusError(Code.CONFLICT, "directory_refused", message)
            return error

        return await in_thread(read)

    async def lost(self, record: VmRecord) -> tuple[str, ...]:
        if not self._prepared(record.uid):
            return ()

        def find() -> tuple[str, ...]:
            prepared = sorted((self._vms / record.uid / "fs").glob("*.json"))
            return tuple(one.stem for one in prepared if self._ended(one))

        return await in_thread(find)

    def _prepared(self, uid: str) -> bool:
        return (self._vms / uid / "fs").is_dir()

    def _ended(self, point: Path) -> bool:
        """Return True if virtiofsd has ended; False if virtiofsd runs or never started."""
        try:
            lock = os.open(point.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def _point(self, uid: str, one: Filesystem) -> Path:
        return self._vms / uid / "fs" / one.name
