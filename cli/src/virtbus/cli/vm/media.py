"""Implements `virtbus vm eject` and `virtbus vm insert`."""

from typing import Any

import click

from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import view as views
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.target import name_argument, namespace_option


def _set_tray(invocation: Invocation, view: dict[str, Any], drive: str, tray: str | None) -> None:
    """Request the tray of a drive by `vm.update`, and print the VM."""
    spec = view["spec"]
    disks = spec["domain"]["devices"]["disks"]
    found = [disk for disk in disks if disk["name"] == drive and disk["device"] == "cdrom"]
    if not found:
        known = ", ".join(disk["name"] for disk in disks if disk["device"] == "cdrom") or "none"
        raise usage(f"{view['name']} has no CD-ROM drive {drive!r}", f"its drives: {known}")
    found[0]["tray"] = tray
    query = {"uid": view["uid"], "revision": view["revision"], "spec": spec}
    after = invocation.call("vm", "update", query)
    invocation.show(after, lambda: views.table([after]))


@click.command(
    "eject",
    epilog=examples(
        """
        virtbus vm eject web installer       the installation is done
        virtbus vm eject web installer --force
        virtbus vm get web                   MediaChangePending: the guest locks the tray
        """
    ),
)
@name_argument
@click.argument("drive")
@click.option("--force", is_flag=True, help="Also if the guest locks the tray.")
@namespace_option
@verb
def eject(invocation: Invocation, *, name: str, drive: str, force: bool, namespace: str) -> None:
    """Eject the medium of the CD-ROM drive DRIVE of the VM NAME, now and for its next starts.

    While the guest locks the tray, the agent tries again, and the VM shows MediaChangePending.
    """
    view = fetch(invocation, name, namespace)
    _set_tray(invocation, view, drive, "forced-open" if force else "open")


@click.command(
    "insert",
    epilog=examples(
        """
        virtbus vm insert web installer
        """
    ),
)
@name_argument
@click.argument("drive")
@namespace_option
@verb
def insert(invocation: Invocation, *, name: str, drive: str, namespace: str) -> None:
    """Insert the medium of the CD-ROM drive DRIVE of the VM NAME again: its volume."""
    _set_tray(invocation, fetch(invocation, name, namespace), drive, None)
