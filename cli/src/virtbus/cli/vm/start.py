"""`virtbus vm start`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch, waits_until
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm start web
        virtbus vm start web --paused        then: virtbus vm unpause web
        virtbus vm start web --no-wait
        """
    )
)
@name_argument
@click.option("--paused", is_flag=True, help="Leave it paused before its first instruction.")
@waits_until("runs")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    paused: bool,
    timeout_s: float | None,
    namespace: str,
) -> None:
    """Start the stopped VM NAME with its disk."""
    query = ref(name, namespace) | ({"paused": True} if paused else {})
    switch(invocation, "start", query, None, timeout_s)
