"""Implements `virtbus vm delete`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.failures import CliError, unknown, worst
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.vm.power import grace_option
from virtbus.cli.vm.target import names_argument, namespace_option, ref
from virtbus.cli.vm.waiting import WaitProgress


@click.command(
    epilog=examples(
        """
        virtbus vm delete web
        virtbus vm delete a b c --grace 0     end the guests at once
        virtbus vm delete web --no-wait       return when the delete is accepted
        """
    )
)
@names_argument
@grace_option
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help=("Wait until everything is removed.")
)
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    names: tuple[str, ...],
    grace: int | None,
    wait: bool,
    timeout: float,
    namespace: str,
) -> None:
    """Delete VMs: a guest is shut down, then its VM's own disks, network and record are removed.

    Volumes stay, except volumes that the VM's spec made with the retention Delete. All deletes are
    sent first and then awaited together. A delete cannot be undone.
    """
    deletion = _Deletion(invocation, grace, namespace)
    results = [deletion.send(name) for name in dict.fromkeys(names)]
    if wait:
        results = deletion.wait(results, timeout)
    done = [result for result in results if not isinstance(result, CliError)]
    failed = [result for result in results if isinstance(result, CliError)]
    if done and invocation.for_eyes:
        for view in done:
            word = "deleted" if wait else "deleting"
            output.write(f"{output.safe(view.get('name'))} {word}")
    elif done:
        items = [
            {**output.picked(view, "name", "namespace", "uid"), "deleted": wait} for view in done
        ]
        output.write(output.render({"items": items}, invocation.style))
    if failed:
        raise worst(failed)


_Result = Mapping[str, Any] | CliError
"""The view of a VM that is being deleted, or the error of its delete."""


class _Deletion:
    """Deletes VMs of one namespace with the same grace."""

    def __init__(self, invocation: Invocation, grace_s: int | None, namespace: str) -> None:
        self._invocation = invocation
        self._more = {} if grace_s is None else {"grace_s": grace_s}
        self._grace_s = grace_s
        self._namespace = namespace

    def send(self, name: str) -> _Result:
        query = ref(name, self._namespace)
        try:
            return self._invocation.call("vm", "delete", {**query, **self._more})
        except CliError as error:
            return error

    def wait(self, results: list[_Result], timeout_s: float) -> list[_Result]:
        """Wait until all VMs are gone; replace the result of each remaining VM by an error."""
        steps = Steps(shown=self._invocation.for_eyes)
        names = [_name(result) for result in results]
        width = max(map(len, names)) if len(names) > 1 else 0
        waitings = {
            n: WaitProgress(
                self._invocation.session,
                str(result["uid"]),
                steps,
                name.ljust(width) if width else "",
            )
            for n, (name, result) in enumerate(zip(names, results, strict=True))
            if not isinstance(result, CliError) and result.get("uid")
        }
        ended = list(results)
        try:
            # subscribe for all VMs first, so that their steps are shown in order
            for waiting in waitings.values():
                waiting.listen()
            for n, waiting in waitings.items():
                result = results[n]
                if isinstance(result, CliError):
                    continue
                waiting.stopping(result, self._grace_s)
                if not waiting.until(lambda view: view is None, timeout_s - steps.elapsed_s):
                    ended[n] = _still_there(waiting.view or result, timeout_s)
        finally:
            steps.close()
        return ended


def _name(result: _Result) -> str:
    return "" if isinstance(result, CliError) else str(result.get("name") or result.get("uid"))


def _still_there(view: Mapping[str, Any], timeout_s: float) -> CliError:
    why = str(view.get("message") or view.get("reason") or "")
    return unknown(
        f"{view.get('name')} is not gone after {units.duration(timeout_s)}; it is "
        + views.state(view)
        + (f": {why}" if why else ""),
        f"the delete continues by itself: `virtbus vm events {view.get('uid')} --follow`",
    )
