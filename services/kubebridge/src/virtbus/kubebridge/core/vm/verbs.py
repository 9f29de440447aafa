"""Effects of a VM's verbs, which are its subresources such as `start`.

A verb starts, stops or restarts a VM by a change of its run strategy, or by a request in its
status. `reconcile.py` then creates or deletes the VMI, which has the effect on the bus. No verb
writes both to Kubernetes and to the bus. A caller that lost the answer can therefore repeat the
verb.
"""

from typing import Any, Literal

from virtbus.kubebridge.core.objects.status_errors import Refusal, bad_request, conflict
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, read, text
from virtbus.kubebridge.core.runtime.subresource_effects import (
    VM,
    Give,
    JsonPatch,
    Outcome,
    SubresourceCall,
    Verb,
    missing,
)
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.verbs import MIGRATION, shared
from virtbus.schemas.vm import RunStrategy as R

NOT_RUNNING = "VM is not running"
UNDERWAY = "unable to complete request: stop/start already underway"
BY_STATUS = frozenset({R.MANUAL, R.RERUN_ON_FAILURE})
"""Strategies under which a start or stop is a request in the status. The spec stays unchanged."""


def _no(call: SubresourceCall, why: str) -> Refusal:
    return conflict("virtualmachine", call.name, why)


def _phase(call: SubresourceCall) -> str:
    return text(call.vmi, "status", "phase")


def start(call: SubresourceCall) -> Outcome:
    """Start a VM. A VM whose VMI is pending, starting or running is refused."""
    if call.vmi is not None and _phase(call) not in {*FINAL, VmiPhase.UNKNOWN, ""}:
        return _no(call, "VM is already running")
    paused = call.options.get("paused") is True
    asked: dict[str, Any] = {"action": "Start"}
    if paused:
        asked["data"] = {"paused": "true"}
    strategy = read(Vm, call.vm).strategy
    if strategy is R.HALTED:
        return _request(call, asked) if paused else (_running(call.vm or {}, on=True),)
    return _asked_start(call, strategy, asked)


def _asked_start(call: SubresourceCall, strategy: R, asked: dict[str, Any]) -> Outcome:
    if strategy not in BY_STATUS:
        return _no(call, f"{strategy} does not support manual start requests")
    if strategy is R.RERUN_ON_FAILURE and _phase(call) == VmiPhase.FAILED:
        return _no(call, f"{strategy} does not support starting VM from failed state")
    over = call.vmi is not None and _phase(call) in FINAL
    return _request(call, *([_stop_of(call)] if over else []), asked)


def _grace_asked(call: SubresourceCall, name: str) -> int | Refusal | None:
    grace_s = call.options.get(name)
    if grace_s is None:
        return None
    if isinstance(grace_s, bool) or not isinstance(grace_s, int):
        return bad_request(f"{name} must be a whole number of seconds")
    if grace_s < 0:
        return bad_request("gracePeriod has to be greater or equal to 0")
    return grace_s


def stop(call: SubresourceCall) -> Outcome:
    """Stop a VM. Under Halted the guest already stops, so only a shorter grace is accepted."""
    strategy = read(Vm, call.vm).strategy
    grace_s = _grace_asked(call, "gracePeriod")
    if isinstance(grace_s, Refusal):
        return grace_s
    alive = call.vmi is not None and _phase(call) not in FINAL
    graced = (_grace(call, grace_s),) if alive and grace_s is not None else ()
    if strategy in {R.ALWAYS, R.ONCE}:
        return (*graced, _running(call.vm or {}, on=False))
    if not alive:
        return _no(call, NOT_RUNNING)
    before_s = read(Vmi, call.vmi).grace_s
    shorter = grace_s is not None and (before_s is None or grace_s < before_s)
    if strategy is R.HALTED and not shorter:
        why = f"{strategy} only supports manual stop requests with a shorter graceperiod"
        return _no(call, why)
    return (*graced, _requests(call.vm, (_stop_of(call),)))


def restart(call: SubresourceCall) -> Outcome:
    """Restart a VM: replace its VMI by a new one."""
    strategy = read(Vm, call.vm).strategy
    grace_s = _grace_asked(call, "gracePeriodSeconds")
    if isinstance(grace_s, Refusal):
        return grace_s
    if grace_s:
        return bad_request("For force restart, only gracePeriod=0 is supported for now")
    if strategy in {R.HALTED, R.ONCE}:
        return _no(call, f"RunStategy {strategy} does not support manual restart requests")
    if call.vmi is None:
        return _no(call, f"VM is not running: {R.HALTED}")
    asked = _request(call, _stop_of(call), {"action": "Start"})
    if isinstance(asked, Refusal) or grace_s is None:
        return asked
    return (_grace(call, 1), *asked)


# --- patches -----------------------------------------------------------------------------------
def _stop_of(call: SubresourceCall) -> dict[str, Any]:
    return {"action": "Stop", "uid": call.uid}


def _running(vm: Object, *, on: bool) -> JsonPatch:
    if at(vm, "spec", "runStrategy") is None:
        return _changed("vm", vm, ("spec", "running"), on)
    return _changed("vm", vm, ("spec", "runStrategy"), str(R.ALWAYS if on else R.HALTED))


def _request(call: SubresourceCall, *asked: dict[str, Any]) -> Outcome:
    """Add requests to the status. Open requests make this a conflict."""
    if items(call.vm, "status", "stateChangeRequests"):
        return _no(call, UNDERWAY)
    return (_requests(call.vm, asked),)


def _requests(vm: Object | None, asked: tuple[dict[str, Any], ...]) -> JsonPatch:
    if at(vm, "status") is None:
        return _changed("vm/status", vm, ("status",), {"stateChangeRequests": list(asked)})
    return _changed("vm/status", vm, ("status", "stateChangeRequests"), list(asked))


def _grace(call: SubresourceCall, grace_s: int) -> JsonPatch:
    uid = {"op": "test", "path": "/metadata/uid", "value": call.uid}
    return _changed("vmi", call.vmi, ("spec", "terminationGracePeriodSeconds"), grace_s, uid)


def _changed(
    of: Literal["vm", "vm/status", "vmi"],
    obj: Object | None,
    path: tuple[str, ...],
    value: Any,
    test: dict[str, Any] | None = None,
) -> JsonPatch:
    """Return the patch that sets a field.

    By default, the patch is a conflict if the field has changed since it was read. With `test`,
    only a failure of `test` is a conflict.
    """
    pointer, before = "/" + "/".join(path), at(obj, *path)
    change = {"op": "add" if before is None else "replace", "path": pointer, "value": value}
    return JsonPatch(of, (test or {"op": "test", "path": pointer, "value": before}, change))


VERBS = (
    Verb("PUT", VM, "start", start),
    Verb("PUT", VM, "stop", stop),
    Verb("PUT", VM, "restart", restart),
    # virtbus has no instance types, so a VM has nothing to expand.
    Verb("GET", VM, "expand-spec", lambda call: (Give(dict(call.vm or {})),), 200),
    *shared(VM),
    missing("PUT", VM, "migrate", MIGRATION),
    missing("PUT", VM, "memorydump", "memory cannot be dumped yet"),
    missing("PUT", VM, "removememorydump", "memory cannot be dumped yet"),
)
