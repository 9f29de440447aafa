"""Opens logical volumes as devices whose marks are LVM's tags (ADR 0088).

The agent makes logical volumes and writes their tags. A logical volume that grows keeps its marks,
and a guest sees all extents of its logical volume. All methods block.
"""

import os
import threading
from collections.abc import Callable
from typing import Literal

from virtbus.bus.runtime.device_socket import LogicalAnswer, LogicalRequest
from virtbus.imaged.core.device_marks import DeviceMark
from virtbus.imaged.edge.device_io import Device
from virtbus.schemas.node_rpc import HeldVolume
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.volume_ref import VolumeRef

AskLogical = Callable[[LogicalRequest], tuple[LogicalAnswer, int | None]]
"""Asks the agent, as `device_socket.ask_logical` does."""
AT_ONCE, WAIT_S = 2, 5.0
"""At most AT_ONCE requests wait for the agent, so a volume group that hangs blocks at most AT_ONCE
threads. Any other request fails after it has waited WAIT_S seconds for its turn."""


def no_group(_request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
    """Raise OSError: the node has no volume group."""
    raise OSError(0, "this node has no pool of the kind lvm")


class LogicalVolume(Device):
    """One logical volume, which does not exist if `descriptor` is None."""

    def __init__(
        self, ref: VolumeRef, ask: AskLogical, answer: LogicalAnswer, descriptor: int | None
    ) -> None:
        self._ref = ref
        self._ask = ask
        self._answer = answer
        self.descriptor = -1 if descriptor is None else descriptor
        self.room_bytes = answer.size_bytes

    def close(self) -> None:
        """Close the device. A second call has no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    @property
    def old_bytes(self) -> int:
        """Return the number of bytes that may have old data: 0 in a thin pool."""
        return 0 if self._answer.thin else self.room_bytes

    def seen_bytes(self, size_bytes: int) -> int:
        """Return the size of the logical volume: `size_bytes`, rounded up to extents."""
        return max(size_bytes, self.room_bytes)

    def claim(self) -> DeviceMark | None:
        """Return a claim if the logical volume exists, because the agent made it for the volume."""
        return DeviceMark(kind="claim", ref=self._ref) if self.room_bytes else None

    def filled(self) -> DeviceMark | None:
        size_bytes, operation = self._answer.filled_bytes, self._answer.operation
        if not size_bytes:
            return None
        return DeviceMark(kind="filled", ref=self._ref, size_bytes=size_bytes, operation=operation)

    def put_claim(self, ref: VolumeRef) -> None:
        """Do nothing: the agent has made the logical volume for this volume."""

    def put_filled(self, mark: DeviceMark) -> None:
        self._tell("mark", mark.size_bytes, mark.operation)

    def drop_filled(self) -> None:
        if self._answer.filled_bytes:
            self._tell("unmark")

    def drop_claim(self) -> None:
        """Close and remove the logical volume, which no other process may have open."""
        self.close()
        self._tell("remove")

    def _tell(
        self, do: Literal["mark", "unmark", "remove"], size_bytes: int = 0, operation: str = ""
    ) -> None:
        request = _request(self._ref, do, size_bytes)
        self._ask(request.model_copy(update={"operation": operation}))


class LogicalVolumes:
    """The logical volumes of the node's pools."""

    def __init__(self, ask: AskLogical = no_group) -> None:
        self._ask_agent = ask
        self._at_once = threading.BoundedSemaphore(AT_ONCE)

    def opened(
        self, ref: VolumeRef, do: Literal["open", "make", "grow"], size_bytes: int
    ) -> LogicalVolume:
        """Return the logical volume of `ref`; `make` and `grow` let the agent change it first.

        Raises:
            OSError: the agent refuses and says why (ENOSPC: no room), does not answer, or is busy.
        """
        return LogicalVolume(ref, self._ask, *self._ask(_request(ref, do, size_bytes)))

    def page(self, pool: str, after: str) -> tuple[tuple[HeldVolume, ...], bool]:
        """Return volumes of a pool whose folder is greater than `after`, and True if more follow.

        Raises:
            OSError: as `opened`.
        """
        answer, _ = self._ask(LogicalRequest(pool=pool, volume=after, do="list"))
        found = tuple(_held(pool, folder, size) for folder, size in answer.volumes.items())
        return found, answer.more

    def _ask(self, request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
        if not self._at_once.acquire(timeout=WAIT_S):
            raise OSError(0, "its agent is busy with other logical volumes")
        try:
            return self._ask_agent(request)
        finally:
            self._at_once.release()


def _request(
    ref: VolumeRef,
    do: Literal["open", "make", "grow", "mark", "unmark", "remove"],
    size_bytes: int,
) -> LogicalRequest:
    return LogicalRequest(pool=ref.pool, volume=ref.folder, do=do, size_bytes=size_bytes)


def _held(pool: str, folder: str, size_bytes: int) -> HeldVolume:
    namespace, name, uid = folder.split(".")
    ref = VolumeRef(
        uid=uid,
        namespace=namespace,
        name=name,
        size_bytes=size_bytes,
        copied=True,
        pool=pool,
        kind=PoolKind.LVM,
    )
    return HeldVolume(folder=folder, ref=ref)
