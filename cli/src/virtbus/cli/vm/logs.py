"""Implements `virtbus vm logs`."""

import codecs
import re
import sys
from collections.abc import Callable

import click

from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import SerialStream, node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

END = "end of log"
"""The agent's reason for closing the stream after the whole log was sent."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command(
    epilog=examples(
        """
        virtbus vm logs web
        virtbus vm logs web -f
        virtbus vm logs web --tail-bytes 1000 --raw > boot.log
        """
    )
)
@name_argument
@click.option("-f", "--follow", is_flag=True, help="Continue with new output.")
@click.option(
    "--tail-bytes",
    default=65_536,
    show_default=True,
    metavar="N",
    help=("Number of bytes at the log's end to print first."),
)
@click.option("--raw", is_flag=True, help="Print control characters unchanged.")
@namespace_option
@verb
def command(
    invocation: Invocation, *, name: str, follow: bool, tail_bytes: int, raw: bool, namespace: str
) -> None:
    """Print the serial console's log of the VM NAME.

    A guest may print escape codes. Without --raw, escape codes are shown as text.
    """
    view = fetch(invocation, name, namespace)
    write = _writer(None if raw else Visible().text)
    stream = SerialStream(invocation.session, node_subject(view, "logs"), write)
    query = {"uid": view.get("uid"), "tail_bytes": tail_bytes, "follow": follow}
    closed = stream.read_to_end(query)
    if closed != END:
        raise CliError(Exit.REFUSED, "closed", f"the log ended: {closed}")


class Visible:
    """Escapes control characters in a stream of UTF-8: a backslash, `x` and two hex digits.

    Line feeds and tabs stay; carriage returns are removed. Invalid UTF-8 is escaped in the same
    way, because a terminal may take some of its bytes for control characters (C1).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def text(self, data: bytes) -> bytes:
        shown = self._decoder.decode(data).replace("\r", "")
        return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", shown).encode()


def _writer(change: Callable[[bytes], bytes] | None) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        sys.stdout.buffer.write(change(data) if change else data)
        sys.stdout.buffer.flush()

    return write
