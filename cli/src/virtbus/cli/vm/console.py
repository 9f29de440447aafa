"""`virtbus vm console`."""

import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click

from virtbus.bus.ids import uuid7
from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import SerialStream, node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

ESCAPE = b"\x1d"
"""^], as telnet and virsh have it."""
GUEST_STOPPED = "the guest stopped"
_DRAIN_S = 1.0
_CHUNK = 4096
_TAIL_BYTES = 4096
"""A screen or two, so that who comes sees where they are."""


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
    help="With piped input: how long to go on reading after its end.",
)
@click.option("--view", is_flag=True, help="Only look on; who types goes on typing.")
@click.option(
    "--tail-bytes",
    type=click.IntRange(0, 1024 * 1024),
    metavar="N",
    help="How much of what was written before comes first.  [default: a terminal 4096, else 0]",
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
    """Enter the serial console of the VM NAME.

    Keys go to the guest as they are; only ^] is kept, it leaves. Any number of people see a
    console at once; of those who came without --view, the last one types.
    """
    vm = fetch(invocation, name, namespace)
    subject = node_subject(vm, "console")
    stream = SerialStream(invocation.session, subject, _to_stdout, _remark)
    source = sys.stdin.fileno()
    typed = os.isatty(source)
    if tail_bytes is None:
        tail_bytes = _TAIL_BYTES if typed else 0
    try:
        # raw before the first output: whoever sees it may type, and Ctrl-C is the guest's
        with _raw(source, typed=typed):
            if typed:
                name_shown = output.safe(vm.get("name"))
                output.write(f"console of {name_shown}; leave with ^]\r", sys.stderr)
            # `session`: for agents of 0.1.0
            query = {"write": not view, "tail_bytes": tail_bytes, "session": uuid7()}
            stream.open({"uid": vm.get("uid"), **query})
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
    """Carry bytes both ways until ^], the end of input, or the end of the console."""
    import select  # beside its one use

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
    """A terminal that passes every key on; it is as before afterwards."""
    if not typed:
        yield
        return
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _remark(text: str) -> None:
    output.write(f"\r\n[{output.safe(text)}]\r", sys.stderr)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
