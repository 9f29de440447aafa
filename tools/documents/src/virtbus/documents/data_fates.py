"""Lists the outcome of each event for each kind of data, for docs/reference/data-fates.md.

Each outcome names the test that shows it. `tests/contract/test_data_fates.py` checks that each of
these tests exists.
"""

from virtbus.documents.fates import Data, Fate, Outcome
from virtbus.documents.shared_fates import SHARED_FATES

_VOLUMES = "services/controller/tests/test_volume_holders.py"
_HELD = "services/imaged/tests/test_volumes.py"
_KEPT = "services/imaged/tests/test_quarantine.py"
_ENDED = "services/nodeagent/tests/test_quarantine.py"
_EXPORTS = "services/imaged/tests/test_exports.py"
_OPERATIONS = "services/controller/tests/test_operation_api.py"
_OFF_MOVES = "services/controller/tests/test_off_moves.py"
_ALONG = f"{_OFF_MOVES}::test_a_vm_that_is_off_goes_to_another_node_with_all_its_volumes"
_MOVES = "services/controller/tests/test_volume_moves.py"
_SNAPSHOTS = "services/imaged/tests/test_snapshots.py"
_SNAPSHOT_API = "services/controller/tests/test_snapshot_api.py"
_BACKUPS = "services/imaged/tests/test_backups.py"
_BACKUP_API = "services/controller/tests/test_backup_api.py"
_POOLS = "services/imaged/tests/test_pools.py"
_UNINSTALL = "tests/integration/test_uninstall.py"
_DIRECTORIES = "services/controller/tests/test_directories.py"
_STAY = f"{_DIRECTORIES}::test_a_vm_that_writes_to_a_directory_stays_and_one_that_reads_may_leave"
_NOT_KEPT = f"{_DIRECTORIES}::test_a_directory_has_no_snapshots_and_no_backups"
_SHARED = "tests/e2e/test_directories.py::test_a_guest_shares_directories_with_its_host"
_TEMPLATES = "services/controller/tests/test_volume_templates.py"
_OUTLIVES = f"{_HELD}::test_a_volume_outlives_its_vm_and_the_next_vm_finds_its_data"
_PURGED_BY_NAME = f"{_KEPT}::test_a_purge_removes_the_entry_that_it_names_and_no_other"
_NO_ENTRY = f"{_KEPT}::test_a_release_without_keep_removes_the_disks_and_no_entry"
_LOSSES = f"{_VOLUMES}::test_a_node_is_forgotten_with_the_volumes_that_the_request_names"
_NO_COMMAND = f"{_VOLUMES}::test_a_vm_with_a_volume_leaves_its_node_for_no_command"
_FENCED = f"{_VOLUMES}::test_a_vm_with_a_volume_waits_for_its_fenced_node"
_RESTORED = "tests/sim/test_restored_bus.py"
_NOBODY = f"{_RESTORED}::test_a_restored_bus_ends_no_guest_and_loses_no_byte_until_a_person_decides"
_CANCELLED = f"{_OPERATIONS}::test_a_delete_of_a_volume_cancels_its_export"
_COPIED = f"{_SNAPSHOTS}::test_a_snapshot_is_restored_and_what_it_replaced_is_kept"
_KEPT_UNLESS = "kept as a snapshot; refused while the VM or the volume is protected"
_KEPT_IMAGE = f"{_SNAPSHOTS}::test_a_snapshot_outlives_its_vm_and_keeps_its_image"
_LAYERED = "services/imaged/tests/test_layered_snapshots.py"
_NEEDED = (
    "services/imaged/tests/test_layer_sweep.py"
    "::test_disks_snapshots_and_the_quarantine_need_their_layers"
)
_UNTIL = Outcome(Fate.STAYS, _NEEDED, "until nothing needs it")
_RECORDS = "services/controller/tests/test_untouched_records.py"
_NAMESPACE = f"{_RECORDS}::test_the_end_of_all_vms_of_a_namespace_leaves_its_other_data"
_LEFT = f"{_RECORDS}::test_a_stop_a_drain_and_a_fence_leave_snapshots_exports_and_schedules"
_BESIDE = (
    "services/imaged/tests/test_untouched.py::test_an_event_of_a_vm_or_a_pool_leaves_other_data"
)
_OWN_END = f"{_TEMPLATES}::test_only_the_end_of_its_own_vm_removes_a_volume"
_RETENTION = f"{_TEMPLATES}::test_the_retention_decides_what_the_delete_of_the_vm_removes"
_NO_FREE_BYTE = f"{_POOLS}::test_a_full_pool_takes_nothing_new_and_deletes_work_without_a_free_byte"
_GONE = f"{_POOLS}::test_a_pool_that_the_node_lacks_or_that_is_not_there_is_refused"
_FAILED_MOVE = f"{_MOVES}::test_a_failure_leaves_the_volume_where_it_is"
_UNTOUCHED = {
    Data.OWN_VOLUME: Outcome(Fate.STAYS, _OWN_END),
    Data.EXPORT: Outcome(Fate.STAYS, _LEFT),
    Data.SNAPSHOT: Outcome(Fate.STAYS, _LEFT),
    Data.LAYER: Outcome(Fate.STAYS, _BESIDE),
    Data.BACKUP: Outcome(Fate.STAYS, _BESIDE),
}
"""The outcomes of an event of a VM for the data that the event does not touch."""
_FULL = Outcome(Fate.STAYS, _BESIDE, "new ones are refused while `local` is full")
_LEFT_ON = f"{_UNINSTALL}::test_a_purge_of_the_host_is_refused_while_there_is_data"

FATES: dict[str, dict[Data, Outcome]] = {
    "`vm delete`": {
        Data.DISK: Outcome(Fate.REMOVED, f"{_ENDED}::test_a_delete_and_a_drain_remove_the_disks"),
        Data.VOLUME: Outcome(Fate.STAYS, _OUTLIVES),
        Data.OWN_VOLUME: Outcome(
            Fate.REMOVED,
            _RETENTION,
            "if the VM that made it holds it, and it is not protected",
        ),
        Data.QUARANTINE: Outcome(Fate.STAYS, _NO_ENTRY),
        Data.EXPORT: Outcome(
            Fate.STAYS, f"{_EXPORTS}::test_an_export_outlives_its_disk", "cancelled if unfinished"
        ),
        Data.SNAPSHOT: Outcome(Fate.STAYS, _KEPT_IMAGE),
        Data.LAYER: _UNTIL,
        Data.BACKUP: Outcome(Fate.STAYS, f"{_BACKUPS}::test_a_backup_outlives_its_vm"),
        Data.DIRECTORY: Outcome(Fate.STAYS, _SHARED),
    },
    "a namespace of Kubernetes is deleted": {
        Data.DISK: Outcome(
            Fate.REMOVED,
            "services/kubebridge/tests/test_orphans.py::test_a_vm_whose_vmi_was_deleted_is_deleted",
            "with its VM, if the bridge or the node's runtime made it; for the bus a namespace is"
            " only a name",
        ),
        Data.VOLUME: Outcome(Fate.STAYS, _NAMESPACE),
        Data.OWN_VOLUME: Outcome(Fate.REMOVED, _RETENTION, "as by `vm delete`"),
        Data.EXPORT: Outcome(Fate.STAYS, _NAMESPACE),
        Data.SNAPSHOT: Outcome(Fate.STAYS, _NAMESPACE),
        Data.BACKUP: Outcome(Fate.STAYS, _NAMESPACE),
    },
    "`backup delete`": {
        Data.BACKUP: Outcome(
            Fate.REMOVED,
            f"{_BACKUPS}::test_a_backup_with_an_increment_is_not_deleted",
            "refused while an increment rests on it",
        ),
    },
    "`volume delete`": {
        Data.VOLUME: Outcome(
            Fate.REMOVED,
            f"{_HELD}::test_only_a_release_of_the_volume_removes_it_and_may_be_repeated",
            "refused while a VM holds it or it is protected",
        ),
        Data.EXPORT: Outcome(Fate.STAYS, _CANCELLED, "cancelled if unfinished"),
        Data.LAYER: _UNTIL,
    },
    "`volume move`": {
        Data.VOLUME: Outcome(
            Fate.MOVED,
            f"{_MOVES}::test_a_volume_is_on_the_other_node_once_all_its_bytes_are",
            "after a failure it stays; refused while its VM is not off",
        ),
        Data.EXPORT: Outcome(
            Fate.REMOVED,
            f"{_MOVES}::test_a_volume_is_on_the_other_node_once_all_its_bytes_are",
            "only the file of the move",
        ),
    },
    "`volume move` of a VM that is off": {
        Data.DISK: Outcome(
            Fate.STAYS,
            f"{_OFF_MOVES}::test_a_vm_with_disks_of_its_own_stays_with_the_next_step",
            "to another node it is refused, or removed if the eviction strategy permits it",
        ),
        Data.VOLUME: Outcome(Fate.MOVED, _ALONG, "to another node: all volumes of its VM, or none"),
        Data.OWN_VOLUME: Outcome(Fate.MOVED, _ALONG, "as each volume"),
    },
    "`vm stop`": {
        Data.DISK: Outcome(
            Fate.STAYS, "tests/e2e/test_one_guest.py::test_stop_and_start_keep_disk_and_address"
        ),
        Data.VOLUME: Outcome(
            Fate.STAYS,
            "services/controller/tests/test_volume_attachments.py"
            "::test_a_vm_that_is_off_gets_a_volume_and_gives_it_back",
        ),
        **_UNTOUCHED,
    },
    "`node drain`, `vm move`": {
        Data.DISK: Outcome(
            Fate.REMOVED,
            f"{_ENDED}::test_a_delete_and_a_drain_remove_the_disks",
            "the VM stays unless `--discard-local-disks` or its eviction strategy permits it",
        ),
        Data.VOLUME: Outcome(Fate.STAYS, _NO_COMMAND, "with its VM"),
        Data.DIRECTORY: Outcome(Fate.STAYS, _STAY, "with its VM, unless that only reads"),
        **_UNTOUCHED,
    },
    "`node fence`": {
        Data.DISK: Outcome(
            Fate.QUARANTINED,
            f"{_ENDED}::test_a_vm_moved_by_a_fence_leaves_its_record_with_its_disks",
            "when the host returns, if the VM was moved",
        ),
        Data.VOLUME: Outcome(Fate.STAYS, _FENCED, "with its VM"),
        Data.DIRECTORY: Outcome(Fate.STAYS, _STAY, "with its VM, unless that only reads"),
        **_UNTOUCHED,
    },
    "the host returns after a fence": {
        Data.DISK: Outcome(
            Fate.QUARANTINED,
            f"{_KEPT}::test_a_disk_with_writes_is_kept_whole_and_listed",
            "a disk without writes is removed",
        ),
        Data.VOLUME: Outcome(Fate.STAYS, _FENCED),
        **_UNTOUCHED,
    },
    "the VM's record is missing": {
        Data.DISK: Outcome(Fate.STAYS, _NOBODY, "a person adopts the VM, or ends it"),
        Data.VOLUME: Outcome(
            Fate.STAYS, f"{_VOLUMES}::test_an_unreadable_vm_that_is_removed_keeps_its_volume"
        ),
        Data.OWN_VOLUME: Outcome(
            Fate.STAYS, f"{_TEMPLATES}::test_only_the_end_of_its_own_vm_removes_a_volume"
        ),
    },
    "the volume's record is missing": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            "services/controller/tests/test_volume_orphans.py"
            "::test_an_audit_lists_data_of_volumes_without_a_record",
            "`node audit` lists it; `volume adopt` makes a record",
        ),
    },
    "a restored or rebuilt bus": {
        Data.DISK: Outcome(Fate.STAYS, _NOBODY),
        Data.VOLUME: Outcome(
            Fate.STAYS, f"{_VOLUMES}::test_a_rebuild_restores_the_volumes_that_its_vms_hold"
        ),
        Data.OWN_VOLUME: Outcome(
            Fate.STAYS,
            f"{_TEMPLATES}::test_a_volume_that_a_rebuild_restored_is_retained",
            "after a rebuild it is retained, except on a server",
        ),
        Data.QUARANTINE: Outcome(Fate.STAYS, f"{_KEPT}::test_an_entry_outlives_imaged"),
        Data.BACKUP: Outcome(
            Fate.STAYS,
            f"{_BACKUP_API}::test_backups_of_all_nodes_are_listed_shown_and_deleted",
            "it needs no record",
        ),
        Data.EXPORT: Outcome(Fate.STAYS, _BESIDE, "until it is a day old"),
        Data.SNAPSHOT: Outcome(
            Fate.STAYS,
            f"{_SNAPSHOT_API}::test_data_without_a_record_is_listed_and_adopted",
            "without a record, see below",
        ),
    },
    "the snapshot's record is missing": {
        Data.SNAPSHOT: Outcome(
            Fate.STAYS,
            f"{_SNAPSHOT_API}::test_data_without_a_record_is_listed_and_adopted",
            "`node audit` lists it; `snapshot adopt` makes a record",
        ),
    },
    "`node forget`": {
        Data.DISK: Outcome(
            Fate.LOST,
            "services/controller/tests/test_node_api.py"
            "::test_a_node_that_is_gone_for_good_is_forgotten_by_every_controller",
            "refused while the node has VMs",
        ),
        Data.VOLUME: Outcome(Fate.LOST, _LOSSES, "refused until `--lose-volume` names each volume"),
        Data.EXPORT: Outcome(
            Fate.LOST,
            f"{_OPERATIONS}::test_operations_of_a_forgotten_node_fail_and_of_a_silent_one_wait",
        ),
        Data.SNAPSHOT: Outcome(
            Fate.LOST,
            f"{_SNAPSHOT_API}::test_a_forgotten_node_loses_the_snapshots_that_are_named",
            "refused until `--lose-snapshot` names each snapshot",
        ),
        Data.BACKUP: Outcome(
            Fate.LOST,
            f"{_BACKUP_API}::test_nodes_that_do_not_answer_are_named",
            "unless its directory is elsewhere",
        ),
        Data.OWN_VOLUME: Outcome(Fate.LOST, _LOSSES, "as each volume"),
    },
    "an operation fails or is cancelled": {
        Data.DISK: Outcome(
            Fate.STAYS, f"{_EXPORTS}::test_failures_are_told_once_and_leave_nothing"
        ),
        Data.EXPORT: Outcome(
            Fate.REMOVED, f"{_EXPORTS}::test_a_cancel_before_the_end_leaves_nothing"
        ),
        Data.SNAPSHOT: Outcome(
            Fate.REMOVED,
            f"{_SNAPSHOTS}::test_a_cancel_before_the_end_leaves_nothing_and_after_it_is_too_late",
            "one that is complete stays",
        ),
        Data.LAYER: Outcome(
            Fate.REMOVED,
            f"{_LAYERED}::test_without_a_switch_nothing_has_changed",
            "the disk keeps its file",
        ),
        Data.BACKUP: Outcome(
            Fate.REMOVED,
            f"{_BACKUPS}::test_a_crash_at_any_write_leaves_no_backup_or_a_complete_one",
            "one that is complete stays",
        ),
        Data.VOLUME: Outcome(Fate.STAYS, _FAILED_MOVE),
        Data.OWN_VOLUME: Outcome(Fate.STAYS, _FAILED_MOVE),
    },
    "a day after the end of the operation, `operation delete`": {
        Data.EXPORT: Outcome(Fate.REMOVED, f"{_EXPORTS}::test_old_exports_expire"),
    },
    "the host's disk is full": {
        Data.DISK: Outcome(
            Fate.STAYS,
            "tests/e2e/test_broken_host.py"
            "::test_a_full_disk_fails_the_vm_with_its_cause_and_free_space_repairs_it",
            "deletes work",
        ),
        Data.EXPORT: Outcome(
            Fate.REMOVED, f"{_EXPORTS}::test_failures_are_told_once_and_leave_nothing"
        ),
    },
    "the backup directory is full or gone": {
        Data.BACKUP: Outcome(
            Fate.STAYS,
            f"{_BACKUPS}::test_a_node_without_a_directory_or_space_makes_no_backup",
            "new ones are refused",
        ),
    },
    "its pool is full": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            _NO_FREE_BYTE,
            "growth, copies and creates are refused; deletes work",
        ),
        Data.OWN_VOLUME: Outcome(Fate.STAYS, _NO_FREE_BYTE, "as each volume"),
        Data.DISK: Outcome(Fate.STAYS, _BESIDE, "it is in the pool `local`"),
        Data.EXPORT: _FULL,
        Data.SNAPSHOT: _FULL,
        Data.BACKUP: _FULL,
    },
    "`volume delete` in a pool on a server": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            "services/controller/tests/test_pools.py"
            "::test_a_deleted_volume_on_a_server_is_gone_at_once_and_its_data_stays",
            "its operator removes it; the name is free",
        ),
    },
    "`vm move`, `node drain` or `node fence` with a volume on a server": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            "services/controller/tests/test_pools.py"
            "::test_a_volume_on_a_server_goes_with_its_vm_to_a_node_that_reaches_it",
            "on its server; the VM uses it on its next node",
        ),
    },
    "imaged dies while it writes a device": {
        Data.VOLUME: Outcome(
            Fate.REPLACED,
            "services/imaged/tests/test_devices.py"
            "::test_a_device_is_complete_if_it_has_the_mark_after_a_crash_at_any_write",
            "written again; VMs wait until the content is complete and compared",
        ),
    },
    "its pool's server dies": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            "tests/e2e/test_network_disks.py::test_a_guest_waits_for_its_server_and_continues",
            "the guest pauses, and continues when the server is back",
        ),
    },
    "its pool is gone": {
        Data.VOLUME: Outcome(
            Fate.STAYS,
            _GONE,
            "its VM waits, and so does its delete",
        ),
        Data.OWN_VOLUME: Outcome(Fate.STAYS, _GONE, "as each volume"),
        Data.DISK: Outcome(Fate.STAYS, _BESIDE, "it is in the pool `local`"),
        Data.EXPORT: Outcome(Fate.STAYS, _BESIDE),
        Data.SNAPSHOT: Outcome(Fate.STAYS, _BESIDE),
        Data.BACKUP: Outcome(Fate.STAYS, _BESIDE),
    },
    "`snapshot create`": {
        Data.DISK: Outcome(Fate.COPIED, _COPIED),
        Data.VOLUME: Outcome(Fate.COPIED, _COPIED),
        Data.LAYER: Outcome(
            Fate.STAYS,
            f"{_LAYERED}::test_the_content_of_each_state_is_the_one_of_its_instant",
            "the disk of a running guest becomes one",
        ),
        Data.DIRECTORY: Outcome(Fate.REFUSED, _NOT_KEPT, "also by `backup create`"),
    },
    "`snapshot restore`": {
        Data.DISK: Outcome(Fate.REPLACED, _COPIED, _KEPT_UNLESS),
        Data.VOLUME: Outcome(Fate.REPLACED, _COPIED, _KEPT_UNLESS),
        Data.SNAPSHOT: Outcome(Fate.STAYS, _COPIED),
        Data.LAYER: Outcome(
            Fate.STAYS,
            f"{_LAYERED}::test_a_restore_rests_on_the_layer_and_copies_nothing",
        ),
    },
    "`snapshot delete`": {
        Data.SNAPSHOT: Outcome(
            Fate.REMOVED,
            f"{_SNAPSHOT_API}::test_a_delete_ends_the_operation_then_the_data_then_the_record",
            "refused while it is protected",
        ),
        Data.LAYER: _UNTIL,
    },
    "`node quarantine purge`": {
        Data.QUARANTINE: Outcome(Fate.REMOVED, _PURGED_BY_NAME),
        Data.LAYER: _UNTIL,
    },
    "`deploy/uninstall --purge`": {
        Data.DISK: Outcome(Fate.REFUSED, _LEFT_ON),
        Data.VOLUME: Outcome(Fate.REFUSED, _LEFT_ON),
        Data.QUARANTINE: Outcome(Fate.REFUSED, _LEFT_ON),
        Data.SNAPSHOT: Outcome(Fate.REFUSED, _LEFT_ON),
        Data.EXPORT: Outcome(
            Fate.REMOVED, f"{_UNINSTALL}::test_a_purge_of_the_host_removes_its_exports"
        ),
        Data.OWN_VOLUME: Outcome(Fate.REFUSED, _LEFT_ON),
        Data.BACKUP: Outcome(
            Fate.STAYS,
            f"{_UNINSTALL}::test_a_purge_of_the_host_leaves_backups_elsewhere",
            "unless its directory is below the state folder",
        ),
    },
}
"""The outcomes by event, then by data. Data without an outcome stays. `OWN_VOLUME` without an
outcome has the outcome of `VOLUME`."""
for _event, _outcome in SHARED_FATES.items():
    FATES[_event][Data.SHARED_VOLUME] = _outcome
