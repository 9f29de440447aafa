"""Implements `virtbus backup schedule create|list|get|update|delete`."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, output, units
from virtbus.cli.durations import whole_seconds
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.vm.target import namespace_filter, namespace_option

_HERE = "virtbus.cli.backup_schedule"
RESOURCE = "backup-schedule"
HEADER = ("NAMESPACE", "NAME", "VM", "EVERY", "KEEP", "STATE", "LAST", "MESSAGE")


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}:create", "Make a schedule."),
        "list": (f"{_HERE}:listing", "List schedules."),
        "get": (f"{_HERE}:get", "Show one schedule."),
        "update": (f"{_HERE}:update", "Change a schedule, or suspend it."),
        "delete": (f"{_HERE}:delete", "End schedules; their backups stay."),
    },
    epilog=examples(
        """
        virtbus backup schedule create nightly --vm web --every 24h --keep 7
        virtbus backup schedule list
        """
    ),
)
def command() -> None:
    """Manage schedules of backups.

    `virtbus status` shows an alarm after a run that failed or was missed. After each successful
    run, old backups of the schedule are removed. Damaged backups, the last verified backup, and
    backups on which others rest are kept.
    """


def _every(function: Any) -> Any:
    return click.option(
        "--every",
        metavar="TIME",
        callback=_time,
        help="Time from one backup to the next, such as 6h or 24h.",
    )(function)


def _time(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else whole_seconds(context, option, text)


def _numbers(function: Any) -> Any:
    chain = "Length of a chain: a full backup and its increments.  [default: 8]"
    for option in (
        click.option(
            "--keep", type=click.IntRange(min=1), metavar="N", help="Number of backups to keep."
        ),
        click.option("--chain", type=click.IntRange(min=1), metavar="N", help=chain),
        click.option("--verify/--no-verify", default=None, help="Verify each new backup."),
    ):
        function = option(function)
    return function


@click.command(
    epilog=examples("virtbus backup schedule create nightly --vm web --every 24h --keep 7")
)
@click.argument("name")
@click.option(
    "--vm", metavar="VM", required=True, shell_complete=completion_sources.vms, help="The VM."
)
@_every
@_numbers
@click.option(
    "--uid", metavar="UUID", help="A uid of your choice: the same command may be repeated."
)
@namespace_option
@verb
def create(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Make the schedule NAME. Its first backup is made at once.

    Each backup is an increment if that is possible. --every is 24h and --keep is 7 by default.
    """
    given = {"every_s": flags["every"], **{key: flags[key] for key in ("keep", "chain", "verify")}}
    spec = {"vm": flags["vm"], "every_s": 86_400, "keep": 7}
    spec |= {key: value for key, value in given.items() if value is not None}
    asked = {"name": name, "namespace": namespace, "spec": spec, "uid": flags["uid"] or uuid7()}
    invocation.call_and_show(RESOURCE, "create", asked, table)


@click.command(name="list", epilog=examples("virtbus backup schedule list"))
@namespace_filter
@verb
def listing(invocation: Invocation, *, namespace: str | None) -> None:
    """List schedules with their states."""
    query = {"limit": PAGE} | ({"namespace": namespace} if namespace else {})
    items = invocation.listed(RESOURCE, query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(epilog=examples("virtbus backup schedule get nightly -o yaml"))
@click.argument("name")
@namespace_option
@verb
def get(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Show the schedule NAME."""
    invocation.call_and_show(RESOURCE, "get", {"name": name, "namespace": namespace}, table)


@click.command(
    epilog=examples(
        """
        virtbus backup schedule update nightly --keep 14
        virtbus backup schedule update nightly --suspend
        """
    )
)
@click.argument("name")
@_every
@_numbers
@click.option("--suspend/--resume", default=None, help="Stop or continue to make backups.")
@namespace_option
@verb
def update(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Change the schedule NAME."""
    names = {"every": "every_s", "suspend": "suspended"}
    given = {names.get(key, key): value for key, value in flags.items() if value is not None}
    invocation.call_and_show(
        RESOURCE, "update", {"name": name, "namespace": namespace, **given}, table
    )


@click.command(epilog=examples("virtbus backup schedule delete nightly"))
@click.argument("names", nargs=-1, required=True)
@namespace_option
@verb
def delete(invocation: Invocation, *, names: tuple[str, ...], namespace: str) -> None:
    """End schedules. Their backups stay, and a backup that is being made is completed."""
    asked = [{"name": name, "namespace": namespace} for name in dict.fromkeys(names)]
    views = [invocation.call(RESOURCE, "delete", one) for one in asked]
    items = [{"name": view.get("name"), "deleted": True} for view in views]
    lines = "\n".join(f"{output.safe(view.get('name'))} deleted" for view in views)
    invocation.show({"items": items}, lambda: lines)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of schedules."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    spec = view.get("spec") or {}
    last_ns = view.get("last_ns")
    return (
        str(view.get("namespace", "")),
        str(view.get("name", "")),
        str(spec.get("vm", "")),
        f"{spec.get('every_s', 0)}s",
        str(spec.get("keep", "")),
        str(view.get("state", "")),
        units.ago(last_ns) if last_ns else "-",
        str(view.get("message") or ""),
    )
