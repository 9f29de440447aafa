"""Implements `virtbus node audit`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import completion_sources, output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples

TIMEOUT_S = 70.0
HEADER = ("NODE", "KIND", "VM", "WHAT", "REPAIR")


@click.command(
    epilog=examples(
        """
        virtbus node audit                   every host; prints what is left over, if anything
        virtbus node audit n1 --repair
        virtbus node audit -o json | jq '.nodes[].findings'
        """
    )
)
@click.argument("name", required=False, shell_complete=completion_sources.nodes)
@click.option("--repair", is_flag=True, help="Remove orphans, restore missing resources.")
@verb
def command(invocation: Invocation, *, name: str | None, repair: bool) -> None:
    """Compare the host NAME, or every host, with the records of its VMs.

    It prints each domain, network, disk, file and status whose VM has no record. It also prints VMs
    that the bus has lost (kind record: `virtbus bus rebuild` restores them), data of volumes
    without a record (`virtbus volume adopt`), and missing parts of networks (kind fault: bridge,
    nftables, links). Hosts repair findings by themselves after 10 minutes; --repair does it now. No
    repair ends a running guest or removes a volume. Disks are moved to the quarantine (`virtbus
    node quarantine`). Resources that virtbus did not make are ignored.
    """
    data: dict[str, Any] = {"repair": repair} | ({"node": name} if name else {})
    answer = invocation.call("node", "audit", data, timeout_s=TIMEOUT_S)
    rows = _rows(answer)
    table = output.table(HEADER, rows) if rows else "all is well: nothing is left over"
    invocation.show(answer, lambda: table)
    open_ = sum(row[4] != "repaired" for row in rows)
    if open_:
        hint = "`virtbus node audit --repair` removes what REPAIR names; see --help for the rest"
        raise CliError(Exit.REFUSED, "findings", f"{open_} finding(s) remain", hint=hint)


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
