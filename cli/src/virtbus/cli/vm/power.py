"""Implements `vm start`, `stop`, `restart`, `pause`, `unpause`, `reset` and `soft-reboot`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.vm.target import name_argument, namespace_option, ref
from virtbus.cli.vm.waiting import WaitProgress, failed

Function = Callable[..., Any]
_HALTED = frozenset({"Stopped", "Succeeded", "Failed"})


def waits_until(what: str) -> Callable[[Function], Function]:
    """Add `--wait/--no-wait` and `--timeout` to a verb, as the parameter `timeout_s`.

    `timeout_s` is None with --no-wait. The help text of --wait is "Wait until it <what>."
    """

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
    """Add `--grace S` and `--force`; the value is None if neither is given."""
    force = click.option(
        "--force",
        "grace",
        type=int,
        flag_value=0,
        help="End the guest at once (as --grace 0), also one that libvirt has lost.",
    )
    return click.option(
        "--grace",
        type=int,
        metavar="S",
        help="Seconds that the guest gets to shut down.  [default: the VM's termination grace, 30]",
    )(force(function))


def switch(
    invocation: Invocation,
    action: str,
    query: Mapping[str, Any],
    goals: frozenset[str] | None,
    timeout_s: float | None,
) -> None:
    """Request `vm.<action>` and print the VM.

    With `timeout_s`, first wait until the VM's state is one of `goals`. `goals` None means
    Running, or Paused if the VM starts paused.
    """
    view: Mapping[str, Any] = invocation.call("vm", action, query)
    if timeout_s is not None:
        goals = goals or frozenset({"Paused" if view.get("paused") else "Running"})
        view = _reached(invocation, action, view, goals, timeout_s, query.get("grace_s"))
    invocation.show(view, lambda: views.table([view]))


def press(invocation: Invocation, action: str, query: Mapping[str, Any], **more: Any) -> None:
    """Request `vm.<action>` for the VM's current epoch, with `more` fields; print the VM."""
    now = invocation.call("vm", "get", query)
    view = invocation.call("vm", action, {**query, "epoch": now.get("epoch"), **more})
    invocation.show(view, lambda: views.table([view]))


def _reached(
    invocation: Invocation,
    action: str,
    view: Mapping[str, Any],
    goals: frozenset[str],
    timeout_s: float,
    grace_s: int | None,
) -> Mapping[str, Any]:
    generation = int(view.get("generation") or 0)

    def reached(seen: Mapping[str, Any]) -> bool:
        # The state is the old one until the node has seen this request.
        if int(seen.get("observed_generation") or 0) < generation:
            return False
        # A guest that failed can never be paused, so its failure ends the wait. For other actions,
        # Failed may be the state before the action.
        fails = views.state(seen) == "Failed" and action in {"pause", "unpause"}
        if seen.get("power_observed") is False and not fails:
            return False
        if views.state(seen) == "Failed" and "Failed" not in goals:
            raise failed(seen)
        return views.state(seen) in goals

    waiting = WaitProgress(
        invocation.session, str(view.get("uid")), Steps(shown=invocation.for_eyes)
    )
    if "Stopped" in goals:
        waiting.stopping(view, grace_s)
    return waiting.settle(view, reached, f"is not {' or '.join(sorted(goals))}", timeout_s)


@click.command(
    "start",
    epilog=examples(
        """
        virtbus vm start web
        virtbus vm start web --paused        then: virtbus vm unpause web
        virtbus vm start web --no-wait
        """
    ),
)
@name_argument
@click.option("--paused", is_flag=True, help="Leave the guest paused before its first instruction.")
@waits_until("runs")
@namespace_option
@verb
def start(
    invocation: Invocation,
    *,
    name: str,
    paused: bool,
    timeout_s: float | None,
    namespace: str,
) -> None:
    """Start the stopped VM NAME with its disk."""
    query = ref(name, namespace) | ({"paused": True} if paused else {})
    switch(invocation, "start", query, None, timeout_s)


@click.command(
    "stop",
    epilog=examples(
        """
        virtbus vm stop web                  ask the guest, end it after its grace
        virtbus vm stop web --force          end the guest at once
        virtbus vm start web                 and run it again
        """
    ),
)
@name_argument
@grace_option
@waits_until("is off")
@namespace_option
@verb
def stop(
    invocation: Invocation,
    *,
    name: str,
    grace: int | None,
    timeout_s: float | None,
    namespace: str,
) -> None:
    """Stop the VM NAME; it keeps its disk, its name and its node."""
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "stop", query, _HALTED, timeout_s)


@click.command(
    "restart",
    epilog=examples(
        """
        virtbus vm restart web               shut down, then start with its current spec
        virtbus vm restart web --grace 0     end the guest at once
        virtbus vm restart web --no-wait
        """
    ),
)
@name_argument
@grace_option
@waits_until("runs again")
@namespace_option
@verb
def restart(
    invocation: Invocation,
    *,
    name: str,
    grace: int | None,
    timeout_s: float | None,
    namespace: str,
) -> None:
    """End the guest of the VM NAME, and start it again on the same host with its disk.

    A restart applies pending changes of the VM's spec (the condition RestartRequired).
    """
    query = ref(name, namespace) | ({} if grace is None else {"grace_s": grace})
    switch(invocation, "restart", query, None, timeout_s)


@click.command(
    "pause",
    epilog=examples(
        """
        virtbus vm pause web
        virtbus vm unpause web               and resume it
        """
    ),
)
@name_argument
@waits_until("is paused")
@namespace_option
@verb
def pause(invocation: Invocation, *, name: str, timeout_s: float | None, namespace: str) -> None:
    """Pause the CPUs of the VM NAME, and keep its memory.

    The VM stays paused until `unpause`, `stop` or `restart`. If its host restarts meanwhile, the
    guest boots on the host and is paused again. A paused guest cannot react to a shutdown request,
    so `stop` or `delete` ends it at once.
    """
    switch(invocation, "pause", ref(name, namespace), frozenset({"Paused"}), timeout_s)


@click.command(
    "unpause",
    epilog=examples(
        """
        virtbus vm unpause web
        virtbus vm start web --paused        a VM that waits for its first unpause
        """
    ),
)
@name_argument
@waits_until("runs again")
@namespace_option
@verb
def unpause(invocation: Invocation, *, name: str, timeout_s: float | None, namespace: str) -> None:
    """Resume the paused VM NAME, even if it was not paused by `pause`."""
    switch(invocation, "unpause", ref(name, namespace), frozenset({"Running"}), timeout_s)


@click.command(
    "reset",
    epilog=examples(
        """
        virtbus vm reset web
        virtbus vm soft-reboot web           ask the guest instead
        """
    ),
)
@name_argument
@namespace_option
@verb
def reset(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Reset the VM NAME at once, without asking its guest.

    Unwritten data of the guest is lost. The reset happens once, or the command reports why it did
    not happen. A reset does not apply a changed spec: use `restart` for that.
    """
    press(invocation, "reset", ref(name, namespace))


@click.command(
    "soft-reboot",
    epilog=examples(
        """
        virtbus vm soft-reboot web
        virtbus vm events web -f             guest.rebooting, then guest.ready
        """
    ),
)
@name_argument
@namespace_option
@verb
def soft_reboot(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Ask the guest of the VM NAME to reboot, by its guest agent or ACPI.

    The command returns once the guest was asked; a guest that does not react keeps running. Use
    `restart` to end such a guest after its grace, `reset` to end it at once.
    """
    press(invocation, "soft-reboot", ref(name, namespace))
