"""`virtbus vm unpause`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch, waits_until
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm unpause web
        virtbus vm start web --paused        a VM that waits for its first unpause
        """
    )
)
@name_argument
@waits_until("goes on")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, timeout_s: float | None, namespace: str) -> None:
    """Resume the paused VM NAME, even if it was not paused by `pause`."""
    switch(invocation, "unpause", ref(name, namespace), frozenset({"Running"}), timeout_s)
