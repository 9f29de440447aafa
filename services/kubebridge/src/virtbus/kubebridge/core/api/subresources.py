"""Maps the verbs of `subresources.kubevirt.io` to effects, by the verb tables of VMs and VMIs.

Codes and messages are KubeVirt's, because virtctl prints the messages and waits for some codes. A
verb that is not supported yet answers 501 with the name of the missing feature.
"""

from collections.abc import Mapping
from typing import Any

from virtbus.kubebridge.core.objects.status_errors import (
    Refusal,
    bad_request,
    not_found,
    of_http,
)
from virtbus.kubebridge.core.objects.unstructured import at, text
from virtbus.kubebridge.core.runtime.subresource_effects import (
    KINDS,
    VM,
    Give,
    JsonPatch,
    Outcome,
    SubresourceCall,
    Verb,
)
from virtbus.kubebridge.core.vm import verbs as vm
from virtbus.kubebridge.core.vmi import verbs as vmi

GROUP, VERSIONS = "subresources.kubevirt.io", ("v1", "v1alpha3")
EXPAND = "expand-vm-spec"
"""A verb of a namespace. The VM is in the request body."""
VERBS = (*vm.VERBS, *vmi.VERBS)
BY_NAME: Mapping[tuple[str, str], Verb] = {(verb.resource, verb.name): verb for verb in VERBS}


def expanded(given: Any, namespace: str) -> Refusal | dict[str, Any]:
    """Return the VM in the body of `expand-vm-spec`; refuse instance types and preferences."""
    if not isinstance(given, dict) or not isinstance(given.get("spec"), dict):
        return bad_request("Object is not a valid VirtualMachine")
    if text(given, "metadata", "namespace") not in {"", namespace}:
        return bad_request(f"VM namespace must be empty or {namespace}")
    if at(given, "spec", "instancetype") or at(given, "spec", "preference"):
        return of_http(501, f"{EXPAND}: instance types and preferences are not supported yet")
    return given


def answer(call: SubresourceCall) -> Outcome:
    """Return the effects of a call, in the order to run them, or a refusal.

    For a dry run, only `JsonPatch` and `Give` are returned.
    """
    verb = BY_NAME.get((call.resource, call.verb))
    if verb is None:
        return of_http(404, f"there is no subresource {call.verb!r:.60}")
    if verb.method != call.method:
        return of_http(405, f"{call.verb} needs the method {verb.method}")
    if verb.missing:
        return of_http(501, verb.missing)
    if (call.vm if call.resource == VM else call.vmi) is None:
        return not_found(KINDS[call.resource], call.name)
    outcome = verb.decide(call)
    if isinstance(outcome, Refusal) or not call.dry_run:
        return outcome
    return tuple(effect for effect in outcome if isinstance(effect, JsonPatch | Give))
