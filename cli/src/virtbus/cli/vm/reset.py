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
    """Press the reset button of the VM NAME: its guest boots anew at once, unasked.

    What the guest had not written yet is lost. It happens once, or the answer says why not. The
    machine stays as it is: `restart` makes it anew from its spec.
    """
    press(invocation, "reset", ref(name, namespace))
