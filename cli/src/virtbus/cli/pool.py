"""Implements `virtbus pool list|get`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.schemas.pool import PoolKind, abilities_of

_HERE = "virtbus.cli.pool"
HEADER = ("NODE", "POOL", "KIND", "STATE", "SIZE", "FREE", "PROMISED", "VOLUMES", "ABILITIES")


@click.group(
    cls=LazyGroup,
    verbs={
        "list": (f"{_HERE}:listing", "List the pools of all nodes."),
        "get": (f"{_HERE}:get", "Show one pool on each node that has it."),
    },
    epilog=examples(
        """
        virtbus pool list
        virtbus volume create data-1 --size 10GiB --pool fast
        """
    ),
)
def command() -> None:
    """Show the pools that hold the data of volumes.

    Each node has the pool `local`. Others are in the file pools.toml of the node.
    """


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus pool list
        virtbus pool list -o json | jq '.items[] | select(.state != "Ready")'
        """
    ),
)
@verb
def listing(invocation: Invocation) -> None:
    """List pools: SIZE, FREE, and what their volumes were PROMISED of what they may be."""
    items = _pools(invocation)
    if not items:
        invocation.note("no node has reported a pool")
    invocation.show({"items": items}, lambda: table(items))
    for item in items:
        if item.get("message"):
            invocation.note(f"{item.get('node')}: {item.get('name')}: {item.get('message')}")


@click.command(epilog=examples("virtbus pool get fast -o yaml"))
@click.argument("name")
@verb
def get(invocation: Invocation, *, name: str) -> None:
    """Show the pool NAME on each node that has it, with the reason of its state."""
    items = [item for item in _pools(invocation) if item.get("name") == name]
    if not items:
        message = f"no node has a pool {name}"
        raise CliError(Exit.NOT_FOUND, "pool_unknown", message, hint="`virtbus pool list`")
    invocation.show({"items": items}, lambda: table(items))
    for item in items:
        if item.get("message"):
            invocation.note(f"{item.get('node')}: {item.get('message')}")


def _pools(invocation: Invocation) -> list[dict[str, Any]]:
    found = []
    for node in invocation.listed("node")["items"]:
        for pool in node.get("pools") or ():
            kind = PoolKind(str(pool.get("kind")))
            abilities = abilities_of(str(pool.get("name")), kind)._asdict()
            found.append({"node": node.get("node"), **pool, "abilities": abilities})
    return found


def table(items: list[dict[str, Any]]) -> str:
    """Return a table with a row for each pool of each node."""
    return output.table(HEADER, [_row(item) for item in items])


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    size, limit = item.get("size_bytes") or 0, item.get("overcommit") or 0
    promised = units.size(item.get("allocated_bytes") or 0)
    abilities = item.get("abilities", {})
    able = [name for name, is_able in abilities.items() if is_able]
    return (
        str(item.get("node", "")),
        str(item.get("name", "")),
        str(item.get("kind", "")),
        str(item.get("state", "")),
        units.size(size) if size else "-",
        units.size(item.get("free_bytes")) if size and not abilities.get("assigned") else "-",
        f"{promised}/{units.size(int(size * limit))}" if limit and size else promised,
        str(item.get("volumes", 0)),
        ",".join(able) or "-",
    )
