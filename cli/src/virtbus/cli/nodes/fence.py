"""`virtbus node fence` and `unfence`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.target import node_argument
from virtbus.cli.nodes.wishes import show


@click.command(
    epilog=examples(
        """
        virtbus node fence n1 --confirm "powered off by its BMC"
        virtbus node fence n1 --confirm "disk removed" --discard-local-disks
        virtbus node get n1                  which VMs wait for it, and why
        virtbus node unfence n1              it is back, and may take part again
        """
    )
)
@node_argument
@click.option(
    "--confirm",
    required=True,
    metavar="HOW",
    help="How you know that the host is off: kept with the fence, for others to read.",
)
@click.option(
    "--discard-local-disks",
    is_flag=True,
    help="Start elsewhere also VMs without an eviction strategy; their disks are given up.",
)
@verb
def fence(invocation: Invocation, *, name: str, confirm: str, discard_local_disks: bool) -> None:
    """Say that the silent host NAME is off, so that its VMs may start elsewhere.

    Only do so when no guest can run there any more: power, not only its network, is off. VMs whose
    spec says eviction_strategy None start on other hosts from their images; the others wait for the
    host. Back again it starts nothing, and removes what runs elsewhere by now; then unfence it.
    """
    asked = {"node": name, "confirm": confirm, "discard_local_disks": discard_local_disks}
    show(invocation, invocation.call("node", "fence", asked))


@click.command(
    epilog=examples(
        """
        virtbus node unfence n1
        """
    )
)
@node_argument
@verb
def unfence(invocation: Invocation, *, name: str) -> None:
    """Let the host NAME, which is back, take part again.

    Refused until it answers, has compared itself with its records, and has let go of what was moved
    away while it was off. The VMs that waited for it start there again.
    """
    show(invocation, invocation.call("node", "unfence", {"node": name}))
