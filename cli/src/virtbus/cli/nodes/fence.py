"""`virtbus node fence` and `unfence`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.cordon import show
from virtbus.cli.nodes.target import node_argument


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
    help="How you know that the host is off: stored with the fence, for others to read.",
)
@click.option(
    "--discard-local-disks",
    is_flag=True,
    help="Start VMs without an eviction strategy elsewhere too; their disks are lost.",
)
@verb
def fence(invocation: Invocation, *, name: str, confirm: str, discard_local_disks: bool) -> None:
    """Declare the silent host NAME off, so that its VMs may start elsewhere.

    Do so only when no guest can run there any more: power, not only its network, is off. VMs whose
    spec says eviction_strategy None start on other hosts from their images; the others wait for the
    host. When the host is back, it starts nothing and removes VMs that run elsewhere by now; then
    unfence it.
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

    This is refused until the host answers, has compared itself with its records, and has released
    the VMs that were moved while it was off. The VMs that waited for it start there again.
    """
    show(invocation, invocation.call("node", "unfence", {"node": name}))
