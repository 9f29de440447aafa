"""Decides about clones: VMs whose own disks begin with a snapshot (ADR 0061)."""

from virtbus.controller.core.snapshot_changes import ref_of_snapshot, refuse_incomplete
from virtbus.controller.core.volume_placement import Home
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.snapshot import Origin, SnapshotRecord
from virtbus.schemas.vm import VmRecord, VmSecrets, VmSpec

_DISKS = ("mounts", "links")
_PUBLIC = ("hostname", "fqdn", *_DISKS)


def origin_of(snapshot: SnapshotRecord, home: Home | None) -> Origin:
    """Return the origin of a clone; `home` is the node of the clone's volumes.

    Raises:
        VirtbusError: 409. `deleting`: the snapshot is being deleted. `snapshot_lost`: the data was
            given up. `snapshot_not_ready`: the data is not complete. `not_of_a_vm`: the snapshot is
            of a volume. `volumes_apart`: the clone's volumes are on another node.
    """
    refuse_incomplete(snapshot)
    if snapshot.resource != "vm":
        message = (
            f"{snapshot.name} is the snapshot of a volume, and a VM begins with one of a VM; "
            "`virtbus snapshot restore --to` gives it to another volume"
        )
        raise VirtbusError(Code.CONFLICT, "not_of_a_vm", message)
    if home is not None and home.node not in {"", snapshot.node}:
        message = (
            f"the snapshot {snapshot.name} is on {snapshot.node}, and the volume {home.volume} on "
            f"{home.node}; use data of one node"
        )
        raise VirtbusError(Code.CONFLICT, "volumes_apart", message)
    return Origin(snapshot=ref_of_snapshot(snapshot), node=snapshot.node)


def taken_over(
    spec: VmSpec, own: VmSecrets | None, source: VmRecord, held: VmSecrets, name: str, uid: str
) -> VmSecrets:
    """Return the secrets of a clone: its own, and the source's where the clone has none.

    `held` are the source's secrets. The source's seed replaces a seed of the clone without secrets,
    but the clone's mounts and links stay. A host name that is the source's name becomes `name`.
    """
    own = own or VmSecrets(uid=uid)
    names = {volume.name: volume.cloud_init for volume in spec.volumes}
    seeds = {
        volume: _renamed(seed, source.name, name).model_copy(update=_kept(names[volume]))
        for volume, seed in held.cloud_init.items()
        if volume in names and _is_empty(own.cloud_init.get(volume))
    }
    files = {volume: one for volume, one in held.files.items() if volume in names}
    pulls = {volume: one for volume, one in held.image_pull.items() if volume in names}
    ignition = own.ignition or (held.ignition if spec.ignition is not None else None)
    return VmSecrets(
        uid=uid,
        cloud_init={**own.cloud_init, **seeds},
        files={**files, **own.files},
        image_pull={**pulls, **own.image_pull},
        ignition=ignition,
    )


def _is_empty(seed: CloudInit | None) -> bool:
    """Return True for a seed without secrets; an empty text counts as left out."""
    return seed is None or not any(one for field, one in seed if field not in _PUBLIC)


def _kept(seed: CloudInit | None) -> dict[str, object]:
    """Return the non-empty mounts and links of a clone's own seed."""
    return {} if seed is None else {name: own for name in _DISKS if (own := getattr(seed, name))}


def _renamed(seed: CloudInit, before: str, after: str) -> CloudInit:
    """Return the seed with the clone's name; a name with a domain keeps the domain."""
    if seed.hostname != before:
        return seed
    fqdn = seed.fqdn
    if fqdn is not None and fqdn.startswith(f"{before}."):
        fqdn = f"{after}{fqdn.removeprefix(before)}"
    return seed.model_copy(update={"hostname": after, "fqdn": fqdn})
