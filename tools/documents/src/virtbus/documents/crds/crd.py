"""Builds the CustomResourceDefinitions of kubevirt.io/v1, with KubeVirt's names and columns."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from virtbus.documents.crds import cel
from virtbus.documents.crds.models.installation import KubeVirt
from virtbus.documents.crds.models.instance import VirtualMachineInstance
from virtbus.documents.crds.models.virtualmachine import VirtualMachine
from virtbus.documents.crds.schema import Schema, structural
from virtbus.kubebridge.core.fields.row import Field, Verdict
from virtbus.kubebridge.core.fields.table import VM, VMI

GROUP = "kubevirt.io"
AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def column(name: str, path: str, **more: Any) -> Schema:
    """Return a column of `kubectl get`. Only `-o wide` shows columns with priority 1."""
    return {"name": name, "type": "string", "jsonPath": path, **more}


def condition(name: str, kind: str, **more: Any) -> Schema:
    """Return a column with the status of the condition of type `kind`."""
    return column(name, f".status.conditions[?(@.type=='{kind}')].status", **more)


class Resource(NamedTuple):
    """The input of one CRD. `rows` are the verdicts of virtbus on the CRD's fields, by path."""

    kind: str
    short_names: tuple[str, ...]
    columns: tuple[Schema, ...]
    model: type[BaseModel]
    rows: Mapping[str, Field]
    status: bool
    """True if status is a subresource.

    A VMI's status is no subresource, because KubeVirt's clients write the object as a whole.
    """
    held: Mapping[str, Schema] = {}
    """Schema keywords by path, for the rules that API servers check by themselves."""


def _rows(prefix: str, rows: tuple[Field, ...]) -> dict[str, Field]:
    return {f"{prefix}.{row.path}": row for row in rows if row.path}


RESOURCES = (
    Resource(
        "VirtualMachine",
        ("vm", "vms"),
        (
            AGE,
            column("Status", ".status.printableStatus", description="State for people"),
            condition("Ready", "Ready"),
        ),
        VirtualMachine,
        _rows("spec", VM.rows) | _rows("spec.template.spec", VMI.rows),
        status=True,
        held=cel.keywords(cel.VM_ROWS, "spec") | cel.of_spec("spec.template.spec"),
    ),
    Resource(
        "VirtualMachineInstance",
        ("vmi", "vmis"),
        (
            AGE,
            column("Phase", ".status.phase"),
            column("IP", ".status.interfaces[0].ipAddress"),
            column("NodeName", ".status.nodeName"),
            condition("Ready", "Ready"),
            condition("Live-Migratable", "LiveMigratable", priority=1),
            condition("Paused", "Paused", priority=1),
        ),
        VirtualMachineInstance,
        _rows("spec", VMI.rows),
        status=False,
        held=cel.of_spec("spec") | cel.keywords(cel.RUN_ROWS, "spec"),
    ),
    Resource(
        "KubeVirt",
        ("kv", "kvs"),
        (AGE, column("Phase", ".status.phase")),
        KubeVirt,
        {},
        status=True,
    ),
)


def definitions() -> dict[str, Schema]:
    """Return all definitions by plural name."""
    return {f"{one.kind.lower()}s": definition(one) for one in RESOURCES}


def definition(resource: Resource) -> Schema:
    """Return the definition as an object for `kubectl apply`."""
    schema = structural(resource.model, lambda path: _told(resource.rows.get(path)))
    for path, keywords in resource.held.items():
        _below(schema, path).update(keywords)
    named = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    schema["properties"] = {**named, "metadata": {"type": "object"}, **schema["properties"]}
    singular = resource.kind.lower()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": f"{singular}s",
                "singular": singular,
                "kind": resource.kind,
                "shortNames": list(resource.short_names),
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    **({"subresources": {"status": {}}} if resource.status else {}),
                    "additionalPrinterColumns": list(resource.columns),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _below(schema: Schema, path: str) -> Schema:
    """Return the schema at a path. `[]` stands for each item of a list."""
    for name in path.replace("[]", ".[]").split("."):
        schema = schema["items"] if name == "[]" else schema["properties"][name]
    return schema


def _told(row: Field | None) -> str:
    """Return the text that `kubectl explain` adds if virtbus differs from KubeVirt."""
    if row is None:
        return ""
    match row.verdict:
        case Verdict.MAPPED:
            return ""
        case Verdict.IGNORED:
            return f"Ignored by virtbus: {row.why}."
        case Verdict.REFUSED:
            return f"Refused by virtbus: {row.why}; {row.instead}."
