"""`virtbus events`."""

import time
from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import fact_lines, output, units
from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.live_facts import LiveFacts
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
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option(
    "--since", metavar="AGE", help="How far back: 90s, 10m, 2h, 1d.  [default: 1h; with -f: none]"
)
@click.option("--kind", default="", metavar="PREFIX", help="Only kinds that start so: image, vm.d…")
@verb
def command(invocation: Invocation, *, follow: bool, since: str | None, kind: str) -> None:
    """What happens to all VMs: each step of each life, as stored facts."""
    oldest_ns = _oldest(since, follow=follow)

    def tell(item: Mapping[str, Any]) -> None:
        if fact_lines.kind_of(item).startswith(kind) and fact_lines.at_ns(item) >= oldest_ns:
            data = item.get("data") or {}
            name = str(data.get("name") or str(data.get("uid") or "")[:8])
            fact_lines.say(item, invocation.style, oldest_ns, name)

    live = LiveFacts(invocation, "virtbus.evt.>", tell)
    if invocation.for_eyes:
        output.write(f"{'VM':<{_NAME_WIDTH}}  {fact_lines.line(fact_lines.HEADER)}")
        output.flush()
    if since or not follow:
        for item in stored(invocation):
            live.stored(item)
    if follow:
        live.follow()


def _oldest(since: str | None, *, follow: bool) -> int:
    """The clock (ns) from which facts are shown."""
    if since is None and follow:
        return time.time_ns() - units.NS
    try:
        age_s = units.seconds_of(since or "1h")
    except ValueError:
        raise usage(f"--since {since!r} is no age", "use 90s, 10m, 2h or 1d") from None
    return time.time_ns() - int(age_s * units.NS)
