"""Implements `virtbus image prefetch`."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from virtbus.cli import completion_sources, output, units
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.image_nodes import chosen, nodes_options
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.live_table import LiveTable

if TYPE_CHECKING:
    from virtbus.cli.image_fetching import NodePull

HEADER = ("NODE", "STATE", "FETCHED", "TIME", "IMAGE", "MESSAGE")


@click.command(
    epilog=examples(
        """
        virtbus image prefetch debian
        virtbus image prefetch https://images.example/disk.qcow2 --node n1 --node n2
        virtbus image prefetch debian --label zone=a -o json
        """
    )
)
@click.argument("ref", shell_complete=completion_sources.images)
@nodes_options
@click.option("--timeout", default=3600.0, show_default=True, metavar="S", help="Time limit.")
@verb
def command(
    invocation: Invocation,
    *,
    ref: str,
    nodes: tuple[str, ...],
    label_texts: tuple[str, ...],
    timeout: float,
) -> None:
    """Fetch the image REF onto nodes in advance, and show each node's progress.

    A node that has the current image fetches nothing. If some nodes fail, the others keep the
    image, the exit code is 1, and each failure is listed. A repeat tries the failed nodes again.
    """
    _check(ref)
    targets = chosen(invocation, nodes, label_texts)
    table = LiveTable(HEADER, shown=invocation.for_eyes)
    try:
        pulls = asyncio.run(_fetch(invocation, targets, ref, timeout, table))
    finally:
        table.close()
    answer = {"ref": ref, "nodes": [_plain(pull) for pull in pulls]}
    invocation.show(answer, lambda: output.table(HEADER, map(_row, pulls)))
    if len({pull.image.digest for pull in pulls if pull.image is not None}) > 1:
        invocation.note(f"{output.safe(ref)} is not the same image on all nodes: pin its digest")
    failed = [pull for pull in pulls if pull.image is None]
    if failed:
        raise CliError(
            Exit.REFUSED,
            "prefetch_failed",
            f"{ref} could not be fetched by {len(failed)} of {len(pulls)} node(s)",
            details=[{"path": pull.node, "message": pull.message} for pull in failed],
        )


def _check(ref: str) -> None:
    from virtbus.schemas.image import check_image_ref

    try:
        check_image_ref(ref)
    except ValueError as error:
        raise usage(f"REF {error}") from None


async def _fetch(
    invocation: Invocation, nodes: list[str], ref: str, timeout_s: float, table: LiveTable
) -> list["NodePull"]:
    from virtbus.cli.bus_client import connected  # both modules load slowly
    from virtbus.cli.image_fetching import Fetching

    def changed(pulls: Sequence["NodePull"]) -> None:
        table.show(map(_row, sorted(pulls, key=lambda pull: pull.state not in _MOVING)))

    async with connected(invocation.client()) as bus:
        return await Fetching(bus, nodes, ref, changed).run(timeout_s)


_MOVING = ("fetching", "failed")
"""States whose nodes are first in the table, because a small screen cuts off the last rows."""


def _row(pull: "NodePull") -> tuple[str, ...]:
    image = pull.image
    return (
        pull.node,
        pull.state,
        _fetched(pull),
        units.duration(pull.took_s) if pull.took_s else "-",
        units.digest(image.digest) if image is not None else "-",
        pull.message,
    )


def _fetched(pull: "NodePull") -> str:
    """Return `12MiB of 30MiB (40 %)`, or `12MiB` when ready or without a total, or `-`."""
    done = units.size(pull.done_bytes)
    if pull.image is not None or not pull.total_bytes:
        return done if pull.done_bytes else "-"
    share = min(100, pull.done_bytes * 100 // pull.total_bytes)
    return f"{done} of {units.size(pull.total_bytes)} ({share} %)"


def _plain(pull: "NodePull") -> dict[str, Any]:
    found: dict[str, Any] = {
        "node": pull.node,
        "state": pull.state,
        "fetched_bytes": pull.done_bytes,
        "seconds": round(pull.took_s, 3),
    }
    if pull.image is not None:
        found["image"] = pull.image.model_dump(mode="json")
    if pull.message:
        found["message"] = pull.message
    return found
