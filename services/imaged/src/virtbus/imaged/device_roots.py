"""Writes an image once to a device of the host: a pod's root disk, which outlives the pod.

The device's end has the same marks as a volume on a device (ADR 0060). A device without the mark of
complete content is written again, for example after a crash.
"""

import asyncio
from functools import partial
from pathlib import Path

from virtbus.bus.runtime.device_socket import open_host_device
from virtbus.imaged.core.disk_requests import device_root_ref, device_roots
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_jobs import Job
from virtbus.imaged.edge.devices import Devices
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import OpenedSource
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.images import Images
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef


class DeviceRoots:
    """The devices of the host whose first content is an image."""

    def __init__(
        self,
        images: Images,
        store: ImageStore,
        pools: Pools,
        threads: DiskThreads,
        limits: TransferLimits,
        door: Path,
    ) -> None:
        """`door` is the socket on which the agent hands over open devices."""
        self._images = images
        self._store = store
        self._pools = pools
        self._threads = threads
        self._limits = limits
        self._door = door
        self._one_at_a_time = asyncio.Lock()
        """One lock for all devices, because a device may have several paths."""

    async def ensure(self, record: VmRecord, asker: Asker) -> None:
        """Write the image to each device of the record that has no content yet.

        Raises:
            VirtbusError: 400 `disk_too_large`. 409 `device_other_image`, `device_taken`,
                `device_not_blank`, `disk_damaged`. 503 `pool_gone`. The errors of `Images.ensure`.
        """
        for path, source in device_roots(record):
            devices = self._devices(path)
            digest = source.file_digest or (await self._images.ensure(source, asker)).digest
            ref = device_root_ref(digest)
            async with self._one_at_a_time:
                if await self._is_filled(devices, ref, path):
                    continue
            image = await self._images.ensure(source, asker)
            async with self._one_at_a_time:
                if not await self._is_filled(devices, ref, path):
                    await self._fill(devices, ref, image)

    def _devices(self, path: str) -> Devices:
        return Devices(lambda _pool, _volume: open_host_device(self._door, path))

    async def _is_filled(self, devices: Devices, ref: VolumeRef, path: str) -> bool:
        """Return True if the device has the complete content of `ref`.

        Raises VirtbusError 409 `device_other_image` if it has the content of another image.
        """
        if await self._threads.run(devices.filled_bytes, ref) is not None:
            return True
        there = await self._threads.run(devices.owner, ref)
        if there is not None and there.image and there.folder != ref.folder:
            message = (
                f"the device {path} has the root disk of the image {there.image}, and the pod has "
                f"{ref.image}; use that image, another PersistentVolume, or clear the device's "
                "first and last MiB to lose its content"
            )
            raise VirtbusError(Code.CONFLICT, "device_other_image", message)
        return False

    async def _fill(self, devices: Devices, ref: VolumeRef, image: ImageInfo) -> None:
        path_of_image, size_bytes = self._store.path(image.digest), image.virtual_size_bytes
        opening = partial(OpenedSource, path_of_image, None, size_bytes, "", image.format)
        volumes = DeviceVolumes(devices, self._threads, self._pools.files.root)
        with self._store.lease(image.digest), await self._threads.run(opening) as opened:
            await self._threads.run(self._pools.check_room, ref, 0, opened.used_bytes)
            await volumes.fill(ref, size_bytes, opened, self._limits, Job())
