"""Writes volumes to devices of the host: claim, content, comparison, and the final mark (ADR 0060).

The agent opens the devices. All methods block on the disk.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from virtbus.imaged.core.device_marks import DeviceMark
from virtbus.imaged.edge.device_io import CHUNK_BYTES, Device, extents_of
from virtbus.imaged.edge.logical_volumes import LogicalVolumes
from virtbus.imaged.edge.partial_download import disk_full, store_error
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import HeldVolume
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.volume_ref import VolumeRef

ZERO_BYTES = 64 * 1024**2
GROW_S = 5.0
"""Seconds that one request spends on a growth; the next request continues the growth."""
_ZEROES = bytes(CHUNK_BYTES)

OpenDevice = Callable[[str, str], int]
"""Opens the device of a volume, by pool and volume key: `device_socket.open_device`."""

RefuseUsed = Callable[[str, str], None]
"""Raises OSError if a VM has a volume, by pool and folder: `device_socket.refuse_used`."""


class Devices:
    """The devices of the node's pools."""

    def __init__(
        self, open_device: OpenDevice, logical_volumes: LogicalVolumes | None = None
    ) -> None:
        self._open_device = open_device
        self.refuse_used: RefuseUsed = lambda _pool, _folder: None
        self._logical_volumes = logical_volumes or LogicalVolumes()

    @contextmanager
    def opened(
        self, ref: VolumeRef, do: Literal["open", "make", "grow"] = "open", size_bytes: int = 0
    ) -> Iterator[Device]:
        """Open the device of a volume.

        `make` first creates a logical volume of `size_bytes`. `grow` first enlarges a logical
        volume to `size_bytes`.

        Raises:
            VirtbusError: 503 `pool_gone`, `disk_full`, `store_error`.
        """
        try:
            if ref.kind is PoolKind.LVM:
                device: Device = self._logical_volumes.opened(ref, do, size_bytes)
            else:
                device = Device(self._open_device(ref.pool, ref.key))
        except OSError as error:
            raise _unopened(ref, error) from error
        try:
            yield device
        except OSError as error:
            raise store_error(error) from error
        finally:
            device.close()

    def filled(self, ref: VolumeRef) -> DeviceMark | None:
        """Return the mark of the volume's complete content.

        None if the content is incomplete, or is that of another volume.
        """
        with self.opened(ref) as device:
            mark = device.filled()
            return mark if mark is not None and mark.ref.folder == ref.folder else None

    def held(self, pool: str, key: str) -> HeldVolume | None:
        """Return the volume that has claimed a pool's device; None without a claim.

        The result has no reference if the content is incomplete, or if the settings assign the
        device to a volume of another name. Raises OSError.
        """
        device = Device(self._open_device(pool, key))
        try:
            claim, filled = device.claim(), device.filled()
        finally:
            device.close()
        if claim is None:
            return None
        folder = claim.ref.folder
        if filled is None or filled.ref.folder != folder or claim.ref.key != key:
            return HeldVolume(folder=folder)
        there = {"pool": pool, "kind": PoolKind.BLOCK, "size_bytes": filled.size_bytes}
        return HeldVolume(
            folder=folder, ref=filled.ref.model_copy(update={**there, "copied": True})
        )

    def filled_bytes(self, ref: VolumeRef) -> int | None:
        mark = self.filled(ref)
        return None if mark is None else mark.size_bytes

    def grown_bytes(self, ref: VolumeRef) -> int | None:
        """Make a logical volume as large as its record says; return the result of `filled_bytes`.

        The mark has the size that the guest may see. This size rises only after the new part reads
        as zeroes, so the guest never sees old data of another volume.

        Raises:
            VirtbusError: 503 `volume_growing`: the caller must repeat the call. The errors of
                `opened`.
        """
        mark = self.filled(ref)
        if mark is None or ref.kind is not PoolKind.LVM or mark.size_bytes >= ref.size_bytes:
            return None if mark is None else mark.size_bytes
        with self.opened(ref, "grow", ref.size_bytes) as device:
            until_s = time.monotonic() + GROW_S
            at, end = mark.size_bytes, device.room_bytes
            while at < min(end, device.old_bytes) and time.monotonic() < until_s:
                count = min(ZERO_BYTES, end - at)
                device.zero(at, count)
                at += count
            at = end if device.old_bytes < end else at
            device.sync()
            device.put_filled(mark.model_copy(update={"size_bytes": at}))
        if at < end:
            message = f"the volume {ref.name} grows: {at} of {end} bytes"
            raise VirtbusError(Code.UNAVAILABLE, "volume_growing", message, after_ms=500)
        return at

    def owner(self, ref: VolumeRef) -> VolumeRef | None:
        with self.opened(ref) as device:
            mark = device.claim()
            return mark.ref if mark is not None else None

    def begin(self, ref: VolumeRef, size_bytes: int) -> int:
        """Claim the device, and remove the mark of complete content.

        Return the number of bytes that the caller makes zero before it writes content.

        Raises:
            VirtbusError: 400 `disk_too_large`. The errors of `opened` and `Device.put_claim`.
        """
        with self.opened(ref, "make", size_bytes) as device:
            if size_bytes > device.room_bytes:
                message = (
                    f"the volume {ref.name} would have {format_bytes(size_bytes)}; its device has "
                    f"room for {format_bytes(device.room_bytes)}"
                )
                raise VirtbusError(Code.INVALID, "disk_too_large", message)
            device.put_claim(ref)
            device.drop_filled()
            return device.old_bytes

    def zero(self, ref: VolumeRef, at: int, count: int) -> None:
        with self.opened(ref) as device:
            device.zero(at, count)

    def read_into(self, ref: VolumeRef, target: int, at: int, count: int) -> None:
        with self.opened(ref) as device:
            for here in range(at, at + count, CHUNK_BYTES):
                data = os.pread(device.descriptor, min(CHUNK_BYTES, at + count - here), here)
                if data != _ZEROES[: len(data)]:
                    os.pwrite(target, data, here)
            os.ftruncate(target, at + count)

    def finish(
        self, ref: VolumeRef, source: int | None, size_bytes: int, operation: str = ""
    ) -> None:
        """Copy a raw file to the device, compare both, and mark the content as complete.

        `operation` is the id of the operation that fills the volume.

        Raises:
            VirtbusError: 409 `disk_damaged`: the device does not return the written bytes. The
                errors of `opened`.
        """
        with self.opened(ref) as device:
            extents = extents_of(source) if source is not None else []
            wanted = hashlib.sha256()
            for at, count in extents:
                for here in range(at, at + count, CHUNK_BYTES):
                    data = os.pread(source or 0, min(CHUNK_BYTES, at + count - here), here)
                    wanted.update(data)
                    device.write(here, data)
            device.sync()
            if device.digest_of(extents) != wanted.hexdigest():
                message = f"the device of {ref.name} returns other bytes than were written to it"
                raise VirtbusError(Code.CONFLICT, "disk_damaged", message)
            digest = wanted.hexdigest()
            device.put_filled(
                DeviceMark(
                    kind="filled",
                    ref=ref,
                    digest=digest,
                    size_bytes=device.seen_bytes(size_bytes),
                    operation=operation,
                )
            )

    def begin_release(self, ref: VolumeRef) -> int | None:
        """Return the number of bytes that must become zero before `end_release`.

        Return None if the device does not belong to the volume.

        Raises:
            VirtbusError: 409 `volume_in_use`: the agent says that a VM of this node has the volume,
                or the agent does not answer. The errors of `opened`.
        """
        with self.opened(ref) as device:
            there = device.claim()
            if there is None or there.ref.folder != ref.folder:
                return None
            self._check_unused(ref)
            device.drop_filled()
            return device.old_bytes

    def _check_unused(self, ref: VolumeRef) -> None:
        """Raise 409 `volume_in_use` in the cases that `begin_release` names.

        This method asks the agent, because a restored bus may not know that a guest has the volume.
        """
        try:
            self.refuse_used(ref.pool, ref.folder)
        except OSError as error:
            why = error.strerror or "its agent does not answer"
            message = f"the content of the volume {ref.name} stays: {why}"
            raise VirtbusError(Code.CONFLICT, "volume_in_use", message, after_ms=5000) from error

    def end_release(self, ref: VolumeRef) -> None:
        """Give the device up; the caller has made its content zero."""
        with self.opened(ref) as device:
            device.sync()
            device.drop_claim()


def _unopened(ref: VolumeRef, error: OSError) -> VirtbusError:
    why = error.strerror or "its agent does not answer"
    if error.errno == errno.ENOSPC:
        return disk_full(f"the volume {ref.name} has no room: {why}")
    message = f"the device of the volume {ref.name} cannot be opened: {why}"
    return VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=5000)
