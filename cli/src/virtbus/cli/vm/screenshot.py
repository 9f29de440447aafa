"""Implements `virtbus vm screenshot`."""

import sys
from pathlib import Path

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import SerialStream, node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

END = "end of picture"
"""The agent's reason for closing the stream after the whole picture was sent."""


@click.command(
    epilog=examples(
        """
        virtbus vm screenshot web                  web.png
        virtbus vm screenshot web -f - | display
        """
    )
)
@name_argument
@click.option(
    "-f", "--file", "file", metavar="FILE", help="Output file; - is stdout.  [default: NAME.png]"
)
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, file: str | None, namespace: str) -> None:
    """Write the display of the VM NAME to a PNG file."""
    view = fetch(invocation, name, namespace)
    picture = bytearray()
    stream = SerialStream(invocation.session, node_subject(view, "screenshot"), picture.extend)
    closed = stream.read_to_end({"uid": view.get("uid")})
    if closed != END:
        raise CliError(Exit.REFUSED, "closed", f"the picture is not whole: {closed}")
    if file == "-":
        sys.stdout.buffer.write(picture)
        return
    path = Path(file or f"{Path(str(view.get('name'))).name}.png")
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise CliError(Exit.REFUSED, "file", f"cannot write {path}: {error.strerror}") from None
    value = {"file": str(path), "bytes": len(picture)}
    invocation.show(value, lambda: f"{output.safe(str(path))}: {len(picture)} bytes")
