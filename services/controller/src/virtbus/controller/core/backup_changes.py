"""Describes backups as the API shows them, and the operations that make and verify them."""

from virtbus.controller.core.resting import UP_STATES
from virtbus.schemas.backup import HeldBackup
from virtbus.schemas.backup_api import BackupCreate, BackupList, BackupServe, BackupView
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.states import VmState

MAX_PROBLEM_CHARS = 200
"""Maximum length of the text of a problem in a list."""
UNREADABLE = "its description cannot be read; see its folder in the backup directory"


def shown(node: str, held: HeldBackup, *, whole: bool = False) -> BackupView:
    """Return a backup in the directory of a node; `whole` adds its specification and disks."""
    check = held.check
    found: dict[str, object] = {"id": held.id, "node": node, "children": held.children}
    if check is not None:
        problem = check.problem if whole else check.problem[:MAX_PROBLEM_CHARS]
        found |= {"verified_ns": check.at_ns, "problem": problem}
    made = held.manifest
    if made is None:
        return BackupView.model_validate(found | {"problem": UNREADABLE})
    names = set(BackupView.model_fields) - found.keys() - {"spec", "disks"}
    fields = made.model_dump(include=names | ({"spec", "disks"} if whole else set()))
    found |= fields | {"vm": made.name, "size_bytes": made.size_bytes}
    return BackupView.model_validate(found)


def selected(want: BackupList, held: HeldBackup) -> bool:
    """Return True for a backup that a list asks for.

    An unreadable backup has no known VM or namespace, so it is only in a list without both.
    """
    made = held.manifest
    if made is None:
        return want.vm is None and want.namespace is None
    return want.vm in {None, made.name} and want.namespace in {None, made.namespace}


def creating(
    want: BackupCreate, fields: dict[str, object], id_: str, now_ns: int
) -> OperationRecord:
    """Return the operation that makes a backup; `fields` is the result of `resting.of_vm`."""
    asked = {"mode": want.mode, "chain": want.chain, "namespace": want.namespace}
    made = {"kind": "backup", "id": id_, "created_ns": now_ns}
    return OperationRecord.model_validate({**asked, **made, **fields})


def scheduled(record: BackupScheduleRecord, fields: dict[str, object]) -> OperationRecord:
    """Return the operation of a schedule's run. Calls with equal arguments return equal records."""
    asked = {"chain": record.spec.chain, "namespace": record.namespace, "schedule": record.name}
    made = {"kind": "backup", "id": record.run, "created_ns": record.begun_ns}
    return OperationRecord.model_validate({**asked, **made, **fields})


def serving(want: BackupServe, fields: dict[str, object], id_: str, now_ns: int) -> OperationRecord:
    """Return the operation that serves a VM's disks to a reader; `fields` as in `creating`."""
    asked = {"since": want.since or "", "within_s": want.within_s, "namespace": want.namespace}
    made = {"kind": "serve", "id": id_, "created_ns": now_ns}
    return OperationRecord.model_validate({**asked, **made, **fields})


def refuse_off(name: str, state: VmState) -> None:
    """Raise 409 `vm_off` if the guest does not run, because the guest's QEMU serves the disks."""
    if state not in UP_STATES:
        message = (
            f"{name} is {state}, and only a running guest is read; start it, or use "
            f"`virtbus backup create {name}`"
        )
        raise VirtbusError(Code.CONFLICT, "vm_off", message)


def verifying(view: BackupView, id_: str, owner: str, now_ns: int) -> OperationRecord:
    """Return the operation that verifies a backup. A backup has at most one at a time."""
    return OperationRecord(
        kind="verify",
        id=id_,
        node=view.node,
        namespace=view.namespace,
        resource="vm",
        uid=view.id,
        name=view.vm,
        backup=view.id,
        owner=owner,
        created_ns=now_ns,
    )


def backups_off(node: str) -> VirtbusError:
    """Return the error 422 of a node that has no directory for backups."""
    message = f"{node} has no directory for backups; set backup_dir in its imaged.toml"
    return VirtbusError(Code.UNSUPPORTED, "backups_off", message)


def not_found(id_: str, silent: list[str]) -> VirtbusError:
    """Return the error of a missing backup: 503 if a node that may have it did not answer."""
    if silent:
        message = f"no node that answers has the backup {id_}; {', '.join(silent)} did not answer"
        return VirtbusError(Code.UNAVAILABLE, "backups_unheard", message, after_ms=1000)
    message = f"no node has the backup {id_}; `virtbus backup list` shows what there is"
    return VirtbusError(Code.NOT_FOUND, "backup_not_found", message)
