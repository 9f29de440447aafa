"""Implements `virtbus operation list|get|watch|cancel|delete`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.failures import CliError, Exit, tried, unknown, worst
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm.target import namespace_filter

_HERE = "virtbus.cli.operation"
HEADER = ("ID", "KIND", "NAMESPACE", "OF", "NODE", "PHASE", "DONE", "AGE", "MESSAGE")
ENDED = frozenset({"Succeeded", "Failed", "Cancelled"})
POLL_S = 0.5
SOON_S = 0.05
"""The first pause between requests for a state. A snapshot without copies takes less time."""


@click.group(
    cls=LazyGroup,
    verbs={
        "list": (f"{_HERE}:listing", "List operations."),
        "get": (f"{_HERE}:get", "Show one operation."),
        "watch": (f"{_HERE}:watch", "Show the progress of an operation until its end."),
        "cancel": (
            f"{_HERE}:cancel",
            "Cancel operations; the content of disks stays as it was.",
        ),
        "delete": (f"{_HERE}:delete", "Remove ended operations and their files."),
    },
    epilog=examples(
        """
        virtbus operation list
        virtbus operation watch 0192f0c1-2d3e-7abc-8def-0123456789ab
        """
    ),
)
def command() -> None:
    """Manage operations: long work on VMs and volumes, such as exports.

    An operation runs on the node of its VM or volume. A VM or volume has one running operation at a
    time. An operation needs no client: it continues if the command that waits for it ends early.
    After its end it is kept for a day, or less: the controllers' settings operation_keep_s and
    operations_per_namespace limit this.
    """


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus operation list
        virtbus operation list -o json | jq -r '.items[] | select(.phase == "Failed") | .id'
        """
    ),
)
@namespace_filter
@verb
def listing(invocation: Invocation, *, namespace: str | None) -> None:
    """List operations, the oldest first."""
    query: dict[str, Any] = {"limit": PAGE}
    if namespace:
        query["namespace"] = namespace
    items = invocation.listed("operation", query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(
    epilog=examples("virtbus operation get 0192f0c1-2d3e-7abc-8def-0123456789ab -o yaml")
)
@click.argument("id_", metavar="ID")
@verb
def get(invocation: Invocation, *, id_: str) -> None:
    """Show the operation ID."""
    view = invocation.call("operation", "get", {"id": id_})
    invocation.show(view, lambda: table([view]))


@click.command(epilog=examples("virtbus operation watch 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("id_", metavar="ID")
@verb
def watch(invocation: Invocation, *, id_: str) -> None:
    """Show the progress of the operation ID until its end."""
    view = until_ended(invocation, invocation.call("operation", "get", {"id": id_}))
    invocation.show(view, lambda: table([view]))
    refuse_failed(view)


@click.command(epilog=examples("virtbus operation cancel 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@verb
def cancel(invocation: Invocation, *, ids: tuple[str, ...]) -> None:
    """Cancel operations. The content of disks stays as it was.

    A cancel is refused once the final step of the operation has begun.
    """
    views, failed = _each(invocation, "cancel", ids)
    if views:
        invocation.show({"items": views}, lambda: table(views))
    if failed:
        raise worst(failed)


@click.command(epilog=examples("virtbus operation delete 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@verb
def delete(invocation: Invocation, *, ids: tuple[str, ...]) -> None:
    """Remove operations that have ended, and the files of exports on their nodes."""
    views, failed = _each(invocation, "delete", ids)
    items = [{"id": view.get("id"), "deleted": True} for view in views]
    lines = "\n".join(f"{output.safe(view.get('id'))} deleted" for view in views)
    if items:
        invocation.show({"items": items}, lambda: lines)
    if failed:
        raise worst(failed)


def _each(
    invocation: Invocation, action: str, ids: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[CliError]]:
    return tried(lambda id_: invocation.call("operation", action, {"id": id_}), dict.fromkeys(ids))


# --- for other verbs --------------------------------------------------------------------------
def until_ended(invocation: Invocation, view: dict[str, Any]) -> dict[str, Any]:
    """Show an operation's progress until its end; return the operation.

    Raises:
        CliError: as `Invocation.call`.
        CliError: `outcome_unknown`: a person interrupted the wait. The operation continues.
    """
    steps = Steps(shown=invocation.for_eyes)
    id_, pause_s = str(view.get("id")), pauses_s()
    try:
        while view.get("phase") not in ENDED:
            show_progress(steps, view)
            time.sleep(next(pause_s))
            view = invocation.call("operation", "get", {"id": id_})
    except KeyboardInterrupt:
        message = f"operation {id_} continues"
        raise unknown(message, f"`virtbus operation watch {id_}`, or `… cancel {id_}`") from None
    finally:
        steps.close()
    return view


def pauses_s() -> Iterator[float]:
    """Yield the pauses between requests for a state, from SOON_S up to POLL_S."""
    pause_s = SOON_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, POLL_S)


def show_progress(steps: Steps, view: Mapping[str, Any]) -> None:
    """Show an operation's progress, or the reason why the operation waits."""
    if waits := view.get("message"):
        steps.wait(str(waits))
        return
    what = str(view.get("step") or view.get("phase"))
    done, total = int(view.get("done_bytes") or 0), int(view.get("total_bytes") or 0)
    steps.transfer(output.safe(what), done, total or None)


def refuse_failed(view: Mapping[str, Any]) -> None:
    """Raise CliError if the operation has not succeeded."""
    if view.get("phase") == "Succeeded":
        return
    error = view.get("error")
    if isinstance(error, Mapping):
        raise CliError.answered(error)
    why = view.get("message") or "it was cancelled"
    raise CliError(Exit.REFUSED, "cancelled", f"operation {view.get('id')}: {why}")


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of operations."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    done, total = int(view.get("done_bytes") or 0), int(view.get("total_bytes") or 0)
    what = f"{view.get('resource')}/{view.get('name')}"
    error = view.get("error")
    failed = error.get("message") if isinstance(error, Mapping) else ""
    return (
        str(view.get("id", "")),
        str(view.get("kind", "export")),
        str(view.get("namespace", "")),
        f"{what}:{view['disk']}" if view.get("disk") else what,
        str(view.get("node") or "-"),
        str(view.get("phase") or "Accepted"),
        f"{min(100, 100 * done // total)} %" if total else "-",
        units.ago(view.get("created_ns")),
        str(failed or view.get("message") or ""),
    )
