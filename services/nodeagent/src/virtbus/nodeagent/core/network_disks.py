"""Finds the disks of volumes on servers and devices, and renders their sources.

QEMU connects to the server by its own driver, so the host needs none. The message of a volume names
its pool only; server, place and login are settings of the node (ADR 0060).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from virtbus.bus.runtime.pool_settings import (
    BlockPool,
    IscsiPool,
    LvmPool,
    NbdPool,
    NfsPool,
    PoolSettings,
    RbdPool,
    ServerPool,
)
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.logical_volumes import device_path
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
class Login:
    """A login of a disk at its server. The secret is in a file of the node."""

    kind: str
    """libvirt's type of the secret: `iscsi`, `ceph`."""
    user: str
    secret_file: str
    id: str
    """The UUID of libvirt's secret. For a guest it is the volume's own. A volume has one guest, so
    no two starts share one."""


@dataclass(frozen=True, slots=True)
class NetworkDisk:
    """A volume on a server."""

    pool: ServerPool
    place: str
    login: Login | None = None


_SECRET_KINDS = {PoolKind.ISCSI: "iscsi", PoolKind.RBD: "ceph"}


def network_disk(ref: VolumeRef, pools: Mapping[str, PoolSettings]) -> NetworkDisk:
    """Return the network disk of a volume; raises VirtbusError 409 `pool_unknown`."""
    pool = pools.get(ref.pool)
    if not isinstance(pool, ServerPool) or ref.key not in pool.volumes:
        raise _unassigned(ref)
    return NetworkDisk(pool, pool.volumes[ref.key], login_of(pool, ref.uid))


def login_of(pool: ServerPool, id_: str) -> Login | None:
    """Return the login at a pool's server, with the UUID of its secret; None if it needs none."""
    if isinstance(pool, IscsiPool | RbdPool) and pool.user:
        return Login(_SECRET_KINDS[pool.kind], pool.user, pool.secret_file, id_)
    return None


def _unassigned(ref: VolumeRef) -> VirtbusError:
    message = (
        f"the pool {ref.pool} of this node has nothing for {ref.key}; its operator assigns it "
        f"in pools.toml (pools.{ref.pool}.volumes), and restarts virtbus-nodeagent"
    )
    return VirtbusError(Code.CONFLICT, "pool_unknown", message)


def network_source(disk: NetworkDisk) -> Element:
    """Return the `<source>` of a network disk. Without `tls`, libvirt's default would apply."""
    pool, name = disk.pool, disk.place
    match pool:
        case NbdPool():
            host = el("host", name=pool.host, port=pool.port)
            tls = "yes" if pool.tls else "no"
            return el("source", host, protocol="nbd", name=name, tls=tls)
        case IscsiPool():
            host = el("host", name=pool.host, port=pool.port)
            return el("source", host, _auth(disk.login), protocol="iscsi", name=name)
        case RbdPool():
            hosts = [el("host", name=one, port=pool.port) for one in pool.monitors]
            return el("source", *hosts, _auth(disk.login), protocol="rbd", name=name)
        case NfsPool():
            host = el("host", name=pool.host)
            return el("source", host, _nfs_ids(pool), protocol="nfs", name=name)


def _nfs_ids(pool: NfsPool) -> Element | None:
    if pool.user is None:
        return None
    return el("identity", user=f"+{pool.user}", group=f"+{pool.group}")


def _auth(login: Login | None) -> Element | None:
    if login is None:
        return None
    return el("auth", el("secret", type=login.kind, uuid=login.id), username=login.user)


def device_of(ref: VolumeRef, pools: Mapping[str, PoolSettings]) -> str:
    """Return the path of a volume's device; raises VirtbusError 409 `pool_unknown`."""
    pool = pools.get(ref.pool)
    if isinstance(pool, LvmPool) and ref.kind is PoolKind.LVM:
        return device_path(pool, f"{ref.pool}/{ref.folder}")
    if ref.kind is PoolKind.BLOCK and isinstance(pool, BlockPool) and ref.key in pool.volumes:
        return pool.volumes[ref.key]
    raise _unassigned(ref)


def device_source(path: str, size_bytes: int) -> Element:
    """Return the `<source>` of a device. The guest sees its first bytes, and not the marks.

    `ALL_BYTES` is a device without marks, which may grow.
    """
    if size_bytes == ALL_BYTES:
        return el("source", dev=path)
    part = el("slice", type="storage", offset=0, size=-(-size_bytes // 512) * 512)
    return el("source", el("slices", part), dev=path)


def why_it_waits(record: VmRecord) -> str:
    """Return why a guest waits that QEMU has paused at an error of a disk."""
    refs = record.volume_refs.values()
    pools = sorted({ref.pool for ref in refs if ABILITIES[ref.kind].shared})
    return NO_SERVER.format(pools=", ".join(pools)) if pools else NO_ROOM
