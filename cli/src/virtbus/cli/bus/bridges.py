"""`virtbus bus add-bridge`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from virtbus.bus.provisioning.bus_directory import BusDirectory
from virtbus.bus.provisioning.permissions import bridge
from virtbus.cli.bus.nodes import reload
from virtbus.cli.bus.place import copy_hint, directory, knows, refusals, written
from virtbus.cli.failures import unavailable
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples
from virtbus.schemas.ids import check_id


@click.command(epilog=examples("virtbus bus add-bridge east"))
@click.argument("cluster")
@directory
@local
def add_bridge(invocation: Invocation, cluster: str, place: str) -> None:
    """Create an account for a further Kubernetes cluster's bridge.

    Every bus has the user `bridge` for one cluster. Each bridge sees and changes only the VMs that
    its own account created, so two clusters never share a VM.
    """
    prepared = BusDirectory(Path(place))
    user = bridge(check_id(cluster)).user
    with refusals():
        changed = prepared.add_bridge(cluster)
        reloaded = reload(prepared)
        plan = prepared.plan()
        refusing = asyncio.run(knows(prepared, plan, user)) if reloaded else {}
    told: dict[str, Any] = {"bridge": cluster, "changed": [str(path) for path in changed]}
    told |= {"credentials": [str(prepared.creds(user))]}
    told |= {"reloaded": reloaded, "refusing": refusing}
    lines = [written(changed), f"credentials: {prepared.creds(user)}"]
    lines += copy_hint(prepared, plan, list(refusing))
    invocation.show(told, lambda: "\n".join(lines))
    if not reloaded:
        raise unavailable("no server answers, so none was reloaded", "start them, then repeat this")
    if refusing:
        raise unavailable(
            f"these servers do not know {user} yet: {', '.join(refusing)}",
            "copy accounts.conf as above, then repeat this command",
        )
