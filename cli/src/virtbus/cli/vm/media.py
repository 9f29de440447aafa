"""Implements `virtbus vm eject` and `virtbus vm insert`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import completion_sources
from virtbus.cli.failures import usage
from virtbus.cli.image import fetched, raise_partial
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import view as views
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import node_of
from virtbus.cli.vm.target import name_argument, namespace_option


def _set_tray(invocation: Invocation, view: dict[str, Any], drive: str, tray: str | None) -> None:
    """Request the position of a drive's tray by `vm.update`, and print the VM."""
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
        virtbus vm insert web installer                    the same medium again
        virtbus vm insert web installer drivers            another one, by its image name
        virtbus vm insert web installer https://images.example/drivers.iso
        """
    ),
)
@name_argument
@click.argument("drive")
@click.argument("image", required=False, shell_complete=completion_sources.images)
@click.option(
    "--timeout", default=3600.0, show_default=True, metavar="S", help="Time limit to fetch IMAGE."
)
@namespace_option
@verb
def insert(
    invocation: Invocation,
    *,
    name: str,
    drive: str,
    image: str | None,
    timeout: float,
    namespace: str,
) -> None:
    """Insert a medium into the CD-ROM drive DRIVE of the VM NAME, now and for its next starts.

    Without IMAGE, the drive's present medium is inserted again. With IMAGE, the VM's node fetches
    the image first. The VM keeps the image's digest, so its later starts have the same content.
    """
    view: dict[str, Any] = fetch(invocation, name, namespace)
    if image is not None:
        volumes = [one for one in view["spec"]["volumes"] if one["name"] == drive]
        if not volumes or not volumes[0].get("image"):
            raise usage(f"the drive {drive!r} of {name} has no image, so it cannot get another")
        volumes[0]["image"]["ref"] = _pinned(invocation, view, image, timeout)
    _set_tray(invocation, view, drive, None)


def _pinned(invocation: Invocation, view: dict[str, Any], ref: str, timeout_s: float) -> str:
    """Fetch an image to the VM's node; return its reference with the digest of its content."""
    node = node_of(view)
    query: dict[str, Any] = {"ref": ref, "node": node, "namespace": view["namespace"]}
    answer: Mapping[str, Any] = fetched(invocation, query, timeout_s)
    raise_partial(answer, "pull_failed", f"{ref} could not be fetched by")
    bare, at, digest = ref.rpartition("@")
    known = bare if at and digest.startswith("sha256:") else ref
    return f"{known}@{answer['images'][node]['digest']}"
