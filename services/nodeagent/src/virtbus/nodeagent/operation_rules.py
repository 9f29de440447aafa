"""Decides if an operation may begin, must wait, or must end, by the VMs of the node (ADR 0048)."""

from collections.abc import Iterable
from typing import NamedTuple

from virtbus.nodeagent.vm.machine import EVACUATING, SETTLED, UP
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
from virtbus.schemas.operation import OperationRecord

OFF = SETTLED - UP
"""Phases in which no guest runs and none is being started or ended."""
LEAVING = EVACUATING | {"ending"}
GOING = "its VM is being deleted, or leaves this node"


class Verdict(NamedTuple):
    """The next step of an operation. All fields empty: it may be carried out.

    `waits` is the reason for a wait, `ends` that for a cancel, `error` that for a failure.
    """

    waits: str = ""
    ends: str = ""
    error: ErrorBody | None = None


GO = Verdict()


def before(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict on an operation that has not begun; `vms` are those of the node."""
    if op.kind == "fill" and not _of_vm(op):
        return _of_fill(op, vms)
    if not _of_vm(op):
        return _of_volume(op, vms)
    vm = _found(op, vms)
    if vm is None:
        return _failed("vm_left", f"the VM is not on {op.node} any more; begin again")
    if _leaves(vm):
        return Verdict(ends=GOING)
    return GO if vm.phase in OFF else _busy(vm)


def _busy(vm: ActorState) -> Verdict:
    if vm.phase == "new":
        return Verdict(waits="the agent compares host and records")
    if vm.record.powered:
        return _failed("vm_runs", f"{vm.record.name} runs; stop it, then begin again")
    return Verdict(waits=f"{vm.record.name} is being stopped")


def during(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict on an operation that runs. A start of its VM waits for its end."""
    if not _of_vm(op):
        return GO
    vm = _found(op, vms)
    return Verdict(ends=GOING) if vm is None or _leaves(vm) else GO


def _leaves(vm: ActorState) -> bool:
    return vm.ends or vm.phase in LEAVING


def _of_vm(op: OperationRecord) -> tuple[str, int] | None:
    """Return the uid and epoch of the VM whose disk is read; None if it is a volume or an image."""
    if op.resource == "vm":
        return op.uid, op.epoch
    source = op.source
    return (source.vm, source.epoch) if source is not None and source.vm is not None else None


def _found(op: OperationRecord, vms: Iterable[ActorState]) -> ActorState | None:
    """Return the VM whose disk is read, if it is still the one that was requested."""
    wanted = _of_vm(op)
    return next((vm for vm in vms if (vm.record.uid, vm.record.epoch) == wanted), None)


def _of_volume(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    for vm in vms:
        used = {ref.uid for ref in vm.record.volume_refs.values()}
        if op.uid in used and vm.phase not in OFF:
            return _failed("volume_in_use", f"{vm.record.name} uses {op.name}; stop it first")
    return GO


def _of_fill(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict for a fill: the VM that has its source must be off."""
    source = op.source.volume if op.source is not None else None
    for vm in vms:
        used = {ref.uid for ref in vm.record.volume_refs.values()}
        if source is None or source.uid not in used or vm.phase in OFF:
            continue
        if vm.phase == "new" or not vm.record.powered:
            return Verdict(waits=f"{vm.record.name}, which has {source.name}, is not off yet")
        return _failed("volume_in_use", f"{vm.record.name} uses {source.name}; stop it first")
    return GO


def _failed(reason: str, message: str) -> Verdict:
    return Verdict(error=VirtbusError(Code.CONFLICT, reason, message).body)
