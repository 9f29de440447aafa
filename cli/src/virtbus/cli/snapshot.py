"""Implements `virtbus snapshot create|list|get|update|restore|adopt|delete`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, operation, output, units
from virtbus.cli.failures import usage
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.named_deletes import delete_named
from virtbus.cli.vm.target import namespace_filter, namespace_option

_HERE = "virtbus.cli.snapshot"
HEADER = ("NAMESPACE", "NAME", "OF", "STATE", "SIZE", "NODE", "AGE", "MESSAGE")
STORED_S = 30.0
"""Within this time, a controller stores the end of an operation in the operation's snapshot."""


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}:create", "Freeze the disks of a VM, or a volume."),
        "list": (f"{_HERE}:listing", "List snapshots."),
        "get": (f"{_HERE}:get", "Show one snapshot."),
        "update": (f"{_HERE}:update", "Protect a snapshot, or end its protection."),
        "restore": (f"{_HERE}:restore", "Replace disks with the disks of a snapshot."),
        "adopt": (
            f"{_HERE}:adopt",
            "Write the missing record of a snapshot whose data is on a node.",
        ),
        "delete": (f"{_HERE}:delete", "Remove snapshots with their data."),
    },
    epilog=examples(
        """
        virtbus snapshot create web-1 --vm web
        virtbus vm stop web
        virtbus snapshot restore web-1
        virtbus snapshot list
        """
    ),
)
def command() -> None:
    """Manage snapshots: frozen copies of the disks of a VM or of a volume.

    A snapshot outlives its VM or volume. Its data is on the node of that VM or volume. Disks of a
    running guest are not copied: the guest continues to write in new files. Disks of a VM that is
    off are copied; on file systems with reflinks (XFS, btrfs), the copy shares their space.
    """


def _name(function: Any) -> Any:
    return click.argument("name", shell_complete=completion_sources.snapshots)(function)


def _wait(function: Any) -> Any:
    return click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait until the work has ended."
    )(function)


@click.command(
    epilog=examples(
        """
        virtbus snapshot create web-1 --vm web
        virtbus snapshot create data-1-monday --volume data-1 --protected
        """
    )
)
@click.argument("name")
@click.option("--vm", metavar="VM", shell_complete=completion_sources.vms, help="The source.")
@click.option(
    "--volume", metavar="VOLUME", shell_complete=completion_sources.volumes, help="The source."
)
@click.option("--protected", is_flag=True, help="Refuse deletes until this is cleared.")
@click.option("--layered", is_flag=True, help="Copy nothing, even if the VM is off.")
@click.option(
    "--uid", metavar="UUID", help="A uid of your choice: the same command may be repeated."
)
@_wait
@namespace_option
@verb
def create(invocation: Invocation, *, name: str, namespace: str, wait: bool, **flags: Any) -> None:
    """Make the snapshot NAME of all disks of a VM, or of a volume, at one instant.

    A running guest continues. If the guest has a guest agent, its file systems are frozen for that
    instant. A VM that is off can start again after the copy; an earlier start waits.
    """
    if (flags["vm"] is None) == (flags["volume"] is None):
        raise usage("a snapshot has one source", "give either --vm or --volume")
    asked = {"name": name, "namespace": namespace, "uid": flags["uid"] or uuid7()}
    asked |= {key: flags[key] for key in ("vm", "volume", "protected", "layered") if flags[key]}
    _accepted(invocation, "create", asked, wait=wait)


@click.command(
    epilog=examples(
        """
        virtbus snapshot restore web-1 --keep web-before
        virtbus snapshot restore web-1 --to web2
        """
    )
)
@_name
@click.option("--to", metavar="NAME", help="Another VM or volume, which gets the disks instead.")
@click.option(
    "--keep", metavar="NAME", help="Name of the new snapshot that gets the replaced disks."
)
@click.option(
    "--uid", metavar="UUID", help="Uid of the new snapshot: the same command may be repeated."
)
@_wait
@namespace_option
@verb
def restore(
    invocation: Invocation,
    *,
    name: str,
    namespace: str,
    uid: str | None,
    wait: bool,
    **flags: str | None,
) -> None:
    """Replace a volume, or the disks of a VM that is off, with the disks of the snapshot NAME.

    The replaced disks become a new snapshot, which is shown. Restore that snapshot to undo this
    command.
    """
    asked = {"name": name, "namespace": namespace, "keep_uid": uid or uuid7()}
    asked |= {key: value for key, value in flags.items() if value}
    _accepted(invocation, "restore", asked, wait=wait)


def _accepted(invocation: Invocation, action: str, asked: dict[str, Any], *, wait: bool) -> None:
    view = invocation.call("snapshot", action, asked)
    if not wait:
        invocation.show(view, lambda: table([view]))
        invocation.note(f"`virtbus operation watch {view.get('uid')}` shows its progress")
        return
    seen = completed(invocation, view)
    invocation.show(seen, lambda: table([seen]))


def completed(invocation: Invocation, view: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot after its operation. Wait up to STORED_S for the snapshot's update.

    Raises:
        CliError: the operation failed.
    """
    running = invocation.call("operation", "get", {"id": view.get("uid")})
    operation.refuse_failed(operation.until_ended(invocation, running))
    named = output.picked(view, "name", "namespace", "uid")
    until, pause_s = time.monotonic() + STORED_S, operation.pauses_s()
    seen = invocation.call("snapshot", "get", named)
    while seen.get("state") == "Creating" and time.monotonic() < until:
        time.sleep(next(pause_s))
        seen = invocation.call("snapshot", "get", named)
    return seen


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus snapshot list
        virtbus snapshot list --vm web
        """
    ),
)
@namespace_filter
@click.option("--vm", metavar="VM", shell_complete=completion_sources.vms, help="Only of this VM.")
@click.option(
    "--volume",
    metavar="VOLUME",
    shell_complete=completion_sources.volumes,
    help="Only of this volume.",
)
@verb
def listing(invocation: Invocation, *, namespace: str | None, **flags: str | None) -> None:
    """List snapshots with their sources and states."""
    given = {"namespace": namespace, **flags}
    query = {"limit": PAGE} | {key: value for key, value in given.items() if value}
    items = invocation.listed("snapshot", query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(epilog=examples("virtbus snapshot get web-1 -o yaml"))
@_name
@namespace_option
@verb
def get(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Show the snapshot NAME."""
    invocation.call_and_show("snapshot", "get", {"name": name, "namespace": namespace}, table)


@click.command(epilog=examples("virtbus snapshot update web-1 --no-protected"))
@_name
@click.option("--protected/--no-protected", required=True, help="Refuse deletes, or permit them.")
@namespace_option
@verb
def update(invocation: Invocation, *, name: str, protected: bool, namespace: str) -> None:
    """Change the snapshot NAME."""
    invocation.call_and_show(
        "snapshot", "update", {"name": name, "namespace": namespace, "protected": protected}, table
    )


@click.command(
    epilog=examples(
        """
        virtbus node audit n1                lists data of snapshots without a record
        virtbus snapshot adopt web-1 --node n1
        """
    )
)
@click.argument("name")
@click.option(
    "--node",
    metavar="NODE",
    required=True,
    shell_complete=completion_sources.nodes,
    help="The node that has the data.",
)
@click.option("--uid", metavar="UUID", help="The snapshot, if the node has several of that name.")
@namespace_option
@verb
def adopt(invocation: Invocation, *, name: str, node: str, uid: str | None, namespace: str) -> None:
    """Write the missing record of the snapshot NAME, whose data is on a node."""
    asked = {"name": name, "namespace": namespace, "node": node} | ({"uid": uid} if uid else {})
    invocation.call_and_show("snapshot", "adopt", asked, table)


@click.command(epilog=examples("virtbus snapshot delete web-1 web-2"))
@click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.snapshots)
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the data is removed."
)
@click.option("--timeout", default=60.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def delete(
    invocation: Invocation, *, names: tuple[str, ...], wait: bool, timeout: float, namespace: str
) -> None:
    """Remove snapshots with their data. This cannot be undone. VMs and volumes stay."""
    asked = [{"name": name, "namespace": namespace} for name in dict.fromkeys(names)]
    delete_named(invocation, "snapshot", asked, wait_s=timeout if wait else None)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of snapshots."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(view.get("state") or "-")
    return (
        str(view.get("namespace", "")),
        str(view.get("name", "")),
        f"{view.get('resource')}/{view.get('source')}",
        f"{state},protected" if view.get("protected") else state,
        units.size(view.get("size_bytes") or 0),
        str(view.get("node") or "-"),
        units.ago(view.get("created_ns")),
        str(view.get("message") or ""),
    )
