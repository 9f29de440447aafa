"""Implements `virtbus vm adopt`."""

import click

from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.target import name_argument, namespace_option, ref

CLUSTER = "virtbus.io/cluster"
OWNED = (CLUSTER, "kubevirt.io/created-by")
ORPHANED = "virtbus.io/orphaned"


@click.command(
    epilog=examples(
        """
        virtbus vm adopt 0192f0c1-2d3e-7abc-8def-0123456789ab
        """
    )
)
@name_argument
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Detach the VM NAME from the Kubernetes cluster that created it; virtbus keeps the VM.

    Use it for a VM that is shown as orphaned: its cluster no longer has an object for the VM, for
    example after a restore of the API server. The cluster's bridge never touches the VM again. To
    end the VM instead, delete it.
    """
    view = invocation.call("vm", "get", ref(name, namespace))
    if CLUSTER not in (view.get("labels") or {}):
        message = f"{name} was not made by a Kubernetes cluster: there is nothing to adopt"
        raise CliError(Exit.REFUSED, "not_orphaned", message)
    update = {
        "uid": view["uid"],
        "revision": view["revision"],
        "labels": {key: one for key, one in view["labels"].items() if key not in OWNED},
        "annotations": {
            key: one for key, one in (view.get("annotations") or {}).items() if key != ORPHANED
        },
    }
    answer = invocation.call("vm", "update", update)
    invocation.show(answer, lambda: f"{view['name']} is a VM of virtbus only now")
