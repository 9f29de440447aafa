"""Implements `virtbus vm freeze` and `virtbus vm thaw`."""

import click

from virtbus.cli.durations import whole_seconds
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import press
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    "freeze",
    epilog=examples(
        """
        virtbus vm freeze web --timeout 30s  then copy its disks, and:
        virtbus vm thaw web
        virtbus vm get web                   the condition Frozen shows the deadline
        """
    ),
)
@name_argument
@click.option(
    "--timeout",
    "timeout_s",
    default="5m",
    show_default=True,
    metavar="T",
    callback=whole_seconds,
    help="The guest is thawed after this time; 1h at most.",
)
@namespace_option
@verb
def freeze(invocation: Invocation, *, name: str, timeout_s: int, namespace: str) -> None:
    """Freeze the file systems of the VM NAME's guest, by its QEMU guest agent.

    All data that the guest's programs wrote is then on disk, and further writes wait. The guest is
    thawed after the timeout, also if this command, the bus or an agent dies. If the guest is frozen
    already, the command sets a new deadline.
    """
    press(invocation, "freeze", ref(name, namespace), timeout_s=timeout_s)


@click.command(
    "thaw",
    epilog=examples(
        """
        virtbus vm thaw web
        virtbus vm events web                guest.frozen, then guest.thawed with its reason
        """
    ),
)
@name_argument
@namespace_option
@verb
def thaw(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Thaw the file systems of the VM NAME's guest, also if virtbus did not freeze them."""
    press(invocation, "thaw", ref(name, namespace))
