"""Locks the disks of VMs and the volumes of a node, so that one task at a time works on each."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.schemas.volume_ref import VolumeRef


class DiskLocks(KeyedLock):
    """A lock for each VM (its uid), volume (its folder) and snapshot (`snapshot_lock`)."""

    @asynccontextmanager
    async def held(self, uid: str, *volumes: VolumeRef) -> AsyncIterator[None]:
        """Hold the locks of a VM and of its volumes. The VM's lock comes first, as in `Disks`."""
        async with self.of(uid), self.volumes(volumes):
            yield

    @asynccontextmanager
    async def volumes(self, volumes: Iterable[VolumeRef]) -> AsyncIterator[None]:
        """Hold the locks of volumes, taken in the order of folders. Take a VM's lock first."""
        async with AsyncExitStack() as stack:
            for folder in sorted({ref.folder for ref in volumes}):
                await stack.enter_async_context(self.of(folder))
            yield
