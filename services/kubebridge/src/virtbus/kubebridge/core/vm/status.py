"""Computes a VM's status from its VMI. `printableStatus` has KubeVirt's order of precedence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from virtbus.kubebridge.core.fields.table import VMI
from virtbus.kubebridge.core.fields.translator import changed
from virtbus.kubebridge.core.objects.unstructured import NewCondition, Object, merged, read, stamp
from virtbus.kubebridge.core.translation import annotations
from virtbus.kubebridge.core.translation.mapping import defaulted_template
from virtbus.kubebridge.core.vm.model import StateChange, Vm
from virtbus.kubebridge.core.vm.run_strategies import BACKS_OFF, back_off_s
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.status import (
    ERR_IMAGE_PULL,
    IMAGE_PULL_BACKOFF,
    PAUSED,
    POD_SCHEDULED,
    READY,
    SYNCHRONIZED,
)

DIGITS_OF_INT64 = 19
RESTART_REQUIRED, FAILURE = "RestartRequired", "Failure"
ANNOTATIONS_DROPPED = "AnnotationsDropped"
TOO_LARGE = "AnnotationsTooLarge"
NOT_LIVE = "a non-live-updatable field was changed in the template spec"
MIRRORED = ("Paused", "AgentConnected", "LiveMigratable", "Synchronized", "PodScheduled")


@dataclass(frozen=True, slots=True)
class Pair:
    """A VM and its VMI.

    `starts` means that the VMI is about to be created; `stops`, that it is about to be deleted.
    `failures` is the new number of failed starts in a row. If None, the VM's status has the number.
    """

    vm: Vm
    vmi: Vmi | None
    starts: bool = False
    stops: bool = False
    failures: int | None = None

    def holds(self, kind: str, *, on: bool = True, reason: str = "") -> bool:
        return self.vmi is not None and any(
            one.type == kind and one.status == str(on) and reason in {"", one.reason}
            for one in self.vmi.conditions
        )


def _runs(pair: Pair) -> bool:
    return pair.vmi is not None and pair.vmi.phase is VmiPhase.RUNNING


def _over(pair: Pair) -> bool:
    return pair.vmi is None or pair.vmi.phase in FINAL


def _starting(pair: Pair) -> bool:
    if pair.vmi is None:
        return pair.starts
    return pair.vmi.phase in {VmiPhase.PENDING, VmiPhase.SCHEDULING, VmiPhase.SCHEDULED}


def _crash_loop(pair: Pair) -> bool:
    failures = pair.vm.failures if pair.failures is None else pair.failures
    backs_off = failures > 0 and pair.vm.strategy in BACKS_OFF
    return backs_off and _over(pair) and not pair.starts


def _unsynchronized(pair: Pair, reason: str) -> bool:
    return pair.holds(SYNCHRONIZED, on=False, reason=reason)


PRINTABLE: tuple[tuple[str, Callable[[Pair], bool]], ...] = (
    ("Terminating", lambda pair: pair.vm.deleting),
    (
        "Stopping",
        lambda pair: pair.vmi is not None and not _over(pair) and (pair.stops or pair.vmi.deleting),
    ),
    ("Paused", lambda pair: _runs(pair) and pair.holds(PAUSED)),
    ("Running", _runs),
    ("ErrorUnschedulable", lambda pair: pair.holds(POD_SCHEDULED, on=False)),
    (ERR_IMAGE_PULL, lambda pair: _unsynchronized(pair, ERR_IMAGE_PULL)),
    (IMAGE_PULL_BACKOFF, lambda pair: _unsynchronized(pair, IMAGE_PULL_BACKOFF)),
    ("Starting", _starting),
    ("CrashLoopBackOff", _crash_loop),
    ("Stopped", _over),
)
"""Statuses in order of precedence. The first status that applies is used; the last resort is
Unknown.

KubeVirt's other statuses are not used yet. Their positions would be: Migrating after Stopping;
WaitingForReceiver last; Provisioning, WaitingForVolumeBinding, ErrorPvcNotFound and DataVolumeError
around ErrorUnschedulable.
"""


def printable(pair: Pair) -> str:
    """Return `status.printableStatus`."""
    return next((name for name, holds_ in PRINTABLE if holds_(pair)), "Unknown")


def status(
    pair: Pair, requests: list[StateChange], now: datetime, *, failed: str = "", observed: str = ""
) -> dict[str, Any]:
    """Return the whole status.

    `failed` is the reason why the VMI could not be created. `observed` is the run strategy on which
    the bridge has acted; if empty, the status keeps its `runStrategy`. `requests` are the unmet
    requests.
    """
    vm, vmi = pair.vm, pair.vmi
    failure = start_failure(vm, vmi, now)
    pair = replace(pair, failures=failure.get("consecutiveFailCount", 0))
    fields: dict[str, Any] = {
        **{key: value for key, value in vm.status.items() if key not in _OURS},
        "created": vmi is not None,
        "ready": pair.holds(READY),
        "printableStatus": printable(pair),
        "conditions": merged(_conditions(pair, failed), vm.conditions, now)[0],
        "observedGeneration": _observed(vm, vmi),
        "desiredGeneration": vm.generation,
        "runStrategy": observed or vm.followed,
        "stateChangeRequests": [dict(one.raw) for one in requests],
        "startFailure": failure,
    }
    optional = ("runStrategy", "stateChangeRequests", "startFailure")
    return {key: value for key, value in fields.items() if value or key not in optional}


_OURS = frozenset(
    {
        *("created", "ready", "printableStatus", "conditions", "observedGeneration"),
        *("desiredGeneration", "runStrategy", "stateChangeRequests", "startFailure"),
    }
)


def start_failure(vm: Vm, vmi: Vmi | None, now: datetime) -> dict[str, Any]:
    """Return `status.startFailure`: the count of failed starts in a row, and the next start's time.

    The result is empty if the run strategy has no backoff, or if the guest has run.
    """
    ran = vmi is not None and any(one.phase == VmiPhase.RUNNING for one in vmi.transitions)
    if vm.strategy not in BACKS_OFF or ran:
        return {}
    if vmi is None or vmi.phase is not VmiPhase.FAILED or vm.failed_uid == vmi.uid:
        return dict(vm.start_failure)
    after = now + timedelta(seconds=back_off_s(vm.failures + 1, vmi.uid))
    return {
        "consecutiveFailCount": vm.failures + 1,
        "lastFailedVMIUID": vmi.uid,
        "retryAfterTimestamp": stamp(after),
    }


# --- conditions --------------------------------------------------------------------------------
def _conditions(pair: Pair, failed: str) -> list[NewCondition]:
    conditions = []
    if pair.vmi is None:
        conditions.append(NewCondition(READY, False, "VMINotExists", "VMI does not exist"))
    else:
        mirrored = {one.type: one for one in pair.vmi.conditions}
        if READY not in mirrored:
            message = "VMI is missing the Ready condition"
            conditions.append(NewCondition(READY, False, "VMIConditionMissing", message))
        there = (mirrored[kind] for kind in (READY, *MIRRORED) if kind in mirrored)
        conditions += [
            NewCondition(one.type, one.status == "True", one.reason, one.message) for one in there
        ]
        if restart_required(pair.vm, pair.vmi):
            conditions.append(NewCondition(RESTART_REQUIRED, True, "RestartRequired", NOT_LIVE))
    if failed:
        conditions.append(NewCondition(FAILURE, True, "FailedCreate", failed))
    # `slim_template` sets this field only on a VM that the webhooks would refuse. Such a VM exists
    # only if the webhooks were unreachable when it was written.
    if pair.vm.annotation_bytes:
        (cause,) = annotations.causes(pair.vm.raw)
        message = f"{cause.field}: {cause.message}"
        conditions.append(NewCondition(ANNOTATIONS_DROPPED, True, TOO_LARGE, message))
    return conditions


def _alive(vmi: Vmi | None) -> bool:
    return vmi is not None and not vmi.deleting and vmi.phase not in FINAL


def restart_required(vm: Vm, vmi: Vmi) -> bool:
    """Return True if the VM's template has changes that take effect only at the next start."""
    if not _alive(vmi) or vmi.made_of == str(vm.generation):
        return False
    return changed(_lasting(defaulted_template(vm.raw).get("spec")), _lasting(vmi.spec), VMI)


def _observed(vm: Vm, vmi: Vmi | None) -> int:
    """Return the generation of the VM whose template the VMI runs.

    This is the VM's present generation if no live VMI runs an older, different template.
    """
    if vmi is None or vmi.made_of == str(vm.generation) or not _alive(vmi):
        return vm.generation
    readable = vmi.made_of.isdecimal() and len(vmi.made_of) < DIGITS_OF_INT64
    return int(vmi.made_of) if readable and _is_behind(vm, vmi) else vm.generation


def _is_behind(vm: Vm, vmi: Vmi) -> bool:
    """Return True if a new VMI would have another spec, or other labels or annotations.

    Fields of the spec that virtbus ignores count here, unlike in `restart_required`. Labels and
    annotations that only the present VMI has are ignored.
    """
    wanted = read(Vmi, defaulted_template(vm.raw))
    return _lasting(wanted.spec) != _lasting(vmi.spec) or any(
        there.get(key) != value
        for wants, there in ((wanted.labels, vmi.labels), (wanted.annotations, vmi.annotations))
        for key, value in wants.items()
    )


def _lasting(spec: Object | None) -> Object:
    """Return the spec without the fields that verbs of the VM change only in the VMI."""
    own = {"terminationGracePeriodSeconds", "startStrategy"}
    return {key: value for key, value in (spec or {}).items() if key not in own}
