"""The webhooks: defaults as a patch, all problems together, and no delay of deletions."""

import base64
import copy
import json
import time
from typing import Any

import pytest
from services.kubebridge.tests.manifests import put, template, vm, vmi

from virtbus.kubebridge.core.fields.translator import MAX_CAUSES
from virtbus.kubebridge.core.objects.metadata import NODE_LABEL
from virtbus.kubebridge.core.translation.defaults import of_vm, of_vmi
from virtbus.kubebridge.core.validation.admission import LONGEST, answer

OLD = {"kubevirt.io/nodeName": "n1"}


def asked(
    obj: Any, old: Any = None, *, mutating: bool = True, kind: str = "", **more: Any
) -> dict[str, Any]:
    """Return the webhook's answer about an object that is created, or changed from `old`."""
    request = {
        "uid": "u1",
        "kind": {"group": "kubevirt.io", "version": "v1", "kind": kind or obj["kind"]},
        "operation": "UPDATE" if old else "CREATE",
        "name": "a",
        "object": obj,
        "oldObject": old,
        **more,
    }
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answered = answer(json.loads(json.dumps(review)), mutating=mutating)
    assert answered["response"].pop("uid") == "u1"
    said: dict[str, Any] = answered["response"]
    return said


def causes(said: dict[str, Any]) -> list[str]:
    """Return the fields that are refused."""
    assert said["allowed"] is False
    return [one["field"] for one in said["status"]["details"]["causes"]]


def patched(obj: Any, said: dict[str, Any]) -> Any:
    """Return the object after the patch, as the API server makes it. Lists are not patched."""
    whole = copy.deepcopy(obj)
    for step in json.loads(base64.b64decode(said["patch"])) if "patch" in said else ():
        *way, last = (
            one.replace("~1", "/").replace("~0", "~") for one in step["path"].split("/")[1:]
        )
        here = whole
        for name in way:
            here = here[name]
        if step["op"] == "remove":
            del here[last]
        else:
            here[last] = step["value"]
    return whole


def plain_vmi() -> dict[str, Any]:
    made = vmi()
    del made["metadata"]["finalizers"]
    made["spec"] = vm()["spec"]["template"]["spec"]
    return made


def test_a_new_vm_gets_its_defaults_and_finalizer() -> None:
    said = asked(vm())
    assert said["allowed"]
    assert patched(vm(), said) == of_vm(vm())


def test_a_new_vmi_gets_its_defaults_and_finalizer() -> None:
    said = asked(plain_vmi())
    assert patched(plain_vmi(), said) == of_vmi(plain_vmi())


def test_a_complete_object_is_not_patched() -> None:
    assert asked(of_vm(vm())) == {"allowed": True}
    assert asked(of_vm(vm()), of_vm(vm())) == {"allowed": True}


def test_the_validating_webhook_patches_nothing() -> None:
    assert asked(vm(), mutating=False) == {"allowed": True}


@pytest.mark.parametrize("mutating", [True, False])
def test_all_problems_are_reported_together_in_kubevirts_words(mutating: bool) -> None:
    """One rule is checked by CEL, too, one only by the webhook, and one field is refused."""
    broken = template(
        {
            "domain.devices.disks.3": {"name": "other", "disk": {}},
            "domain.devices.disks.0.bootOrder": 1,
            "domain.devices.disks.1.bootOrder": 1,
            "domain.launchSecurity": {"sev": {}},
        }
    )
    said = asked(put(broken, {"spec.runStrategy": "Always"}), mutating=mutating)
    assert sorted(causes(said)) == [
        "spec.running",
        "spec.template.spec.domain.devices.disks[1].bootOrder",
        "spec.template.spec.domain.devices.disks[3].name",
        "spec.template.spec.domain.launchSecurity",
    ]
    status = said["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert "Running and RunStrategy are mutually exclusive" in status["message"]
    assert status["details"] | {"causes": []} == {
        "name": "a",
        "group": "kubevirt.io",
        "kind": "VirtualMachine",
        "causes": [],
    }


def test_an_update_is_refused_only_for_new_problems() -> None:
    """A VM from before a rule became stricter can still be halted and labelled."""
    old = template({"domain.launchSecurity": {"sev": {}}})
    assert asked(put(copy.deepcopy(old), {"spec.running": False}), old)["allowed"]
    assert asked(put(copy.deepcopy(old), {"metadata.labels": {"a": "b"}}), old)["allowed"]
    worse = put(copy.deepcopy(old), {"spec.runStrategy": "Always"})
    assert causes(asked(worse, old)) == ["spec.running"]


def test_a_replaced_vm_gets_its_machine_and_uuid_again() -> None:
    assert patched(vm(), asked(vm(), of_vm(vm()))) == of_vm(vm())


def test_users_cannot_change_a_vmis_spec_status_or_reserved_labels() -> None:
    old = put(vmi(), {"metadata.labels": OLD, "status": {"phase": "Running"}})
    changed = put(copy.deepcopy(old), {"spec.domain.cpu.cores": 4, "metadata.labels": {}})
    said = asked(changed, old, mutating=False)
    assert causes(said) == ["spec", "metadata.labels"]
    assert "update of VMI object is restricted" in said["status"]["message"]
    claims = put(copy.deepcopy(old), {"status": {"phase": "Failed"}, "metadata.labels.mine": "x"})
    assert patched(claims, asked(claims, old))["status"] == {"phase": "Running"}
    del old["status"]
    assert "status" not in patched(claims, asked(claims, old))
    assert asked(claims, old, mutating=False) == {"allowed": True}


def test_users_cannot_create_a_vmi_with_a_status_or_reserved_labels() -> None:
    claims = put(plain_vmi(), {"status": {"phase": "Running"}})
    assert "status" not in patched(claims, asked(claims))
    assert causes(asked(put(vmi(), {"metadata.labels": {NODE_LABEL: "n1"}}))) == ["metadata.labels"]


@pytest.mark.parametrize("mutating", [True, False])
def test_updates_of_a_deleted_object_are_admitted(mutating: bool) -> None:
    for old in (template({"domain.launchSecurity": {"sev": {}}}), vmi()):
        old = put(old, {"metadata.deletionTimestamp": "2026-11-22T10:00:00Z"})
        freed = put(copy.deepcopy(old), {"metadata.finalizers": [], "spec.terminationGrace": 1})
        assert asked(freed, old, mutating=mutating) == {"allowed": True}


@pytest.mark.parametrize(
    "review",
    [None, [], {}, {"request": []}, {"kind": "AdmissionReview", "request": {"uid": "a"}}],
)
def test_an_invalid_review_is_an_error(review: Any) -> None:
    with pytest.raises(ValueError, match="not an AdmissionReview"):
        answer(review, mutating=True)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Pod", {}),
        ("VirtualMachine", {"operation": "DELETE"}),
        ("VirtualMachine", {"subResource": "status"}),
    ],
)
def test_an_unexpected_kind_or_operation_is_refused_with_the_next_step(
    kind: str, more: Any
) -> None:
    said = asked({"kind": kind}, kind=kind, **more)
    assert (said["allowed"], said["status"]["code"]) == (False, 400)
    assert "correct the webhooks' rules" in said["status"]["message"]


@pytest.mark.parametrize(
    "spec",
    [None, 1, [], "x", {"template": 1}, {"template": {"spec": []}}, {"template": {"metadata": 1}}],
)
def test_an_object_of_any_shape_gets_an_answer(spec: Any) -> None:
    """The API server checks the schema after the mutating webhook."""
    for kind in ("VirtualMachine", "VirtualMachineInstance"):
        said = asked({"kind": kind, "metadata": {"name": "a"}, "spec": spec})
        assert not said["allowed"]
        assert asked({"kind": kind, "metadata": None, "spec": spec})["allowed"] is False


def test_an_answer_has_a_bounded_size() -> None:
    names = [{"name": "x" * 100_000, "disk": {}} for _ in range(15)]
    small = [{"name": f"d{index}", "disk": {}} for index in range(256)]
    for disks in (names, small):
        said = asked(template({"domain.devices.disks": disks}))
        assert len(causes(said)) <= MAX_CAUSES + 1
        assert len(json.dumps(said)) < (MAX_CAUSES + 2) * LONGEST * 5


def test_a_megabyte_is_reviewed_in_bounded_time() -> None:
    """The bound is in CPU seconds. A webhook has ten seconds, and shares its process."""
    notes = {f"note-{index}": "x" * 50 for index in range(16_000)}
    disks = [{"name": f"d{index}", "disk": {}} for index in range(36_000)]
    noted, crowded = put(vm(), {"metadata.annotations": notes}), {"domain.devices.disks": disks}
    crowd = ["spec.template.spec.domain.devices.disks"]
    for obj, wrong in ((noted, None), (template(crowded), crowd)):
        assert len(json.dumps(obj)) > 1_000_000
        began = time.process_time()
        said = asked(obj)
        assert time.process_time() - began < 2
        assert said["allowed"] if wrong is None else causes(said) == wrong
