"""Implements `virtbus bus rebuild`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.security_group import rule_text, selector_text

UNSURE = {"unconfirmed", "conflict"}
TIMEOUT_S = 120.0
VM_HEADER = ("NAME", "NAMESPACE", "NODE", "STEP", "WHY")
GROUP_HEADER = ("GROUP", "NAMESPACE", "NODES", "STEP", "SELECTS", "RULES", "WHY")
NODE_HEADER = ("NODE", "VMS", "FOLLOWS THIS BUS", "WHY NOT")


@click.command(
    epilog=examples(
        """
        virtbus bus rebuild --dry-run        show what only the hosts have
        virtbus bus rebuild                  write it back, and let the hosts continue
        virtbus bus rebuild --accept-unsigned n1
        virtbus bus rebuild --accept-group n1/default/web@0f43…    as WHY names it
        virtbus bus rebuild -o json | jq '.vms[] | select(.step == "conflict")'
        """
    )
)
@click.option("--dry-run", is_flag=True, help="Only report; write nothing.")
@click.option(
    "--accept-unsigned",
    "accepted",
    multiple=True,
    metavar="NODE[/UID]",
    help="Trust this host's copy of this VM, or of all its VMs, without a signature.",
)
@click.option(
    "--accept-group",
    "groups",
    multiple=True,
    metavar="NODE/NAMESPACE/NAME@DIGEST",
    help="Restore this security group as this host has it, with the rules of this digest.",
)
@verb
def command(
    invocation: Invocation, *, dry_run: bool, accepted: tuple[str, ...], groups: tuple[str, ...]
) -> None:
    """Restore the VMs that hosts know and the bus has lost.

    Use it if a bus was created again, was restored from a backup, or lost records. Every host keeps
    a copy of its VMs' records. The newest copy of each VM is used. No guest is restarted. Hosts
    that had joined another bus do nothing to their VMs before this command; afterwards they follow
    this bus. Start all hosts first; the command may be repeated.

    Secrets (cloud-init user data) exist on hosts only inside the seed disks, so they are not
    restored: a VM keeps its seed, and cannot move to another host.

    STEP is add (the bus had lost the VM), raise or move (the VM's host had a newer record), end
    (the host had released the VM, which had been deleted), unsigned or conflict. With unsigned, a
    host's copy is newer, but no controller of this bus has signed it. The host may be lying, or the
    key was lost with the bus (a backup has it); see --accept-unsigned. With conflict, you decide:
    WHY names the two copies.

    Security groups that only hosts have are listed with their rules, which stay in force on these
    hosts. A group is restored after you have accepted a host's copy, because a host could invent a
    group. WHY names the copy with a digest of its rules. A copy that changed after that is a
    conflict.
    """
    asked: dict[str, object] = {"dry_run": dry_run}
    if accepted:
        asked["accept_unsigned"] = list(accepted)
    if groups:
        asked["accept_groups"] = list(groups)
    answer = invocation.call("bus", "rebuild", asked, timeout_s=TIMEOUT_S)
    invocation.show(answer, lambda: table(answer))
    vms, nodes = answer.get("vms") or [], answer.get("nodes") or []
    if not nodes:
        invocation.note("no host has shown itself; on each: virtbus node up")
    unsure = [one for one in answer.get("groups") or () if one.get("step") in UNSURE]
    if unsure:
        count = len(unsure) + int(answer.get("groups_omitted") or 0)
        invocation.note(f"{count} security group(s) are only on hosts: see --accept-group")
    if answer.get("groups_message"):
        invocation.note(f"security groups may be missing: {answer['groups_message']}")
    if dry_run:
        return
    conflicts = sum(vm.get("step") in {"conflict", "unsigned"} for vm in vms)
    apart = [str(node.get("node")) for node in nodes if not node.get("joined")]
    if conflicts or apart:
        what = [f"{conflicts} VM(s) in conflict"] if conflicts else []
        what += [f"not following: {', '.join(apart)}"] if apart else []
        hint = "resolve the problems above, then repeat: virtbus bus rebuild"
        raise CliError(Exit.REFUSED, "not_whole", "; ".join(what), hint=hint)


def table(answer: Mapping[str, Any]) -> str:
    """Return the answer as tables of VMs, security groups and nodes."""
    vms = [
        tuple(str(vm.get(key) or "-") for key in ("name", "namespace", "node", "step", "message"))
        for vm in answer.get("vms") or ()
    ]
    nodes = [
        (
            str(node.get("node")),
            str(node.get("vms", 0)),
            "yes" if node.get("joined") else "no",
            str(node.get("message") or "-"),
        )
        for node in answer.get("nodes") or ()
    ]
    parts = [output.table(VM_HEADER, vms)] if vms else []
    groups = [_group(one) for one in answer.get("groups") or ()]
    parts += [output.table(GROUP_HEADER, groups)] if groups else []
    parts.append(output.table(NODE_HEADER, nodes))
    parts.append(f"{answer.get('kept', 0)} VM(s) were as they should be")
    return "\n\n".join(parts)


def _group(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a group's row with all rules, because a person must check them."""
    spec = one.get("spec") or {}
    return (
        str(one.get("name")),
        str(one.get("namespace")),
        ",".join(map(str, one.get("nodes") or ())),
        str(one.get("step")),
        selector_text(spec.get("selector") or {}),
        "; ".join(_rules(spec)) or "-",
        str(one.get("message") or "-"),
    )


def _rules(spec: Mapping[str, Any]) -> list[str]:
    rules = [rule_text(rule) for rule in spec.get("rules") or ()]
    if (isolates := spec.get("isolates")) is not None:
        rules.append(f"isolates {', '.join(map(str, isolates)) or 'nothing'}")
    return rules
