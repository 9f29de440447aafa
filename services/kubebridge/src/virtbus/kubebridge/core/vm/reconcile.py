"""Reconciles a VM and its VMI in one function (ADR 0026)."""

from datetime import datetime
from typing import Any

from virtbus.kubebridge.core.objects.metadata import (
    GROUP_VERSION,
    VM_FINALIZER,
    VM_KIND,
    VM_LABEL,
    VMI_KIND,
)
from virtbus.kubebridge.core.objects.moments import find, moment
from virtbus.kubebridge.core.objects.plain import Object, at, items, number, part, text
from virtbus.kubebridge.core.runtime.actions import (
    AT_ONCE_S,
    Action,
    Create,
    Delete,
    Patch,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.runtime.controller import Controller, Inputs, Lister, Watch
from virtbus.kubebridge.core.runtime.kinds import VM, VMI, Key
from virtbus.kubebridge.core.translation.defaults import of_vm, of_vmi
from virtbus.kubebridge.core.vm.run_strategies import (
    Do,
    Has,
    asked_of,
    decide,
    has_of,
    open_requests,
    starts_paused,
    strategy_of,
)
from virtbus.kubebridge.core.vm.status import (
    ANNOTATIONS_DROPPED,
    FAILURE,
    GENERATION,
    TOO_LARGE,
    Pair,
    back_off_left_s,
    printable,
    start_failure,
    status,
)
from virtbus.kubebridge.core.vmi import status as vmi_status
from virtbus.schemas.vm import RunStrategy

ORPHAN = "orphan"
"""The API server's finalizer of `--cascade=orphan`, which keeps the objects that the VM owns."""


YOUNG_S = 1.0
"""Seconds after which most guests run. A status that waits for it saves a write."""
REFUSED_S = 10.0
"""Seconds before a retry after a refused create (a quota, an absent webhook). No event reports the
end of such a cause.
"""


def reconcile(vm: Object, vmi: Object | None, now: datetime, failed: str = "") -> list[Action]:
    """Return the actions for a VM; none if all is done and reported.

    `vmi` has the VM's name. A VMI of another owner is not touched. `failed` is the reason why the
    last create of a VMI was refused.
    """
    foreign = vmi is not None and not owns(vm, vmi)
    if at(vm, "metadata", "deletionTimestamp"):
        return _end(vm, None if foreign else vmi, now)
    if vmi is not None and foreign:
        owner = (
            f"VirtualMachineInstance {text(vmi, 'metadata', 'name')} exists, and is not this VM's"
        )
        return _told(Pair(vm, None), [], now, failed=f"{owner}; delete it or rename the VM")
    finalizers = at(vm, "metadata", "finalizers") or []
    actions = _follow(vm, vmi, now, failed)
    if VM_FINALIZER not in finalizers:
        return [Patch({"metadata": {"finalizers": [*finalizers, VM_FINALIZER]}}), *actions]
    return actions


def _follow(vm: Object, vmi: Object | None, now: datetime, failed: str) -> list[Action]:
    """Follow the run strategy."""
    requests = open_requests(vm, vmi)
    strategy = strategy_of(vm)
    if strategy is RunStrategy.HALTED and text(vm, "status", "runStrategy") != strategy:
        requests = []  # they precede the halt: a restart must not undo it
    do = decide(strategy, has_of(vmi), asked_of(requests))
    if do is Do.START_ONCE:
        do = Do.START if text(vm, "status", "runStrategy") != strategy else Do.NOTHING
    match do:
        case Do.START:
            return _start(vm, requests, now, failed)
        case Do.STOP:
            return _stop(Pair(vm, vmi, stops=True), requests, now)
        case Do.RERUN:
            return _stop(Pair(vm, vmi, stops=True), [*requests, {"action": "Start"}], now)
        case Do.RUN_ALWAYS:
            return [_run_always(vm), Requeue(AT_ONCE_S)]  # requeue: the spec changed
        case _:
            acted = vmi is not None or strategy in {RunStrategy.MANUAL, RunStrategy.HALTED}
            observed = str(strategy) if acted else ""
            told = _told(Pair(vm, vmi), requests, now, observed=observed)
            young_s = _young_s(Pair(vm, vmi), now) if told else 0.0
            return [Requeue(young_s)] if young_s else told


def _young_s(pair: Pair, now: datetime) -> float:
    """Return the seconds for which a new VM's status waits for its VMI to start."""
    made = moment(text(pair.vmi, "metadata", "creationTimestamp"))
    if made is None or part(pair.vm, "status") or printable(pair) != "Starting":
        return 0.0
    # negative under clock skew; creationTimestamp has one-second resolution
    age_s = (now - made).total_seconds()
    return YOUNG_S - age_s if 0 <= age_s < YOUNG_S else 0.0


def owns(vm: Object, vmi: Object) -> bool:
    """Return True if this VM owns the VMI. An earlier VM of its name does not count."""
    owners = at(vmi, "metadata", "ownerReferences") or []
    mine = text(vm, "metadata", "uid")
    return any(isinstance(one, dict) and one.get("uid") == mine for one in owners)


def _start(vm: Object, requests: list[Object], now: datetime, failed: str) -> list[Action]:
    """Create a VMI once the backoff is over. Its appearance triggers the status."""
    left_s = back_off_left_s(vm, now) if start_failure(vm, None, now) else 0.0
    if left_s > 0:
        return [*_told(Pair(vm, None), requests, now), Requeue(left_s)]
    vmi = vmi_of(vm, paused=starts_paused(requests))
    vmi["status"] = vmi_status.status(vmi, vmi_status.Seen(), now)  # saves a separate write
    create: list[Action] = [Create(VMI, vmi)]
    if failed:
        told = _told(Pair(vm, None, starts=True), requests, now, failed=failed)
        if text(find(items(vm, "status", "conditions"), FAILURE), "message") != failed:
            message = f"Error creating virtual machine instance: {failed}"
            told.append(RecordEvent("FailedCreate", message, warning=True))
        return [*told, *create, Requeue(REFUSED_S)]
    name = text(vm, "metadata", "name")
    message = f"Started the virtual machine by creating the new virtual machine instance {name}"
    return [*create, RecordEvent("SuccessfulCreate", message)]


def _stop(pair: Pair, requests: list[Object], now: datetime) -> list[Action]:
    """Stop the VMI. The requests that follow are written first, so that they survive a crash."""
    name = text(pair.vmi, "metadata", "name")
    message = f"Stopped the virtual machine by deleting the virtual machine instance {name}"
    observed = str(strategy_of(pair.vm))
    return [
        *_told(pair, requests, now, observed=observed),
        _delete(pair.vmi),
        RecordEvent("SuccessfulDelete", message),
    ]


def _delete(vmi: Object | None) -> Action:
    meta = part(vmi, "metadata")
    key = Key(VMI, text(meta, "namespace"), text(meta, "name"))
    return Delete(key, text(meta, "uid"), text(meta, "resourceVersion"))


def _run_always(vm: Object) -> Action:
    if at(vm, "spec", "runStrategy") is not None:
        return Patch({"spec": {"runStrategy": str(RunStrategy.ALWAYS)}})
    return Patch({"spec": {"running": True}})


def _end(vm: Object, vmi: Object | None, now: datetime) -> list[Action]:
    """Delete the VMI first, then remove the finalizer. With `--cascade=orphan` the VMI stays.

    The status is written last, so a failed write of it does not delay the deletion.
    """
    finalizers = at(vm, "metadata", "finalizers") or []
    orphans = ORPHAN in finalizers
    if vmi is not None and not orphans:
        told = _told(Pair(vm, vmi, stops=True), [], now)
        ending = has_of(vmi) is Has.ENDING
        return told if ending else [_delete(vmi), *told]
    if VM_FINALIZER in finalizers:
        kept = [one for one in finalizers if one != VM_FINALIZER]
        return [Patch({"metadata": {"finalizers": kept}})]
    return []


def _told(
    pair: Pair, requests: list[Object], now: datetime, *, failed: str = "", observed: str = ""
) -> list[Action]:
    said = status(pair, requests, now, failed=failed, observed=observed)
    if said == part(pair.vm, "status"):
        return []
    dropped = text(find(said["conditions"], ANNOTATIONS_DROPPED), "message")
    known = text(find(items(pair.vm, "status", "conditions"), ANNOTATIONS_DROPPED), "message")
    event = [RecordEvent(TOO_LARGE, dropped, warning=True)] if dropped not in {"", known} else []
    return [Patch({"status": said}, "status"), *event]


def vmi_of(vm: Object, *, paused: bool) -> dict[str, Any]:
    """Return the VMI that a VM's template makes."""
    meta = part(vm, "metadata")
    name = text(meta, "name")
    template = part(of_vm(vm), "spec", "template")
    spec = dict(part(template, "spec"))
    if paused:
        spec["startStrategy"] = "Paused"
    return of_vmi(
        {
            "apiVersion": GROUP_VERSION,
            "kind": VMI_KIND,
            "metadata": {
                "name": name,
                "namespace": text(meta, "namespace"),
                "labels": {**part(template, "metadata", "labels"), VM_LABEL: name},
                "annotations": {
                    **part(template, "metadata", "annotations"),
                    GENERATION: str(number(meta, "generation")),
                },
                "ownerReferences": [
                    {
                        "apiVersion": GROUP_VERSION,
                        "kind": VM_KIND,
                        "name": name,
                        "uid": text(meta, "uid"),
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": spec,
        }
    )


def controller(vmis: Lister) -> Controller:
    """Return the controller of VMs. A VM's VMI has its name."""

    def run(key: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        failed = inputs.refused.message if inputs.refused is not None else ""
        return reconcile(inputs.obj, vmis.get(key.path), inputs.now, failed)

    return Controller(VM, run, (Watch(VM), Watch(VMI)))
