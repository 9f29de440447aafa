"""Implements `virtbus network`."""

import click

from virtbus.cli import output
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples


@click.group(
    cls=LazyGroup,
    verbs={"list": ("virtbus.cli.network:listing", "List the networks for a VM's NICs.")},
)
def command() -> None:
    """Show the networks that nodes offer."""


@click.command(name="list", epilog=examples("virtbus network list"))
@verb
def listing(invocation: Invocation) -> None:
    """List networks: `default` is built in, others are a node's CNI conflists."""
    items = invocation.listed("network")["items"]
    rows = [
        (
            item.get("name", ""),
            item.get("kind", ""),
            item.get("subnet") or "set per node",
            (item.get("detail") or {}).get("nodes") or "-",
        )
        for item in items
    ]
    invocation.show(
        {"items": items}, lambda: output.table(("NETWORK", "KIND", "SUBNET", "NODES"), rows)
    )
