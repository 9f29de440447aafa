"""Implements `virtbus export download|link`, `virtbus vm export` and `virtbus volume export`."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, operation, output, units
from virtbus.cli.durations import whole_seconds
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import target
from virtbus.cli.vm.serial import SerialStream, node_subject

_HERE = "virtbus.cli.export"
END = "end of file"
"""The agent's reason for closing the stream at the end of the file."""
ATTEMPTS = 5
"""Maximum number of streams for one file. Each stream continues where the previous stream broke."""


@click.group(
    cls=LazyGroup,
    verbs={
        "download": (f"{_HERE}:download", "Copy the file of an export to this machine."),
        "link": (f"{_HERE}:link", "Make a link with which anybody can fetch the file over HTTP."),
    },
    epilog=examples("virtbus export download 0192f0c1-2d3e-7abc-8def-0123456789ab -f web.qcow2"),
)
def command() -> None:
    """Fetch exported disks. `virtbus vm export` and `virtbus volume export` make exports."""


@click.command(
    epilog=examples("virtbus export download 0192f0c1-2d3e-7abc-8def-0123456789ab -f web.qcow2")
)
@click.argument("id_", metavar="ID")
@click.option("-f", "--file", metavar="FILE", help="Output file.  [default: NAME.FORMAT]")
@verb
def download(invocation: Invocation, *, id_: str, file: str | None) -> None:
    """Copy the file of the export ID from its node, and check its digest."""
    _fetch(invocation, _ended(invocation, id_), file)


def _ended(invocation: Invocation, id_: str) -> dict[str, Any]:
    view = invocation.call("operation", "get", {"id": id_})
    if view.get("phase") not in operation.ENDED:
        raise CliError(
            Exit.REFUSED,
            "operation_open",
            f"the export {id_} has not ended",
            hint=f"`virtbus operation watch {id_}` waits for it",
        )
    operation.refuse_failed(view)
    return view


@click.command(
    epilog=examples("virtbus export link 0192f0c1-2d3e-7abc-8def-0123456789ab --expires 1h")
)
@click.argument("id_", metavar="ID")
@click.option(
    "--expires",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=whole_seconds,
    help="Time until the link expires, such as 90s, 10m, 2h or 1d. At most 7d.",
)
@verb
def link(invocation: Invocation, *, id_: str, expires: int) -> None:
    """Print a link to the file of the export ID. Anybody who has the link can read the file.

    The node serves the link if its imaged has the setting download_address. `virtbus operation
    delete` ends the link.
    """
    view = _ended(invocation, id_)
    subject = f"virtbus.node.{view.get('node')}.rpc.imaged.export-link"
    made = invocation.session.request(subject, {"id": id_, "valid_s": expires})
    invocation.show(made, lambda: output.safe(str(made.get("url"))))
    size = units.size(made.get("size_bytes"))
    invocation.note(f"{size}, {output.safe(str(made.get('digest')))}; the query is a secret")


def _options(function: Any) -> Any:
    for option in (
        click.option("-f", "--file", metavar="FILE", help="Wait, then download to FILE."),
        click.option("--wait/--no-wait", default=False, help="Wait until the export has ended."),
        click.option(
            "--id",
            "id_",
            metavar="UUID",
            help="An id of your choice: the same command may be repeated.",
        ),
        click.option(
            "--format",
            "format_",
            type=click.Choice(["qcow2", "raw", "raw.gz"]),
            default="qcow2",
            show_default=True,
            help="The format of the file.",
        ),
    ):
        function = option(function)
    return function


@click.command(
    epilog=examples(
        """
        virtbus vm export web --wait
        virtbus vm export web --disk data --format raw.gz -f data.raw.gz
        """
    )
)
@target.name_argument
@click.option("--disk", metavar="DISK", help="A disk of the VM.  [default: its first]")
@_options
@target.namespace_option
@verb
def of_vm(
    invocation: Invocation, *, name: str, namespace: str, disk: str | None, **flags: Any
) -> None:
    """Write a disk of the VM NAME to a file on its node. The VM must be off."""
    asked = {"vm": name, "namespace": namespace}
    _export(invocation, asked | ({"disk": disk} if disk else {}), **flags)


@click.command(
    epilog=examples(
        """
        virtbus volume export data-1 --wait
        virtbus volume export data-1 -f data-1.qcow2
        """
    )
)
@click.argument("name", shell_complete=completion_sources.volumes)
@_options
@target.namespace_option
@verb
def of_volume(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Write the volume NAME to a file on its node. No VM may hold the volume."""
    _export(invocation, {"volume": name, "namespace": namespace}, **flags)


def _export(
    invocation: Invocation,
    asked: dict[str, Any],
    *,
    format_: str,
    id_: str | None,
    wait: bool,
    file: str | None,
) -> None:
    asked |= {"format": format_, "id": id_ or uuid7()}
    view = invocation.call("operation", "export", asked)
    if not wait and file is None:
        invocation.show(view, lambda: operation.table([view]))
        invocation.note(f"`virtbus operation watch {view.get('id')}` shows its progress")
        return
    view = operation.until_ended(invocation, view)
    operation.refuse_failed(view)
    if file is not None:
        _fetch(invocation, view, file)
        return
    result = view.get("result") or {}
    invocation.show(view, lambda: f"{view.get('node')}: {output.safe(result.get('path'))}")


def _fetch(invocation: Invocation, view: dict[str, Any], file: str | None) -> None:
    result = view.get("result") or {}
    path = Path(file or f"{Path(str(view.get('name'))).name}.{view.get('format', 'qcow2')}")
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as target_file:
            digest = _receive(invocation, view, target_file)
        if digest != result.get("digest"):
            part.unlink()
            message = f"the file has the digest {digest}, the export {result.get('digest')}; repeat"
            raise CliError(Exit.REFUSED, "digest", message)
        part.replace(path)
    except OSError as error:
        raise CliError(Exit.REFUSED, "file", f"cannot write {path}: {error.strerror}") from None
    value = {"file": str(path), "bytes": result.get("size_bytes"), "digest": digest}
    size = units.size(result.get("size_bytes"))
    invocation.show(value, lambda: f"{output.safe(str(path))}: {size}, {digest}")


def _receive(invocation: Invocation, view: dict[str, Any], file: BinaryIO) -> str:
    size = int((view.get("result") or {}).get("size_bytes") or 0)
    digest, steps, closed = hashlib.sha256(), Steps(shown=invocation.for_eyes), ""
    try:
        for _ in range(ATTEMPTS):
            write = _writer(
                file, digest.update, lambda done: steps.transfer("download", done, size)
            )
            stream = SerialStream(invocation.session, node_subject(view, "export"), write)
            closed = stream.read_to_end({"uid": view.get("id"), "offset": file.tell()})
            if closed == END:
                return f"sha256:{digest.hexdigest()}"
    finally:
        steps.close()
    raise CliError(Exit.UNAVAILABLE, "closed", f"the file is not whole: {closed}")


def _writer(
    file: BinaryIO, hashed: Callable[[bytes], None], report_bytes: Callable[[int], None]
) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        file.write(data)
        hashed(data)
        report_bytes(file.tell())

    return write
