"""Implements `virtbus node quarantine list|adopt|keep|purge`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.completion_sources import node_argument
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.nodes.quarantine"
TIMEOUT_S = 70.0
HEADER = ("ENTRY", "VM", "STATE", "SIZE", "SINCE", "WHY")


@click.group(
    cls=LazyGroup,
    verbs={
        "list": (f"{_HERE}:listing", "List the VMs and disks of a host that have no record."),
        "adopt": (f"{_HERE}:adopt", "Turn an entry back into a VM."),
        "keep": (f"{_HERE}:keep", "End a VM without a record; its disks stay in quarantine."),
        "purge": (f"{_HERE}:purge", "Remove the disks of an entry for good."),
    },
    epilog=examples(
        """
        virtbus node quarantine list n1
        virtbus node quarantine adopt n1 0192f0c1-2d3e-7abc-8def-0123456789ab
        """
    ),
)
def command() -> None:
    """Manage the VMs and disks of a host that have no record on the bus.

    The services never end these VMs or remove these disks; only these commands do.
    """


def _entry(function: Any) -> Any:
    return click.argument("entry", metavar="UID")(function)


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus node quarantine list n1
        virtbus node quarantine list n1 -o json | jq '.entries[].entry'
        """
    ),
)
@node_argument
@verb
def listing(invocation: Invocation, *, name: str) -> None:
    """List the VMs and disks on the host NAME that have no record.

    A `held` VM is in place, and its guest may be running. A `kept` entry has only disks.
    """
    answer = invocation.call("node", "quarantine", {"node": name})
    if not answer.get("entries"):
        invocation.note(f"nothing is held or kept on {name}")
        if invocation.for_eyes:
            return
    invocation.show(answer, lambda: table(answer))


@click.command(
    epilog=examples(
        """
        virtbus node quarantine adopt n1 0192f0c1-2d3e-7abc-8def-0123456789ab
        virtbus node quarantine adopt n1 0192f0c1-2d3e-7abc-8def-0123456789ab --name rescued
        """
    )
)
@node_argument
@_entry
@click.option(
    "--name",
    "new_name",
    metavar="NEW",
    help="Adopt kept disks as a new VM of this name, or rename a held VM.",
)
@verb
def adopt(invocation: Invocation, *, name: str, entry: str, new_name: str | None) -> None:
    """Turn the entry UID on the host NAME back into a VM.

    A held VM continues unchanged. Kept disks become the VM to which they belonged, which is then
    off. If the host has a VM with this uid again, that VM must be off. That VM gets the kept disks,
    and its present disks are kept instead.
    """
    more = {"name": new_name} if new_name else {}
    answer = _do(invocation, "adopt", name, entry, **more)
    uid = answer.get("adopted")
    invocation.show(answer, lambda: f"{entry} is VM {uid} now; see `virtbus vm get {uid}`")


@click.command(
    epilog=examples(
        """
        virtbus node quarantine keep n1 0192f0c1-2d3e-7abc-8def-0123456789ab
        """
    )
)
@node_argument
@_entry
@verb
def keep(invocation: Invocation, *, name: str, entry: str) -> None:
    """End the VM UID, which has no record, on the host NAME, and keep its disks."""
    answer = _do(invocation, "keep", name, entry)
    invocation.show(answer, lambda: f"{entry} is ended; its disks, if written to, are kept")


@click.command(
    epilog=examples(
        """
        virtbus node quarantine purge n1 0192f0c1-2d3e-7abc-8def-0123456789ab
        """
    )
)
@node_argument
@_entry
@verb
def purge(invocation: Invocation, *, name: str, entry: str) -> None:
    """Remove the disks of the entry UID on the host NAME. This cannot be undone."""
    answer = _do(invocation, "purge", name, entry)
    invocation.show(answer, lambda: f"{entry} is removed from {name}")


def _do(invocation: Invocation, what: str, node: str, entry: str, **more: Any) -> Mapping[str, Any]:
    data = {"node": node, "do": what, "entry": entry, **more}
    return invocation.call("node", "quarantine", data, timeout_s=TIMEOUT_S)


def table(answer: Mapping[str, Any]) -> str:
    """Return a table of entries."""
    entries = list(answer.get("entries") or ())
    text = output.table(HEADER, [_row(entry) for entry in entries])
    more = int(answer.get("total") or 0) - len(entries)
    return f"{text}\n… and {more} more" if more > 0 else text


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    since = int(entry.get("since_ns") or 0) / 1e9
    name = str(entry.get("name") or "-")
    vm = f"{entry['namespace']}/{name}" if entry.get("namespace") else name
    return (
        str(entry.get("entry", "")),
        vm,
        "held" if entry.get("held") else "kept",
        "-" if entry.get("held") else units.size(entry.get("bytes")),
        datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M") if since else "-",
        str(entry.get("why") or "-"),
    )
