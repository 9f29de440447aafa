"""`virtbus node get`, `cordon` and `uncordon`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import node as nodes
from virtbus.cli import output, units
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.target import node_argument


@click.command(
    epilog=examples(
        """
        virtbus node get n1
        virtbus node get n1 -o json | jq '.vms[] | {name, state, stays}'
        """
    )
)
@node_argument
@verb
def get(invocation: Invocation, *, name: str) -> None:
    """Show the host NAME, what is wanted of it, and its VMs."""
    show(invocation, invocation.call("node", "get", {"node": name}))


@click.command(
    epilog=examples(
        """
        virtbus node cordon n1               no new VM comes to n1; those there run on
        virtbus node drain n1                and the VMs there leave
        virtbus node uncordon n1             as before
        """
    )
)
@node_argument
@verb
def cordon(invocation: Invocation, *, name: str) -> None:
    """Let the host NAME take no new VM; what is there runs on."""
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
    """Let the host NAME take VMs again. A drain ends; what has left does not come back."""
    show(invocation, invocation.call("node", "uncordon", {"node": name}))


def show(invocation: Invocation, detail: Mapping[str, Any]) -> None:
    """Print a NodeDetail."""
    invocation.show(detail, lambda: table(detail))


def table(detail: Mapping[str, Any]) -> str:
    """The node's line, and a line a VM."""
    node: Mapping[str, Any] = detail.get("node") or {}
    text = nodes.table([node])
    fence = (node.get("wish") or {}).get("fenced")
    if fence:
        text += f"\n\nfenced by {output.safe(fence.get('by'))}: {output.safe(fence.get('why'))}"
    held, kept = int(node.get("held") or 0), int(node.get("quarantined") or 0)
    if held or kept:
        size = units.size(node.get("quarantined_bytes"))
        name = output.safe(node.get("node"))
        text += (
            f"\n\nwithout a record: {held} VM(s) held, {kept} in quarantine ({size}); "
            f"virtbus node quarantine list {name}"
        )
    vms = detail.get("vms") or []
    if not vms:
        return text
    rows = [
        (
            str(vm.get("namespace", "")),
            str(vm.get("name", "")),
            str(vm.get("state", "")),
            "leaving" if vm.get("leaving") else str(vm.get("stays") or "-"),
        )
        for vm in vms
    ]
    return text + "\n\n" + output.table(("NAMESPACE", "VM", "STATE", "DRAIN"), rows)
