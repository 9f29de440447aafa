"""`virtbus vm start`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm start web
        virtbus vm start web --no-wait
        """
    )
)
@name_argument
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it runs.")
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="How long to wait.")
@namespace_option
@verb
def command(
    invocation: Invocation, *, name: str, wait: bool, timeout: float, namespace: str
) -> None:
    """Start the stopped VM NAME with the disk it had."""
    timeout_s = timeout if wait else None
    switch(invocation, "start", ref(name, namespace), frozenset({"Running"}), timeout_s)
