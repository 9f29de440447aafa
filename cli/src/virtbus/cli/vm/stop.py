"""`virtbus vm stop`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import switch
from virtbus.cli.vm.target import name_argument, namespace_option, ref

_HALTED = frozenset({"Stopped", "Succeeded", "Failed"})


@click.command(
    epilog=examples(
        """
        virtbus vm stop web                  ask the guest, end it after its grace
        virtbus vm stop web --grace 0        pull the plug
        virtbus vm start web                 and run it again
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
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is off.")
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
    """Stop the VM NAME; it keeps its disk, its name and its place."""
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "stop", query, _HALTED, timeout if wait else None)
