"""Shared parts of start, stop, restart and pause: send the request, then wait for its result."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from virtbus.cli import units
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.invocation import Invocation
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.vm.waiting import WaitProgress

Function = Callable[..., Any]


def waits_until(what: str) -> Callable[[Function], Function]:
    """Add `--wait/--no-wait` and `--timeout` as the parameter `timeout_s`: None with --no-wait."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_timeout(*args: Any, wait: bool, timeout: float, **given: Any) -> Any:
            return function(*args, timeout_s=timeout if wait else None, **given)

        asked = f"Wait until it {what}."
        late = click.option(
            "--timeout", default=300.0, show_default=True, metavar="S", help="Time limit."
        )(with_timeout)
        return click.option("--wait/--no-wait", default=True, show_default=True, help=asked)(late)

    return decorate


def grace_option(function: Function) -> Function:
    """Add `--grace S`; None if it is the VM's own."""
    return click.option(
        "--grace",
        type=int,
        metavar="S",
        help="Seconds the guest gets to shut down.  [default: the VM's termination grace, 30]",
    )(function)


def switch(
    invocation: Invocation,
    action: str,
    query: Mapping[str, Any],
    goals: frozenset[str] | None,
    timeout_s: float | None,
) -> None:
    """Request `vm.<wish>` and show the VM; with `timeout_s` once its state is one of `goals`.

    `goals` None: Running, or Paused if the answer says that its start leaves it paused.
    """
    answer = invocation.call("vm", action, query)
    view: Mapping[str, Any] = answer.get("vm") or answer
    if timeout_s is not None:
        goals = goals or frozenset({"Paused" if view.get("paused") else "Running"})
        view = _reached(invocation, action, view, goals, timeout_s, query.get("grace_s"))
    invocation.show(view, lambda: views.table([view]))


def press(invocation: Invocation, action: str, query: Mapping[str, Any]) -> None:
    """Request `vm.<wish>` for the current guest, once, and show the VM."""
    now = invocation.call("vm", "get", query)
    view = invocation.call("vm", action, dict(query) | {"epoch": now.get("epoch")})
    invocation.show(view, lambda: views.table([view]))


def _reached(
    invocation: Invocation,
    action: str,
    view: Mapping[str, Any],
    goals: frozenset[str],
    timeout_s: float,
    grace_s: int | None,
) -> Mapping[str, Any]:
    name, generation = view.get("name"), int(view.get("generation") or 0)
    steps = Steps(shown=invocation.for_eyes)
    waiting = WaitProgress(invocation.session, str(view.get("uid")), steps)

    def verdict(seen: Mapping[str, Any] | None) -> bool:
        if seen is None:
            raise CliError(Exit.NOT_FOUND, "deleted", f"{name} was deleted meanwhile")
        # before the node has seen this request, the state still answers the previous one
        if int(seen.get("observed_generation") or 0) < generation:
            return False
        # a guest that fails meanwhile is never paused; otherwise Failed is an earlier state
        failed = views.state(seen) == "Failed" and action in {"pause", "unpause"}
        if seen.get("power_observed") is False and not failed:
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
        f"it continues by itself: `virtbus vm get {name}`",
    )
