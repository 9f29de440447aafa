"""Deletes named objects such as volumes, and waits until they are gone."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit, tried, unknown, worst
from virtbus.cli.invocation import Invocation

POLL_S = 0.5
View = Mapping[str, Any]


def delete_named(
    invocation: Invocation,
    resource: str,
    asked: Sequence[View],
    *,
    wait_s: float | None,
    check: Callable[[View], None] = lambda _: None,
) -> None:
    """Delete the objects that `asked` names, and show them. With `wait_s` None, do not wait.

    `check` gets an object's view while the object exists, and may raise CliError. The time limit
    raises CliError `outcome_unknown`. Errors are raised after the other objects were deleted and
    shown.
    """
    ended, failed = tried(lambda one: invocation.call(resource, "delete", one), asked)
    if wait_s is not None:
        until = time.monotonic() + wait_s
        ended, late = tried(lambda view: _gone(invocation, resource, view, until, check), ended)
        failed += late
    waited = wait_s is not None
    items = [{**output.picked(one, "name", "namespace", "uid"), "deleted": waited} for one in ended]
    word = "deleted" if waited else "deleting"
    lines = "\n".join(f"{output.safe(one.get('name'))} {word}" for one in ended)
    if items:
        invocation.show({"items": items}, lambda: lines)
    if failed:
        raise worst(failed)


def _gone(
    invocation: Invocation,
    resource: str,
    view: dict[str, Any],
    until: float,
    check: Callable[[View], None],
) -> dict[str, Any]:
    """Return `view` once its object is gone, or another object has its name."""
    asked = output.picked(view, "name", "namespace")
    while True:
        try:
            seen = invocation.call(resource, "get", asked)
        except CliError as error:
            if error.exit_code is Exit.NOT_FOUND:
                return view
            raise
        if seen.get("uid") != view.get("uid"):
            return view
        check(seen)
        if time.monotonic() > until:
            name, why = seen.get("name"), seen.get("message") or "its node has not answered yet"
            raise unknown(
                f"{name} is still being deleted: {why}",
                f"it continues by itself: `virtbus {resource} get {name}`",
            )
        time.sleep(POLL_S)
