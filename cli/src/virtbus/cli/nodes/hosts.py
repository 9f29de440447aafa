"""`virtbus node takeover` and `approve`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.cordon import show
from virtbus.cli.nodes.target import node_argument


@click.command(
    epilog=examples(
        """
        virtbus node get n1                  which agents of its id were refused, and why
        virtbus node takeover n1 --confirm "the old host was scrapped"
        """
    )
)
@node_argument
@click.option(
    "--confirm",
    required=True,
    metavar="HOW",
    help="How you know that the previous host is off: stored, for others to read.",
)
@click.option("--instance", metavar="ID", help="The waiting agent, if there are several.")
@verb
def takeover(invocation: Invocation, *, name: str, confirm: str, instance: str | None) -> None:
    """Give the node NAME to the host whose agent was refused and waits.

    For a host that was replaced, reinstalled or restored from a backup. Do so only when no guest
    can run on the previous host: power, not only its network, is off. The node's VMs start on the
    new host with the disks that exist there. This is refused while the node has a heartbeat.
    """
    asked = {"node": name, "confirm": confirm, "instance": instance}
    show(invocation, invocation.call("node", "takeover", asked))


@click.command(
    epilog=examples(
        """
        virtbus node get n1                  what it reports beyond what it was approved for
        virtbus node approve n1              all that it reports now
        virtbus node approve n1 --label zone=a --label gpu=a100
        """
    )
)
@node_argument
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Approve only these labels; repeatable. Default: the reported ones.",
)
@verb
def approve(invocation: Invocation, *, name: str, labels: tuple[str, ...]) -> None:
    """Approve the labels, CPUs, memory and disk that the node NAME reports now.

    The first report of a node is approved automatically. Anything beyond it attracts no VM until a
    person approves it, because a node's credentials may be stolen.
    """
    asked: dict[str, object] = {"node": name}
    if labels:
        pairs = [label.partition("=") for label in labels]
        if any(not sign for _, sign, _ in pairs):
            message = "a label is KEY=VALUE"
            raise click.BadParameter(message, param_hint="--label")
        asked["labels"] = {key: value for key, _, value in pairs}
    show(invocation, invocation.call("node", "approve", asked))
