"""The table has all of KubeVirt's fields, and each row takes effect."""

import re
from pathlib import Path
from typing import Any

import pytest

from virtbus.kubebridge.core.fields.row import Field, FieldType, Verdict
from virtbus.kubebridge.core.fields.table import VM, VMI
from virtbus.kubebridge.core.fields.translator import MAX_CAUSES, walk
from virtbus.schemas.api import VmCreate

FIELDS = (Path(__file__).parent / "kubevirt_fields.txt").read_text().split()
"""Fields of VirtualMachineInstanceSpec; KubeVirt at d923fdb8 (August 2026)."""
OF_VM = (
    *("dataVolumeTemplates[]", "instancetype", "preference", "runStrategy", "running"),
    *("template", "updateVolumesStrategy"),
)
ROWS = [row for row in VMI.rows if row.path]


def spec(path: str, value: Any) -> dict[str, Any]:
    """Return a spec with one field."""
    name, _, rest = path.partition(".")
    inner = spec(rest, value) if rest else value
    if name.endswith("[]"):
        listed = [inner] if rest or isinstance(value, dict) else value
        return {name.removesuffix("[]"): listed}
    return {name: inner}


def shown(path: str) -> str:
    return f"spec.{path.replace('[]', '[0]')}"


def ids(row: Field) -> str:
    return row.path


def covered(path: str) -> bool:
    """Return True if the field has a row, or a field above it is ignored or refused."""
    if VMI.by_path.get(path) is not None:
        return True
    above = path.rpartition(".")[0]
    while above:
        row = VMI.by_path.get(above)
        if row is not None:
            return row.verdict is not Verdict.MAPPED or row.kind in {FieldType.MAP, FieldType.ANY}
        above = above.rpartition(".")[0]
    return False


def test_every_field_of_kubevirt_has_a_row() -> None:
    open_maps = {"domain.resources.limits", "domain.resources.requests"}
    assert [path for path in FIELDS if not covered(path) and path not in open_maps] == []
    assert [path for path in OF_VM if VM.by_path.get(path) is None] == []


def test_every_row_is_a_field_of_kubevirt() -> None:
    fields = set(FIELDS)
    of_maps = re.compile(
        r"affinity\.|domain\.resources\.(limits|requests)\.|.*\.(secretRef|networkDataSecretRef|sysprep\.configMap|sysprep\.secret)\."
    )
    assert [r.path for r in ROWS if r.path not in fields and not of_maps.match(r.path)] == []


@pytest.mark.parametrize("row", [r for r in ROWS if r.verdict is not Verdict.MAPPED], ids=ids)
def test_unmapped_fields_are_refused_or_ignored(row: Field) -> None:
    value: Any = [{"a": 1}] if row.path.endswith("[]") else {"a": 1}
    found = [cause.field for cause in walk(spec(row.path, value), VMI, "spec").causes]
    refused = shown(row.path).removesuffix("[0]")
    assert found == ([] if row.verdict is Verdict.IGNORED else [refused])


@pytest.mark.parametrize("row", [r for r in ROWS if r.verdict is not Verdict.MAPPED], ids=ids)
def test_empty_values_are_accepted(row: Field) -> None:
    nothings: tuple[Any, ...] = (None, False, [])
    for nothing in nothings:
        assert walk(spec(row.path, nothing), VMI, "spec").causes == []


@pytest.mark.parametrize("row", [r for r in ROWS if r.values], ids=ids)
def test_an_unsupported_value_is_refused_with_the_next_step(row: Field) -> None:
    odd: Any = {FieldType.FLAG: False, FieldType.NUMBER: 7, FieldType.TEXT: "odd"}[row.kind]
    (cause,) = walk(spec(row.path, odd), VMI, "spec").causes
    assert cause.field == shown(row.path)
    assert row.instead in cause.message
    for value in row.values:
        assert walk(spec(row.path, value), VMI, "spec").causes == []


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind is not FieldType.ANY], ids=ids)
def test_a_value_of_another_type_is_reported_with_its_path(row: Field) -> None:
    odd: Any = (
        7
        if row.kind in {FieldType.TEXT, FieldType.OBJECT, FieldType.LIST, FieldType.MAP}
        else {"a": 1}
    )
    odd = "x" if row.kind is FieldType.FLAG else odd
    whole = spec(row.path, odd)
    found = [cause.field for cause in walk(whole, VMI, "spec").causes]
    assert found == [shown(row.path).removesuffix("[0]")]


@pytest.mark.parametrize("row", [r for r in ROWS if r.to], ids=ids)
def test_a_row_maps_to_an_existing_field(row: Field) -> None:
    model: Any = VmCreate.model_json_schema(by_alias=True)
    here: Any = model
    for name in row.to.replace("[]", ".[]").split("."):
        here = here["items"] if name == "[]" else here["properties"][name]
        ref = here.get("$ref") or next(
            (one["$ref"] for one in here.get("anyOf", ()) if "$ref" in one), None
        )
        if ref:
            here = model["$defs"][ref.rpartition("/")[2]]


def test_an_unknown_field_is_refused_with_the_closest_name() -> None:
    (cause,) = walk({"domain": {"cpus": {}}}, VMI, "spec").causes
    assert (cause.field, "did you mean cpu?" in cause.message) == ("spec.domain.cpus", True)


def test_the_number_of_reported_problems_is_bounded() -> None:
    walked = walk({f"field{number}": 1 for number in range(50_000)}, VMI, "spec")
    assert len(walked.causes) == MAX_CAUSES
