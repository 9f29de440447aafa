"""`virtbus bus rebuild`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples

TIMEOUT_S = 120.0
VM_HEADER = ("NAME", "NAMESPACE", "NODE", "STEP", "WHY")
NODE_HEADER = ("NODE", "VMS", "FOLLOWS THIS BUS", "WHY NOT")


@click.command(
    epilog=examples(
        """
        virtbus bus rebuild --dry-run        what the hosts know and the bus has not
        virtbus bus rebuild                  write it back, and let the hosts go on
        virtbus bus rebuild --accept-unsigned n1
        virtbus bus rebuild -o json | jq '.vms[] | select(.step == "conflict")'
        """
    )
)
@click.option("--dry-run", is_flag=True, help="Only tell; write nothing.")
@click.option(
    "--accept-unsigned",
    "accepted",
    multiple=True,
    metavar="NODE[/UID]",
    help="Believe this host of this VM, or of all of its VMs, without a signature.",
)
@verb
def command(invocation: Invocation, *, dry_run: bool, accepted: tuple[str, ...]) -> None:
    """Write back the VMs that the hosts know and the bus has lost.

    For a bus that was made anew, restored from a backup, or lost records. Every host keeps a copy
    of the records it acts on; the newer copy of each VM counts, whoever has it. No guest is
    restarted. A host that held its VMs because this is another bus than it had joined follows
    this one afterwards. Start all hosts first; the verb may be repeated.

    Secrets (cloud-init user data) are on no host but inside the seed disks, so they are not
    written back: a VM keeps the seed that it has, and cannot move to another host.

    STEP: add, the bus had lost it. raise and move, its host had moved on. end, its host had
    let go of it, so it was deleted. unsigned: a host's copy would win, and no controller of this
    bus has signed it, so the host may be lying, or the key was lost with the bus (a backup has
    it); see --accept-unsigned. conflict, you decide: WHY says between what.
    """
    asked: dict[str, object] = {"dry_run": dry_run}
    if accepted:
        asked["accept_unsigned"] = list(accepted)
    answer = invocation.call("bus", "rebuild", asked, timeout_s=TIMEOUT_S)
    invocation.show(answer, lambda: table(answer))
    vms, nodes = answer.get("vms") or [], answer.get("nodes") or []
    if not nodes:
        invocation.note("no host has shown itself; on each: virtbus node up")
    if dry_run:
        return
    conflicts = sum(vm.get("step") in {"conflict", "unsigned"} for vm in vms)
    apart = [str(node.get("node")) for node in nodes if not node.get("joined")]
    if conflicts or apart:
        what = [f"{conflicts} VM(s) in conflict"] if conflicts else []
        what += [f"not following: {', '.join(apart)}"] if apart else []
        hint = "settle what is named above, then repeat: virtbus bus rebuild"
        raise CliError(Exit.REFUSED, "not_whole", "; ".join(what), hint=hint)


def table(answer: Mapping[str, Any]) -> str:
    """What was done for VMs, then the nodes."""
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
    parts.append(output.table(NODE_HEADER, nodes))
    parts.append(f"{answer.get('kept', 0)} VM(s) were as they should be")
    return "\n\n".join(parts)
