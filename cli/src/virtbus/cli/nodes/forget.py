"""`virtbus node forget`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.target import node_argument


@click.command(
    epilog=examples(
        """
        virtbus node fence n1 --confirm "scrapped" --discard-local-disks
        virtbus node forget n1               once no VM is on it any more
        virtbus bus remove-node n1           and its credentials open nothing any more
        """
    )
)
@node_argument
@verb
def command(invocation: Invocation, *, name: str) -> None:
    """Remove all data of the host NAME, which is gone for good, from the bus.

    This is refused while the host has a heartbeat, or has VMs. If the host comes back, it holds its
    VMs until `virtbus bus rebuild`; remove its credentials (`virtbus bus remove-node`).
    """
    answer = invocation.call("node", "forget", {"node": name})
    invocation.show(answer, lambda: f"{name} is forgotten; next: virtbus bus remove-node {name}")
