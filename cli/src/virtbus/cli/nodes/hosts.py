"""Implements `virtbus node fence`, `unfence`, `takeover`, `approve` and `forget`."""

import click

from virtbus.cli.completion_sources import node_argument
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.cordon import show


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

    Use it for a host that was replaced, reinstalled or restored from a backup. Do so only when no
    guest can run on the previous host: its power, not only its network, is off. The node's VMs
    start on the new host with the disks that exist on it. The command is refused while the node has
    a heartbeat.
    """
    asked = {"node": name, "confirm": confirm, "instance": instance}
    show(invocation, invocation.call("node", "takeover", asked))


@click.command(
    epilog=examples(
        """
        virtbus node get n1                  what it reports beyond the approved values
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
    help="Approve only these labels; repeatable.  [default: the reported labels]",
)
@verb
def approve(invocation: Invocation, *, name: str, labels: tuple[str, ...]) -> None:
    """Approve the labels, CPUs, memory and disk that the node NAME reports now.

    The first report of a node is approved automatically. Labels and sizes beyond the approved
    values attract no VM until a person approves them, because a thief of the node's credentials
    could report anything.
    """
    asked: dict[str, object] = {"node": name}
    if labels:
        pairs = [label.partition("=") for label in labels]
        if any(not sign for _, sign, _ in pairs):
            message = "a label is KEY=VALUE"
            raise click.BadParameter(message, param_hint="--label")
        asked["labels"] = {key: value for key, _, value in pairs}
    show(invocation, invocation.call("node", "approve", asked))


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
    help="Also start VMs without eviction_strategy elsewhere; their disks are lost.",
)
@verb
def fence(invocation: Invocation, *, name: str, confirm: str, discard_local_disks: bool) -> None:
    """Declare the silent host NAME off, so that its VMs may start elsewhere.

    Do so only when no guest can run there any more: its power, not only its network, is off. The
    VMs that a drain would evacuate (`virtbus node drain --help`) start on other hosts from their
    images. The other VMs wait for the host. When the host is back, it starts nothing and removes
    VMs that were moved to other hosts; then unfence it.
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
    """End the fence of the host NAME, which is back, so that it runs VMs again.

    The command is refused until the host answers, has compared itself with its records, and has
    released the VMs that were moved while it was off. VMs that waited for the host start on it
    again.
    """
    show(invocation, invocation.call("node", "unfence", {"node": name}))


@click.command(
    epilog=examples(
        """
        virtbus node fence n1 --confirm "scrapped" --discard-local-disks
        virtbus node forget n1               once no VM is on it any more
        virtbus node forget n1 --lose-volume default/data-1
        virtbus bus remove-node n1           and its credentials are refused
        """
    )
)
@node_argument
@click.option(
    "--lose-volume",
    "lose_volumes",
    multiple=True,
    metavar="NS/NAME",
    help="A volume whose data is lost with the host; repeatable.",
)
@click.option(
    "--lose-snapshot",
    "lose_snapshots",
    multiple=True,
    metavar="NS/NAME",
    help="A snapshot whose data is lost with the host; repeatable.",
)
@verb
def forget(invocation: Invocation, *, name: str, **lost: tuple[str, ...]) -> None:
    """Remove all data of the host NAME, which is gone for good, from the bus.

    The command is refused while the host has a heartbeat, or VMs, or volumes and snapshots that
    --lose-volume and --lose-snapshot do not name. If the host comes back, it does nothing to its
    VMs until `virtbus bus rebuild`. So also remove its credentials (`virtbus bus remove-node`).
    """
    more = {key: list(names) for key, names in lost.items() if names}
    answer = invocation.call("node", "forget", {"node": name, **more})
    invocation.show(answer, lambda: f"{name} is forgotten; next: virtbus bus remove-node {name}")
