"""Implements `virtbus vm console`."""

import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import SerialStream, node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

ESCAPE = b"\x1d"
"""The byte of ^], which closes the console, as in telnet and virsh."""
GUEST_STOPPED = "the guest stopped"
_DRAIN_S = 1.0
_CHUNK = 4096
_TAIL_BYTES = 4096
"""Number of bytes of earlier output that a terminal shows first: one or two screens."""


@click.command(
    epilog=examples(
        """
        virtbus vm console web                       leave with ^] (Ctrl and ])
        virtbus vm console web --view                look on, and type nothing
        echo uname -a | virtbus vm console web       type from a pipe
        """
    )
)
@name_argument
@click.option(
    "--linger",
    default=_DRAIN_S,
    show_default=True,
    metavar="S",
    help="With piped input: seconds to show the console after the input ends.",
)
@click.option("--view", is_flag=True, help="Only view; other clients can type.")
@click.option(
    "--tail-bytes",
    type=click.IntRange(0, 1024 * 1024),
    metavar="N",
    help="Number of earlier bytes to show first.  [default: 4096 on a terminal, otherwise 0]",
)
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    linger: float,
    view: bool,
    tail_bytes: int | None,
    namespace: str,
) -> None:
    """Open the serial console of the VM NAME.

    Keys go to the guest unchanged, except ^], which closes the console. Any number of people can
    see a console at once. Of the clients without --view, only the last to open it can type.
    """
    vm = fetch(invocation, name, namespace)
    subject = node_subject(vm, "console")
    stream = SerialStream(invocation.session, subject, _to_stdout, _remark)
    source = sys.stdin.fileno()
    typed = os.isatty(source)
    if tail_bytes is None:
        tail_bytes = _TAIL_BYTES if typed else 0
    try:
        # Enter raw mode before the first output: people type as soon as they see output, and
        # Ctrl-C must reach the guest.
        with _raw(source, typed=typed):
            if typed:
                name_shown = output.safe(vm.get("name"))
                output.write(f"console of {name_shown}; leave with ^]\r", sys.stderr)
            stream.open({"uid": vm.get("uid"), "write": not view, "tail_bytes": tail_bytes})
            _converse(stream, source, linger_s=0.0 if typed else linger)
    finally:
        stream.leave()
    if typed:
        output.write("\nleft the console", sys.stderr)
    if stream.closed == GUEST_STOPPED:
        output.write(f"{output.safe(name)}: {stream.closed}", sys.stderr)
    elif stream.closed:
        raise CliError(Exit.REFUSED, "closed", f"the console was closed: {stream.closed}")


def _converse(stream: SerialStream, source: int, *, linger_s: float) -> None:
    """Copy bytes both ways until ^] or the end of the console.

    After the end of input, continue to show the console for `linger_s`.
    """
    import select  # used here only

    until: float | None = None
    while not stream.closed:
        if until is not None and time.monotonic() > until:
            return
        stream.pump(source if until is None else None)
        if until is None and select.select([source], [], [], 0)[0]:
            data = os.read(source, _CHUNK)
            typed, escape, _ = data.partition(ESCAPE)
            if typed:
                stream.send(typed)
            if escape:
                return
            if not data:
                until = time.monotonic() + linger_s


@contextmanager
def _raw(descriptor: int, *, typed: bool) -> Iterator[None]:
    """Put a terminal in raw mode while the context is open; do nothing if not `typed`."""
    if not typed:
        yield
        return
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSADRAIN)  # TCSADRAIN keeps earlier input
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _remark(text: str) -> None:
    output.write(f"\r\n[{output.safe(text)}]\r", sys.stderr)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
