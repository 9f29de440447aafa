"""Generates docs/reference/kubevirt-fields.md: the tables of fields, defaults and rules."""

from collections.abc import Iterable, Iterator

from virtbus.kubebridge.core.fields.row import Field, FieldType, Verdict
from virtbus.kubebridge.core.fields.table import ANNOTATIONS, VM, VMI
from virtbus.kubebridge.core.translation.defaults import SPEC_DEFAULTS
from virtbus.kubebridge.core.validation.rules import (
    CROWD_RULES,
    RUN_RULES,
    SPEC_RULES,
    VM_RULES,
    VMI_RULES,
    Rule,
)


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            "# KubeVirt's fields",
            "",
            "This page lists how virtbus treats each field of `kubevirt.io/v1`. A manifest with a"
            " refused field is refused as a whole, with all problems in one answer. No field is"
            " dropped silently. `false`, an empty list and an empty string are accepted anywhere."
            " The fields below an ignored or refused field are treated like it. A field that is not"
            " on this page is unknown to KubeVirt and is refused.",
            "",
            "The column *virtbus field* names the field in a VM of virtbus (models.md). The column"
            " *Details* describes the effect. A VM's states and verbs are in kubevirt-states.md."
            " Placement and Services are described in"
            " ../explanation/kubernetes-placement.md.",
            "",
            "## VirtualMachineInstance, `spec`",
            "",
            "The same fields are below `spec.template.spec` of a VirtualMachine.",
            "",
            *_verdicts(VMI.rows),
            "## VirtualMachine, `spec`",
            "",
            *_verdicts(VM.rows),
            "## Annotations",
            "",
            "Annotations of a VirtualMachineInstance or of a VirtualMachine's template. All other"
            " annotations are kept and have no effect.",
            "",
            *_verdicts(tuple(ANNOTATIONS.values())),
            "## Defaults",
            "",
            "A VirtualMachineInstance gets these values for missing fields. The template of a"
            " VirtualMachine gets an architecture, a machine type, and a firmware uuid. The uuid is"
            " derived from the name.",
            "",
            *table(("Field", "Default"), ((f"`{one.path}`", one.what) for one in SPEC_DEFAULTS)),
            "## Rules between fields",
            "",
            "The webhook checks all rules. It reports each violation in `details.causes` with its"
            " field. The column CEL tells if the CustomResourceDefinition checks the rule, too.",
            "",
            *table(
                ("Field", "Reason", "Message", "CEL"),
                [
                    *(_rule(rule, "spec.") for rule in VM_RULES),
                    *(_rule(rule, "") for rule in (*CROWD_RULES, *RUN_RULES, *SPEC_RULES)),
                    *(_rule(rule, "") for rule in VMI_RULES),
                ],
            ),
        ]
    )


def _rule(rule: Rule, prefix: str) -> tuple[str, ...]:
    message = rule.message.replace("{{}}", "\0").replace("{}", "…").replace("\0", "{}")
    return f"`{prefix}{rule.field}`", str(rule.reason), message, "yes" if rule.cel else "no"


def _verdicts(rows: tuple[Field, ...]) -> Iterator[str]:
    for title, verdicts, heads in (
        ("Mapped", {Verdict.MAPPED}, ("Field", "virtbus field", "Accepted values", "Details")),
        ("Ignored", {Verdict.IGNORED}, ("Field", "Reason")),
        ("Refused", {Verdict.REFUSED}, ("Field", "Reason", "Instead")),
    ):
        told = [row for row in rows if row.verdict in verdicts and says(row)]
        if told:
            yield from (f"### {title}", "")
            yield from table(heads, (_cells(row) for row in told))


def says(row: Field) -> bool:
    """Return False for an object or list that only holds other fields."""
    return row.kind not in {FieldType.OBJECT, FieldType.LIST} or bool(row.why)


def _cells(row: Field) -> tuple[str, ...]:
    if row.verdict is Verdict.MAPPED:
        taken = ", ".join(f"`{str(one).lower() if one is True else one}`" for one in row.values)
        taken = taken or (f"`{row.pattern}`" if row.pattern else str(row.kind))
        return f"`{row.path}`", f"`{row.to}`" if row.to else "", taken, row.why
    if row.verdict is Verdict.IGNORED:
        return f"`{row.path}`", row.why
    return f"`{row.path}`", row.why, row.instead


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end."""
    cells = [heads, tuple("---" for _ in heads), *rows]
    return [
        *(
            "| " + " | ".join(one.replace("|", "\\|") for one in row).rstrip() + " |"
            for row in cells
        ),
        "",
    ]
