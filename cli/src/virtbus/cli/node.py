"""`virtbus node`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples

HEADER = ("NODE", "STATE", "VMS", "CPUS", "MEMORY", "DISK FREE", "ACCELERATORS", "SEEN")


@click.group(
    cls=LazyGroup,
    verbs={
        "list": ("virtbus.cli.node:listing", "The hosts, what they have and what is given away.")
    },
)
def command() -> None:
    """The hosts that run VMs."""


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus node list
        virtbus node list -o json | jq '.items[] | {node, state, vms}'
        """
    ),
)
@verb
def listing(invocation: Invocation) -> None:
    """List nodes; CPUS and MEMORY are given away / there are."""
    page = invocation.call("node", "list", {})
    items = page.get("items") or []
    if not items:
        invocation.note("no nodes; on each host: virtbus up")
    invocation.show({"items": items}, lambda: table(items))


def table(items: list[Mapping[str, Any]]) -> str:
    """Nodes as a table."""
    return output.table(HEADER, [_row(item) for item in items])


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    memory = (
        f"{units.size(item.get('committed_memory_bytes'))}/{units.size(item.get('memory_bytes'))}"
    )
    return (
        str(item.get("node", "")),
        str(item.get("state", "")),
        str(item.get("vms", 0)),
        f"{item.get('committed_vcpus', 0)}/{item.get('max_vcpus') or item.get('cpus', 0)}",
        memory,
        units.size(item.get("disk_free_bytes")),
        ",".join(item.get("accelerators") or ()) or "-",
        f"{units.duration(float(item.get('age_s') or 0))} ago",
    )
