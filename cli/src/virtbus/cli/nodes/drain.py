"""Implements `virtbus node drain`: requests the drain and reports each VM that leaves."""

import time
from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import units
from virtbus.cli.completion_sources import node_argument
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.nodes.cordon import show
from virtbus.cli.progress import Steps

_POLL_S = 0.5
_STILL = 3
"""After this number of consecutive checks without a leaving VM, the drain counts as ended."""


@click.command(
    epilog=examples(
        """
        virtbus node drain n1                          VMs that may leave go elsewhere
        virtbus node drain n1 --discard-local-disks    also those whose disks are only there
        virtbus node drain n1 --no-wait -o json
        virtbus node uncordon n1                       end it; evacuated VMs do not return
        """
    )
)
@node_argument
@click.option(
    "--discard-local-disks",
    is_flag=True,
    help="Also evacuate VMs without eviction_strategy; the disks that they wrote are lost.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until all have left.")
@click.option("--timeout", default=600.0, show_default=True, metavar="S", help="Time limit.")
@verb
def command(
    invocation: Invocation, *, name: str, discard_local_disks: bool, wait: bool, timeout: float
) -> None:
    """Place no new VMs on the host NAME, and evacuate its VMs.

    Each VM is stopped with its grace, and started on another host from its images: a running guest
    is not migrated. A VM stays if its volumes are on this host, or if its eviction_strategy is
    External or LiveMigrate. A VM with writable disks also stays, unless its eviction_strategy is
    None or LiveMigrateIfPossible, or it has no eviction_strategy and you give
    --discard-local-disks. VMs that stay keep running and are listed with the reason (exit code 1).

    The controllers continue whether or not this command waits; repeat it to check.
    """
    asked = {"node": name, "discard_local_disks": discard_local_disks}
    detail: Mapping[str, Any] = invocation.call("node", "drain", asked)
    if wait:
        detail = _emptied(invocation, name, detail, timeout)
    show(invocation, detail)
    left = detail.get("vms") or []
    if wait and left:
        raise CliError(
            Exit.REFUSED,
            "vms_stay",
            f"{len(left)} VM(s) stay on {name}",
            hint=f"fix the reasons, or end the drain: virtbus node uncordon {name}",
            details=[
                {"path": _name(vm), "message": vm.get("eviction_blocked_reason") or "stays"}
                for vm in left
            ],
        )


def _emptied(
    invocation: Invocation, name: str, detail: Mapping[str, Any], timeout_s: float
) -> Mapping[str, Any]:
    """Wait until no VM is leaving the node; return the node's last view.

    Raises:
        CliError: VMs are still leaving after `timeout_s`.
    """
    steps = Steps(shown=invocation.for_eyes)
    seen: dict[str, Mapping[str, Any]] = {}
    reported: set[str] = set()
    still, until_s = 0, time.monotonic() + timeout_s
    try:
        while True:
            there = {str(vm["uid"]): vm for vm in detail.get("vms") or ()}
            for uid in seen.keys() - there.keys():
                steps.step("left", f"{_name(seen.pop(uid))} {_whereto(invocation, uid)}")
            for uid, vm in there.items():
                if vm.get("evacuating") and uid not in reported:
                    reported.add(uid)
                    steps.step("leaves", _name(vm))
            seen |= there
            going = [
                vm
                for vm in there.values()
                if vm.get("evacuating") or not vm.get("eviction_blocked_reason")
            ]
            still = 0 if going else still + 1
            if not there or still >= _STILL:
                return detail
            if time.monotonic() > until_s:
                raise unknown(
                    f"{len(going)} VM(s) still leave {name} after {units.duration(timeout_s)}",
                    f"it continues by itself: `virtbus node get {name}`",
                )
            steps.status(f"{len(there)} VM(s) on {name}, {len(going)} on their way")
            time.sleep(_POLL_S)
            detail = invocation.call("node", "get", {"node": name})
    finally:
        steps.close()


def _whereto(invocation: Invocation, uid: str) -> str:
    try:
        return f"is on {invocation.call('vm', 'get', {'uid': uid}).get('node')}"
    except CliError as error:
        return "is deleted" if error.exit_code is Exit.NOT_FOUND else "has left"


def _name(vm: Mapping[str, Any]) -> str:
    return f"{vm.get('namespace')}/{vm.get('name')}"
