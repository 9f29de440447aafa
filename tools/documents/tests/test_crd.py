"""The CRDs have every field of KubeVirt, and API servers accept them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from virtbus.documents.crds import cel
from virtbus.documents.crds.crd import definitions
from virtbus.documents.crds.models.part import Part, Quantity, must, said
from virtbus.documents.crds.models.pods import WHOLE
from virtbus.documents.crds.schema import structural
from virtbus.documents.files import ROOT
from virtbus.kubebridge.core.validation.rules import CROWD_RULES, SPEC_RULES, VM_RULES, VMI_RULES

HERE = Path(__file__).parent
SPEC = (ROOT / "services/kubebridge/tests/kubevirt_fields.txt").read_text().split()
OBJECTS = (HERE / "kubevirt_objects.txt").read_text().split()
"""All fields except the spec of a VMI, after their kind; KubeVirt at d923fdb8 (August 2026)."""
DEFINITIONS = definitions()
KINDS = {one["spec"]["names"]["kind"]: plural for plural, one in DEFINITIONS.items()}
MANIFEST_BYTES = 200 * 1024
"""`kubectl apply` stores the object again in an annotation, which may have 256 KiB."""


def schema(plural: str) -> dict[str, Any]:
    found: dict[str, Any] = DEFINITIONS[plural]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(value: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each value's path and schema. The path of a list ends in `[]`."""
    inner = value.get("items", value)
    here = path if inner is value else f"{path}[]"
    yield here, value
    for name, one in inner.get("properties", {}).items():
        yield from nodes(one, f"{here}.{name}")


def paths(plural: str, kind: str) -> set[str]:
    return {path for path, _ in nodes(schema(plural), kind)}


def test_the_crds_have_every_field_of_kubevirts_spec() -> None:
    ours = paths("virtualmachineinstances", "VMI")
    ours |= {path.removesuffix("[]") for path in ours}
    assert {f"VMI.spec.{name}" for name in SPEC} - ours == set()


def test_the_crds_have_exactly_kubevirts_other_fields() -> None:
    ours = {
        path
        for kind, plural in KINDS.items()
        for path in paths(plural, kind)
        if not path.startswith(("VirtualMachine.spec.template.spec", "VirtualMachineInstance.spec"))
        if path.startswith((f"{kind}.spec", f"{kind}.status"))
    }
    kubernetes = {path for path in ours if ".metadata." in path}
    assert ours - {"KubeVirt.spec"} - kubernetes == set(OBJECTS)


def test_objects_cannot_be_nested_deeper_than_the_bridge_reads() -> None:
    open_ = {
        path
        for kind, plural in KINDS.items()
        for path, value in nodes(schema(plural), kind)
        if "x-kubernetes-preserve-unknown-fields" in value
    }
    assert open_ == {"KubeVirt.spec"}


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_every_field_has_a_type_and_a_description(plural: str) -> None:
    own = {f".{name}" for name in ("apiVersion", "kind", "metadata")}
    for path, value in nodes(schema(plural), ""):
        assert "type" in value or "x-kubernetes-int-or-string" in value, path
        assert value.get("description") or path in own, path


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_a_definition_fits_into_kubectls_annotation(plural: str) -> None:
    assert len(json.dumps(DEFINITIONS[plural])) < MANIFEST_BYTES


def test_each_rule_marked_for_cel_has_a_cel_row() -> None:
    rows = {(row.number, row.field) for row in (*cel.VM_ROWS, *cel.SPEC_ROWS)}
    rules = {
        (rule.number, rule.field)
        for rule in (*VM_RULES, *CROWD_RULES, *SPEC_RULES, *VMI_RULES)
        if rule.cel
    }
    assert rows | cel.BY_SCHEMA == rules
    assert rows & cel.BY_SCHEMA == set()


def test_only_a_machines_status_is_a_subresource() -> None:
    with_status = {
        plural
        for plural, one in DEFINITIONS.items()
        if "subresources" in one["spec"]["versions"][0]
    }
    assert with_status == {"virtualmachines", "kubevirts"}


def test_descriptions_of_refused_fields_give_the_reason() -> None:
    spec = schema("virtualmachines")["properties"]["spec"]["properties"]
    assert "Refused by virtbus" in spec["instancetype"]["description"]
    domain = spec["template"]["properties"]["spec"]["properties"]["domain"]["properties"]
    assert "Refused by virtbus" in domain["launchSecurity"]["description"]


class Inner(Part):
    """Something."""

    size: Quantity = must("Its size.")


class Outer(Part):
    """Something with things in it."""

    inner: Inner | None = said("One inner object.", **WHOLE)
    many: list[Inner] | None = said("Many inner objects.", max_length=3)
    word: str | None = said("A word.", default="yes", nullable=True)


def test_a_model_becomes_a_schema_without_references_and_nulls() -> None:
    made = structural(Outer, lambda path: f"({path})" if path == "many[].size" else "")
    inner = made["properties"]["inner"]
    assert (inner["type"], inner["required"]) == ("object", ["size"])
    assert inner["x-kubernetes-map-type"] == "atomic"
    assert inner["description"] == "One inner object."
    many = made["properties"]["many"]
    assert (many["type"], many["maxItems"]) == ("array", 3)
    size = many["items"]["properties"]["size"]
    assert size["x-kubernetes-int-or-string"] is True
    assert "type" not in size
    assert size["description"] == "Its size. (many[].size)"
    word = made["properties"]["word"]
    assert word == {"type": "string", "default": "yes", "nullable": True, "description": "A word."}
