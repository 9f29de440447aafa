"""Implements `virtbus volume move`."""

import time
from typing import Any

import click

from virtbus.cli import completion_sources
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.target import namespace_option
from virtbus.cli.volume import table

POLL_S = 0.5


@click.command(
    epilog=examples(
        """
        virtbus volume move data-1 --node n2
        virtbus volume move data-1 --node n1     n1 has the data: gives up a move
        """
    )
)
@click.argument("name", shell_complete=completion_sources.volumes)
@click.option(
    "--node",
    required=True,
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="The node that gets the data.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the end.")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, node: str, wait: bool, namespace: str) -> None:
    """Move the data of the volume NAME, which no VM may hold, to another node.

    The volume is on its new node once all of its data is there; then the former data is removed.
    After a failure it is where it was. The work continues without this command.
    """
    asked = {"name": name, "namespace": namespace}
    view = invocation.call("volume", "move", asked | {"node": node})
    if wait:
        view = _ended(invocation, view, asked)
        if view.get("node") != node:
            why = str(view.get("message") or "it was given up")
            raise CliError(Exit.REFUSED, "move_failed", f"{name} is on {view.get('node')}: {why}")
    invocation.show(view, lambda: table([view]))


def _ended(invocation: Invocation, view: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the volume after its move; show what happens meanwhile."""
    told = ""
    try:
        while view.get("state") == "Moving":
            message = str(view.get("message") or "")
            if message != told:
                invocation.note(message)
                told = message
            time.sleep(POLL_S)
            view = invocation.call("volume", "get", asked)
    except KeyboardInterrupt:
        hint = f"`virtbus volume get {asked['name']}` shows it"
        raise unknown("the move continues", hint) from None
    return view
