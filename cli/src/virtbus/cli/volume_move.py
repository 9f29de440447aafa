"""Implements `virtbus volume move` and `virtbus volume copy`."""

import time
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.target import namespace_option
from virtbus.cli.volume import table
from virtbus.cli.volume_create import refuse_unfilled, until_filled

POLL_S = 0.5


@click.command(
    epilog=examples(
        """
        virtbus volume move data-1 --node n2
        virtbus volume move data-1 --pool fast   to another pool of its node
        virtbus volume move data-1 --node n1     cancels a move, if n1 has the data
        """
    )
)
@click.argument("name", shell_complete=completion_sources.volumes)
@click.option(
    "--node",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="The node that gets the data.  [default: NAME's node]",
)
@click.option("--pool", metavar="POOL", help="The pool that gets the data.  [default: NAME's pool]")
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the move has ended."
)
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    node: str | None,
    pool: str | None,
    wait: bool,
    namespace: str,
) -> None:
    """Move the data of the volume NAME to another node or pool. Its VM must be off.

    If a VM holds the volume, a move to another node takes the VM and all of its volumes there, or
    none of them. The VM cannot start during the move.

    The volume is in its new place once all of its data is there. The data in the old place is
    removed after that. After a failure the volume is where it was. The move continues if this
    command is interrupted.
    """
    goal = {key: value for key, value in (("node", node), ("pool", pool)) if value}
    if not goal:
        message = "name the goal with --node, with --pool, or with both"
        raise CliError(Exit.USAGE, "no_goal", message)
    view = _moved(invocation, {"name": name, "namespace": namespace}, goal, wait=wait)
    invocation.show(view, lambda: table([view]))


@click.command(
    epilog=examples(
        """
        virtbus volume copy data-1 data-2
        virtbus volume copy data-1 data-2 --node n2
        virtbus volume copy data-1 data-2 --pool fast
        """
    )
)
@click.argument("name", shell_complete=completion_sources.volumes)
@click.argument("new")
@click.option(
    "--node",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="The node that gets the copy.  [default: NAME's node]",
)
@click.option("--pool", metavar="POOL", help="The pool that gets the copy.  [default: local]")
@namespace_option
@verb
def copy(
    invocation: Invocation,
    *,
    name: str,
    new: str,
    node: str | None,
    pool: str | None,
    namespace: str,
) -> None:
    """Copy the volume NAME to the volume NEW. No running VM may hold NAME.

    The copy is made on the node of NAME. With --node, the copy is then moved to the named node, and
    --pool is a pool of the named node. If this command is interrupted, the copy continues, and
    `virtbus volume move` can move it.
    """
    spec: dict[str, Any] = {"size": 0, "source": {"volume": name}}
    goal = {key: value for key, value in (("node", node), ("pool", pool)) if value}
    if pool and not node:
        spec |= goal
    wanted = {"name": new, "namespace": namespace, "uid": uuid7(), "spec": spec}
    view: dict[str, Any] = invocation.call("volume", "create", wanted).get("volume") or {}
    if view.get("state") == "Filling":
        view = until_filled(invocation, view)
    refuse_unfilled(view)
    there = {"node": view.get("node"), "pool": (view.get("spec") or {}).get("pool")}
    if any(there[key] != value for key, value in goal.items()):
        asked = {"name": new, "namespace": namespace}
        view = _moved(invocation, asked, goal, wait=True)
    invocation.show(view, lambda: table([view]))


def _moved(
    invocation: Invocation, asked: dict[str, Any], goal: dict[str, str], *, wait: bool
) -> dict[str, Any]:
    """Begin a move. With `wait`, wait for its end, and raise CliError if the move failed."""
    view = invocation.call("volume", "move", asked | goal)
    if wait:
        view = _ended(invocation, view, asked)
        there = {"node": view.get("node"), "pool": (view.get("spec") or {}).get("pool")}
        if any(there[key] != value for key, value in goal.items()):
            why = (
                f"{asked['name']} is on {there['node']} in the pool {there['pool']}: "
                f"{view.get('message') or 'given up'}"
            )
            raise CliError(Exit.REFUSED, "move_failed", why)
    return view


def _ended(invocation: Invocation, view: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Show the messages of a move; return the volume after the end of the move."""
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
