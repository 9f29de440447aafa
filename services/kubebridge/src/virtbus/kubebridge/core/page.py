"""docs/reference/kubevirt-fields.md: the tables of fields, defaults and rules."""

from collections.abc import Iterable, Iterator

from virtbus.kubebridge.core.defaults import SPEC_DEFAULTS
from virtbus.kubebridge.core.fields.row import Field, Kind, Verdict
from virtbus.kubebridge.core.fields.table import ANNOTATIONS, VM, VMI
from virtbus.kubebridge.core.rules import (
    CROWD_RULES,
    RUN_RULES,
    SPEC_RULES,
    VM_RULES,
    VMI_RULES,
    Rule,
)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# KubeVirt's fields",
            "",
            "What virtbus makes of each field of `kubevirt.io/v1`. A manifest with a refused field"
            " is refused as a whole, all problems in one answer; nothing is dropped in silence."
            " `false`, an empty list and an empty string ask for nothing, and pass. What lies"
            " beneath an ignored or refused field shares its fate; a field that is not here is not"
            " KubeVirt's, and is refused.",
            "",
            "*Of virtbus* is the field that it becomes in a VM of virtbus (models.md); what has no"
            " such field acts as told under *How*. What a VM's status says, and its verbs:"
            " kubevirt-states.md. Where VMs run, and how Services find them:"
            " ../explanation/kubernetes-placement.md.",
            "",
            "## VirtualMachineInstance, `spec`",
            "",
            "Also below `spec.template.spec` of a VirtualMachine.",
            "",
            *_verdicts(VMI.rows),
            "## VirtualMachine, `spec`",
            "",
            *_verdicts(VM.rows),
            "## Annotations",
            "",
            "Of a VirtualMachineInstance or a VirtualMachine's template. Others are nobody's"
            " command, and are let be.",
            "",
            *_verdicts(tuple(ANNOTATIONS.values())),
            "## Defaults",
            "",
            "Filled in where a VirtualMachineInstance leaves them open. A VirtualMachine's template"
            " gets its architecture, its machine and a firmware uuid, made of its name.",
            "",
            *table(("Field", "Default"), ((f"`{one.path}`", one.what) for one in SPEC_DEFAULTS)),
            "## Rules between fields",
            "",
            "Each break is told in `details.causes` with its field. CEL: a CustomResourceDefinition"
            " can hold the rule by itself; else only the webhook does.",
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
        ("Mapped", {Verdict.MAPPED}, ("Field", "Of virtbus", "Taken", "How")),
        ("Ignored safely", {Verdict.IGNORED}, ("Field", "Why that is safe")),
        ("Refused", {Verdict.REFUSED}, ("Field", "Why", "Instead")),
    ):
        told = [row for row in rows if row.verdict in verdicts and says(row)]
        if told:
            yield from (f"### {title}", "")
            yield from table(heads, (_cells(row) for row in told))


def says(row: Field) -> bool:
    """False for an object that only holds others."""
    return row.kind not in {Kind.OBJECT, Kind.LIST} or bool(row.why)


def _cells(row: Field) -> tuple[str, ...]:
    if row.verdict is Verdict.MAPPED:
        taken = ", ".join(f"`{str(one).lower() if one is True else one}`" for one in row.values)
        taken = taken or (f"`{row.pattern}`" if row.pattern else str(row.kind))
        return f"`{row.path}`", f"`{row.to}`" if row.to else "", taken, row.why
    if row.verdict is Verdict.IGNORED:
        return f"`{row.path}`", row.why
    return f"`{row.path}`", row.why, row.instead


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table and an empty line."""
    cells = [heads, tuple("---" for _ in heads), *rows]
    return [
        *(
            "| " + " | ".join(one.replace("|", "\\|") for one in row).rstrip() + " |"
            for row in cells
        ),
        "",
    ]
