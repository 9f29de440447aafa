"""Implements `virtbus events`."""

import time
from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import event_lines, output, units
from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.live_events import LiveEvents
from virtbus.cli.vm.history import stored

_NAME_WIDTH = 16


@click.command(
    name="events",
    epilog=examples(
        """
        virtbus events --follow
        virtbus events --since 10m
        virtbus events --follow --kind domain -o json
        """
    ),
)
@click.option("-f", "--follow", is_flag=True, help="Continue with new events, until Ctrl-C.")
@click.option(
    "--since", metavar="AGE", help="How far back: 90s, 10m, 2h, 1d.  [default: 1h; with -f: none]"
)
@click.option(
    "--kind", default="", metavar="PREFIX", help=("Only kinds with this prefix: image, vm.d…")
)
@verb
def command(invocation: Invocation, *, follow: bool, since: str | None, kind: str) -> None:
    """Show the stored events of all VMs and nodes."""
    oldest_ns = _oldest(since, follow=follow)
    names = _Names()
    live = LiveEvents(
        invocation, "virtbus.evt.>", _HistoryPrinter(invocation, oldest_ns, kind, names).tell
    )
    past = sorted(stored(invocation), key=event_lines.at_ns) if since or not follow else []
    for item in past:
        names.learn(item)
    if not follow:
        found = [item for item in past if _is_wanted(item, oldest_ns, kind)]
        first_ns = event_lines.at_ns(found[0]) if found else 0
        rows = [(names.of(item), *event_lines.cells(item, first_ns)) for item in found]
        invocation.show({"items": found}, lambda: output.table(("VM", *event_lines.HEADER), rows))
        return
    if invocation.for_eyes:
        output.write(f"{'VM':<{_NAME_WIDTH}}  {event_lines.line(event_lines.HEADER)}")
        output.flush()
    live.follow(past)


def _is_wanted(item: Mapping[str, Any], oldest_ns: int, kind: str) -> bool:
    return event_lines.kind_of(item).startswith(kind) and event_lines.at_ns(item) >= oldest_ns


class _Names:
    """Remembers VM names by uid, because some events lack the name of their VM."""

    def __init__(self) -> None:
        self._by_uid: dict[str, str] = {}

    def learn(self, item: Mapping[str, Any]) -> None:
        data = item.get("data") or {}
        if data.get("name"):
            self._by_uid[str(data.get("uid"))] = str(data["name"])

    def of(self, item: Mapping[str, Any]) -> str:
        """Return the VM's name, or its uid if the name is unknown; empty without a VM."""
        uid = str((item.get("data") or {}).get("uid") or "")
        return self._by_uid.get(uid, uid)


class _HistoryPrinter:
    def __init__(self, invocation: Invocation, oldest_ns: int, kind: str, names: _Names) -> None:
        self._printer = event_lines.EventPrinter(invocation.style)
        self._oldest_ns = oldest_ns
        self._kind = kind
        self._names = names

    def tell(self, item: Mapping[str, Any]) -> None:
        self._names.learn(item)
        if _is_wanted(item, self._oldest_ns, self._kind):
            self._printer.say(item, self._names.of(item))


def _oldest(since: str | None, *, follow: bool) -> int:
    if since is None and follow:
        return time.time_ns() - units.NS
    try:
        age_s = units.seconds_of(since or "1h")
    except ValueError:
        raise usage(f"--since {since!r} is no age", "use 90s, 10m, 2h or 1d") from None
    return time.time_ns() - int(age_s * units.NS)
