"""Lists the requests about objects that outlive their VMs: volumes, snapshots and others.

The pools that hold volumes are among them.
"""

from virtbus.schemas import address_claim, image_name_api, network_api, pool, subjects, volume_api
from virtbus.schemas import backup_api as bak
from virtbus.schemas import backup_schedule as sched
from virtbus.schemas import operation_api as op
from virtbus.schemas import snapshot_api as snap
from virtbus.schemas.channel import Channel, Plane
from virtbus.schemas.channel import core_or_stored as _said
from virtbus.schemas.channel import of_api as _api

OBJECTS: tuple[Channel, ...] = (
    _said(
        subjects.node_pools,
        Plane.RECORD,
        pool.NodePools,
        "nodeagent → controller",
        "The node's pools for volumes, with their sizes and states.",
    ),
    _said(
        subjects.address_claim,
        Plane.RECORD,
        address_claim.AddressClaim,
        "controller → controller",
        "The VM that has an address of a network; claimed before its record.",
    ),
    _api(
        "volume",
        "create",
        volume_api.VolumeCreate,
        volume_api.VolumeCreated,
        "Make a volume; safe to repeat with its uid.",
    ),
    _api("volume", "get", volume_api.VolumeAsk, volume_api.VolumeView, "One volume."),
    _api("volume", "list", volume_api.VolumeList, volume_api.VolumePage, "Volumes, in pages."),
    _api("volume", "update", volume_api.VolumeUpdate, volume_api.VolumeView, "Change a volume."),
    _api(
        "volume",
        "delete",
        volume_api.VolumeDelete,
        volume_api.VolumeView,
        "Remove a volume's data.",
    ),
    _api("volume", "fill", volume_api.VolumeFillAgain, volume_api.VolumeView, "Repeat a copy."),
    _api("volume", "move", volume_api.VolumeMoveTo, volume_api.VolumeView, "Move its data."),
    _api("volume", "adopt", volume_api.VolumeAdopt, volume_api.VolumeView, "Write a lost record."),
    _api(
        "volume",
        "attach",
        volume_api.VolumeAttach,
        volume_api.VolumeView,
        "Attach a volume to a VM.",
    ),
    _api(
        "volume",
        "detach",
        volume_api.VolumeDetach,
        volume_api.VolumeView,
        "Detach a volume from a VM.",
    ),
    _api(
        "snapshot",
        "create",
        snap.SnapshotCreate,
        snap.SnapshotView,
        "Copy disks that no guest uses.",
    ),
    _api("snapshot", "get", snap.SnapshotAsk, snap.SnapshotView, "One snapshot."),
    _api("snapshot", "list", snap.SnapshotList, snap.SnapshotPage, "Snapshots, in pages."),
    _api("snapshot", "update", snap.SnapshotUpdate, snap.SnapshotView, "Protect a snapshot."),
    _api("snapshot", "restore", snap.SnapshotRestore, snap.SnapshotView, "Replace the disks."),
    _api("snapshot", "adopt", snap.SnapshotAdopt, snap.SnapshotView, "Write a lost record."),
    _api("snapshot", "delete", snap.SnapshotDelete, snap.SnapshotView, "Remove its data."),
    _api("backup", "create", bak.BackupCreate, op.OperationView, "Copy the disks of a VM."),
    _api("backup", "get", bak.BackupAsk, bak.BackupView, "One backup with its specification."),
    _api("backup", "list", bak.BackupList, bak.BackupPage, "Backups of all nodes."),
    _api("backup", "verify", bak.BackupVerify, op.OperationView, "Read a backup and its chain."),
    _api("backup", "delete", bak.BackupAsk, bak.BackupView, "Remove a backup."),
    _api(
        "backup-schedule",
        "create",
        sched.BackupScheduleCreate,
        sched.BackupScheduleView,
        "Make a schedule; safe to repeat with its uid.",
    ),
    _api(
        "backup-schedule",
        "get",
        sched.BackupScheduleAsk,
        sched.BackupScheduleView,
        "One schedule of backups.",
    ),
    _api(
        "backup-schedule",
        "list",
        sched.BackupScheduleList,
        sched.BackupSchedulePage,
        "Schedules of backups, in pages.",
    ),
    _api(
        "backup-schedule",
        "update",
        sched.BackupScheduleUpdate,
        sched.BackupScheduleView,
        "Change a schedule of backups.",
    ),
    _api(
        "backup-schedule",
        "delete",
        sched.BackupScheduleDelete,
        sched.BackupScheduleView,
        "End a schedule; its backups stay.",
    ),
    _api(
        "imagename",
        "set",
        image_name_api.ImageNameSet,
        image_name_api.ImageNameView,
        "Make or change an image name.",
    ),
    _api(
        "imagename",
        "get",
        image_name_api.ImageNameAsk,
        image_name_api.ImageNameView,
        "One image name.",
    ),
    _api(
        "imagename",
        "list",
        image_name_api.ImageNameList,
        image_name_api.ImageNamePage,
        "Image names, in pages.",
    ),
    _api(
        "imagename",
        "delete",
        image_name_api.ImageNameDelete,
        image_name_api.ImageNameDeleted,
        "Remove an image name; VMs and images stay.",
    ),
    _api(
        "network",
        "create",
        network_api.NetworkCreate,
        network_api.NetworkCreated,
        "Make a network; safe to repeat with its uid.",
    ),
    _api("network", "get", network_api.NetworkRef, network_api.NetworkObjectView, "One network."),
    _api(
        "network",
        "list",
        network_api.NetworkList,
        network_api.NetworkObjectPage,
        "Networks, in pages.",
    ),
    _api(
        "network",
        "update",
        network_api.NetworkUpdate,
        network_api.NetworkObjectView,
        "Change a network.",
    ),
    _api(
        "network",
        "delete",
        network_api.NetworkDelete,
        network_api.NetworkObjectView,
        "Remove a network that no VM uses.",
    ),
    _api("operation", "export", op.OperationExport, op.OperationView, "Write a disk to a file."),
    _api("operation", "get", op.OperationAsk, op.OperationView, "One operation."),
    _api("operation", "list", op.OperationList, op.OperationPage, "Operations, in pages."),
    _api("operation", "cancel", op.OperationAsk, op.OperationView, "Cancel an operation."),
    _api(
        "operation",
        "delete",
        op.OperationAsk,
        op.OperationView,
        "Remove an operation and its file.",
    ),
)
