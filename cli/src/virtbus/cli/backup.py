"""Implements `virtbus backup create|list|get|verify|restore|delete`."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, operation, output, units
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.vm import view as vm_views
from virtbus.cli.vm.copied_nics import copied_nics
from virtbus.cli.vm.target import namespace_filter, namespace_option
from virtbus.cli.volume_create import refuse_unfilled, until_filled

_HERE = "virtbus.cli.backup"
HEADER = ("ID", "NAMESPACE", "VM", "NODE", "KIND", "SIZE", "AGE", "VERIFIED", "MESSAGE")


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}:create", "Copy the disks of a VM to its node's backup directory."),
        "list": (f"{_HERE}:listing", "List backups."),
        "get": (f"{_HERE}:get", "Show one backup with its disks."),
        "verify": (f"{_HERE}:verify", "Read a backup and compare its digests."),
        "restore": (f"{_HERE}:restore", "Make a new VM from a backup."),
        "delete": (f"{_HERE}:delete", "Remove backups."),
        "serve": ("virtbus.cli.backup_serve:serve", "Offer a running VM's disks to an NBD client."),
        "finish": ("virtbus.cli.backup_serve:finish", "End a reading whose client has all data."),
        "schedule": ("virtbus.cli.backup_schedule", "Back up a VM again and again."),
    },
    epilog=examples(
        """
        virtbus backup create web
        virtbus backup list --vm web
        virtbus backup verify 0192f0c1-2d3e-7abc-8def-0123456789ab
        virtbus backup restore 0192f0c1-2d3e-7abc-8def-0123456789ab --name web2
        """
    ),
)
def command() -> None:
    """Manage backups: copies of all disks of a VM at one instant, in a directory of a node.

    A backup describes itself: another node or another fleet that has the directory can restore it.
    The setting backup_dir of imaged names the directory. A node without this setting makes no
    backups.
    """


def _node(function: Any) -> Any:
    return click.option(
        "--node",
        metavar="NODE",
        shell_complete=completion_sources.nodes,
        help="The node whose directory has the backup.  [default: any]",
    )(function)


def _wait(function: Any) -> Any:
    return click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait until the work has ended."
    )(function)


@click.command(
    epilog=examples(
        """
        virtbus backup create web
        virtbus backup create web --full
        """
    )
)
@click.argument("vm", shell_complete=completion_sources.vms)
@click.option("--full", "mode", flag_value="full", help="Copy all data.")
@click.option(
    "--incremental",
    "mode",
    flag_value="incremental",
    help="Fail if only a full backup is possible.",
)
@click.option(
    "--chain",
    type=click.IntRange(min=1),
    metavar="N",
    help="Length of a chain: a full backup and its increments.  [default: 8]",
)
@click.option(
    "--id", "id_", metavar="UUID", help="An id of your choice: the same command may be repeated."
)
@_wait
@namespace_option
@verb
def create(
    invocation: Invocation, *, vm: str, namespace: str, id_: str | None, wait: bool, **flags: Any
) -> None:
    """Copy all disks of the VM to the backup directory of its node. The VM may be running.

    By default the backup is an increment: it has only the data written since an earlier backup. If
    an increment is impossible, the backup is full, and MESSAGE says why. If the guest has a guest
    agent, the guest's file systems are frozen for the instant of the backup.
    """
    asked = {"vm": vm, "namespace": namespace, "id": id_ or uuid7()}
    asked |= {key: value for key, value in flags.items() if value}
    begun = invocation.call("backup", "create", asked)
    if not wait:
        invocation.show(begun, lambda: operation.table([begun]))
        invocation.note(f"`virtbus operation watch {begun.get('id')}` shows its progress")
        return
    operation.refuse_failed(operation.until_ended(invocation, begun))
    invocation.call_and_show(
        "backup", "get", {"id": begun.get("id"), "node": begun.get("node")}, table
    )


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus backup list
        virtbus backup list --vm web -o json | jq -r '.items[-1].id'
        """
    ),
)
@namespace_filter
@click.option("--vm", metavar="VM", shell_complete=completion_sources.vms, help="Only of this VM.")
@_node
@verb
def listing(invocation: Invocation, *, namespace: str | None, **flags: str | None) -> None:
    """List the backups in the directories of the nodes, the oldest first."""
    given = {"namespace": namespace, **flags}
    page = invocation.call("backup", "list", {key: value for key, value in given.items() if value})
    items = page.get("items") or []
    invocation.show(page, lambda: table(items))
    if page.get("silent"):
        invocation.note(f"no answer from {', '.join(page['silent'])}: their backups are missing")
    if page.get("truncated"):
        invocation.note("there are more; select by --vm or --node")


@click.command(epilog=examples("virtbus backup get 0192f0c1-2d3e-7abc-8def-0123456789ab -o yaml"))
@click.argument("id_", metavar="ID")
@_node
@verb
def get(invocation: Invocation, *, id_: str, node: str | None) -> None:
    """Show the backup ID. As JSON or YAML it has the VM's specification and all disks."""
    invocation.call_and_show("backup", "get", _ask(id_, node), table)


@click.command(epilog=examples("virtbus backup verify 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("id_", metavar="ID")
@_node
@_wait
@verb
def verify(invocation: Invocation, *, id_: str, node: str | None, wait: bool) -> None:
    """Read the backup ID and the backups on which it rests, and check their digests."""
    begun = invocation.call("backup", "verify", {**_ask(id_, node), "operation": uuid7()})
    if not wait:
        invocation.show(begun, lambda: operation.table([begun]))
        return
    operation.refuse_failed(operation.until_ended(invocation, begun))
    invocation.call_and_show("backup", "get", {"id": id_, "node": begun.get("node")}, table)


@click.command(
    epilog=examples(
        """
        virtbus backup restore 0192f0c1-2d3e-7abc-8def-0123456789ab --name web2
        virtbus backup restore 0192f0c1-2d3e-7abc-8def-0123456789ab --name web2 --stopped
        """
    )
)
@click.argument("id_", metavar="ID")
@click.option("--name", metavar="NAME", required=True, help="The name of the new VM.")
@click.option("--stopped", is_flag=True, help="Do not start the VM.")
@_node
@_wait
@namespace_option
@verb
def restore(
    invocation: Invocation,
    *,
    id_: str,
    name: str,
    namespace: str,
    wait: bool,
    **flags: Any,
) -> None:
    """Make the VM NAME from the backup ID, on the node whose directory has the backup.

    Each disk becomes a volume NAME-DISK, which depends on no backup. The node verifies the volume's
    content before a guest uses it. The VM has a uid and MAC addresses of its own, and no first-boot
    data such as cloud-init user data.
    """
    backup = invocation.call("backup", "get", _ask(id_, flags["node"]))
    spec = _spec_of(backup, name, stopped=flags["stopped"])
    _refuse_taken(invocation, name, namespace)
    volumes = [_volume(invocation, backup, disk, name, namespace) for disk in backup["disks"]]
    made = {"name": name, "namespace": namespace, "spec": spec, "uid": uuid7()}
    created = invocation.call("vm", "create", made)
    if wait:
        for volume in volumes:
            refuse_unfilled(until_filled(invocation, volume))
    invocation.show(created["vm"], lambda: vm_views.table([created["vm"]]))


def _refuse_taken(invocation: Invocation, name: str, namespace: str) -> None:
    """Raise CliError if the name is taken, before volumes are made."""
    try:
        invocation.call("vm", "get", {"name": name, "namespace": namespace})
    except CliError as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        return
    message = f"there is a VM named {name} in namespace {namespace}"
    raise CliError(Exit.REFUSED, "name_taken", message, hint="choose another --name")


def _volume(
    invocation: Invocation,
    backup: Mapping[str, Any],
    disk: Mapping[str, Any],
    name: str,
    namespace: str,
) -> dict[str, Any]:
    """Make the volume for a disk of the backup. The backup's node fills the volume."""
    source = {"backup": backup["id"], "disk": disk["name"]}
    asked = {
        "name": f"{name}-{disk['name']}",
        "namespace": namespace,
        "uid": uuid7(),
        "node": backup["node"],
        "spec": {"size": disk["virtual_size_bytes"], "source": source},
    }
    view: dict[str, Any] = invocation.call("volume", "create", asked)["volume"]
    return view


def _spec_of(backup: Mapping[str, Any], name: str, *, stopped: bool) -> dict[str, Any]:
    spec: dict[str, Any] = dict(backup.get("spec") or {})
    kept = {disk["name"] for disk in backup.get("disks") or ()}
    if not kept:
        raise usage(f"the backup {backup.get('id')} has no disks", "`virtbus backup get` shows it")
    volumes = []
    for one in spec.get("volumes") or ():
        if one["name"] in kept:
            volumes.append({"name": one["name"], "volume": {"name": f"{name}-{one['name']}"}})
        elif one.get("host_device") or one.get("host_disk"):
            raise usage(
                f"the disk {one['name']} is a device or file of the node, which no restore gives",
                "docs/howto/backups.md says how to copy one disk",
            )
        elif not one.get("volume"):
            volumes.append(one)
    names = {one["name"] for one in volumes}
    domain = dict(spec.get("domain") or {})
    devices = dict(domain.get("devices") or {})
    devices["interfaces"] = copied_nics(devices)
    devices["disks"] = [one for one in devices.get("disks") or () if one.get("name") in names]
    found = {**spec, "volumes": volumes, "domain": {**domain, "devices": devices}}
    found.pop("hostname", None)
    return found | ({"run_strategy": "Halted"} if stopped else {})


@click.command(epilog=examples("virtbus backup delete 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@_node
@verb
def delete(invocation: Invocation, *, ids: tuple[str, ...], node: str | None) -> None:
    """Remove backups. This cannot be undone. A backup on which another rests cannot be removed."""
    views = [invocation.call("backup", "delete", _ask(id_, node)) for id_ in dict.fromkeys(ids)]
    items = [{"id": view.get("id"), "deleted": True} for view in views]
    lines = "\n".join(f"{output.safe(view.get('id'))} deleted" for view in views)
    invocation.show({"items": items}, lambda: lines)


def _ask(id_: str, node: str | None) -> dict[str, Any]:
    return {"id": id_} | ({"node": node} if node else {})


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of backups."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    because = view.get("full_because")
    said = (view.get("problem"), because and f"full: {because}", view.get("remark"))
    verified = units.ago(view["verified_ns"]) if view.get("verified_ns") else "-"
    return (
        str(view.get("id", "")),
        str(view.get("namespace") or "-"),
        str(view.get("vm") or "-"),
        str(view.get("node", "")),
        f"increment {view.get('depth', 1)}" if view.get("parent") else "full",
        units.size(view.get("size_bytes") or 0),
        units.ago(view.get("created_ns")),
        "damaged" if view.get("verified_ns") and view.get("problem") else verified,
        "; ".join(str(one) for one in said if one),
    )
