"""Implements `virtbus vm move`."""

from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import completion_sources
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.vm.target import name_argument, namespace_option, ref
from virtbus.cli.vm.waiting import WaitProgress, failed

_SETTLED = frozenset({"Running", "Stopped", "Succeeded"})


@click.command(
    epilog=examples(
        """
        virtbus vm move web                          to the best other host
        virtbus vm move web --to n2 --discard-local-disks
        """
    )
)
@name_argument
@click.option(
    "--to",
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help=("The target host.  [default: the best one]"),
)
@click.option(
    "--discard-local-disks",
    is_flag=True,
    help="Discard the VM's written disks; they exist on its host only.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it has moved.")
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def command(  # noqa: PLR0913  one parameter for each option
    invocation: Invocation,
    *,
    name: str,
    to: str | None,
    discard_local_disks: bool,
    wait: bool,
    timeout: float,
    namespace: str,
) -> None:
    """Stop the VM NAME, and start it on another host from its images.

    The guest is not migrated while it runs. A stopped VM stays stopped. The command refuses a VM
    with volumes on its host.
    """
    asked: dict[str, Any] = ref(name, namespace) | {"discard_local_disks": discard_local_disks}
    view: Mapping[str, Any] = invocation.call("vm", "move", asked | ({"to": to} if to else {}))
    if wait and any(one.get("type") == "Evacuating" for one in view.get("conditions") or ()):
        view = _arrived(invocation, view, timeout)
    invocation.show(view, lambda: views.table([view]))


def _arrived(
    invocation: Invocation, view: Mapping[str, Any], timeout_s: float
) -> Mapping[str, Any]:
    """Wait until the VM runs or has stopped on its next node; return its view.

    Raises:
        CliError: the VM failed or was deleted, or has not arrived within `timeout_s`.
    """
    epoch = int(view.get("epoch") or 0)
    waiting = WaitProgress(
        invocation.session, str(view.get("uid")), Steps(shown=invocation.for_eyes)
    )

    def reached(seen: Mapping[str, Any]) -> bool:
        if int(seen.get("epoch") or 0) <= epoch:
            return False
        if views.state(seen) == "Failed":
            raise failed(seen)
        return views.state(seen) in _SETTLED

    return waiting.settle(view, reached, "has not arrived", timeout_s)
