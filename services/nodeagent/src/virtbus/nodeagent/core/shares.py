"""Defines the port for directories that guests share with their host by virtiofs (ADR 0076)."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from virtbus.nodeagent.core.ports import NO_FILES
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmRecord


class Shares(NamedTuple):
    """The paths for a VM's directories in libvirt's XML."""

    program: Path
    """The program that libvirt runs as virtiofsd."""
    points: Mapping[str, Path]
    """An empty folder for each directory, by its tag."""


NO_SHARES = Shares(Path(), {})


class SharedDirectories(Protocol):
    """The directories that guests share with their host."""

    async def prepare(self, record: VmRecord) -> Shares:
        """Prepare the VM's directories for a start, and return the paths for libvirt.

        Raises:
            VirtbusError: 403 `directory_closed`: the node denies the VM a directory.
                503 `state_write`: a folder or file of the agent cannot be written.
        """

    def disks(self, record: VmRecord) -> AbstractAsyncContextManager[Mapping[str, int]]:
        """Open the node's files that are disks of the VM, and close them at the end.

        The context's value has each file's descriptor, by its name in the domain.

        Raises:
            VirtbusError: 403 `directory_closed`: the node denies the VM a file.
                409 `disk_refused`: a file is missing, cannot be made, or is no plain file.
        """

    async def explained(self, record: VmRecord, error: VirtbusError) -> VirtbusError:
        """Return 409 `directory_refused` if a directory caused `error`.

        Return any other `error` unchanged.
        """

    async def lost(self, record: VmRecord) -> tuple[str, ...]:
        """Return the tags of a running guest's directories whose virtiofsd has ended.

        The guest has the directories of its start; the record may have changed since.
        """


class NoShares:
    """The `SharedDirectories` port for simulated guests, which have no directories."""

    async def prepare(self, _record: VmRecord) -> Shares:
        return NO_SHARES

    @asynccontextmanager
    async def disks(self, _record: VmRecord) -> AsyncIterator[Mapping[str, int]]:
        yield NO_FILES

    async def explained(self, _record: VmRecord, error: VirtbusError) -> VirtbusError:
        return error

    async def lost(self, _record: VmRecord) -> tuple[str, ...]:
        return ()
