"""Implements `virtbus vm net`."""

from typing import Any

import click

from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import net_text
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

_ANSWER_S = 8.0


@click.command(
    epilog=examples(
        """
        virtbus vm net web
        virtbus vm net web --check
        virtbus vm net web --check -o json | jq -r '.faults[].next_step'
        """
    )
)
@name_argument
@click.option("--check", is_flag=True, help="Test each part on the node; exit 1 if one is broken.")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, check: bool, namespace: str) -> None:
    """Explain how packets leave the guest of the VM NAME, and where they may be dropped."""
    view = fetch(invocation, name, namespace)
    query = {"uid": view["uid"], "check": check}
    subject = node_subject(view, "network")
    found: dict[str, Any] = invocation.session.request(subject, query, timeout_s=_ANSWER_S)
    shown = {"name": view["name"], "namespace": view["namespace"], **found}
    invocation.show(shown, lambda: net_text.explained(shown))
    faults = found.get("faults") or ()
    if faults:
        what = "; ".join(str(one.get("what", "")) for one in faults)
        raise CliError(Exit.REFUSED, "network_broken", f"the network of {view['name']}: {what}")
