"""Limits the number and the total size of volumes, in a namespace and in the fleet."""

from collections.abc import Sequence
from typing import NamedTuple

from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.volumes import Volumes
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.volume import VolumeRecord


class VolumeQuota(NamedTuple):
    """The quotas of volumes. Bytes count sizes, not the space in use; 0 means no limit."""

    number: Quota
    bytes_per_namespace: int = 0
    bytes_in_all: int = 0

    def refuse_new(self, volumes: Volumes, new: Sequence[VolumeRecord]) -> None:
        """Raise 429 `volume_quota` if the new volumes, all of one namespace, exceed a quota.

        A copy of unknown size counts 0 bytes until its size is known.
        """
        if not new:
            return
        namespace = new[0].namespace
        if why := self.number.full(volumes, namespace, "volumes", more=len(new)):
            raise _full(why)
        self._refuse_bytes(volumes, namespace, sum(one.spec.size for one in new))

    def refuse_growth(self, volumes: Volumes, record: VolumeRecord, size_bytes: int) -> None:
        self._refuse_bytes(volumes, record.namespace, size_bytes - record.spec.size)

    def _refuse_bytes(self, volumes: Volumes, namespace: str, more_bytes: int) -> None:
        for used, most, where in (
            (volumes.size_bytes(namespace), self.bytes_per_namespace, f"namespace {namespace}"),
            (volumes.size_bytes(), self.bytes_in_all, "the fleet"),
        ):
            if most and more_bytes > 0 and used + more_bytes > most:
                left = format_bytes(max(0, most - used))
                raise _full(f"{where} has volumes of {format_bytes(used)}, and {left} left")


def _full(why: str) -> VirtbusError:
    message = f"{why}; delete some, then repeat"
    return VirtbusError(Code.EXHAUSTED, "volume_quota", message, after_ms=10_000)
