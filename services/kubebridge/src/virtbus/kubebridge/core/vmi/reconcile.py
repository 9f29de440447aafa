"""Reconcile of a VMI and its VM on the bus, as one function (ADR 0026)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.metadata import NODE_LABEL, VMI_FINALIZER
from virtbus.kubebridge.core.objects.unstructured import Condition, moment, read, stamp
from virtbus.kubebridge.core.runtime.controller import (
    AT_ONCE_S,
    ATTACHMENT,
    BUS_VM,
    CONFIG_MAP,
    GUEST_AGENT,
    SECRET,
    VMI,
    Action,
    Await,
    BusCall,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Kind,
    Lister,
    OnRefusal,
    Patch,
    RecordEvent,
    Refused,
    Requeue,
)
from virtbus.kubebridge.core.translation.contents import Given, needs
from virtbus.kubebridge.core.translation.mapping import CLUSTER, CREATED_BY, translate
from virtbus.kubebridge.core.translation.networks import attachments
from virtbus.kubebridge.core.translation.nics import ABSENT, replugged
from virtbus.kubebridge.core.validation.rules import between_fields
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.phases import ENDS, EVENTS
from virtbus.kubebridge.core.vmi.status import SYNCHRONIZED, GuestAnswers, Seen, VmLister, status
from virtbus.schemas.api import VmCreated, VmDelete, VmRef, VmUpdate
from virtbus.schemas.errors import Code
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.network import LinkState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView

RETRY_S = (10.0, 300.0)
"""Shortest and longest delay between retries, in seconds.

A start that the node has given up is retried 10, 20, 40 … seconds after its failure, with delays
within these bounds. Any other call is repeated after the shortest delay if its cause may end by
itself. If a user must act, the call is repeated after the longest delay.
"""
FOR_GOOD = frozenset({Code.INVALID, Code.TOO_LARGE, Code.UNSUPPORTED})
"""Refusals that last until a user changes the VMI, or a Secret or ConfigMap of the VMI."""
DEFAULT_GRACE_S, GRACE_MOST_S = 30, 86_400
"""Grace in seconds: the default of a VMI, and the longest that `vm.delete` accepts."""
UID_TAKEN = "uid_taken"
"""Reason of a refused create: the uid belongs to a VM with another spec."""
REFERRED: Mapping[str, Kind] = {one.kind: one for one in (SECRET, CONFIG_MAP)}
"""Kinds of objects that a VMI can refer to."""
ADDED = frozenset({CREATED_BY, CLUSTER, NODE_LABEL})
"""Labels that the bridge itself sets on VMs and VMIs."""
LIVES = frozenset({VmiPhase.SCHEDULING, VmiPhase.SCHEDULED, VmiPhase.RUNNING, VmiPhase.UNKNOWN})
"""Phases of a VMI whose VM was seen on the bus, and whose end was not seen."""


def reconcile(vmi: Vmi, seen: Seen, given: Given, now: datetime, cluster: str) -> list[Action]:
    """Return the actions for a VMI; none if all is done and reported.

    Any input may be older than the others. If the VM is missing, the VMI becomes Failed or loses
    its finalizer only once the VM's end is certain (`Seen.gone`). A repeated create of an existing
    VM changes nothing.
    """
    plan: list[Action] = []
    if vmi.deleting:
        _end(vmi, seen, plan)
        if seen.gone:
            return plan
        _tell(vmi, seen if seen.view is None else replace(seen, refused=None), now, "", plan)
        return plan
    if VMI_FINALIZER not in vmi.finalizers:  # before the create: each VMI with a VM needs it
        plan.append(Patch({"metadata": {"finalizers": [*vmi.finalizers, VMI_FINALIZER]}}))
    seen = _begin(vmi, seen, given, cluster, plan)
    seen = _follow(vmi, seen, given, cluster, plan)
    if _unseen(seen) and vmi.phase in LIVES:
        if seen.refused is None:
            plan.append(Requeue(AT_ONCE_S))
        return plan
    retried = _retry(vmi, seen.view, now, plan)
    _tell(vmi, seen, now, retried, plan)
    return plan


def _unseen(seen: Seen) -> bool:
    """Return True if the VM is missing without a known reason. The VMI's status then stays.

    A controller that lags behind may have listed the VMs without this VM. A repeated create shows
    the truth. The refusal `uid_taken` means that the VM exists, but was created with another
    content of a Secret.
    """
    there = seen.refused is None or seen.refused.reason == UID_TAKEN
    return seen.view is None and not seen.gone and not seen.waits and there


def _begin(vmi: Vmi, seen: Seen, given: Given, cluster: str, plan: list[Action]) -> Seen:
    """Create the VM if none is seen. Return `seen`.

    If the VMI cannot be translated, return a `Seen` with the reason in `waits`.
    """
    if seen.view is not None or seen.gone or vmi.phase in FINAL:
        return seen
    translated = translate(vmi.raw, given, cluster)
    broken = between_fields(translated.whole)
    if translated.create is not None and not broken:
        create = BusCall("create", translated.create, Code.GONE, OnRefusal.REPORT, VmCreated)
        plan.append(create)
        for_good = seen.refused is not None and seen.refused.code in FOR_GOOD
        # Requeue even after a successful create: the new VM may never cause another change.
        plan.append(Requeue(RETRY_S[1 if for_good else 0]))
        if for_good:
            plan.append(Await(references(vmi)))
        return seen
    plan += [Requeue(RETRY_S[1]), Await(references(vmi))]
    causes = (*broken, *translated.causes)
    waits = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Seen(waits=waits[:1024])


def _follow(vmi: Vmi, seen: Seen, given: Given, cluster: str, plan: list[Action]) -> Seen:
    """Update the VM if its interfaces or labels differ from the VMI's.

    Return `seen`. If the VMI cannot be translated, `waits` has the reason. If the VM needs no
    update, `refused` is None.
    """
    view = seen.view
    if view is None:
        return seen
    if view.deleting or vmi.phase in FINAL:
        return replace(seen, refused=None)
    if not (is_replugged(vmi, view) or is_relabelled(vmi, view)):
        return replace(seen, refused=None)
    translated = translate(vmi.raw, given, cluster, contents=False)
    if translated.create is None or translated.create.spec is None:
        waits = "; ".join(f"{cause.field}: {cause.message}" for cause in translated.causes)
        plan.append(Requeue(RETRY_S[0]))
        return replace(seen, waits=waits[:1024])
    # If only labels changed, no NetworkAttachmentDefinition was read. The translated networks are
    # then wrong and must not be used.
    spec = replugged(view.spec, translated.create.spec) if is_replugged(vmi, view) else None
    labels = _labels(translated.create.labels, view) if is_relabelled(vmi, view) else None
    if spec is None and labels is None:
        return replace(seen, refused=None)
    update = VmUpdate(uid=view.uid, revision=view.revision, spec=spec, labels=labels)
    plan += [BusCall("update", update, refusal=OnRefusal.REPORT), Requeue(RETRY_S[0])]
    return seen


def is_replugged(vmi: Vmi, view: VmView) -> bool:
    """Return True if a VMI and its VM differ in interfaces or link states."""
    wanted = {nic.name: nic.state or LinkState.UP for nic in vmi.nics if nic.state != ABSENT}
    has = view.spec.domain.devices.interfaces
    return wanted != {nic.name: nic.state or LinkState.UP for nic in has}


def is_relabelled(vmi: Vmi, view: VmView) -> bool:
    """Return True if a VMI and its VM differ in labels. Labels in ADDED do not count."""
    wanted = {key: value for key, value in vmi.labels.items() if key not in ADDED}
    return wanted != {key: value for key, value in view.labels.items() if key not in ADDED}


def _labels(wanted: Mapping[str, str], view: VmView) -> dict[str, str]:
    own = {key: value for key, value in view.labels.items() if key in ADDED}
    return {key: value for key, value in wanted.items() if key not in ADDED} | own


def _retry(vmi: Vmi, view: VmView | None, now: datetime, plan: list[Action]) -> str:
    """Retry a start that the node has given up, with growing delays.

    Return the time of the last retry; empty if there was none.
    """
    if view is None or not given_up(view) or vmi.phase in FINAL:
        return ""
    trouble = _trouble(vmi)
    since = moment(trouble.since) if trouble is not None else None
    if trouble is None or since is None:  # the status must report the failure before a retry
        plan.append(Requeue(RETRY_S[0]))
        return ""
    last = moment(trouble.probed) or since
    wait = timedelta(seconds=min(max((last - since).total_seconds(), RETRY_S[0]), RETRY_S[1]))
    if now >= last + wait:
        plan.append(BusCall("start", VmRef(uid=view.uid), refusal=OnRefusal.IGNORE))
        return stamp(now)
    plan.append(Requeue((last + wait - now).total_seconds()))
    return trouble.probed


def _end(vmi: Vmi, seen: Seen, plan: list[Action]) -> None:
    if seen.gone:
        if VMI_FINALIZER in vmi.finalizers:
            kept = [one for one in vmi.finalizers if one != VMI_FINALIZER]
            plan.append(Patch({"metadata": {"finalizers": kept}}))
            plan.append(RecordEvent("Deleted", "Signaled Deletion"))
        return
    grace_s = DEFAULT_GRACE_S if vmi.grace_s is None else min(max(vmi.grace_s, 0), GRACE_MOST_S)
    view = seen.view
    if view is None or not view.deleting or grace_s < view.spec.termination_grace_s:
        # Requeue even after a successful delete. If the VM leaves the watch before its deletion was
        # seen, only the 404 of a repeated delete shows its end.
        plan += [delete(vmi.uid, grace_s), Requeue(RETRY_S[0])]
    if view is not None and not view.deleting:
        plan.append(RecordEvent("ShuttingDown", "Signaled Graceful Shutdown"))


def _tell(vmi: Vmi, seen: Seen, now: datetime, retried: str, plan: list[Action]) -> None:
    after_status = status(vmi, seen, now, retried)
    patch: dict[str, Any] = {}
    if after_status != vmi.status:
        patch["status"] = after_status
    node = after_status.get("nodeName")
    if node and vmi.labels.get(NODE_LABEL) != node:
        patch["metadata"] = {"labels": {NODE_LABEL: node}}
    if patch:
        plan.append(Patch(patch))
    _events(vmi, after_status, seen.view.last_exit if seen.view else None, plan)


def _events(
    vmi: Vmi, after_status: dict[str, Any], end: GuestExit | None, plan: list[Action]
) -> None:
    after = VmiPhase(after_status["phase"])
    if after is not vmi.phase and after in EVENTS:
        reason, message = EVENTS[after]
        if after is VmiPhase.FAILED and end is not None:
            message = ENDS.get(end.how, message)
        plan.append(RecordEvent(reason, message, warning=after is VmiPhase.FAILED))
    before = _trouble(vmi)
    for one in after_status["conditions"]:
        message = one.get("message", "")
        if one["type"] == SYNCHRONIZED and message != (before.message if before else ""):
            plan.append(RecordEvent("SyncFailed", message, warning=True))


def _trouble(vmi: Vmi) -> Condition | None:
    return next((one for one in vmi.conditions if one.type == SYNCHRONIZED), None)


def given_up(view: VmView) -> bool:
    """Return True if the VM's node has given up a start, and retries only after `vm.start`."""
    retrying = any(one.type == "Retrying" and one.status for one in view.conditions)
    return view.state is VmState.FAILED and view.failure_stage != "guest" and not retrying


def delete(uid: str, grace_s: int | None = None) -> BusCall:
    """Return the call that deletes a VM on the bus."""
    return BusCall("delete", VmDelete(uid=uid, grace_s=grace_s), Code.NOT_FOUND)


def references(vmi: Vmi) -> frozenset[Key]:
    """Return the Secrets and ConfigMaps that a VMI refers to."""
    named = {(need.kind, need.name) for need in needs(vmi.spec)}
    return frozenset(Key(REFERRED[kind], vmi.namespace, name) for kind, name in named)


def definitions(vmi: Vmi) -> frozenset[Key]:
    """Return the NetworkAttachmentDefinitions that a VMI names in its own namespace."""
    found = (one for one in attachments(vmi.spec) if one.namespace in {"", vmi.namespace})
    return frozenset(Key(ATTACHMENT, vmi.namespace, one.name) for one in found)


NAME_HELD = (
    "the name {name} is held by VM {uid} on the bus, whose VirtualMachineInstance this API server "
    "does not have. It is kept until a person decides: `virtbus vm delete {uid}` ends it and "
    "removes its disks; `virtbus vm adopt {uid}` keeps it without this cluster"
)


class Instances(NamedTuple):
    """The caches that a VMI's reconcile reads, and the name of this cluster."""

    vmis: Lister
    views: VmLister
    guests: GuestAnswers
    cluster: str

    def controller(self) -> Controller:
        watches = (KeyMapping(VMI), KeyMapping(BUS_VM), KeyMapping(GUEST_AGENT))
        return Controller(VMI, self._reconcile, watches, self._references, workers=32)

    def _reconcile(self, key: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        vmi = read(Vmi, inputs.obj)
        uid = vmi.uid
        gone = self.views.gone(uid)
        view = None if gone else self.views.get(uid)
        refused = inputs.refused
        if view is None:
            refused = self._by_an_orphan(key, uid, refused)
        guest, asked = self.guests.get(uid), self.guests.asked(uid)
        seen = Seen(view=view, gone=gone, refused=refused, guest=guest, asked=asked)
        given = {(one.kind.kind, one.name): obj for one, obj in inputs.references.items()}
        return reconcile(vmi, seen, given, inputs.now, self.cluster)

    def _references(self, key: Key, _: float) -> Iterable[Key]:
        """Return the objects that the next reconcile of the VMI must read from the API server.

        A create needs the Secrets, ConfigMaps and NetworkAttachmentDefinitions of the VMI. A change
        of interfaces needs only the NetworkAttachmentDefinitions.
        """
        uid = self.vmis.uid(key.path)
        if not uid or self.views.gone(uid):
            return ()
        view, vmi = self.views.get(uid), read(Vmi, self.vmis.get(key.path))
        if vmi.deleting or vmi.phase in FINAL:
            return ()
        networks = definitions(vmi)
        if view is not None:
            return networks if is_replugged(vmi, view) else ()
        return references(vmi) | networks

    def _by_an_orphan(self, key: Key, uid: str, refused: Refused | None) -> Refused | None:
        """Explain a conflict by the orphaned VM that holds this name. Otherwise return `refused`.

        The orphaned VM is kept until a person decides.
        """
        if refused is None or refused.code != Code.CONFLICT:
            return refused
        for other in self.views.named(key.path):
            if other != uid and not self.vmis.ended(other):
                message = NAME_HELD.format(name=key.name, uid=other)
                return Refused(Code.CONFLICT, "name_held_by_orphan", message)
        return refused
