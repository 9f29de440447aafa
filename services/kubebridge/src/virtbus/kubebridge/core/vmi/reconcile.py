"""Reconciles a VMI and its VM of virtbus in one function (ADR 0026)."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from virtbus.kubebridge.core.objects.metadata import NODE_LABEL, VMI_FINALIZER
from virtbus.kubebridge.core.objects.moments import find, moment, stamp
from virtbus.kubebridge.core.objects.plain import Object, at, number, part, text
from virtbus.kubebridge.core.runtime.actions import (
    AT_ONCE_S,
    Action,
    Await,
    Call,
    OnRefusal,
    Patch,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.runtime.kinds import CONFIG_MAP, SECRET, Key, Kind
from virtbus.kubebridge.core.translation.defaults import of_vmi
from virtbus.kubebridge.core.translation.mapping import translate
from virtbus.kubebridge.core.translation.references import Given, needs
from virtbus.kubebridge.core.validation.rules import between_fields
from virtbus.kubebridge.core.vmi.phases import ENDS, EVENTS, FINAL, Phase
from virtbus.kubebridge.core.vmi.status import (
    SYNCHRONIZED,
    Seen,
    conditions,
    given_up,
    phase,
    status,
)
from virtbus.schemas.api import VmCreate, VmCreated, VmDelete, VmRef
from virtbus.schemas.errors import Code
from virtbus.schemas.guest_end import GuestEnd
from virtbus.schemas.vm import VmView

RETRY_S = (10.0, 300.0)
"""Shortest and longest delay between retries.

An image that failed permanently is retried after as long as it has been failing, within these
bounds. The first bound applies if the cause may end by itself, the second if a user must act.
"""
FOR_GOOD = frozenset({Code.INVALID, Code.TOO_LARGE, Code.UNSUPPORTED})
"""Refusals that last until the manifest, or a Secret that it names, changes."""
DEFAULT_GRACE_S, GRACE_MOST_S = 30, 86_400
"""The grace of a VMI that gives none, and the longest that `vm.delete` accepts."""
UID_TAKEN = "uid_taken"
"""Reason of a refused create: the uid belongs to a VM with another spec."""
REFERRED: Mapping[str, Kind] = {one.kind: one for one in (SECRET, CONFIG_MAP)}
"""Kinds of objects that a VMI can refer to."""
LIVES = frozenset({Phase.SCHEDULING, Phase.SCHEDULED, Phase.RUNNING, Phase.UNKNOWN})
"""Phases in which the VM was seen and its end was not."""


def reconcile(vmi: Object, seen: Seen, given: Given, now: datetime, cluster: str) -> list[Action]:
    """Return the actions for a VMI; none if all is done and reported.

    Any input may be older than the others. Only certain knowledge (`Seen.gone`) ends, releases or
    fails a VMI. A repeated create changes nothing.
    """
    plan: list[Action] = []
    if at(vmi, "metadata", "deletionTimestamp"):
        _end(vmi, seen, plan)
        if seen.gone:
            return plan
        _tell(vmi, seen, now, "", plan)
        return plan
    finalizers = at(vmi, "metadata", "finalizers") or []
    if VMI_FINALIZER not in finalizers:  # first: each VMI with a VM needs it
        plan.append(Patch({"metadata": {"finalizers": [*finalizers, VMI_FINALIZER]}}))
    seen = _begin(vmi, seen, given, cluster, plan)
    if _unseen(seen) and phase(vmi) in LIVES:
        if seen.refused is None:
            plan.append(Requeue(AT_ONCE_S))
        return plan
    retried = _retry(vmi, seen.view, now, plan)
    _tell(vmi, seen, now, retried, plan)
    return plan


def _unseen(seen: Seen) -> bool:
    """Return True if the VM is missing in our view of the bus without a reason. The status stays.

    A lagging controller may have listed without it; a repeated create gives the answer. That answer
    may be `uid_taken` because a Secret changed since the VM was created.
    """
    there = seen.refused is None or seen.refused.reason == UID_TAKEN
    return seen.view is None and not seen.gone and not seen.waits and there


def _begin(vmi: Object, seen: Seen, given: Given, cluster: str, plan: list[Action]) -> Seen:
    """Create the VM while none is seen, or note why the create has to wait."""
    if seen.view is not None or seen.gone or phase(vmi) in FINAL:
        return seen
    translated = translate(vmi, given, cluster)
    broken = between_fields(of_vmi(vmi))
    if translated.create is not None and not broken:
        plan.append(_create(translated.create))
        for_good = seen.refused is not None and seen.refused.code in FOR_GOOD
        # Requeue on success too: the returned VM may never emit another change.
        plan.append(Requeue(RETRY_S[1 if for_good else 0]))
        if for_good:
            plan.append(Await(references(vmi)))
        return seen
    plan += [Requeue(RETRY_S[1]), Await(references(vmi))]
    causes = (*broken, *translated.causes)
    waits = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Seen(waits=waits[:1024])


def _retry(vmi: Object, view: VmView | None, now: datetime, plan: list[Action]) -> str:
    """Retry a permanent failure with growing delays. Return the time of the last retry, or ""."""
    if view is None or not given_up(view) or phase(vmi) in FINAL:
        return ""
    trouble = find(conditions(vmi), SYNCHRONIZED)
    since = moment(text(trouble, "lastTransitionTime"))
    if since is None:  # report it first, then retry
        plan.append(Requeue(RETRY_S[0]))
        return ""
    last = moment(text(trouble, "lastProbeTime")) or since
    wait = timedelta(seconds=min(max((last - since).total_seconds(), RETRY_S[0]), RETRY_S[1]))
    if now >= last + wait:
        plan.append(Call("start", VmRef(uid=view.uid), refusal=OnRefusal.IGNORE))
        return stamp(now)
    plan.append(Requeue((last + wait - now).total_seconds()))
    return text(trouble, "lastProbeTime")


def _end(vmi: Object, seen: Seen, plan: list[Action]) -> None:
    """Delete the VM, then remove the finalizer: a VMI that is gone has nothing on any node."""
    finalizers = at(vmi, "metadata", "finalizers") or []
    if seen.gone:
        if VMI_FINALIZER in finalizers:
            kept = [one for one in finalizers if one != VMI_FINALIZER]
            plan.append(Patch({"metadata": {"finalizers": kept}}))
            plan.append(RecordEvent("Deleted", "Signaled Deletion"))
        return
    given = at(vmi, "spec", "terminationGracePeriodSeconds")
    grace_s = number(vmi, "spec", "terminationGracePeriodSeconds")
    grace_s = DEFAULT_GRACE_S if given is None else min(max(grace_s, 0), GRACE_MOST_S)
    view = seen.view
    if view is None or not view.deleting or grace_s < view.spec.termination_grace_s:
        plan.append(delete(text(vmi, "metadata", "uid"), grace_s))
    if view is not None and not view.deleting:
        plan.append(RecordEvent("ShuttingDown", "Signaled Graceful Shutdown"))


def _tell(vmi: Object, seen: Seen, now: datetime, retried: str, plan: list[Action]) -> None:
    """Write the status, the node's label and the finalizer in one write, if anything is new."""
    said = status(vmi, seen, now, retried)
    patch: dict[str, Any] = {}
    if said != part(vmi, "status"):
        patch["status"] = said
    node = text(said, "nodeName")
    if node and text(vmi, "metadata", "labels", NODE_LABEL) != node:
        patch["metadata"] = {"labels": {NODE_LABEL: node}}
    if patch:
        plan.append(Patch(patch))
    _events(vmi, said, seen.view.last_end if seen.view else None, plan)


def _events(vmi: Object, said: Object, end: GuestEnd | None, plan: list[Action]) -> None:
    after = Phase(text(said, "phase"))
    if after is not phase(vmi) and after in EVENTS:
        reason, message = EVENTS[after]
        if after is Phase.FAILED and end is not None:
            message = ENDS.get(end.how, message)
        plan.append(RecordEvent(reason, message, warning=after is Phase.FAILED))
    trouble = find(said.get("conditions", ()), SYNCHRONIZED)
    known = find(conditions(vmi), SYNCHRONIZED)
    if trouble and text(trouble, "message") != text(known, "message"):
        plan.append(RecordEvent("SyncFailed", text(trouble, "message"), warning=True))


def _create(create: VmCreate) -> Call:
    return Call("create", create, Code.GONE, OnRefusal.REPORT, VmCreated)


def delete(uid: str, grace_s: int | None = None) -> Call:
    """Return the delete of a VM on the bus."""
    return Call("delete", VmDelete(uid=uid, grace_s=grace_s), Code.NOT_FOUND)


def references(vmi: Object) -> frozenset[Key]:
    """Return the Secrets and ConfigMaps that a VMI refers to."""
    namespace = text(vmi, "metadata", "namespace")
    named = {(need.kind, need.name) for need in needs(part(vmi, "spec"))}
    return frozenset(Key(REFERRED[kind], namespace, name) for kind, name in named)
