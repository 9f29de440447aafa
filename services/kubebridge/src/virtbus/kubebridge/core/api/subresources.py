"""Maps the verbs of `subresources.kubevirt.io` to effects, in one table.

Codes and messages are KubeVirt's, because virtctl prints them and waits for them. A verb that is
not supported yet answers 501 with the name of the missing feature.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.plain import at, text
from virtbus.kubebridge.core.objects.refusals import (
    Refusal,
    bad_request,
    conflict,
    not_found,
    not_implemented,
)
from virtbus.kubebridge.core.objects.typed import read
from virtbus.kubebridge.core.runtime.calls import AskGuest, Bus, Call, Deed, Give, Stream
from virtbus.kubebridge.core.vm import verbs as power
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.phases import Phase
from virtbus.kubebridge.core.vmi.status import AGENT, PAUSED, holds
from virtbus.schemas.guest import GuestQuestion

GROUP, VERSIONS = "subresources.kubevirt.io", ("v1", "v1alpha3")
VM, VMI = "virtualmachines", "virtualmachineinstances"
KINDS = {VM: "virtualmachine", VMI: "virtualmachineinstance"}
EXPAND = "expand-vm-spec"
"""A verb of a namespace. The VM is in the request body."""
VM_NOT_RUNNING, VMI_NOT_RUNNING = "VM is not running", "VMI is not running"
NO_AGENT = "VMI does not have guest agent connected"

Outcome = Refusal | tuple[Deed, ...]


class Verb(NamedTuple):
    """A row. `decide` gets a call whose objects exist. `success` is the code of a success."""

    method: str
    resource: str
    name: str
    decide: Callable[[Call], Outcome]
    success: int = 202
    missing: str = ""

    @property
    def access(self) -> str:
        """Return the verb of the SubjectAccessReview."""
        return "get" if self.method == "GET" else "update"


def _runs(call: Call) -> bool:
    return text(call.vmi, "status", "phase") == Phase.RUNNING


def _no(call: Call, why: str) -> Refusal:
    return conflict(KINDS[VMI], call.name, why)


def _paused(call: Call) -> bool:
    return call.vmi is not None and holds(read(Vmi, call.vmi), PAUSED)


def _agent(call: Call) -> bool:
    return call.vmi is not None and holds(read(Vmi, call.vmi), AGENT)


def _pause(call: Call) -> Outcome:
    if not _runs(call):
        return _no(call, VM_NOT_RUNNING)
    if _paused(call):
        return _no(call, "VMI is already paused")
    return (Bus("vm.pause", call.uid),)


def _unpause(call: Call) -> Outcome:
    if not _runs(call):
        return _no(call, VMI_NOT_RUNNING)
    if not _paused(call):
        return _no(call, "VMI is not paused")
    return (Bus("vm.unpause", call.uid),)


def _reset(call: Call) -> Outcome:
    return (Bus("vm.reset", call.uid),) if _runs(call) else _no(call, VMI_NOT_RUNNING)


def _soft_reboot(call: Call) -> Outcome:
    if not _runs(call):
        return _no(call, VM_NOT_RUNNING)
    if _paused(call):
        return _no(call, "VMI is paused")
    return (Bus("vm.soft-reboot", call.uid),)  # every guest has ACPI


def _console(call: Call) -> Outcome:
    if text(call.vmi, "status", "phase") == Phase.FAILED:
        return _no(call, "VMI is in failed status")
    # 400 instead of 409: virtctl retries for as long as it gets this answer.
    return (Stream("console", call.uid),) if _runs(call) else bad_request(VMI_NOT_RUNNING)


def _display(call: Call) -> Refusal | None:
    if at(call.vmi, "spec", "domain", "devices", "autoattachGraphicsDevice") is False:
        return bad_request("No graphics devices are present.")
    return None if _runs(call) else bad_request(VMI_NOT_RUNNING)


def _vnc(call: Call) -> Outcome:
    return _display(call) or (Stream("vnc", call.uid),)


def _screenshot(call: Call) -> Outcome:
    return _display(call) or (Stream("screenshot", call.uid),)


def _port_forward(call: Call) -> Outcome:
    port, protocol = str(call.options.get("port", "")), call.options.get("protocol") or "tcp"
    wrong = _wrong_port(port, protocol)
    if wrong:
        return bad_request(wrong)
    if call.vmi is None:
        return conflict(KINDS[VM], call.name, "VMI is not started")
    if not _runs(call):
        return _no(call, VMI_NOT_RUNNING)
    if _paused(call):
        return _no(call, "VMI is paused")
    return (Stream("portforward", call.uid, int(port), str(protocol)),)


def _wrong_port(port: str, protocol: object) -> str:
    if not port:
        return "port must not be empty"
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        return f"port {port!r:.20} is not valid; write 1-65535"
    if protocol not in {"tcp", "udp"}:
        return f"protocol {protocol!r:.20} is not supported; write tcp or udp"
    return ""


def _ask(*questions: GuestQuestion) -> Callable[[Call], Outcome]:
    def decide(call: Call) -> Outcome:
        if not _runs(call):
            return _no(call, VMI_NOT_RUNNING)
        if not _agent(call):
            return _no(call, NO_AGENT)
        return (AskGuest(call.uid, questions),)

    return decide


def _expand(call: Call) -> Outcome:
    """Return the VM itself: without instance types, it is already expanded."""
    return (Give(dict(call.vm or {})),)


def expanded(given: Any, namespace: str) -> Refusal | dict[str, Any]:
    """Expand the VM in the body (`expand-vm-spec`)."""
    if not isinstance(given, dict) or not isinstance(given.get("spec"), dict):
        return bad_request("Object is not a valid VirtualMachine")
    if text(given, "metadata", "namespace") not in {"", namespace}:
        return bad_request(f"VM namespace must be empty or {namespace}")
    if at(given, "spec", "instancetype") or at(given, "spec", "preference"):
        return not_implemented(f"{EXPAND}: instance types and preferences are not supported yet")
    return given


def _later(call: Call) -> Outcome:
    raise AssertionError(call.verb)


def _missing(method: str, resource: str, name: str, what: str) -> Verb:
    return Verb(method, resource, name, _later, missing=f"{name} is not supported yet: {what}")


CLAIMS, MIGRATION = "disks cannot be hotplugged yet", "virtbus has no live migration yet"
FREEZE = "file systems cannot be frozen yet"
SEV, GRAPH = "encrypted guests are not supported", "there is no graph of objects yet"
BACKUP = "there are no backups yet"

VERBS = (
    Verb("PUT", VM, "start", power.start),
    Verb("PUT", VM, "stop", power.stop),
    Verb("PUT", VM, "restart", power.restart),
    Verb("GET", VM, "expand-spec", _expand, 200),
    Verb("GET", VM, "portforward", _port_forward, 101),
    Verb("GET", VMI, "portforward", _port_forward, 101),
    Verb("GET", VMI, "console", _console, 101),
    Verb("GET", VMI, "vnc", _vnc, 101),
    Verb("GET", VMI, "vnc/screenshot", _screenshot, 200),
    Verb("PUT", VMI, "pause", _pause),
    Verb("PUT", VMI, "unpause", _unpause),
    Verb("PUT", VMI, "reset", _reset),
    Verb("PUT", VMI, "softreboot", _soft_reboot),
    Verb("GET", VMI, "guestosinfo", _ask(*GuestQuestion), 200),
    Verb("GET", VMI, "userlist", _ask(GuestQuestion.USERS), 200),
    Verb("GET", VMI, "filesystemlist", _ask(GuestQuestion.FILESYSTEMS), 200),
    _missing("GET", VMI, "usbredir", "USB devices cannot be redirected yet"),
    _missing("GET", VMI, "vsock", "guests have no vsock yet"),
    _missing("PUT", VMI, "freeze", FREEZE),
    _missing("PUT", VMI, "unfreeze", FREEZE),
    _missing("PUT", VM, "migrate", MIGRATION),
    _missing("PUT", VM, "memorydump", "memory cannot be dumped yet"),
    _missing("PUT", VM, "removememorydump", "memory cannot be dumped yet"),
    *(
        _missing(method, resource, name, what)
        for resource in (VM, VMI)
        for method, name, what in (
            ("PUT", "addvolume", CLAIMS),
            ("PUT", "removevolume", CLAIMS),
            ("PUT", "evacuate/cancel", MIGRATION),
            ("GET", "objectgraph", GRAPH),
        )
    ),
    _missing("PUT", VMI, "backup", BACKUP),
    _missing("PUT", VMI, "redefine-checkpoint", BACKUP),
    _missing("GET", VMI, "sev/fetchcertchain", SEV),
    _missing("GET", VMI, "sev/querylaunchmeasurement", SEV),
    _missing("PUT", VMI, "sev/setupsession", SEV),
    _missing("PUT", VMI, "sev/injectlaunchsecret", SEV),
)
BY_NAME: Mapping[tuple[str, str], Verb] = {(verb.resource, verb.name): verb for verb in VERBS}


def answer(call: Call) -> Outcome:
    """Return the effects of a call, or a refusal. Effects run in order, at the versions read."""
    verb = BY_NAME.get((call.resource, call.verb))
    if verb is None:
        return Refusal(404, "NotFound", f"there is no subresource {call.verb!r:.60}")
    if verb.method != call.method:
        why = f"{call.verb} needs the method {verb.method}"
        return Refusal(405, "MethodNotAllowed", why)
    if verb.missing:
        return not_implemented(verb.missing)
    if (call.vm if call.resource == VM else call.vmi) is None:
        return not_found(KINDS[call.resource], call.name)
    outcome = verb.decide(call)
    if isinstance(outcome, Refusal) or not call.dry_run:
        return outcome
    return tuple(deed for deed in outcome if deed.is_a_patch)
