"""Implements `virtbus vm get`."""

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import view as views
from virtbus.cli.vm.target import name_argument, namespace_option, ref

_ANSWER_S = 5.0


@click.command(
    epilog=examples(
        """
        virtbus vm get web
        virtbus vm get web --counters
        virtbus vm get web -o json | jq -r '.interfaces[0].addresses[0]'
        virtbus vm get 0192f0c1-2d3e-7abc-8def-0123456789ab -o yaml
        """
    )
)
@name_argument
@click.option("--counters", is_flag=True, help="Bytes and packets of each interface, read now.")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, counters: bool, namespace: str) -> None:
    """Show the VM NAME (or uid): state, addresses, conditions and their reasons."""
    view = fetch(invocation, name, namespace)
    if counters:
        from virtbus.cli.vm.serial import node_subject  # rarely needed

        subject = node_subject(view, "counters")
        answer = invocation.session.request(subject, {"uid": view.get("uid")}, timeout_s=_ANSWER_S)
        view = view | {"counters": answer.get("interfaces") or []}
    invocation.show(view, lambda: views.describe(view))


def fetch(invocation: Invocation, name: str, namespace: str) -> dict[str, object]:
    """Return a VM (a `VmView` as a map); raise CliError with exit code 3 for a missing VM."""
    return invocation.call("vm", "get", ref(name, namespace))
