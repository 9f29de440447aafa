"""Finds the folders of volumes in the pools of a node, and measures the pools (ADR 0060).

All methods block on the disk. A pool that hangs blocks the thread that measures it, so
`pool_probes.py` reports it as Slow, then Gone. Work on the volumes of a pool that is Gone is
refused, and lists of volumes do not have them.
"""

import logging
import os
from collections.abc import Mapping

from virtbus.bus.runtime.pool_settings import BlockPool, LocalPool, LvmPool, PoolSettings
from virtbus.imaged.core.disk_requests import refuse_unfilled
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.devices import Devices, OpenDevice
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.logical_volumes import AskLogical, LogicalVolumes, no_group
from virtbus.imaged.edge.partial_download import disk_full
from virtbus.imaged.edge.volume_files import DISK, PAGE, VolumeFolders
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import HeldResources, HeldVolume, MadeDisk
from virtbus.schemas.pool import (
    ABILITIES,
    LOCAL,
    ON_DEVICES,
    USABLE,
    PoolKind,
    PoolReport,
    PoolState,
)
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.volume_ref import VolumeRef

log = logging.getLogger(__name__)

_STEPS = 256
"""Sizes in reports are multiples of a 256th of the pool, so that reports change rarely."""
AFTER_MS = 10_000


def no_device(_pool: str, _volume: str) -> int:
    """Raise OSError: the node has no devices for volumes."""
    raise OSError(0, "this node has no pool of devices")


class Pools:
    """The pools of a node. Only pools of the kind `local` have folders.

    The folder of the pool named `local` is `disks/volumes`.
    """

    def __init__(
        self,
        files: DiskFolders,
        settings: Mapping[str, PoolSettings] | None = None,
        limits: SpaceLimits | None = None,
        open_device: OpenDevice = no_device,
        ask_logical: AskLogical = no_group,
    ) -> None:
        self.files = files
        """The folders of VMs' own disks."""
        self._logical_volumes = LogicalVolumes(ask_logical)
        self.devices = Devices(open_device, self._logical_volumes)
        self._groups = [name for name, one in (settings or {}).items() if isinstance(one, LvmPool)]
        self._block = {
            name: one for name, one in (settings or {}).items() if isinstance(one, BlockPool)
        }
        self._settings = {
            name: one
            for name, one in (settings or {LOCAL: LocalPool(kind=PoolKind.LOCAL)}).items()
            if isinstance(one, LocalPool)
        }
        self._limits = limits or SpaceLimits(0, 0.0)
        self._folders = {name: VolumeFolders(files.root, name) for name in self._settings}
        self.states: dict[str, PoolReport] = {}
        """The last report of each pool."""
        self._sizes: dict[str, dict[str, int]] = {name: {} for name in self._folders}
        """By pool and folder: the size that the guest sees, as it was last read."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._folders)

    def of(self, ref: VolumeRef, *, to_read: bool = False) -> VolumeFolders:
        """Return the folders of a volume's pool, if the pool is usable.

        With `to_read`, the pool may be ReadOnly.

        Raises:
            VirtbusError: 409 `pool_unknown`: the node has no such pool. 503 `pool_gone`.
        """
        folders = self._folders.get(ref.pool)
        if folders is None:
            message = (
                f"this node has no pool {ref.pool}, which the volume {ref.name} needs; "
                "`virtbus pool list` shows the pools of each node"
            )
            raise VirtbusError(Code.CONFLICT, "pool_unknown", message, after_ms=AFTER_MS)
        last = self.states.get(ref.pool)
        usable = USABLE | {PoolState.READ_ONLY} if to_read else USABLE
        if last is not None and last.state not in usable:
            message = f"the pool {ref.pool} is {last.state}: {last.message}"
            raise VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=AFTER_MS)
        if ref.pool != LOCAL and (why := self._missing(ref.pool)):
            message = f"the pool {ref.pool} is Gone: {why}"
            raise VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=AFTER_MS)
        return folders

    def elsewhere(self, ref: VolumeRef) -> MadeDisk | None:
        """Return the disk of a volume on a device or on a server; None for a volume with a file.

        Raises:
            VirtbusError: 503 `volume_not_filled`. The errors of `Devices.grown_bytes`.
        """
        if ABILITIES[ref.kind].shared:
            return MadeDisk(virtual_size_bytes=ref.size_bytes)
        if ref.kind not in ON_DEVICES:
            return None
        size_bytes = self.devices.grown_bytes(ref)
        if size_bytes is None:
            refuse_unfilled(ref)
        return MadeDisk(virtual_size_bytes=size_bytes or ref.size_bytes)

    def has_content(self, ref: VolumeRef) -> bool:
        if ref.kind in ON_DEVICES:
            return self.devices.filled_bytes(ref) is not None
        return self.of(ref).read(ref.folder, DISK) is not None

    @property
    def local(self) -> VolumeFolders:
        """Return the folders of the pool `local`. Only volumes of this pool rest on images."""
        return self._folders[LOCAL]

    def space_of(self, name: str) -> SpaceLimits:
        reserve = self._settings[name].reserve
        return self._limits if reserve is None else SpaceLimits(reserve, 0.0)

    def check_room(
        self, ref: VolumeRef | None, promised_bytes: int, written_bytes: int = 0
    ) -> None:
        """Raise 503 `disk_full` if the pool takes no more data of a volume.

        `ref` None stands for an own disk of a VM, which does not count for overcommit.
        `promised_bytes` is the growth of the size that the guest sees, `written_bytes` the size
        that a copy writes now.
        """
        name = LOCAL if ref is None else ref.pool
        found = self.measure(name)
        self.states[name] = found
        if ref is not None and promised_bytes and (why := found.refusal(promised_bytes)):
            raise disk_full(f"the pool {name} {why}")
        if found.free_bytes - written_bytes < found.reserve_bytes:
            raise disk_full(
                f"the pool {name} has {format_bytes(found.free_bytes)} free and keeps "
                f"{format_bytes(found.reserve_bytes)} (reserve); "
                f"{format_bytes(written_bytes)} more do not fit; delete volumes, or enlarge it"
            )

    def page(self, after: str) -> HeldResources:
        """Return the first volumes whose folder is greater than `after`.

        `unread_pools` of the answer are the pools with volumes that could not be read.
        """
        unread: set[str] = set()
        pages = [
            *(self._page_of(name, after, unread) for name in self._folders),
            *(self._logical_page(name, after, unread) for name in self._groups),
            *((self._marked(name, one, after, unread), False) for name, one in self._block.items()),
        ]
        found = sorted((one for page, _ in pages for one in page), key=lambda one: one.folder)
        more = len(found) > PAGE or any(more for _, more in pages)
        return HeldResources(
            volumes=tuple(found[:PAGE]), more=more, unread_pools=tuple(sorted(unread))
        )

    def _page_of(
        self, name: str, after: str, unread: set[str]
    ) -> tuple[tuple[HeldVolume, ...], bool]:
        """Return the volumes in a pool's folder; none of a Gone pool, whose reads could hang."""
        if self._is_gone(name):
            unread.add(name)
            return (), False
        one = self._folders[name].page(after)
        return one.volumes, one.more

    def _marked(
        self, name: str, pool: BlockPool, after: str, unread: set[str]
    ) -> tuple[HeldVolume, ...]:
        """Return the volumes on devices of a pool; none of a device that cannot be opened."""
        found = []
        for key in pool.volumes:
            if f"{key}/" <= after:  # the folder of the key, `<key>.<uid>`, sorts before `<key>/`
                continue
            try:
                held = self.devices.held(name, key)
            except OSError as error:
                extra = {"code": "device_unlisted"}
                log.warning("the device of %s in pool %s: %s", key, name, error, extra=extra)
                unread.add(name)
                continue
            if held is not None and held.folder > after:
                found.append(held)
        return tuple(found)

    def _logical_page(
        self, name: str, after: str, unread: set[str]
    ) -> tuple[tuple[HeldVolume, ...], bool]:
        try:
            return self._logical_volumes.page(name, after)
        except OSError as error:
            extra = {"code": "pool_unlisted"}
            log.warning("the volumes of pool %s are unknown: %s", name, error, extra=extra)
            unread.add(name)
            return (), False

    # --- measures ---------------------------------------------------------------------------
    def unmeasured(self, name: str) -> PoolReport:
        settings = self._settings[name]
        return PoolReport(
            name=name, kind=settings.kind, state=PoolState.READY, overcommit=settings.overcommit
        )

    def measure(self, name: str) -> PoolReport:
        empty = self.unmeasured(name)
        why = "" if name == LOCAL else self._missing(name)
        if why:
            return empty.model_copy(update={"state": PoolState.GONE, "message": why})
        folders = self._folders[name]
        try:
            found = os.statvfs(self.files.root if name == LOCAL else folders.root)
            sizes = self._volume_sizes(name, folders)
        except OSError as error:
            update = {"state": PoolState.GONE, "message": f"{error.strerror}; see the host's log"}
            return empty.model_copy(update=update)
        size_bytes = found.f_blocks * found.f_frsize
        report = empty.model_copy(
            update={
                "size_bytes": size_bytes,
                "free_bytes": found.f_bavail * found.f_frsize,
                "reserve_bytes": self.space_of(name).floor_bytes(size_bytes),
                "allocated_bytes": sum(sizes.values()),
                "volumes": len(sizes),
                "block_bytes": found.f_frsize,
            }
        )
        return report.model_copy(update=_state(report, read_only=bool(found.f_flag & os.ST_RDONLY)))

    def forget(self, ref: VolumeRef | None) -> None:
        if ref is not None:
            self._sizes[ref.pool].pop(ref.folder, None)

    def read_again(self, name: str) -> None:
        """Forget the sizes of a pool's volumes: QEMU may have grown volumes of running guests."""
        self._sizes[name] = {}

    def _volume_sizes(self, name: str, folders: VolumeFolders) -> dict[str, int]:
        known = self._sizes[name]
        there = {folder: known.get(folder) for folder in folders.names()}
        sizes = {}
        for folder, size_bytes in there.items():
            found = size_bytes if size_bytes is not None else folders.size_bytes(folder)
            if found is not None:
                sizes[folder] = found
        self._sizes[name] = sizes
        return sizes

    def _is_gone(self, name: str) -> bool:
        last = self.states.get(name)
        if last is not None and last.state is PoolState.GONE:
            return True
        return name != LOCAL and bool(self._missing(name))

    def _missing(self, name: str) -> str:
        """Return why a pool's folder cannot be used; empty if it can."""
        root, settings = self._folders[name].root, self._settings[name]
        try:
            there, above = root.stat(), self.files.root.stat()
        except FileNotFoundError:
            return f"the folder {root} does not exist; make it, and mount its file system"
        except OSError as error:
            return f"{root}: {error.strerror}"
        if settings.mount and there.st_dev == above.st_dev:
            return f"nothing is mounted at {root}; mount it, or set `mount = false`"
        if not os.access(root, os.R_OK | os.X_OK):
            return f"imaged has no right to read {root}; give it to the user of imaged"
        return ""


def rounded(report: PoolReport) -> PoolReport:
    """Return a report whose sizes change rarely."""
    step = max(1, report.size_bytes // _STEPS)
    return report.model_copy(
        update={
            "free_bytes": report.free_bytes // step * step,
            "allocated_bytes": -(-report.allocated_bytes // step) * step,
        }
    )


def _state(report: PoolReport, *, read_only: bool) -> dict[str, object]:
    limit_bytes = int(report.size_bytes * report.overcommit)
    if read_only:
        why = "its file system is mounted read-only; check its disk, and mount it again"
        return {"state": PoolState.READ_ONLY, "message": why}
    if report.free_bytes <= report.reserve_bytes:
        why = (
            f"{format_bytes(report.free_bytes)} are free, and it keeps "
            f"{format_bytes(report.reserve_bytes)} (reserve); delete volumes, or enlarge it"
        )
        return {"state": PoolState.FULL, "message": why}
    if limit_bytes and report.allocated_bytes >= limit_bytes:
        why = (
            f"its volumes have {format_bytes(report.allocated_bytes)}, and may have "
            f"{format_bytes(limit_bytes)} (overcommit); delete volumes, or enlarge it"
        )
        return {"state": PoolState.FULL, "message": why}
    return {"state": PoolState.READY, "message": ""}
