"""`virtbus vm soft-reboot`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import press
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm soft-reboot web
        virtbus vm events web -f             guest.rebooting, then guest.ready
        """
    )
)
@name_argument
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Ask the guest of the VM NAME to reboot, by its guest agent or ACPI.

    It returns once the guest was asked; a guest that does not react keeps running. Use `restart` to
    end such a guest after its grace, `reset` to end it at once.
    """
    press(invocation, "soft-reboot", ref(name, namespace))
