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
PLACES_HEADER = ("NODE", "VOLUME", "PLACE")
UNKNOWN = "unknown"
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

    Each node has the pool `local`. The file pools.toml of a node defines its other pools.
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
    """List pools. PROMISED is the total size of a pool's volumes, then after a slash its limit."""
    items = _pools(invocation)
    if not items:
        invocation.note("no node has reported a pool")
    invocation.show({"items": items}, lambda: table(items))
    for item in items:
        for remark in _remarks(item):
            invocation.note(f"{item.get('node')}: {item.get('name')}: {remark}")


@click.command(epilog=examples("virtbus pool get fast -o yaml"))
@click.argument("name")
@verb
def get(invocation: Invocation, *, name: str) -> None:
    """Show the pool NAME on each node, and each device, export or file assigned to a volume."""
    items = [item for item in _pools(invocation) if item.get("name") == name]
    if not items:
        message = f"no node has a pool {name}"
        raise CliError(Exit.NOT_FOUND, "pool_unknown", message, hint="`virtbus pool list`")
    invocation.show({"items": items}, lambda: "\n\n".join((table(items), *places(items))))
    for item in items:
        for remark in _remarks(item):
            invocation.note(f"{item.get('node')}: {remark}")


def _pools(invocation: Invocation) -> list[dict[str, Any]]:
    found = []
    for node in invocation.listed("node")["items"]:
        for pool in node.get("pools") or ():
            abilities = _abilities(str(pool.get("name")), str(pool.get("kind")))
            found.append({"node": node.get("node"), **pool, "abilities": abilities})
    return found


def _abilities(name: str, kind: str) -> dict[str, bool]:
    """Return a pool's abilities; empty for an unknown kind, for example of a newer node."""
    try:
        return abilities_of(name, PoolKind(kind))._asdict()
    except ValueError:
        return {}


def table(items: list[dict[str, Any]]) -> str:
    """Return a table of the pools of all nodes."""
    return output.table(HEADER, [_row(item) for item in items])


def places(items: list[dict[str, Any]]) -> list[str]:
    """Return a list with one table: the size of each device, export or file of a volume.

    Without assigned volumes, the list is empty.
    """
    rows = [
        (str(item.get("node", "")), volume, _place(item, volume))
        for item in items
        for volume in item.get("assigned") or ()
    ]
    return [output.table(PLACES_HEADER, rows)] if rows else []


def _place(item: Mapping[str, Any], volume: str) -> str:
    size = (item.get("place_bytes") or {}).get(volume)
    return UNKNOWN if size is None else units.size(size)


def _remarks(item: Mapping[str, Any]) -> list[str]:
    """Return the reason of a pool's state, and the age of sizes that the server did not confirm."""
    found = [str(item["message"])] if item.get("message") else []
    if then_ns := item.get("places_confirmed_ns"):
        found.append(f"sizes are {units.ago(then_ns)} old: the server has not confirmed them since")
    return found


def _size(item: Mapping[str, Any]) -> str:
    size, known = item.get("size_bytes") or 0, item.get("place_bytes") or {}
    assigned = item.get("assigned") or ()
    if all(volume in known for volume in assigned):
        return units.size(size) if size else "-"
    return f">{units.size(size)}" if size else UNKNOWN


def _free(item: Mapping[str, Any]) -> str:
    """Return the free space of a pool.

    The result is `unknown` for a pool on a server. It is `-` for a pool of assigned devices or of
    unknown size.
    """
    abilities = item.get("abilities", {})
    if abilities.get("shared"):
        return UNKNOWN
    known = item.get("size_bytes") and not abilities.get("assigned")
    return units.size(item.get("free_bytes")) if known else "-"


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    size, limit = item.get("size_bytes") or 0, item.get("overcommit") or 0
    promised = units.size(item.get("allocated_bytes") or 0)
    able = [name for name, is_able in item.get("abilities", {}).items() if is_able]
    return (
        str(item.get("node", "")),
        str(item.get("name", "")),
        str(item.get("kind", "")),
        str(item.get("state", "")),
        _size(item),
        _free(item),
        f"{promised}/{units.size(int(size * limit))}" if limit and size else promised,
        str(item.get("volumes", 0)),
        ",".join(able) or "-",
    )
