"""`virtbus node takeover` and `approve`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.target import node_argument
from virtbus.cli.nodes.wishes import show


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
    help="How you know that the host before is off: kept with the word, for others to read.",
)
@click.option("--instance", metavar="ID", help="Which agent is meant, where several wait.")
@verb
def takeover(invocation: Invocation, *, name: str, confirm: str, instance: str | None) -> None:
    """Give the node NAME to the host whose agent was refused and waits.

    For a host that was replaced, installed anew or restored from a backup. Only do so when no guest
    can run on the host before: power, not only its network, is off. The node's VMs start on the
    new host with the disks that are there. Refused while the node is heard.
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
    help="Approve these labels and no other; once for each. Default: as it reports.",
)
@verb
def approve(invocation: Invocation, *, name: str, labels: tuple[str, ...]) -> None:
    """Let the node NAME offer the labels, CPUs, memory and disk that it reports now.

    What a node reported when it was first heard is approved. More attracts no VM until a person
    says so, for a node's credentials may be stolen.
    """
    asked: dict[str, object] = {"node": name}
    if labels:
        pairs = [label.partition("=") for label in labels]
        if any(not sign for _, sign, _ in pairs):
            message = "a label is KEY=VALUE"
            raise click.BadParameter(message, param_hint="--label")
        asked["labels"] = {key: value for key, _, value in pairs}
    show(invocation, invocation.call("node", "approve", asked))
