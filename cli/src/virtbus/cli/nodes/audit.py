"""Implements `virtbus node audit`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import completion_sources, output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples

TIMEOUT_S = 70.0
ADOPTED = ("volume", "snapshot")
"""Kinds of findings for which --adopt writes a record."""
HEADER = ("NODE", "KIND", "VM", "WHAT", "REPAIR")


@click.command(
    epilog=examples(
        """
        virtbus node audit                   every host; prints what is left over, if anything
        virtbus node audit n1 --repair
        virtbus node audit n1 --adopt        after the loss of the bus: its volumes and snapshots
        virtbus node audit -o json | jq '.nodes[].findings'
        """
    )
)
@click.argument("name", required=False, shell_complete=completion_sources.nodes)
@click.option("--repair", is_flag=True, help="Remove orphans, and restore missing resources.")
@click.option("--adopt", is_flag=True, help="Write records for volumes and snapshots without one.")
@verb
def command(invocation: Invocation, *, name: str | None, repair: bool, adopt: bool) -> None:
    """Compare the host NAME, or every host, with the records of its VMs.

    It prints each domain, network, disk, file and status whose VM has no record. It also prints VMs
    that the bus has lost (kind record: `virtbus bus rebuild` restores them), data of volumes and
    snapshots without a record, and missing parts of networks (kind fault: bridge, nftables, links).
    Hosts repair findings by themselves after 10 minutes (the setting orphan_grace_s), or at once if
    the VM's record was deleted. --repair repairs them now. No repair ends a running guest or
    removes a volume. Disks are moved to the quarantine (`virtbus node quarantine`). Resources that
    virtbus did not make are ignored.

    --adopt writes a record for each volume and snapshot that has data but no record, as the host
    describes the data. For a single volume or snapshot, use `virtbus volume adopt` or `virtbus
    snapshot adopt`.
    """
    data: dict[str, Any] = {"repair": repair} | ({"node": name} if name else {})
    answer = invocation.call("node", "audit", data, timeout_s=TIMEOUT_S)
    tried: set[str] = set()
    while adopt and _adopt(invocation, answer, tried):  # each answer has only some findings
        answer = invocation.call("node", "audit", data, timeout_s=TIMEOUT_S)
    rows = _rows(answer)
    table = output.table(HEADER, rows) if rows else "all is well: nothing is left over"
    invocation.show(answer, lambda: table)
    open_ = sum(row[4] != "repaired" for row in rows)
    if open_:
        hint = "`virtbus node audit --repair` removes what REPAIR names; see --help for the rest"
        raise CliError(Exit.REFUSED, "findings", f"{open_} finding(s) remain", hint=hint)


def _adopt(invocation: Invocation, answer: Mapping[str, Any], tried: set[str]) -> bool:
    """Adopt the data of findings that are not in `tried`; return True if a record was written."""
    done = False
    for node in answer.get("nodes") or ():
        for found in node.get("findings") or ():
            kind, uid = str(found["kind"]), str(found.get("uid"))
            if kind not in ADOPTED or not found.get("name") or uid in tried:
                continue
            tried.add(uid)
            whose = {field: found[field] for field in ("name", "namespace", "uid")}
            try:
                invocation.call(kind, "adopt", {**whose, "node": node["node"]})
            except CliError as error:
                if error.exit_code > Exit.NOT_FOUND:
                    raise
                what = f"{kind} {whose['namespace']}/{whose['name']} of {node['node']}"
                invocation.note(f"{what} is not adopted: {error.message}")
            else:
                done = True
    return done


def _rows(answer: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for node in answer.get("nodes") or ():
        name = str(node.get("node"))
        if node.get("message"):
            rows.append((name, "node", "-", str(node["message"]), "-"))
        for found in node.get("findings") or ():
            done = "repaired" if found.get("repaired") else str(found.get("repair") or "-")
            uid, what = str(found.get("uid") or "-"), str(found.get("what"))
            rows.append((name, str(found.get("kind")), uid, what, done))
    return rows
