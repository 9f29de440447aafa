"""Derives a VM's status from its VMI: printableStatus in KubeVirt's order of precedence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from virtbus.kubebridge.core.fields.table import VMI
from virtbus.kubebridge.core.fields.walk import changed
from virtbus.kubebridge.core.objects.moments import condition, merged, moment, stamp
from virtbus.kubebridge.core.objects.plain import Object, at, items, number, part, text
from virtbus.kubebridge.core.translation import annotations as notes
from virtbus.kubebridge.core.translation.mapping import defaulted_template
from virtbus.kubebridge.core.vm.run_strategies import (
    BACKS_OFF,
    Has,
    back_off_s,
    has_of,
    strategy_of,
)
from virtbus.kubebridge.core.vmi.phases import FINAL, Phase
from virtbus.kubebridge.core.vmi.status import (
    ERR_IMAGE_PULL,
    IMAGE_PULL_BACKOFF,
    PAUSED,
    POD_SCHEDULED,
    READY,
    SYNCHRONIZED,
    holds,
)

GENERATION = "kubevirt.io/vm-generation"
"""The generation of the VM from which a VMI was created."""
DIGITS_OF_INT64 = 19
RESTART_REQUIRED, FAILURE = "RestartRequired", "Failure"
ANNOTATIONS_DROPPED = "AnnotationsDropped"
TOO_LARGE = "AnnotationsTooLarge"
NOT_LIVE = "a non-live-updatable field was changed in the template spec"
MIRRORED = ("Paused", "AgentConnected", "LiveMigratable", "Synchronized", "PodScheduled")


@dataclass(frozen=True, slots=True)
class Pair:
    """A VM and its VMI. `starts`: the VMI is about to be created; `stops`: to be deleted."""

    vm: Object
    vmi: Object | None
    starts: bool = False
    stops: bool = False

    @property
    def has(self) -> Has:
        """Return the state of the VMI."""
        return has_of(self.vmi)

    @property
    def phase(self) -> str:
        """Return the VMI's phase, or an empty string."""
        return text(self.vmi, "status", "phase")


def _synchronized(pair: Pair, reason: str) -> bool:
    return pair.vmi is not None and holds(pair.vmi, SYNCHRONIZED, on=False, reason=reason)


def _unschedulable(pair: Pair) -> bool:
    return pair.vmi is not None and holds(pair.vmi, POD_SCHEDULED, on=False)


def _paused(pair: Pair) -> bool:
    return pair.vmi is not None and pair.phase == Phase.RUNNING and holds(pair.vmi, PAUSED)


def _stopping(pair: Pair) -> bool:
    live = pair.vmi is not None and pair.phase not in FINAL
    return live and (pair.stops or pair.has is Has.ENDING)


def _starting(pair: Pair) -> bool:
    if pair.vmi is None:
        return pair.starts
    return pair.phase in {"", Phase.PENDING, Phase.SCHEDULING, Phase.SCHEDULED}


def _crash_loop(pair: Pair) -> bool:
    over = pair.vmi is None or pair.phase in FINAL
    failures = number(pair.vm, "status", "startFailure", "consecutiveFailCount")
    return over and not pair.starts and failures > 0 and strategy_of(pair.vm) in BACKS_OFF


PRINTABLE: tuple[tuple[str, Callable[[Pair], bool]], ...] = (
    ("Terminating", lambda pair: bool(at(pair.vm, "metadata", "deletionTimestamp"))),
    ("Stopping", _stopping),
    ("Paused", _paused),
    ("Running", lambda pair: pair.phase == Phase.RUNNING),
    ("ErrorUnschedulable", _unschedulable),
    (ERR_IMAGE_PULL, lambda pair: _synchronized(pair, ERR_IMAGE_PULL)),
    (IMAGE_PULL_BACKOFF, lambda pair: _synchronized(pair, IMAGE_PULL_BACKOFF)),
    ("Starting", _starting),
    ("CrashLoopBackOff", _crash_loop),
    ("Stopped", lambda pair: pair.vmi is None or pair.phase in FINAL),
)
"""Statuses in order of precedence. The first that applies counts; Unknown if none does.

Migrating will come after Stopping, and WaitingForReceiver last. Provisioning,
WaitingForVolumeBinding, ErrorPvcNotFound and DataVolumeError will come around ErrorUnschedulable.
"""


def printable(pair: Pair) -> str:
    """Return `status.printableStatus`."""
    return next((name for name, holds_ in PRINTABLE if holds_(pair)), "Unknown")


def status(
    pair: Pair, requests: list[Object], now: datetime, *, failed: str = "", observed: str = ""
) -> dict[str, Any]:
    """Return the whole status.

    `failed` is the reason why the VMI could not be created. `observed` is the strategy that was
    acted on. `requests` are the unmet ones.
    """
    vm, vmi = pair.vm, pair.vmi
    before, at_ = part(vm, "status"), stamp(now)
    kept = {key: value for key, value in before.items() if key not in _OURS}
    failure = start_failure(vm, vmi, now)
    counted = (
        {**vm, "status": {**before, "startFailure": failure}}
        if failure
        else {
            **vm,
            "status": {key: value for key, value in before.items() if key != "startFailure"},
        }
    )
    pair = Pair(counted, vmi, pair.starts, pair.stops)
    said: dict[str, Any] = {
        **kept,
        "created": vmi is not None,
        "ready": vmi is not None and holds(vmi, READY),
        "printableStatus": printable(pair),
        "conditions": merged(_conditions(pair, failed), items(before, "conditions"), at_),
        "observedGeneration": _observed(vm, vmi),
        "desiredGeneration": number(vm, "metadata", "generation"),
    }
    if acted_on := observed or text(before, "runStrategy"):
        said["runStrategy"] = acted_on
    if requests:
        said["stateChangeRequests"] = [dict(one) for one in requests]
    if failure:
        said["startFailure"] = failure
    return said


_OURS = frozenset(
    {
        *("created", "ready", "printableStatus", "conditions", "observedGeneration"),
        *("desiredGeneration", "runStrategy", "stateChangeRequests", "startFailure"),
    }
)


def start_failure(vm: Object, vmi: Object | None, now: datetime) -> dict[str, Any]:
    """Return the count of failed starts in a row, and the time of the next retry."""
    before = part(vm, "status", "startFailure")
    if strategy_of(vm) not in BACKS_OFF or _ran(vmi):
        return {}
    uid = text(vmi, "metadata", "uid")
    if text(vmi, "status", "phase") != Phase.FAILED or text(before, "lastFailedVMIUID") == uid:
        return dict(before)
    count = number(before, "consecutiveFailCount") + 1
    after = now + timedelta(seconds=back_off_s(count, uid))
    return {
        "consecutiveFailCount": count,
        "lastFailedVMIUID": uid,
        "retryAfterTimestamp": stamp(after),
    }


def back_off_left_s(vm: Object, now: datetime) -> float:
    """Return the seconds before a VMI may be created; 0 or less means now."""
    until = moment(text(vm, "status", "startFailure", "retryAfterTimestamp"))
    return (until - now).total_seconds() if until is not None else 0.0


def _ran(vmi: Object | None) -> bool:
    transitions = items(vmi, "status", "phaseTransitionTimestamps")
    return any(text(one, "phase") == Phase.RUNNING for one in transitions)


# --- conditions --------------------------------------------------------------------------------
def _conditions(pair: Pair, failed: str) -> Iterator[dict[str, Any]]:
    vmi = pair.vmi
    if vmi is None:
        yield condition(READY, on=False, reason="VMINotExists", message="VMI does not exist")
    else:
        mirrored = {text(one, "type"): one for one in items(vmi, "status", "conditions")}
        if READY not in mirrored:
            message = "VMI is missing the Ready condition"
            yield condition(READY, on=False, reason="VMIConditionMissing", message=message)
        for kind in (READY, *MIRRORED):
            if kind in mirrored:
                yield _mirror(mirrored[kind])
        if restart_required(pair.vm, vmi):
            yield condition(RESTART_REQUIRED, on=True, reason="RestartRequired", message=NOT_LIVE)
    if failed:
        yield condition(FAILURE, on=True, reason="FailedCreate", message=failed)
    for cause in notes.causes(pair.vm):  # the VM was written while the webhooks were away
        message = f"{cause.field}: {cause.message}"
        yield condition(ANNOTATIONS_DROPPED, on=True, reason=TOO_LARGE, message=message)


def _mirror(one: Object) -> dict[str, Any]:
    return condition(
        text(one, "type"),
        on=text(one, "status") == "True",
        reason=text(one, "reason"),
        message=text(one, "message"),
    )


def restart_required(vm: Object, vmi: Object) -> bool:
    """Return True if the VM's template now makes another guest than its VMI has."""
    made_of = text(vmi, "metadata", "annotations", GENERATION)
    if has_of(vmi) is not Has.ALIVE or made_of == str(number(vm, "metadata", "generation")):
        return False
    return changed(_lasting(defaulted_template(vm)), _lasting(vmi), VMI)


def _observed(vm: Object, vmi: Object | None) -> int:
    """Return the generation that runs: the VM's, unless the VMI has an older template."""
    made_of = text(vmi, "metadata", "annotations", GENERATION)
    readable = made_of.isdecimal() and len(made_of) < DIGITS_OF_INT64
    if vmi is not None and readable and _is_behind(vm, vmi):
        return int(made_of)
    return number(vm, "metadata", "generation")


def _is_behind(vm: Object, vmi: Object) -> bool:
    """Return True if a VMI created now would differ in any field, even in an ignored one."""
    if has_of(vmi) is not Has.ALIVE:
        return False
    wanted = defaulted_template(vm)
    if _lasting(wanted) != _lasting(vmi):
        return True
    return any(
        at(vmi, "metadata", kind, key) != value
        for kind in ("labels", "annotations")
        for key, value in part(wanted, "metadata", kind).items()
    )


def _lasting(vmi: Object) -> Object:
    """Return the spec without the fields that a stop or a paused start changes in the VMI alone."""
    own = {"terminationGracePeriodSeconds", "startStrategy"}
    return {key: value for key, value in part(vmi, "spec").items() if key not in own}
