"""Implements `virtbus volume list|get|update|adopt|attach|detach|delete`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.cli import completion_sources, output, units
from virtbus.cli.failures import unknown, usage
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.named_deletes import delete_named
from virtbus.cli.vm import request
from virtbus.cli.vm.target import namespace_filter, namespace_option
from virtbus.schemas.disk import DiskBus
from virtbus.schemas.volume_spec import Access, Retention

_HERE = "virtbus.cli.volume"
POLL_S = 0.5
HEADER = ("NAMESPACE", "NAME", "STATE", "SIZE", "NODE", "HOLDER", "HELD", "SOURCE")


@click.group(
    cls=LazyGroup,
    verbs={
        "create": ("virtbus.cli.volume_create:command", "Make a volume: empty, or from a source."),
        "fill": ("virtbus.cli.volume_create:fill", "Copy the content of a volume again."),
        "list": (f"{_HERE}:listing", "List volumes."),
        "get": (f"{_HERE}:get", "Show one volume."),
        "update": (f"{_HERE}:update", "Grow a volume, protect it, or change its labels."),
        "adopt": (
            f"{_HERE}:adopt",
            "Write the missing record of a volume whose data is on a node.",
        ),
        "attach": (f"{_HERE}:attach", "Add a volume to a VM, also to one that runs."),
        "detach": (f"{_HERE}:detach", "Take a volume from its VM, also from one that runs."),
        "move": ("virtbus.cli.volume_move", "Move the data of a volume to another node."),
        "copy": ("virtbus.cli.volume_move:copy", "Copy a volume, also to another node."),
        "flatten": ("virtbus.cli.flatten:of_volume", "Copy the layers below a volume into it."),
        "export": ("virtbus.cli.export:of_volume", "Write a volume to a file on its node."),
        "delete": (f"{_HERE}:delete", "Remove volumes with their data."),
    },
    epilog=examples(
        """
        virtbus volume create data-1 --size 10GiB
        virtbus vm create web --image tiny --volume data-1
        virtbus vm delete web                the volume and its data stay
        virtbus volume list
        """
    ),
)
def command() -> None:
    """Manage volumes: disks with a name, whose data outlives their VMs.

    One VM at a time holds a volume. The hold begins with the VM's create or an attach, and ends
    with the VM's delete or a detach. If a volume was made with `--access shared`, several VMs may
    hold it. The data is on one node, and VMs that use the volume are placed on that node. Several
    nodes may reach a volume in a pool on a server.
    """


def _name(function: Any) -> Any:
    return click.argument("name", shell_complete=completion_sources.volumes)(function)


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus volume list
        virtbus volume list -n shop --label tier=db
        virtbus volume list -o json | jq -r '.items[] | select(.holder == "") | .name'
        """
    ),
)
@namespace_filter
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@verb
def listing(invocation: Invocation, *, namespace: str | None, label_texts: tuple[str, ...]) -> None:
    """List volumes with their states, nodes and holders."""
    query: dict[str, Any] = {"labels": request.labels(label_texts), "limit": PAGE}
    if namespace:
        query["namespace"] = namespace
    items = invocation.listed("volume", query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(epilog=examples("virtbus volume get data-1 -o yaml"))
@_name
@namespace_option
@verb
def get(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Show the volume NAME."""
    view = invocation.call_and_show("volume", "get", {"name": name, "namespace": namespace}, table)
    if view.get("message"):
        invocation.note(str(view["message"]))


@click.command(
    epilog=examples(
        """
        virtbus volume update data-1 --size 20GiB
        virtbus volume update data-1 --no-protected
        virtbus volume update db-data --retention Retain       outlives the VM that made it
        """
    )
)
@_name
@click.option("--size", metavar="SIZE", help="The new size. A volume never shrinks.")
@click.option("--protected/--no-protected", default=None, help="Refuse deletes, or permit them.")
@click.option(
    "--retention",
    type=click.Choice([str(one) for one in Retention]),
    help="The volume's fate when the VM that made it is deleted and still holds it.",
)
@click.option(
    "--label", "label_texts", multiple=True, metavar="K=V", help="Replaces all labels; repeatable."
)
@namespace_option
@verb
def update(
    invocation: Invocation,
    *,
    name: str,
    label_texts: tuple[str, ...],
    namespace: str,
    **flags: Any,
) -> None:
    """Change the volume NAME.

    A running guest sees a new size at once. If the disk's bus cannot report sizes, the VM must be
    off.
    """
    given = {**flags, "labels": request.labels(label_texts) or None}
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise usage("nothing to change", "give --size, --protected, --retention or --label")
    asked = {"name": name, "namespace": namespace, **changes}
    invocation.call_and_show("volume", "update", asked, table)


@click.command(
    epilog=examples(
        """
        virtbus node audit n1                lists data of volumes without a record
        virtbus volume adopt data-1 --node n1
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
@click.option("--uid", metavar="UUID", help="The uid, if the node has several volumes NAME.")
@namespace_option
@verb
def adopt(invocation: Invocation, *, name: str, node: str, uid: str | None, namespace: str) -> None:
    """Write the missing record of the volume NAME, whose data is on a node.

    With the record, a VM can use the volume, and `virtbus volume delete` can remove it.
    """
    asked = {"name": name, "namespace": namespace, "node": node} | ({"uid": uid} if uid else {})
    invocation.call_and_show("volume", "adopt", asked, table)


@click.command(
    epilog=examples(
        """
        virtbus volume attach data-1 web
        virtbus volume attach data-2 web --disk logs --bus scsi
        virtbus volume get data-1            the reason, if the guest does not have it yet
        """
    )
)
@_name
@click.argument("vm", shell_complete=completion_sources.vms)
@click.option("--disk", metavar="NAME", help="Name of the disk.  [default: the volume's name]")
@click.option("--bus", type=click.Choice([str(one) for one in DiskBus]), help="[default: virtio]")
@namespace_option
@verb
def attach(invocation: Invocation, *, name: str, vm: str, namespace: str, **flags: Any) -> None:
    """Add the volume NAME to the VM.

    A running guest gets the disk at once. If the disk's bus has no hot-plug, the VM must be off.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    asked = {"name": name, "namespace": namespace, "vm": vm, **given}
    invocation.call_and_show("volume", "attach", asked, table)


@click.command(
    epilog=examples(
        """
        virtbus volume detach data-1
        virtbus volume detach data-1 web     only if web holds it; others that share it keep it
        virtbus volume detach data-1 --no-wait
        virtbus volume detach data-1 --force also if the guest has mounted it
        virtbus volume detach data-1 --gone 0192f0c1-2d3e-7abc-8def-000000000001
        """
    )
)
@_name
@click.argument("vm", required=False, shell_complete=completion_sources.vms)
@click.option(
    "--gone",
    metavar="UUID",
    help="The uid of a holder without a record. Be sure that its guest does not run.",
)
@click.option("--force", is_flag=True, help="Also if the guest has mounted the volume.")
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Wait until the guest has released the volume.",
)
@click.option("--timeout", default=30.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def detach(
    invocation: Invocation,
    *,
    name: str,
    namespace: str,
    wait: bool,
    timeout: float,
    **flags: str | bool | None,
) -> None:
    """Take the volume NAME from the VM that holds it. The data stays.

    Unmount the volume in the guest first. A running guest must release the disk. Until then, the
    volume is Detaching, and the guest is asked again. If the disk's bus has no hot-plug, the VM
    must be off.
    """
    given = {key: value for key, value in flags.items() if value}
    asked = {"name": name, "namespace": namespace}
    view = invocation.call("volume", "detach", asked | given)
    until = time.monotonic() + timeout
    while wait and _leaves(view, given.get("vm")):
        if time.monotonic() > until:
            why = view.get("message") or "its guest has not released it yet"
            raise unknown(
                f"{name} is still being detached: {why}",
                f"it continues by itself: `virtbus volume get {name}`",
            )
        time.sleep(POLL_S)
        view = invocation.call("volume", "get", asked)
    invocation.show(view, lambda: table([view]))


def _leaves(view: Mapping[str, Any], vm: str | bool | None) -> bool:
    """Return True while the volume is being detached from `vm`; without `vm`, from any VM."""
    leaving = {one.get("name") for one in view.get("holders") or () if one.get("detaching")}
    return view.get("state") == "Detaching" and (vm is None or not leaving or vm in leaving)


@click.command(
    epilog=examples(
        """
        virtbus volume delete data-1
        virtbus volume delete a b --no-wait
        """
    )
)
@click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.volumes)
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the data is removed."
)
@click.option("--timeout", default=60.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def delete(
    invocation: Invocation, *, names: tuple[str, ...], wait: bool, timeout: float, namespace: str
) -> None:
    """Remove volumes with their data. This cannot be undone.

    A volume that a VM holds, or that is protected, is not removed: the request is refused.
    """
    asked = [{"name": name, "namespace": namespace} for name in dict.fromkeys(names)]
    delete_named(invocation, "volume", asked, wait_s=timeout if wait else None)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each volume."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    spec = view.get("spec") or {}
    marks = [str(view.get("state") or "-"), "protected" if spec.get("protected") else ""]
    marks.append("shared" if spec.get("access") == Access.SHARED else "")
    return (
        str(view.get("namespace", "")),
        str(view.get("name", "")),
        ",".join(filter(None, marks)),
        units.size(spec.get("size")) if spec.get("size") else "-",
        str(view.get("node") or "-"),
        _holders(view),
        units.ago(view.get("held_since_ns")),
        _source(spec.get("source") or {}),
    )


def _holders(view: Mapping[str, Any]) -> str:
    """Return the names of the VMs that hold a volume, or the uid of a VM without a record."""
    first = {"name": view.get("holder_name"), "uid": view.get("holder")}
    holders = view.get("holders") or (first,)
    return ",".join(str(one.get("name") or one.get("uid") or "-") for one in holders)


def _source(source: Mapping[str, Any]) -> str:
    """Return the source of a volume: an image, `empty`, or a path such as `vm/NAME`."""
    for kind in ("volume", "vm", "snapshot", "backup"):
        if source.get(kind):
            return f"{kind}/{source[kind]}"
    return str(source.get("image") or "empty")
