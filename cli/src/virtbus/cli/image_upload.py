"""Implements `virtbus image upload`."""

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virtbus.cli import output
from virtbus.cli.failures import usage
from virtbus.cli.image import HEADER, raise_partial, row
from virtbus.cli.image_nodes import chosen, nodes_options
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps

if TYPE_CHECKING:
    from virtbus.cli.image_transfer import LocalImage

_READ_BYTES = 1024**2
_NO_DIGEST = f"sha256:{'0' * 64}"


@click.command(
    epilog=examples(
        """
        virtbus image upload web.qcow2 --name web/2026-11
        virtbus image upload disk.raw.zst --name golden --node n1 --node n2
        virtbus image upload disk.vmdk --name legacy --label zone=a
        virtbus vm create web --image web/2026-11
        """
    )
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--name", required=True, metavar="NAME", help="The image's name, such as web/2026-11."
)
@nodes_options
@verb
def command(
    invocation: Invocation,
    *,
    file: Path,
    name: str,
    nodes: tuple[str, ...],
    label_texts: tuple[str, ...],
) -> None:
    """Store FILE as the image NAME on nodes, over the bus.

    The nodes get the file one after another. If the upload is interrupted, the same command
    continues it. The file may have any format that `image pull` accepts. The name stays until
    `image delete`.
    """
    targets = chosen(invocation, nodes, label_texts)
    steps = Steps(shown=invocation.for_eyes)
    try:
        image = _read(file, lambda _: name, steps)
        images, errors = asyncio.run(_send(invocation, targets, image, steps))
    finally:
        steps.close()
    answer = {"name": name, "digest": image.digest, "images": images, "errors": errors}
    if images or not errors:
        rows = [row({**one, "nodes": [node]}) for node, one in images.items()]
        invocation.show(answer, lambda: output.table(HEADER, rows))
    raise_partial(answer, "upload_failed", f"{name} could not be uploaded to")


def uploaded(
    invocation: Invocation, file: Path, name_of: Callable[[str], str], node: str
) -> "LocalImage":
    """Upload a file to one node as an image. `name_of` makes the image's name from its digest.

    Raises:
        CliError: the file is unusable, or the node refused the image.
    """
    steps = Steps(shown=invocation.for_eyes)
    try:
        image = _read(file, name_of, steps)
        _, errors = asyncio.run(_send(invocation, [node], image, steps))
    finally:
        steps.close()
    raise_partial({"errors": errors}, "upload_failed", f"{file} could not be uploaded to")
    return image


async def _send(
    invocation: Invocation, nodes: list[str], image: "LocalImage", steps: Steps
) -> tuple[dict[str, Any], dict[str, str]]:
    from virtbus.cli.bus_client import connected
    from virtbus.cli.image_transfer import send_to  # both modules load slowly

    def moved(node: str, done_bytes: int) -> None:
        steps.transfer(f"upload to {node}", done_bytes, image.size_bytes)

    async with connected(invocation.client()) as bus:
        return await send_to(bus, nodes, image, moved)


def _read(file: Path, name_of: Callable[[str], str], steps: Steps) -> "LocalImage":
    """Check the name, and compute the file's digest.

    Raises:
        CliError: the name or the file is unusable.
    """
    from virtbus.cli.image_transfer import LocalImage
    from virtbus.schemas.image import check_plain_name

    try:
        check_plain_name(name_of(_NO_DIGEST))
    except ValueError as error:
        raise usage(f"--name {error}") from None
    try:
        with file.open("rb", buffering=0) as source:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                raise usage(f"{file} is no file with content", "name the disk image itself")
            digest, done = hashlib.sha256(), 0
            while piece := source.read(_READ_BYTES):
                digest.update(piece)
                done += len(piece)
                steps.transfer(f"read {file.name}", done, status.st_size)
    except OSError as error:
        raise usage(f"cannot read {file}: {error.strerror}") from None
    whole = f"sha256:{digest.hexdigest()}"
    return LocalImage(file, name_of(whole), whole, done)
