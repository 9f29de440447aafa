"""Reconciles a VMI and its VM of virtbus in one function (ADR 0026)."""

from datetime import datetime, timedelta
from typing import Any

from virtbus.kubebridge.core.actions import (
    AT_ONCE_S,
    Action,
    BusCreate,
    BusDelete,
    BusHold,
    BusStart,
    LookAgain,
    Plan,
    Tell,
    WriteVmi,
)
from virtbus.kubebridge.core.defaults import of_vmi
from virtbus.kubebridge.core.mapping import CLUSTER, translate
from virtbus.kubebridge.core.metadata import NODE_LABEL, VMI_FINALIZER
from virtbus.kubebridge.core.moments import find, moment, stamp
from virtbus.kubebridge.core.needs import Given
from virtbus.kubebridge.core.phases import ENDS, EVENTS, FINAL, Phase
from virtbus.kubebridge.core.plain import Object, at, number, part, text
from virtbus.kubebridge.core.rules import between_fields
from virtbus.kubebridge.core.vmi_status import (
    SYNCHRONIZED,
    Seen,
    conditions,
    given_up,
    phase,
    status,
)
from virtbus.schemas.errors import Code
from virtbus.schemas.guest_end import GuestEnd
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm import VmView

RETRY_S = (10.0, 300.0)
"""Between tries of an image that failed for good: as long as it failed so far, within these. What
may change by itself is looked at as often as the first, what a user must change as the second."""
FOR_GOOD = frozenset({Code.INVALID, Code.TOO_LARGE, Code.UNSUPPORTED})
"""Refusals that hold until the manifest, or a Secret that it names, is another."""
DEFAULT_GRACE_S, GRACE_MOST_S = 30, 86_400
"""Where the VMI says none, and the longest that `vm.delete` takes."""
UID_TAKEN = "uid_taken"
"""Why a create is refused whose uid is a VM that is not as asked for."""
NO_VMI = "the API server of its cluster has no VirtualMachineInstance of it, and told of no delete"
OTHER_VMI = "its cluster has another VirtualMachineInstance of this name, and told of no delete"
HELD = (
    "VM {uid} of virtbus has no VirtualMachineInstance {key} here, whose delete nobody told: it is "
    "kept as it is; `virtbus vm delete {uid}` ends it and removes its disks, `virtbus vm adopt "
    "{uid}` keeps it, without this cluster"
)
LIVES = frozenset({Phase.SCHEDULING, Phase.SCHEDULED, Phase.RUNNING, Phase.UNKNOWN})
"""Its VM was seen once, and its end was not."""


def reconcile(vmi: Object, seen: Seen, given: Given, now: datetime, cluster: str) -> list[Action]:
    """What is to be done; nothing where all is told and done.

    Any of the inputs may be older than the others: nothing is ended, let go or told as failed but
    on what is certain (`Seen.gone`), and a create that comes again changes nothing.
    """
    plan = Plan()
    if at(vmi, "metadata", "deletionTimestamp"):
        _end(vmi, seen, plan)
        if seen.gone:
            return plan.actions
        _tell(vmi, seen, now, "", plan)
        return plan.actions
    finalizers = at(vmi, "metadata", "finalizers") or []
    if VMI_FINALIZER not in finalizers:  # first, so that no VM is ever without it
        plan.then(WriteVmi({"metadata": {"finalizers": [*finalizers, VMI_FINALIZER]}}))
    seen = _begin(vmi, seen, given, cluster, plan)
    if _unseen(seen) and phase(vmi) in LIVES:
        if seen.refused is None:
            plan.then(LookAgain(AT_ONCE_S))
        return plan.actions
    retried = _retry(vmi, seen.view, now, plan)
    _tell(vmi, seen, now, retried, plan)
    return plan.actions


def _unseen(seen: Seen) -> bool:
    """Its VM is not in our view of the bus, and nobody said why: what was told of it still holds.

    A controller that is behind may have listed without it; the create, asked again, tells. It may
    say that the VM is there, and not as it would be made now: a Secret changed since.
    """
    there = seen.refused is None or seen.refused.reason == UID_TAKEN
    return seen.view is None and not seen.gone and not seen.waits and there


def _begin(vmi: Object, seen: Seen, given: Given, cluster: str, plan: Plan) -> Seen:
    """The create, for as long as no VM is seen; or why it has to wait."""
    if seen.view is not None or seen.gone or phase(vmi) in FINAL:
        return seen
    translated = translate(vmi, given, cluster)
    broken = between_fields(of_vmi(vmi))
    if translated.create is not None and not broken:
        plan.then(BusCreate(translated.create))
        code = seen.refused.code if seen.refused else 0
        # Requeue on success too: the returned VM may never emit another change.
        plan.then(LookAgain(RETRY_S[1 if code in FOR_GOOD else 0]))
        return seen
    plan.then(LookAgain(RETRY_S[0 if translated.waits and not broken else 1]))
    causes = (*broken, *translated.causes)
    waits = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Seen(waits=waits[:1024])


def _retry(vmi: Object, view: VmView | None, now: datetime, plan: Plan) -> str:
    """Ask again for what failed for good, ever more rarely; when that was last, or empty."""
    if view is None or not given_up(view) or phase(vmi) in FINAL:
        return ""
    trouble = find(conditions(vmi), SYNCHRONIZED)
    since = moment(text(trouble, "lastTransitionTime"))
    if since is None:  # told first, then tried again
        plan.then(LookAgain(RETRY_S[0]))
        return ""
    last = moment(text(trouble, "lastProbeTime")) or since
    wait = timedelta(seconds=min(max((last - since).total_seconds(), RETRY_S[0]), RETRY_S[1]))
    if now >= last + wait:
        plan.then(BusStart(view.uid))
        return stamp(now)
    plan.then(LookAgain((last + wait - now).total_seconds()))
    return text(trouble, "lastProbeTime")


def _end(vmi: Object, seen: Seen, plan: Plan) -> None:
    """The VM goes first, then the finalizer: a VMI that is gone has nothing on any node."""
    finalizers = at(vmi, "metadata", "finalizers") or []
    if seen.gone:
        if VMI_FINALIZER in finalizers:
            kept = [one for one in finalizers if one != VMI_FINALIZER]
            plan.then(WriteVmi({"metadata": {"finalizers": kept}}))
            plan.then(Tell("Deleted", "Signaled Deletion"))
        return
    given = at(vmi, "spec", "terminationGracePeriodSeconds")
    grace_s = number(vmi, "spec", "terminationGracePeriodSeconds")
    grace_s = DEFAULT_GRACE_S if given is None else min(max(grace_s, 0), GRACE_MOST_S)
    view = seen.view
    if view is None or not view.deleting or grace_s < view.spec.termination_grace_s:
        plan.then(BusDelete(text(vmi, "metadata", "uid"), grace_s))
    if view is not None and not view.deleting:
        plan.then(Tell("ShuttingDown", "Signaled Graceful Shutdown"))


def _tell(vmi: Object, seen: Seen, now: datetime, retried: str, plan: Plan) -> None:
    """The status, the node's label and the finalizer, in one write, if anything is new."""
    said = status(vmi, seen, now, retried)
    patch: dict[str, Any] = {}
    if said != part(vmi, "status"):
        patch["status"] = said
    node = text(said, "nodeName")
    if node and text(vmi, "metadata", "labels", NODE_LABEL) != node:
        patch["metadata"] = {"labels": {NODE_LABEL: node}}
    if patch:
        plan.then(WriteVmi(patch))
    _events(vmi, said, seen.view.last_end if seen.view else None, plan)


def _events(vmi: Object, said: Object, end: GuestEnd | None, plan: Plan) -> None:
    after = Phase(text(said, "phase"))
    if after is not phase(vmi) and after in EVENTS:
        reason, message = EVENTS[after]
        if after is Phase.FAILED and end is not None:
            message = ENDS.get(end.how, message)
        plan.then(Tell(reason, message, warning=after is Phase.FAILED))
    trouble = find(said.get("conditions", ()), SYNCHRONIZED)
    known = find(conditions(vmi), SYNCHRONIZED)
    if trouble and text(trouble, "message") != text(known, "message"):
        plan.then(Tell("SyncFailed", text(trouble, "message"), warning=True))


def orphan(view: VmView, there: str, cluster: str, *, ended: bool) -> BusDelete | BusHold | None:
    """What to do about a VM of the bus when the API server has `there` under its name.

    That is the uid of a VMI, empty for none. `ended`: the end of the VM's own VMI was seen, as when
    the create of a slow bridge comes after it. Where it was not, the VMI is only absent, perhaps of
    an API server that was restored to an older state: absence ends nothing (ADR 0033).
    """
    if view.labels.get(CLUSTER) != cluster or view.deleting:
        return None
    if there == view.uid:
        return BusHold(view.uid, "") if ORPHANED in view.annotations else None
    if ended:
        return BusDelete(view.uid)
    why = OTHER_VMI if there else NO_VMI
    return BusHold(view.uid, why) if view.annotations.get(ORPHANED) != why else None
