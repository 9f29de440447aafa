"""Implements `virtbus vm clone`: a snapshot, and a VM whose disks rest on it."""

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
from virtbus.cli.vm.target import name_argument, namespace_option, ref

_OF_ONE_VM = ("mac_address", "publish")
"""The properties of a NIC that only one VM can have."""


@click.command(
    epilog=examples(
        """
        virtbus vm clone web web2
        virtbus vm clone web web3 --snapshot before-upgrade
        """
    )
)
@name_argument
@click.argument("new")
@click.option(
    "--snapshot",
    metavar="SNAPSHOT",
    shell_complete=completion_sources.snapshots,
    help="An existing snapshot of it.  [default: a new one of this instant]",
)
@namespace_option
@verb
def command(
    invocation: Invocation, *, name: str, new: str, snapshot: str | None, namespace: str
) -> None:
    """Make the VM NEW with the disks of the VM NAME, which may run.

    Nothing is copied: the disks of NEW rest on those of a snapshot. NEW has a uid, MAC addresses
    and an instance id of its own, so cloud-init makes a new machine id and new host keys. Published
    ports stay with NAME. A new snapshot is called clone-NEW; delete it when you
    like.
    """
    source = invocation.call("vm", "get", ref(name, namespace))
    spec = _spec_of(source)
    if snapshot is None:
        snapshot = f"clone-{new}"
        asked = {"name": snapshot, "namespace": source["namespace"], "vm": source["name"]}
        taken = invocation.call("snapshot", "create", {**asked, "uid": uuid7(), "layered": True})
        completed(invocation, taken)
    made = {"name": new, "namespace": source["namespace"], "spec": spec, "origin": snapshot}
    made |= {key: source[key] for key in ("labels", "annotations") if source.get(key)}
    created = invocation.call("vm", "create", {**made, "uid": uuid7()})
    invocation.show(created["vm"], lambda: views.table([created["vm"]]))


def _spec_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a clone, without what only one VM can have."""
    spec: dict[str, Any] = dict(source["spec"])
    held = [one["name"] for one in spec.get("volumes", ()) if one.get("volume")]
    if held:
        raise usage(
            f"{source['name']} holds the volumes {', '.join(held)}, which only one VM may have",
            "clone a VM without volumes, and attach copies (virtbus volume create --from-volume)",
        )
    domain = dict(spec.get("domain") or {})
    devices = dict(domain.get("devices") or {})
    nics = devices.get("interfaces") or ()
    devices["interfaces"] = [
        {key: value for key, value in nic.items() if key not in _OF_ONE_VM} for nic in nics
    ]
    domain["devices"] = devices
    return {**spec, "domain": domain}
