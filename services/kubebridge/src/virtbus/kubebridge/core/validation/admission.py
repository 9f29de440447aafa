"""Admission: computes the answer to an AdmissionReview (ADR 0025).

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from virtbus.kubebridge.core.fields.translator import MAX_CAUSES
from virtbus.kubebridge.core.objects.metadata import RESERVED_LABELS
from virtbus.kubebridge.core.objects.status_errors import (
    Cause,
    Reason,
    Refusal,
    bad_request,
    invalid,
)
from virtbus.kubebridge.core.objects.unstructured import Object, at, part, text
from virtbus.kubebridge.core.runtime.controller import VM, VMI
from virtbus.kubebridge.core.translation.defaults import json_patch, of_vm, of_vmi
from virtbus.kubebridge.core.validation.rules import foreign_vmi_causes, vm_causes, vmi_causes

LONGEST = 1024
"""Limit of a reported path or message, in characters. Both may quote 1.5 MB of an object."""
VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"
CREATE, UPDATE = "CREATE", "UPDATE"
Plain = dict[str, Any]


class AdmittedKind(NamedTuple):
    """The admission of one kind: its defaults, and the checks of a new or changed object.

    Only writes of users reach the webhooks. The bridge's own writes are excluded.
    """

    fill: Callable[[Object, Object], Plain]
    created: Callable[[Object], list[Cause]]
    changed: Callable[[Object, Object], list[Cause]]


def _vmi_filled(vmi: Object, old: Object) -> Plain:
    """Fill in a VMI. As in KubeVirt, the status that a user sends is ignored.

    The API server keeps this status, because VMIs have no status subresource.
    """
    whole = dict(vmi) if old else of_vmi(vmi)
    whole.pop("status", None)
    return whole | {"status": old["status"]} if "status" in old else whole


def _vm_changed(vm: Object, old: Object) -> list[Cause]:
    """Return only new problems, so that stricter rules let a user halt an old VM."""
    if at(vm, "spec") == at(old, "spec"):
        return []
    reported = set(vm_causes(old))
    return [cause for cause in vm_causes(vm) if cause not in reported]


def _vmi_changed(vmi: Object, old: Object) -> list[Cause]:
    """Refuse changes of reserved labels and of the spec. A run of a guest keeps its spec."""
    causes = []
    if at(vmi, "spec") != at(old, "spec"):
        message = (
            "update of VMI object is restricted; change its VirtualMachine's template and restart"
            " it, or delete this VMI and create it again"
        )
        causes.append(Cause("spec", message, Reason.NOT_SUPPORTED))
    mine, theirs = (part(one, "metadata", "labels") for one in (old, vmi))
    moved = [label for label in RESERVED_LABELS if mine.get(label) != theirs.get(label)]
    if moved:
        message = (
            "modification of the following reserved kubevirt.io/ labels on a VMI object is"
            f" prohibited: {', '.join(moved)}"
        )
        causes.append(Cause("metadata.labels", message, Reason.NOT_SUPPORTED))
    return causes


KINDS = {
    VM.kind: AdmittedKind(lambda vm, _: of_vm(vm), vm_causes, _vm_changed),
    VMI.kind: AdmittedKind(
        _vmi_filled, lambda vmi: [*vmi_causes(vmi), *foreign_vmi_causes(vmi)], _vmi_changed
    ),
}


def answer(review: Any, *, mutating: bool) -> Plain:
    """Return the answer to a review.

    The mutating webhook refuses invalid objects, too. It runs before the API server checks the
    schema and CEL, so it can report all problems of an object together.

    Raises:
        ValueError: `review` is not an AdmissionReview.
    """
    request = part(review, "request")
    uid = text(request, "uid")
    if text(review, "apiVersion") != VERSION or text(review, "kind") != KIND or not uid:
        msg = f"not an {KIND} of {VERSION}"
        raise ValueError(msg)
    return {
        "apiVersion": VERSION,
        "kind": KIND,
        "response": {"uid": uid, **_decision(request, mutating)},
    }


def _decision(request: Object, mutating: bool) -> Plain:
    kind, operation = text(request, "kind", "kind"), text(request, "operation")
    admitted, obj, old = KINDS.get(kind), part(request, "object"), part(request, "oldObject")
    if admitted is None or operation not in {CREATE, UPDATE} or text(request, "subResource"):
        why = f"{operation} of {kind or 'nothing'}: virtbus admits only {', '.join(KINDS)}; correct"
        return _denied(bad_request(f"{why} the webhooks' rules (deploy/kubernetes)"))
    if at(obj, "metadata", "deletionTimestamp"):
        return {"allowed": True}  # a deletion must always succeed
    whole = admitted.fill(obj, old if operation == UPDATE else {}) if mutating else obj
    causes = admitted.changed(whole, old) if operation == UPDATE else admitted.created(whole)
    if causes:
        name = text(request, "name") or text(obj, "metadata", "name")
        return _denied(invalid(kind, name or text(obj, "metadata", "generateName"), _bound(causes)))
    patch = json_patch(obj, whole)
    if not patch:
        return {"allowed": True}
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    return {"allowed": True, "patchType": "JSONPatch", "patch": encoded}


def _denied(refusal: Refusal) -> Plain:
    return {"allowed": False, "status": refusal.plain()}


def _bound(causes: list[Cause]) -> list[Cause]:
    shown = [
        one._replace(field=one.field[:LONGEST], message=one.message[:LONGEST])
        for one in causes[:MAX_CAUSES]
    ]
    more = len(causes) - MAX_CAUSES
    if more > 0:
        shown.append(Cause("spec", f"has {more} more problems; correct these first"))
    return shown
