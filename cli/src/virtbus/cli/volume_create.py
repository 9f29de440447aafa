"""Implements `virtbus volume create|fill`, and shows the progress of copies (ADR 0053)."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, operation
from virtbus.cli.failures import CliError, Exit, unknown, usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import request
from virtbus.cli.vm.target import namespace_option
from virtbus.cli.volume import table
from virtbus.schemas.pool import LOCAL
from virtbus.schemas.volume_spec import Access

POLL_S = 0.5
CONTAINER_SCHEME = "docker://"
SOURCES = ("image", "volume", "vm", "snapshot", "url", "container")
UPLOADS = "volumes"
"""The first part of the image name of an upload (`--from-file`).

The image is removed once the volume has its content.
"""
_WAIT = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait for the end of a copy."
)


@click.command(
    epilog=examples(
        """
        virtbus volume create data-1 --size 10GiB
        virtbus volume create root-1 --size 20GiB --from-image debian/12 --node n2 --protected
        virtbus volume create cluster --size 50GiB --access shared
        virtbus volume create data-2 --from-volume data-1
        virtbus volume create root-2 --from-vm web
        virtbus volume create root-3 --from-snapshot before-upgrade
        virtbus volume create legacy --from-file disk.vmdk --node n1
        virtbus volume create golden --from-url https://example.com/disk.qcow2 --no-wait
        virtbus volume create fedora --from-container-disk quay.io/containerdisks/fedora:40
        """
    )
)
@click.argument("name")
@click.option(
    "--size", metavar="SIZE", help="Such as 512MiB or 10GiB.  [default of a copy: the source's]"
)
@click.option(
    "--from-image",
    "image",
    metavar="REF",
    shell_complete=completion_sources.images,
    help="Begin with an image. The disk is made for the first VM, and rests on the image.",
)
@click.option(
    "--full", is_flag=True, help="Copy the image now, so that the disk does not rest on it."
)
@click.option(
    "--from-volume",
    "volume",
    metavar="NAME",
    shell_complete=completion_sources.volumes,
    help="Copy another volume. No running VM may hold it.",
)
@click.option(
    "--from-vm",
    "vm",
    metavar="VM[:DISK]",
    shell_complete=completion_sources.vms,
    help="Copy a disk of a VM that is off.  [default: the first disk]",
)
@click.option(
    "--from-snapshot",
    "snapshot",
    metavar="SNAPSHOT[:DISK]",
    shell_complete=completion_sources.snapshots,
    help="Copy a disk of a snapshot, whose VM may run.  [default: the first disk]",
)
@click.option(
    "--from-file",
    "--from-upload",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Upload a local disk file, and copy it: qcow2, raw, or a format of `image pull`.",
)
@click.option("--from-url", "url", metavar="URL", help="Fetch a disk, and copy it.")
@click.option(
    "--from-container-disk",
    "container",
    metavar="IMAGE",
    help="Fetch a container image, such as quay.io/containerdisks/fedora:40, and copy its disk.",
)
@click.option(
    "--node",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="The node of the data.  [default: the first VM's node; for a copy, chosen now]",
)
@click.option(
    "--pool",
    metavar="POOL",
    help="The pool of the data, see `virtbus pool list`.  [default: local]",
)
@click.option(
    "--access",
    type=click.Choice([str(one) for one in Access]),
    help="shared: several VMs with a cluster file system may hold the volume.  [default: one]",
)
@click.option("--protected", is_flag=True, help="Refuse deletes until the protection ends.")
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@click.option(
    "--uid", metavar="UUID", help="A uid of your choice. It makes the command safe to repeat."
)
@_WAIT
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    namespace: str,
    wait: bool,
    file: Path | None,
    **flags: Any,
) -> None:
    """Make the volume NAME: empty, on an image, or as a copy.

    The volume's node makes the copy, and continues if this command is interrupted. With
    --from-file, a repeat of the command continues an interrupted upload. A VM that holds the
    volume waits for the copy.
    """
    source = _source(file, flags, wait=wait)
    spec: dict[str, Any] = {"size": flags["size"] or 0}
    if source:
        spec["source"] = source
    for name_of_field in ("pool", "access"):
        if flags[name_of_field]:
            spec[name_of_field] = flags[name_of_field]
    copied = {"full", "volume", "vm", "snapshot"} | (
        {"image"} if flags["pool"] not in {None, LOCAL} else set()
    )
    if not flags["size"] and not (copied & source.keys()):
        raise usage("an empty volume and one on an image need --size", "add --size 10GiB")
    if flags["protected"]:
        spec["protected"] = True
    wanted = {
        "name": name,
        "namespace": namespace,
        "uid": flags["uid"] or uuid7(),
        "spec": spec,
        "labels": request.labels(flags["label_texts"]),
    }
    if file is not None:
        _make_of_file(invocation, wanted, file, flags["node"])
        return
    if flags["node"]:
        wanted["node"] = flags["node"]
    _show(invocation, _made(invocation, wanted), wait=wait)


def _source(file: Path | None, flags: Mapping[str, Any], *, wait: bool) -> dict[str, Any]:
    """Return the spec's `source`; empty for an empty volume.

    For `--from-file` the source is a placeholder, which `_make_of_file` replaces after the upload.
    """
    given = [flags[one] for one in SOURCES if flags[one]]
    if len(given) + (file is not None) > 1:
        raise usage(
            "give one of --from-image, --from-volume, --from-vm, --from-snapshot, --from-file, "
            "--from-url and --from-container-disk"
        )
    if file is not None and not wait:
        raise usage("--from-file waits for its copy", "leave --no-wait out")
    if flags["full"] and not flags["image"]:
        raise usage("--full needs --from-image; other sources are always copied")
    if data := next((one for one in ("volume", "vm", "snapshot") if flags[one]), ""):
        name, _, disk = flags[data].partition(":")
        return {data: name} | ({"disk": disk} if disk else {})
    if url := flags["url"] or _of_container(flags["container"]):
        return {"image": url, "full": True}
    if flags["image"]:
        return {"image": flags["image"]} | ({"full": True} if flags["full"] else {})
    return {"full": True} if file is not None else {}


def _of_container(image: str | None) -> str:
    """Return the URL of a container image; empty if `image` is empty or None."""
    return f"{CONTAINER_SCHEME}{image.removeprefix(CONTAINER_SCHEME)}" if image else ""


def _made(invocation: Invocation, wanted: Mapping[str, Any]) -> dict[str, Any]:
    answer = invocation.call("volume", "create", wanted)
    view: dict[str, Any] = answer.get("volume") or {}
    if not answer.get("created"):
        invocation.note(f"{view.get('name')} was there already, unchanged")
    return view


def _make_of_file(
    invocation: Invocation, wanted: dict[str, Any], file: Path, node: str | None
) -> None:
    """Upload a file to the node of the volume, copy it there, and remove the uploaded image."""
    from virtbus.cli.image_nodes import chosen
    from virtbus.cli.image_upload import uploaded  # both imports are slow

    nodes = chosen(invocation, [node] if node else [], [])
    if len(nodes) > 1:
        raise usage("the file is uploaded to one node", f"add --node, such as --node {nodes[0]}")
    base = f"{UPLOADS}/{wanted['namespace']}/{wanted['name']}"
    image = uploaded(invocation, file, lambda digest: f"{base}-{digest[7:19]}", nodes[0])
    source = {"image": f"{image.name}@{image.digest}", "full": True}
    wanted |= {"node": nodes[0], "spec": {**wanted["spec"], "source": source}}
    view = _made(invocation, wanted)
    try:
        view = until_filled(invocation, view)
        refuse_unfilled(view)
    except CliError:
        invocation.note(f"the uploaded file stays as the image {image.name}; see `image delete`")
        raise
    invocation.call("image", "delete", {"ref": image.name, "node": nodes[0]})
    invocation.show(view, lambda: table([view]))


@click.command(epilog=examples("virtbus volume fill data-2"))
@click.argument("name", shell_complete=completion_sources.volumes)
@_WAIT
@namespace_option
@verb
def fill(invocation: Invocation, *, name: str, namespace: str, wait: bool) -> None:
    """Copy the content of the volume NAME again, after a failure or a cancel.

    A volume that has content is never overwritten.
    """
    view = invocation.call("volume", "fill", {"name": name, "namespace": namespace})
    _show(invocation, view, wait=wait)


def _show(invocation: Invocation, view: dict[str, Any], *, wait: bool) -> None:
    """Show a volume. With `wait`, first wait for its copy; raise CliError if the copy failed."""
    if wait and view.get("state") == "Filling":
        view = until_filled(invocation, view)
    if wait:
        refuse_unfilled(view)
    invocation.show(view, lambda: table([view]))
    if not wait and view.get("fill_operation"):
        id_ = view["fill_operation"]
        invocation.note(f"`virtbus operation watch {id_}` shows its progress")


def until_filled(invocation: Invocation, view: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of a volume's copy; return the volume after the end of the copy.

    Raises:
        CliError: an error of `Invocation.call`, or `unknown` if the user interrupts the wait. The
            copy continues after an interrupt.
    """
    asked = {"name": view.get("name"), "namespace": view.get("namespace"), "uid": view.get("uid")}
    id_, steps = str(view.get("fill_operation")), Steps(shown=invocation.for_eyes)
    try:
        while view.get("state") == "Filling":
            _tell(invocation, steps, id_)
            time.sleep(POLL_S)
            view = invocation.call("volume", "get", asked)
    except KeyboardInterrupt:
        message = f"operation {id_} continues"
        raise unknown(message, f"`virtbus operation watch {id_}`, or `… cancel {id_}`") from None
    finally:
        steps.close()
    return view


def _tell(invocation: Invocation, steps: Steps, id_: str) -> None:
    """Show an operation's progress; nothing if no controller has written the operation yet."""
    try:
        operation.show_progress(steps, invocation.call("operation", "get", {"id": id_}))
    except CliError as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise


def refuse_unfilled(view: Mapping[str, Any]) -> None:
    """Raise CliError if the copy into a volume has failed."""
    if view.get("state") == "FillFailed":
        message = f"{view.get('name')} has no content: {view.get('message')}"
        raise CliError(Exit.REFUSED, "fill_failed", message)
