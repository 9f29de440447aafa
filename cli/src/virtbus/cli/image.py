"""Implements `virtbus image`."""

import os
from collections.abc import Mapping
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, output, units
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.progress import Steps
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage

HEADER = ("IMAGE", "FORMAT", "SIZE", "VIRTUAL DISK", "NODES", "DIGEST")


@click.group(
    cls=LazyGroup,
    verbs={
        "list": ("virtbus.cli.image:listing", "List the images in the nodes' stores."),
        "delete": ("virtbus.cli.image:delete", "Remove an image from the nodes' stores."),
        "pull": ("virtbus.cli.image:pull", "Fetch an image in advance."),
        "prefetch": (
            "virtbus.cli.image_prefetch",
            "Fetch an image onto nodes, with the progress of each.",
        ),
        "upload": ("virtbus.cli.image_upload", "Store a local file as an image on nodes."),
    },
)
def command() -> None:
    """Manage disk images on the nodes.

    `vm create` pulls images as needed; pulling earlier makes the first start quick.
    """


@click.command(name="list", epilog=examples("virtbus image list\nvirtbus image list -o json"))
@verb
def listing(invocation: Invocation) -> None:
    """List images, and the nodes that have them."""
    items = invocation.listed("image")["items"]
    items.sort(key=lambda item: (item.get("names") or [], item["digest"]))
    invocation.show({"items": items}, lambda: output.table(HEADER, [row(i) for i in items]))


@click.command(
    name="pull",
    epilog=examples(
        """
        virtbus image pull tiny
        virtbus image pull https://images.example/debian-12.qcow2@sha256:… --node n1
        virtbus image pull docker://quay.io/containerdisks/fedora:40
        """
    ),
)
@click.argument("ref", shell_complete=completion_sources.images)
@click.option(
    "--node",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="Only onto this node.  [default: every ready node]",
)
@click.option("--timeout", default=3600.0, show_default=True, metavar="S", help="Time limit.")
@click.option(
    "-n",
    "--namespace",
    default=lambda: os.environ.get("VIRTBUS_NAMESPACE"),
    metavar="NS",
    help="The namespace of the image name REF.  [default: default] [env: VIRTBUS_NAMESPACE]",
)
@verb
def pull(
    invocation: Invocation, *, ref: str, node: str | None, timeout: float, namespace: str | None
) -> None:
    """Pull the image REF (a name or URL, may end in @sha256:<digest>) onto nodes.

    A docker:// URL names a container image with a disk in its folder /disk. For another file of the
    container image, append `#/path/in/it`.
    """
    query: dict[str, Any] = {"ref": ref} | ({"node": node} if node else {})
    query |= {"namespace": namespace} if namespace else {}
    answer = fetched(invocation, query, timeout)
    images: Mapping[str, Mapping[str, Any]] = answer.get("images") or {}
    if images or not answer.get("errors"):
        by_digest = [row({**image, "nodes": [name]}) for name, image in images.items()]
        invocation.show(answer, lambda: output.table(HEADER, by_digest))
    raise_partial(answer, "pull_failed", f"{ref} could not be fetched by")


def fetched(invocation: Invocation, query: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Request `image.pull` with a progress bar; return the answer."""
    job = uuid7()
    steps = Steps(shown=invocation.for_eyes)
    reports = _Reports(steps)
    invocation.session.subscribe(f"virtbus.node.*.progress.{job}.*", reports.receive)
    try:
        return invocation.call("image", "pull", query | {"job": job}, timeout_s=timeout_s)
    finally:
        steps.close()


@click.command(
    name="delete",
    epilog=examples(
        """
        virtbus image delete tiny
        virtbus image delete https://images.example/debian-12.qcow2 --node n1
        virtbus image delete sha256:<digest>         with all its names
        """
    ),
)
@click.argument("ref", shell_complete=completion_sources.images)
@click.option(
    "--node",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="Only from this node.  [default: all]",
)
@verb
def delete(invocation: Invocation, *, ref: str, node: str | None) -> None:
    """Remove the image REF (a name, URL or digest) from the nodes' stores.

    VMs that use the image keep running. A node removes the file once no disk uses it any more.
    """
    query = {"ref": ref} | ({"node": node} if node else {})
    answer = invocation.call("image", "delete", query)
    nodes: Mapping[str, Mapping[str, Any]] = answer.get("nodes") or {}
    rows = [
        (
            name,
            ", ".join(gone.get("names") or ()) or "-",
            units.size(gone.get("freed_bytes") or 0),
            str(len(gone.get("used_by") or ())),
        )
        for name, gone in sorted(nodes.items())
    ]
    header = ("NODE", "NAMES REMOVED", "FREED", "VMS THAT STILL USE IT")
    invocation.show(answer, lambda: output.table(header, rows))
    raise_partial(answer, "delete_failed", f"{ref} could not be removed from")


class _Reports:
    """Collects the progress of a pull on all nodes, and shows the sum as a progress bar."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._by_node: dict[str, tuple[int, int | None]] = {}

    def receive(self, item: WireMessage) -> None:
        try:
            report = bodies.data_of(item.body)
        except bodies.UndecodableError:
            return
        if not isinstance(report, Mapping):
            return
        node = item.subject.split(".")[2]
        self._by_node[node] = (int(report.get("done_bytes") or 0), report.get("total_bytes"))
        done = sum(each for each, _ in self._by_node.values())
        totals = [total for _, total in self._by_node.values()]
        known = sum(total for total in totals if total) if all(totals) else None
        self._steps.transfer(f"pull to {', '.join(sorted(self._by_node))}", done, known)


def raise_partial(answer: Mapping[str, Any], reason: str, what: str) -> None:
    """If nodes failed, raise CliError with their errors."""
    errors: Mapping[str, str] = answer.get("errors") or {}
    if errors:
        raise CliError(
            Exit.REFUSED,
            reason,
            f"{what} {len(errors)} node(s)",
            details=[{"path": name, "message": text} for name, text in errors.items()],
        )


def row(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return an image's row for HEADER. `item` also needs `nodes`, the image's nodes."""
    names = ", ".join(item.get("names") or ()) or "-"
    more = item.get("more_names")
    return (
        f"{names} and {more} more" if more else names,
        str(item.get("format", "")),
        units.size(item.get("size_bytes")),
        units.size(item.get("virtual_size_bytes")),
        ",".join(item.get("nodes") or ()) or "-",
        units.digest(str(item.get("digest", ""))),
    )
