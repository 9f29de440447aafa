"""Implements `virtbus vm clone`: the new VM's disks rest on a snapshot, or are copies."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources
from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.snapshot import completed
from virtbus.cli.vm import view as views
from virtbus.cli.vm.copied_nics import copied_nics
from virtbus.cli.vm.target import name_argument, namespace_option, ref

_FROZEN = ("image", "container_disk", "empty_disk", "volume")
"""Kinds of volumes in a VM's spec whose disks a snapshot of the VM contains."""


@click.command(
    epilog=examples(
        """
        virtbus vm clone web web2
        virtbus vm clone web web3 --snapshot before-upgrade
        virtbus vm clone web web4 --full         needs neither web nor the snapshot afterwards
        """
    )
)
@name_argument
@click.argument("new")
@click.option(
    "--snapshot",
    metavar="SNAPSHOT",
    shell_complete=completion_sources.snapshots,
    help="An existing snapshot of NAME.  [default: a new one of this instant]",
)
@click.option(
    "--full",
    is_flag=True,
    help="Copy the disks into volumes NEW-DISK, which are deleted with NEW.",
)
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    new: str,
    snapshot: str | None,
    full: bool,
    namespace: str,
) -> None:
    """Make the VM NEW with the disks of the VM NAME, which may be running.

    By default nothing is copied: the disks of NEW rest on the disks of a snapshot. NEW has a uid,
    MAC addresses and an instance id of its own, so cloud-init makes a new machine id and new host
    keys. Published ports and static addresses stay with NAME. A new snapshot is called clone-NEW;
    delete it when you like.

    With --full the disks are copied, and NEW starts when the copies are complete. The copies
    continue if this command is interrupted. A snapshot that this command made is removed after the
    copies.
    """
    source = invocation.call("vm", "get", ref(name, namespace))
    spec, taken = _spec_of(source, full=full), snapshot or f"clone-{new}"
    if snapshot is None:
        asked = {"name": taken, "namespace": source["namespace"], "vm": source["name"]}
        begun = invocation.call("snapshot", "create", {**asked, "uid": uuid7(), "layered": True})
        completed(invocation, begun)
    made = {"name": new, "namespace": source["namespace"], "origin": taken}
    made["spec"] = _copied(spec, taken, new) if full else spec
    made |= {key: source[key] for key in ("labels", "annotations") if source.get(key)}
    view = invocation.call("vm", "create", {**made, "uid": uuid7()})["vm"]
    if full:
        _wait(invocation, view)
        if snapshot is None:
            named = {"name": taken, "namespace": source["namespace"]}
            invocation.call("snapshot", "delete", named)
    invocation.show(view, lambda: views.table([view]))


def _copied(spec: Mapping[str, Any], snapshot: str, new: str) -> dict[str, Any]:
    """Return a spec in which each disk of the snapshot becomes a volume with a copy."""
    disks = []
    for one in spec.get("volumes") or ():
        if not any(one.get(kind) for kind in _FROZEN):
            disks.append(one)
            continue
        template = {"size": 0, "source": {"snapshot": snapshot, "disk": one["name"]}}
        template["retention"] = "Delete"
        named = {"name": f"{new}-{one['name']}", "template": template}
        disks.append({"name": one["name"], "volume": named})
    return {**spec, "volumes": disks}


def _wait(invocation: Invocation, view: Mapping[str, Any]) -> None:
    from virtbus.cli.volume_create import refuse_unfilled, until_filled  # loads slowly

    for one in view["spec"].get("volumes") or ():
        if one.get("volume"):
            asked = {"name": one["volume"]["name"], "namespace": view["namespace"]}
            refuse_unfilled(until_filled(invocation, invocation.call("volume", "get", asked)))


def _spec_of(source: Mapping[str, Any], *, full: bool) -> dict[str, Any]:
    spec: dict[str, Any] = dict(source["spec"])
    held = [one["name"] for one in spec.get("volumes", ()) if one.get("volume")]
    if held and not full:
        raise usage(
            f"{source['name']} holds the volumes {', '.join(held)}, which only one VM may have",
            "--full copies them",
        )
    domain = dict(spec.get("domain") or {})
    devices = dict(domain.get("devices") or {})
    devices["interfaces"] = copied_nics(devices)
    domain["devices"] = devices
    return {**spec, "domain": domain}
