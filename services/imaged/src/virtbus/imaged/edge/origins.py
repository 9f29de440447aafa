"""Finds the layers on which a clone's own disks are made (ADR 0061)."""

from pathlib import Path

from virtbus.imaged.core.disk_requests import DiskRequest
from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.layer import MAX_LAYERS, layer_name
from virtbus.schemas.snapshot import Origin


def begun_with(disks: Path, origin: Origin | None, disk: DiskRequest) -> Overlay | None:
    """Return the overlay of a clone's new disk, on a layer of the clone's origin.

    None if there is no origin, if the disk is that of a volume object, or if the origin lacks the
    disk. The file of a copied snapshot gets a second name as a layer. The caller has locked the
    snapshot. Blocks on the disk.

    Raises:
        VirtbusError: 409 `snapshot_missing`: the snapshot is not on this node any more. 409
            `chain_too_long`. The errors of `LayerFolder.chain`.
    """
    if origin is None or disk.ref is not None:
        return None
    files, ref, volume = SnapshotFolders(disks), origin.snapshot, disk.volume
    note = files.complete(ref.folder)
    if note is None:
        message = (
            f"the disk {volume} begins with the snapshot {ref.name}, which this node does not have "
            "any more; delete the VM, and clone it from another snapshot"
        )
        raise VirtbusError(Code.CONFLICT, "snapshot_missing", message)
    if volume not in {one.name for one in note.disks if one.ref is None}:
        return None
    name = layer_name(ref.uid, volume)
    if not note.layered:
        files.layers.lend(files.frozen_path(note, volume), name)
    found = files.layers.read(name)
    if len(files.layers.chain(found)[0]) + 1 > MAX_LAYERS:
        message = f"the disk {volume} of the snapshot rests on too many layers for a clone"
        raise VirtbusError(Code.CONFLICT, "chain_too_long", message)
    return Overlay(found.virtual_size_bytes, str(files.layers.root / name), ImageFormat.QCOW2)
