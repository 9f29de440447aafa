"""What start and stop share: send the wish, then wait for the state that it names."""

from collections.abc import Mapping
from typing import Any

from virtbus.cli import units
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.invocation import Invocation
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.vm.waiting import Waiting


def switch(
    invocation: Invocation,
    wish: str,
    query: Mapping[str, Any],
    goals: frozenset[str],
    timeout_s: float | None,
) -> None:
    """Ask `vm.<wish>` and show the VM; with `timeout_s` once its state is one of `goals`."""
    answer = invocation.call("vm", wish, query)
    view: Mapping[str, Any] = answer.get("vm") or answer
    if timeout_s is not None:
        view = _reached(invocation, view, goals, timeout_s, query.get("grace_s"))
    invocation.show(view, lambda: views.table([view]))


def _reached(
    invocation: Invocation,
    view: Mapping[str, Any],
    goals: frozenset[str],
    timeout_s: float,
    grace_s: int | None,
) -> Mapping[str, Any]:
    name, generation = view.get("name"), int(view.get("generation") or 0)
    steps = Steps(shown=invocation.for_eyes)
    waiting = Waiting(invocation.session, str(view.get("uid")), steps)

    def verdict(seen: Mapping[str, Any] | None) -> bool:
        if seen is None:
            raise CliError(Exit.NOT_FOUND, "deleted", f"{name} was deleted meanwhile")
        # before the node has seen this wish, the state still answers the one before
        if int(seen.get("observed_generation") or 0) < generation:
            return False
        if views.state(seen) == "Failed" and "Failed" not in goals:
            why = seen.get("message") or seen.get("reason") or "no reason is known"
            hint = f"`virtbus vm events {name}` shows each step"
            raise CliError(Exit.REFUSED, "failed", f"{name} is Failed: {why}", hint=hint)
        return views.state(seen) in goals

    try:
        waiting.listen()
        if "Stopped" in goals:
            waiting.stopping(view, grace_s)
        if waiting.until(verdict, timeout_s):
            return waiting.view or view
    finally:
        steps.close()
    state = views.state(waiting.view or view)
    raise unknown(
        f"{name} is not {' or '.join(sorted(goals))} after {units.duration(timeout_s)};"
        f" it is {state}",
        f"it goes on by itself: `virtbus vm get {name}`",
    )
