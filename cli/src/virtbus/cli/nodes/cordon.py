"""Implements `virtbus node get`, `cordon` and `uncordon`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import node as nodes
from virtbus.cli import output, units
from virtbus.cli.completion_sources import node_argument
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples


@click.command(
    epilog=examples(
        """
        virtbus node get n1
        virtbus node get n1 -o json | jq '.vms[] | {name, state, eviction_blocked_reason}'
        """
    )
)
@node_argument
@verb
def get(invocation: Invocation, *, name: str) -> None:
    """Show the host NAME, its desired state, and its VMs."""
    show(invocation, invocation.call("node", "get", {"node": name}))


@click.command(
    epilog=examples(
        """
        virtbus node cordon n1               n1 gets no new VM; its VMs keep running
        virtbus node drain n1                and the VMs there leave
        virtbus node uncordon n1             as before
        """
    )
)
@node_argument
@verb
def cordon(invocation: Invocation, *, name: str) -> None:
    """Place no new VMs on the host NAME; its VMs keep running."""
    show(invocation, invocation.call("node", "cordon", {"node": name}))


@click.command(
    epilog=examples(
        """
        virtbus node uncordon n1             n1 takes VMs again; ends a drain as well
        """
    )
)
@node_argument
@verb
def uncordon(invocation: Invocation, *, name: str) -> None:
    """Place new VMs on the host NAME again. This ends a drain; evacuated VMs do not return."""
    show(invocation, invocation.call("node", "uncordon", {"node": name}))


def show(invocation: Invocation, detail: Mapping[str, Any]) -> None:
    """Print the API's answer about one node (a `NodeDetail` as a map)."""
    invocation.show(detail, lambda: table(detail))


def table(detail: Mapping[str, Any]) -> str:
    """Return the node's row, remarks about the node, and a row for each of its VMs."""
    node: Mapping[str, Any] = detail.get("node") or {}
    text = nodes.table([node])
    fence = (node.get("node_spec") or {}).get("fenced")
    if fence:
        text += f"\n\nfenced by {output.safe(fence.get('by'))}: {output.safe(fence.get('why'))}"
    if (used := int(node.get("image_bytes") or 0)) or node.get("image_quota_bytes"):
        quota = int(node.get("image_quota_bytes") or 0)
        text += f"\n\nimages: {units.size(used)}" + (f" of {units.size(quota)}" if quota else "")
    held, kept = int(node.get("held") or 0), int(node.get("quarantined") or 0)
    if held or kept:
        size = units.size(node.get("quarantined_bytes"))
        name = output.safe(node.get("node"))
        text += (
            f"\n\nwithout a record: {held} VM(s) held, {kept} in quarantine ({size}); "
            f"virtbus node quarantine list {name}"
        )
    for rival in node.get("rivals") or ():
        where = output.safe(rival.get("hostname") or "a host")
        text += (
            f"\n\na second agent on {where} ({output.safe(rival.get('instance'))}) is kept out: "
        )
        text += output.safe(rival.get("why"))
    if more := node.get("unapproved"):
        names = ", ".join(output.safe(one) for one in more)
        text += f"\n\nattracts no VM until `virtbus node approve`: {names}"
    vms = detail.get("vms") or []
    if not vms:
        return text
    rows = [
        (
            str(vm.get("namespace", "")),
            str(vm.get("name", "")),
            str(vm.get("state", "")),
            "evacuating" if vm.get("evacuating") else str(vm.get("eviction_blocked_reason") or "-"),
        )
        for vm in vms
    ]
    return text + "\n\n" + output.table(("NAMESPACE", "VM", "STATE", "DRAIN"), rows)
