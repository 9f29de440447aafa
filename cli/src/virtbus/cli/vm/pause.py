"""`virtbus vm pause`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch, waits_until
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm pause web
        virtbus vm unpause web               and let it go on
        """
    )
)
@name_argument
@waits_until("stands still")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, timeout_s: float | None, namespace: str) -> None:
    """Let the CPUs of the VM NAME stand still, and keep its memory as it is.

    It stays so until `unpause`, `stop` or `restart`; should its host start anew meanwhile, the
    guest starts anew there, and is paused again. A paused guest hears no request to shut down: a
    `stop` or `delete` ends it at once.
    """
    switch(invocation, "pause", ref(name, namespace), frozenset({"Paused"}), timeout_s)
