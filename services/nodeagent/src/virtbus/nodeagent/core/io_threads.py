"""Assigns QEMU's I/O threads to virtio disks and the SCSI controller."""

from collections.abc import Mapping
from typing import NamedTuple

from virtbus.schemas.disk import DiskBus, IoThreads, IoThreadsPolicy
from virtbus.schemas.vm import Domain

THREADS_PER_VCPU = 2
_SCSI = ""
"""The key of the SCSI controller in a map of disk names."""


class IoThreadPlan(NamedTuple):
    """A domain's number of I/O threads, and the thread (from 1) of each virtio disk and SCSI."""

    total: int
    of_disks: Mapping[str, int]
    of_scsi: int | None


def io_threads(domain: Domain) -> IoThreadPlan:
    """Number the shared threads first, and then the threads of single disks."""
    virtio = [disk for disk in domain.devices.disks if disk.bus is DiskBus.VIRTIO]
    own = [disk.name for disk in virtio if disk.dedicated_io_thread]
    sharers = [disk.name for disk in virtio if not disk.dedicated_io_thread]
    if any(disk.bus is DiskBus.SCSI for disk in domain.devices.disks):
        sharers.append(_SCSI)
    most = _most_shared(domain.io_threads, THREADS_PER_VCPU * domain.cpu.vcpus - len(own))
    shared = min(most, len(sharers))
    users = {name: 1 + at % shared for at, name in enumerate(sharers)} if shared else {}
    users |= {name: 1 + shared + at for at, name in enumerate(own)}
    return IoThreadPlan(shared + len(own), users, users.get(_SCSI))


def _most_shared(threads: IoThreads | None, left: int) -> int:
    """Return the largest number of shared threads. `left` is the number for the policy `auto`."""
    if threads is None:
        return 0
    match threads.policy:
        case IoThreadsPolicy.SHARED:
            return 1
        case IoThreadsPolicy.AUTO:
            return max(left, 1)
        case IoThreadsPolicy.POOL:
            return threads.count or 1
