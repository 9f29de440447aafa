"""`virtbus vm reset`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import press
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm reset web
        virtbus vm soft-reboot web           ask the guest instead
        """
    )
)
@name_argument
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Reset the VM NAME at once, without asking its guest.

    Unwritten data of the guest is lost. The reset happens once, or the command reports why not. The
    virtual machine is unchanged: use `restart` to apply a new spec.
    """
    press(invocation, "reset", ref(name, namespace))
