"""Finds volumes' disks on servers and devices, and renders their sources.

QEMU connects to a server by its own driver, so the host needs no driver. Records and messages name
only a volume's pool. The server, the address of the data and the login are settings of the node
(ADR 0060).
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from virtbus.bus.runtime.pool_settings import (
    BlockPool,
    LvmPool,
    PoolSettings,
    ServerPool,
)
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.logical_volumes import device_path
from virtbus.nodeagent.core.servers.kinds import server_of
from virtbus.nodeagent.core.servers.port import Login
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.pool import ABILITIES, PoolKind
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

ALL_BYTES = -1
NO_ROOM = (
    "the disk of its host is full or failing: free space there; the guest then continues by itself"
)
NO_SERVER = (
    "a disk of it does not answer: the server of the pool {pools}, or the disk of its host; the "
    "guest then continues by itself"
)


@dataclass(frozen=True, slots=True)
class NetworkDisk:
    """A volume on a server."""

    pool: ServerPool
    place: str
    login: Login | None = None


def network_disk(ref: VolumeRef, pools: Mapping[str, PoolSettings], vm: str) -> NetworkDisk:
    """Return the network disk of a VM's volume. Raises VirtbusError 409 `pool_unknown`."""
    pool = pools.get(ref.pool)
    if not isinstance(pool, ServerPool) or ref.key not in pool.volumes:
        raise _unassigned(ref)
    id_ = str(uuid.uuid5(uuid.UUID(ref.uid), vm)) if ref.shared else ref.uid
    return NetworkDisk(pool, pool.volumes[ref.key], server_of(pool).login(id_))


def _unassigned(ref: VolumeRef) -> VirtbusError:
    message = (
        f"the pool {ref.pool} of this node has nothing for {ref.key}; its operator assigns it "
        f"in pools.toml (pools.{ref.pool}.volumes), and restarts virtbus-nodeagent"
    )
    return VirtbusError(Code.CONFLICT, "pool_unknown", message)


def network_source(disk: NetworkDisk) -> Element:
    """Return the `<source>` of a network disk."""
    return server_of(disk.pool).source(disk.place, disk.login)


def device_of(ref: VolumeRef, pools: Mapping[str, PoolSettings]) -> str:
    """Return the path of a volume's device. Raises VirtbusError 409 `pool_unknown`."""
    pool = pools.get(ref.pool)
    if isinstance(pool, LvmPool) and ref.kind is PoolKind.LVM:
        return device_path(pool, f"{ref.pool}/{ref.folder}")
    if ref.kind is PoolKind.BLOCK and isinstance(pool, BlockPool) and ref.key in pool.volumes:
        return pool.volumes[ref.key]
    raise _unassigned(ref)


def device_source(path: str, size_bytes: int) -> Element:
    """Return the `<source>` of a device. The guest sees only its first `size_bytes`.

    After these bytes, the device may have marks of virtbus. `ALL_BYTES` is for a device without
    marks: the guest sees all its bytes, even after a growth.
    """
    if size_bytes == ALL_BYTES:
        return el("source", dev=path)
    part = el("slice", type="storage", offset=0, size=-(-size_bytes // 512) * 512)
    return el("source", el("slices", part), dev=path)


def why_it_waits(record: VmRecord) -> str:
    """Return the likely reason of a pause by QEMU at a disk error."""
    refs = record.volume_refs.values()
    pools = sorted({ref.pool for ref in refs if ABILITIES[ref.kind].shared})
    return NO_SERVER.format(pools=", ".join(pools)) if pools else NO_ROOM
