"""Effects of a VMI's verbs, which are its subresources such as `pause`."""

import math
from collections.abc import Callable
from typing import Literal

from virtbus.kubebridge.core.objects.durations import seconds_of
from virtbus.kubebridge.core.objects.status_errors import Refusal, bad_request, conflict
from virtbus.kubebridge.core.objects.unstructured import at, read, text
from virtbus.kubebridge.core.runtime.subresource_effects import (
    KINDS,
    VM,
    VMI,
    AskGuest,
    BusVerb,
    Decide,
    Effect,
    GuestStream,
    Outcome,
    SubresourceCall,
    Verb,
    missing,
)
from virtbus.kubebridge.core.vmi.model import Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.status import AGENT, PAUSED, holds
from virtbus.schemas.api import FREEZE_MAX_S
from virtbus.schemas.guest import GuestQuestion

VM_NOT_RUNNING, VMI_NOT_RUNNING = "VM is not running", "VMI is not running"
NO_AGENT = "VMI does not have guest agent connected"
IS_PAUSED = "VMI is paused"
FREEZE_DEFAULT_S = 300
"""KubeVirt's default of `unfreezeTimeout`, in seconds."""


def _runs(call: SubresourceCall) -> bool:
    return text(call.vmi, "status", "phase") == VmiPhase.RUNNING


def _no(call: SubresourceCall, why: str) -> Refusal:
    return conflict(KINDS[VMI], call.name, why)


def _paused(call: SubresourceCall) -> bool:
    return call.vmi is not None and holds(read(Vmi, call.vmi), PAUSED)


def _unpaused(call: SubresourceCall) -> bool:
    return not _paused(call)


def _agent(call: SubresourceCall) -> bool:
    return call.vmi is not None and holds(read(Vmi, call.vmi), AGENT)


def _if(
    make: Callable[[str], Effect], *needs: tuple[Callable[[SubresourceCall], bool], str]
) -> Decide:
    """Return a function that decides a verb: it returns one effect, or a conflict.

    Each of `needs` is a check of the call, and the message of the conflict if the check fails.
    """

    def decide(call: SubresourceCall) -> Outcome:
        wrong = next((why for holds_, why in needs if not holds_(call)), "")
        return _no(call, wrong) if wrong else (make(call.uid),)

    return decide


def _bus(verb: str, *needs: tuple[Callable[[SubresourceCall], bool], str]) -> Decide:
    return _if(lambda uid: BusVerb(verb, uid), *needs)


def _ask(*questions: GuestQuestion) -> Decide:
    return _if(lambda uid: AskGuest(uid, questions), (_runs, VMI_NOT_RUNNING), (_agent, NO_AGENT))


def _console(call: SubresourceCall) -> Outcome:
    if text(call.vmi, "status", "phase") == VmiPhase.FAILED:
        return _no(call, "VMI is in failed status")
    # The answer is 400, not 409, because virtctl continues to retry after 400.
    return (GuestStream("console", call.uid),) if _runs(call) else bad_request(VMI_NOT_RUNNING)


def _display(what: Literal["vnc", "screenshot"]) -> Decide:
    def decide(call: SubresourceCall) -> Outcome:
        if at(call.vmi, "spec", "domain", "devices", "autoattachGraphicsDevice") is False:
            return bad_request("No graphics devices are present.")
        return (GuestStream(what, call.uid),) if _runs(call) else bad_request(VMI_NOT_RUNNING)

    return decide


def port_forward(call: SubresourceCall) -> Outcome:
    """Open a stream to a port of the guest."""
    port, protocol = str(call.options.get("port", "")), call.options.get("protocol") or "tcp"
    wrong = _wrong_port(port, protocol)
    if wrong:
        return bad_request(wrong)
    if call.vmi is None:
        return conflict(KINDS[VM], call.name, "VMI is not started")
    if not _runs(call):
        return _no(call, VMI_NOT_RUNNING)
    if _paused(call):
        return _no(call, IS_PAUSED)
    return (GuestStream("portforward", call.uid, int(port), str(protocol)),)


def _wrong_port(port: str, protocol: object) -> str:
    if not port:
        return "port must not be empty"
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        return f"port {port!r:.20} is not valid; write 1-65535"
    if protocol not in {"tcp", "udp"}:
        return f"protocol {protocol!r:.20} is not supported; write tcp or udp"
    return ""


def _freeze(call: SubresourceCall) -> Outcome:
    """Freeze the guest for `unfreezeTimeout`. KubeVirt's 0 (no limit) becomes FREEZE_MAX_S."""
    wanted = call.options.get("unfreezeTimeout")
    asked_s = FREEZE_DEFAULT_S if wanted is None else seconds_of(wanted)
    if asked_s is None or asked_s > FREEZE_MAX_S:
        return bad_request(f"unfreezeTimeout must be a duration of at most {FREEZE_MAX_S}s")
    if not _runs(call):
        return _no(call, VMI_NOT_RUNNING)
    if _paused(call):
        return _no(call, IS_PAUSED)
    return (BusVerb("freeze", call.uid, math.ceil(asked_s) or FREEZE_MAX_S),)


CLAIMS, MIGRATION = "disks cannot be hotplugged yet", "virtbus has no live migration yet"
SEV, GRAPH = "encrypted guests are not supported", "there is no graph of objects yet"
BACKUP = "the bridge makes no backups yet; `virtbus backup create` does"


def shared(resource: str) -> tuple[Verb, ...]:
    """Return the verbs that VMs and VMIs have in common."""
    return (
        Verb("GET", resource, "portforward", port_forward, 101),
        missing("PUT", resource, "addvolume", CLAIMS),
        missing("PUT", resource, "removevolume", CLAIMS),
        missing("PUT", resource, "evacuate/cancel", MIGRATION),
        missing("GET", resource, "objectgraph", GRAPH),
    )


VERBS = (
    Verb("GET", VMI, "console", _console, 101),
    Verb("GET", VMI, "vnc", _display("vnc"), 101),
    Verb("GET", VMI, "vnc/screenshot", _display("screenshot"), 200),
    Verb(
        "PUT",
        VMI,
        "pause",
        _bus("pause", (_runs, VM_NOT_RUNNING), (_unpaused, "VMI is already paused")),
    ),
    Verb(
        "PUT",
        VMI,
        "unpause",
        _bus("unpause", (_runs, VMI_NOT_RUNNING), (_paused, "VMI is not paused")),
    ),
    Verb("PUT", VMI, "reset", _bus("reset", (_runs, VMI_NOT_RUNNING))),
    Verb(  # a soft reboot needs ACPI, which every guest has
        "PUT",
        VMI,
        "softreboot",
        _bus("soft-reboot", (_runs, VM_NOT_RUNNING), (_unpaused, IS_PAUSED)),
    ),
    Verb("GET", VMI, "guestosinfo", _ask(*GuestQuestion), 200),
    Verb("GET", VMI, "userlist", _ask(GuestQuestion.USERS), 200),
    Verb("GET", VMI, "filesystemlist", _ask(GuestQuestion.FILESYSTEMS), 200),
    *shared(VMI),
    missing("GET", VMI, "usbredir", "USB devices cannot be redirected yet"),
    missing("GET", VMI, "vsock", "guests have no vsock yet"),
    Verb("PUT", VMI, "freeze", _freeze),
    Verb("PUT", VMI, "unfreeze", _bus("thaw", (_runs, VMI_NOT_RUNNING), (_unpaused, IS_PAUSED))),
    missing("PUT", VMI, "backup", BACKUP),
    missing("PUT", VMI, "redefine-checkpoint", BACKUP),
    missing("GET", VMI, "sev/fetchcertchain", SEV),
    missing("GET", VMI, "sev/querylaunchmeasurement", SEV),
    missing("PUT", VMI, "sev/setupsession", SEV),
    missing("PUT", VMI, "sev/injectlaunchsecret", SEV),
)
