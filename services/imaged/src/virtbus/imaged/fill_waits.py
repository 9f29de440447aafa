"""Lets VMs wait for the content of their volumes, which operations copy (ADR 0053)."""

import asyncio

from virtbus.imaged.core.disk_requests import refuse_unfilled
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.pools import Pools
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef


class FillWaits:
    """The VMs that wait. A wait is no failure: it ends with the copy, or when the VM is deleted."""

    def __init__(self, pools: Pools, threads: DiskThreads) -> None:
        self._pools = pools
        self._threads = threads
        self._filled = asyncio.Event()
        self._waiting: dict[str, VolumeRef] = {}

    def tell(self) -> None:
        """Let all VMs look again: a volume was filled."""
        self._filled.set()
        self._filled = asyncio.Event()

    async def has_content(self, ref: VolumeRef) -> bool:
        return await self._threads.run(self._pools.has_content, ref)

    async def wait(self, record: VmRecord) -> None:
        """Wait until each copied volume of the VM has content.

        Volumes that the VM detaches do not count.
        """
        leaving = record.detaching
        try:
            for name, ref in record.volume_refs.items():
                while ref.copied and name not in leaving:
                    filled = self._filled
                    if await self.has_content(ref):
                        break
                    self._waiting[record.uid] = ref
                    await filled.wait()
        finally:
            self._waiting.pop(record.uid, None)

    def refuse_waiting(self, uid: str) -> None:
        ref = self._waiting.get(uid)
        if ref is not None:
            refuse_unfilled(ref)
