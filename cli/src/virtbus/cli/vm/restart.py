"""`virtbus vm restart`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch
from virtbus.cli.vm.target import name_argument, namespace_option, ref


@click.command(
    epilog=examples(
        """
        virtbus vm restart web               shut down, then start with its spec of now
        virtbus vm restart web --grace 0     pull the plug first
        virtbus vm restart web --no-wait
        """
    )
)
@name_argument
@click.option(
    "--grace",
    type=int,
    metavar="S",
    help="Seconds the guest gets to shut down.  [default: the VM's termination grace, 30]",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it runs again.")
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="How long to wait.")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    grace: int | None,
    wait: bool,
    timeout: float,
    namespace: str,
) -> None:
    """End the guest of the VM NAME, and start it again on the same host with the disk it had.

    It takes over what changed in its spec meanwhile (the condition RestartRequired).
    """
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "restart", query, None, timeout if wait else None)
