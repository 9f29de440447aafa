"""Implements `virtbus vm events`."""

import click

from virtbus.cli import event_lines, output
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.live_events import LiveEvents
from virtbus.cli.vm.history import stored, uid_of
from virtbus.cli.vm.target import name_argument, namespace_option


@click.command(
    epilog=examples(
        """
        virtbus vm events web
        virtbus vm events web --follow
        virtbus vm events web -o json
        """
    )
)
@name_argument
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, follow: bool, namespace: str) -> None:
    """Show the events of the VM NAME.

    Events are kept for 72 hours, also after the delete of a VM. NAME may be a deleted VM's name or
    uid.
    """
    uid = uid_of(invocation, name, namespace)
    if follow:
        _follow(invocation, uid)
        return
    # the stream has the order of arrival; people expect the order of the senders' clocks
    items = sorted(stored(invocation, uid=uid), key=event_lines.at_ns)
    first_ns = event_lines.at_ns(items[0]) if items else 0
    rows = [event_lines.cells(item, first_ns) for item in items]
    invocation.show({"items": items}, lambda: output.table(event_lines.HEADER, rows))


def _follow(invocation: Invocation, uid: str) -> None:
    printer = event_lines.EventPrinter(invocation.style)
    live = LiveEvents(invocation, f"virtbus.evt.*.{uid}.>", printer.say)
    if invocation.for_eyes:
        output.write(event_lines.line(event_lines.HEADER))
    live.follow(sorted(stored(invocation, uid=uid), key=event_lines.at_ns))
