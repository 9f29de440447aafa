"""`virtbus vm restart`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import grace_option, switch, waits_until
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
@grace_option
@waits_until("runs again")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    grace: int | None,
    timeout_s: float | None,
    namespace: str,
) -> None:
    """End the guest of the VM NAME, and start it again on the same host with its disk.

    It applies pending changes of its spec (the condition RestartRequired).
    """
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "restart", query, None, timeout_s)
