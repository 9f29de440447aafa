"""Implements `virtbus node` and `virtbus node list`."""

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
        "up": (
            "virtbus.cli.up.node_command",
            "Run this host's services on a bus elsewhere.",
        ),
        "list": ("virtbus.cli.node:listing", "List the hosts, their size and allocations."),
        "get": ("virtbus.cli.nodes.cordon:get", "Show a host, its desired state and its VMs."),
        "cordon": ("virtbus.cli.nodes.cordon:cordon", "Place no new VM on a host."),
        "uncordon": (
            "virtbus.cli.nodes.cordon:uncordon",
            "Place VMs on a host again; ends a drain.",
        ),
        "audit": ("virtbus.cli.nodes.audit", "Find objects on hosts that no record accounts for."),
        "quarantine": (
            "virtbus.cli.nodes.quarantine",
            "List, adopt, keep or purge VMs and disks without a record.",
        ),
        "drain": ("virtbus.cli.nodes.drain", "Cordon a host and move its VMs to others."),
        "fence": ("virtbus.cli.nodes.hosts:fence", "Confirm that a silent host is powered off."),
        "unfence": ("virtbus.cli.nodes.hosts:unfence", "End the fence of a host that is back."),
        "takeover": ("virtbus.cli.nodes.hosts:takeover", "Give a node to another host."),
        "approve": (
            "virtbus.cli.nodes.hosts:approve",
            "Approve the labels and size that a node reports.",
        ),
        "forget": ("virtbus.cli.nodes.hosts:forget", "Remove the data of a host that is gone."),
    },
)
def command() -> None:
    """Manage the hosts that run VMs."""


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
    """List nodes; CPUS and MEMORY show allocated / total."""
    page = invocation.listed("node")
    items = page["items"]
    if not items:
        invocation.note("no nodes; on each host: virtbus up")
    alarms = list(page.get("alarms") or ())
    for alarm in alarms:
        invocation.note(f"alarm: {alarm}")
    invocation.show({"items": items, "alarms": alarms}, lambda: table(items))


def table(items: list[Mapping[str, Any]]) -> str:
    """Return a table of nodes (`items` of the API's answer)."""
    return output.table(HEADER, [_row(item) for item in items])


def state(item: Mapping[str, Any]) -> str:
    """Return the node's state and desired state, for example `ready,cordoned`."""
    node_spec = item.get("node_spec") or {}
    words = [str(item.get("state", ""))]
    if node_spec.get("fenced"):
        words.append("fenced")
    if node_spec.get("draining") and "draining" not in words:
        words.append("draining")
    elif node_spec.get("cordoned") and not node_spec.get("draining"):
        words.append("cordoned")
    return ",".join(words)


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    memory = (
        f"{units.size(item.get('committed_memory_bytes'))}/{units.size(item.get('memory_bytes'))}"
    )
    return (
        str(item.get("node", "")),
        state(item),
        str(item.get("vms", 0)),
        f"{item.get('committed_vcpus', 0)}/{item.get('max_vcpus') or item.get('cpus', 0)}",
        memory,
        units.size(item.get("disk_free_bytes")),
        ",".join(item.get("accelerators") or ()) or "-",
        f"{units.duration(float(item.get('age_s') or 0))} ago",
    )
