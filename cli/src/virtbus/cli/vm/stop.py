"""`virtbus vm stop`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.power import grace_option, switch, waits_until
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
@grace_option
@waits_until("is off")
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
    """Stop the VM NAME; it keeps its disk, its name and its node."""
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "stop", query, _HALTED, timeout_s)
