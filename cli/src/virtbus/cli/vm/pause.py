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
        virtbus vm unpause web               and resume it
        """
    )
)
@name_argument
@waits_until("stands still")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, timeout_s: float | None, namespace: str) -> None:
    """Pause the CPUs of the VM NAME, and keep its memory.

    It stays paused until `unpause`, `stop` or `restart`. If its host restarts meanwhile, the guest
    boots there and is paused again. A paused guest cannot react to a shutdown request, so `stop` or
    `delete` ends it at once.
    """
    switch(invocation, "pause", ref(name, namespace), frozenset({"Paused"}), timeout_s)
