"""`virtbus vm unpause`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch
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
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it goes on.")
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="How long to wait.")
@namespace_option
@verb
def command(
    invocation: Invocation, *, name: str, wait: bool, timeout: float, namespace: str
) -> None:
    """Let the paused VM NAME go on where it stood, whoever paused it."""
    timeout_s = timeout if wait else None
    switch(invocation, "unpause", ref(name, namespace), frozenset({"Running"}), timeout_s)
