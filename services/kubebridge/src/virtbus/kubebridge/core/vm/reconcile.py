"""Reconcile of a VM and its VMI, as one function (ADR 0026)."""

from datetime import datetime
from typing import Any

from virtbus.kubebridge.core.objects.metadata import (
    VM_FINALIZER,
    VM_LABEL,
)
from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.runtime.controller import (
    AT_ONCE_S,
    VM,
    VMI,
    Action,
    Controller,
    Create,
    Delete,
    Inputs,
    Key,
    KeyMapping,
    Lister,
    Patch,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.translation.defaults import of_vm, of_vmi
from virtbus.kubebridge.core.translation.nics import without_absent
from virtbus.kubebridge.core.vm import interfaces
from virtbus.kubebridge.core.vm.model import StateChange, Vm
from virtbus.kubebridge.core.vm.run_strategies import Decision, plan
from virtbus.kubebridge.core.vm.status import (
    ANNOTATIONS_DROPPED,
    FAILURE,
    TOO_LARGE,
    Pair,
    printable,
    start_failure,
    status,
)
from virtbus.kubebridge.core.vmi import status as vmi_status
from virtbus.kubebridge.core.vmi.model import GENERATION, Vmi
from virtbus.schemas.vm import RunStrategy

ORPHAN = "orphan"
"""The API server's finalizer of `--cascade=orphan`, which keeps the objects that the VM owns."""


YOUNG_S = 1.0
"""Seconds within which most guests start. The first status of a new VM waits until its VMI has this
age. The first write then already reports a running guest."""
REFUSED_S = 10.0
"""Seconds before a refused create is repeated. The end of the cause, such as a quota or an absent
webhook, causes no watch event."""


def reconcile(vm: Vm, vmi: Vmi | None, now: datetime, failed: str = "") -> list[Action]:
    """Return the actions for a VM; none if all is done and reported.

    `vmi` is the VMI of the same name. A VMI that this VM does not own is left alone. `failed` is
    the reason why the last create of a VMI was refused.
    """
    own = vmi if vmi is not None and any(one.uid == vm.uid for one in vmi.owners) else None
    if vm.deleting:
        return _end(vm, own, now)
    if vmi is not None and own is None:
        owner = f"VirtualMachineInstance {vmi.name} exists, and is not this VM's"
        return _report(Pair(vm, None), [], now, failed=f"{owner}; delete it or rename the VM")
    actions = interfaces.follow(vm, vmi) or _follow(vm, vmi, now, failed)
    if VM_FINALIZER not in vm.finalizers:
        return [Patch({"metadata": {"finalizers": [*vm.finalizers, VM_FINALIZER]}}), *actions]
    return actions


def _follow(vm: Vm, vmi: Vmi | None, now: datetime, failed: str) -> list[Action]:
    do, requests = plan(vm, vmi)
    if do is Decision.START:
        return _start(vm, requests, now, failed)
    if do in {Decision.STOP, Decision.RERUN} and vmi is not None:
        again = [read(StateChange, {"action": "Start"})] if do is Decision.RERUN else []
        return _stop(vm, vmi, [*requests, *again], now)
    if do is Decision.RUN_ALWAYS:
        named = {"runStrategy": str(RunStrategy.ALWAYS)}
        spec = named if vm.names_strategy else {"running": True}
        return [Patch({"spec": spec}), Requeue(AT_ONCE_S)]  # the bridge's write queues no reconcile
    acted = vmi is not None or vm.strategy in {RunStrategy.MANUAL, RunStrategy.HALTED}
    observed = str(vm.strategy) if acted else ""
    report = _report(Pair(vm, vmi), requests, now, observed=observed)
    young_s = _young_s(vm, vmi, now) if report else 0.0
    return [Requeue(young_s)] if young_s else report


def _young_s(vm: Vm, vmi: Vmi | None, now: datetime) -> float:
    if vmi is None or vmi.created is None or vm.status or printable(Pair(vm, vmi)) != "Starting":
        return 0.0
    # Clock skew or the one-second resolution of creationTimestamp can make the age negative.
    age_s = (now - vmi.created).total_seconds()
    return YOUNG_S - age_s if 0 <= age_s < YOUNG_S else 0.0


def _start(vm: Vm, requests: list[StateChange], now: datetime, failed: str) -> list[Action]:
    """Create a VMI once the backoff is over. The watch event of the new VMI updates the status."""
    if vm.retry_at is not None and vm.retry_at > now and start_failure(vm, None, now):
        left_s = (vm.retry_at - now).total_seconds()
        return [*_report(Pair(vm, None), requests, now), Requeue(left_s)]
    vmi = vmi_of(vm, paused=bool(requests) and requests[0].paused == "true")
    # The create contains the VMI's first status. This saves one write.
    vmi["status"] = vmi_status.status(read(Vmi, vmi), vmi_status.Seen(), now)
    create: list[Action] = [Create(VMI, vmi)]
    if failed:
        report = _report(Pair(vm, None, starts=True), requests, now, failed=failed)
        if _message(vm, FAILURE) != failed:
            message = f"Error creating virtual machine instance: {failed}"
            report.append(RecordEvent("FailedCreate", message, warning=True))
        return [*report, *create, Requeue(REFUSED_S)]
    message = f"Started the virtual machine by creating the new virtual machine instance {vm.name}"
    return [*create, RecordEvent("SuccessfulCreate", message)]


def _stop(vm: Vm, vmi: Vmi, requests: list[StateChange], now: datetime) -> list[Action]:
    """Delete the VMI. The open requests are written first, so that they survive a crash."""
    message = f"Stopped the virtual machine by deleting the virtual machine instance {vmi.name}"
    return [
        *_report(Pair(vm, vmi, stops=True), requests, now, observed=str(vm.strategy)),
        _delete(vmi),
        RecordEvent("SuccessfulDelete", message),
    ]


def _delete(vmi: Vmi) -> Action:
    return Delete(Key(VMI, vmi.namespace, vmi.name), vmi.uid, vmi.version)


def _end(vm: Vm, vmi: Vmi | None, now: datetime) -> list[Action]:
    """Delete the VMI, and remove the VM's finalizer once the VMI is gone.

    With `--cascade=orphan` the VMI stays. The delete of the VMI precedes the write of the status,
    so a failed write cannot delay the delete.
    """
    if vmi is not None and ORPHAN not in vm.finalizers:
        report = _report(Pair(vm, vmi, stops=True), [], now)
        return report if vmi.deleting else [_delete(vmi), *report]
    if VM_FINALIZER in vm.finalizers:
        kept = [one for one in vm.finalizers if one != VM_FINALIZER]
        return [Patch({"metadata": {"finalizers": kept}})]
    return []


def _report(
    pair: Pair, requests: list[StateChange], now: datetime, *, failed: str = "", observed: str = ""
) -> list[Action]:
    new_status = status(pair, requests, now, failed=failed, observed=observed)
    if new_status == pair.vm.status:
        return []
    dropped = _message(pair.vm, ANNOTATIONS_DROPPED)
    events = [
        RecordEvent(TOO_LARGE, one["message"], warning=True)
        for one in new_status["conditions"]
        if one["type"] == ANNOTATIONS_DROPPED and one["message"] != dropped
    ]
    return [Patch({"status": new_status}, "status"), *events]


def _message(vm: Vm, kind: str) -> str:
    return next((one.message for one in vm.conditions if one.type == kind), "")


def vmi_of(vm: Vm, *, paused: bool) -> dict[str, Any]:
    """Return the VMI that a VM's template describes. If `paused`, its guest starts paused."""
    made = read(Vmi, of_vm(vm.raw).get("spec", {}).get("template"))
    owner = {
        "apiVersion": VM.api_version,
        "kind": VM.kind,
        "name": vm.name,
        "uid": vm.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": vm.name,
        "namespace": vm.namespace,
        "labels": {**made.labels, VM_LABEL: vm.name},
        "annotations": {**made.annotations, GENERATION: str(vm.generation)},
        "ownerReferences": [owner],
    }
    spec = {**made.spec, "startStrategy": "Paused"} if paused else dict(made.spec)
    named = {"apiVersion": VMI.api_version, "kind": VMI.kind}
    return of_vmi(without_absent({**named, "metadata": metadata, "spec": spec}))


def controller(vmis: Lister) -> Controller:
    """Return the controller of VMs. A VM and its VMI have the same name."""

    def run(key: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        failed = inputs.refused.message if inputs.refused is not None else ""
        vmi = vmis.get(key.path)
        own = read(Vmi, vmi) if vmi is not None else None
        return reconcile(read(Vm, inputs.obj), own, inputs.now, failed)

    return Controller(VM, run, (KeyMapping(VM), KeyMapping(VMI)))
