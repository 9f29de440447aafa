"""Implements `virtbus bus init`."""

from pathlib import Path
from typing import Any

import click

from virtbus.bus.provisioning.bus_directory import (
    CLIENT_PORT,
    ROUTE_PORT,
    STORE,
    BusDirectory,
    BusPlan,
    parse_servers,
)
from virtbus.cli.bus.place import refusals, written
from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples
from virtbus.schemas.ids import check_id


@click.command(
    name="init",
    epilog=examples(
        """
        virtbus bus init /etc/virtbus/bus --host bus.example.org,10.0.0.5
        virtbus bus init bus --servers 3 --host a.example --host b.example --host c.example \\
        |    --installed-at /etc/virtbus/nats --node n1 --node n2
        virtbus bus init bus            again: renews certificates that end soon, nothing else
        """
    ),
)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help=("Names of one server, separated by commas; repeat for each server."),
)
@click.option("--servers", type=click.Choice(["1", "3"]), default="1", show_default=True)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="A host of VMs; repeatable.")
@click.option(
    "--bridge",
    "bridges",
    multiple=True,
    metavar="CLUSTER",
    help="A further Kubernetes cluster; repeatable.",
)
@click.option(
    "--port", type=int, default=CLIENT_PORT, show_default=True, help=("The port for clients.")
)
@click.option("--route-port", type=int, default=ROUTE_PORT, show_default=True)
@click.option(
    "--monitor-port", type=int, default=8222, show_default=True, help="Port on 127.0.0.1; 0: none."
)
@click.option("--bind-names", is_flag=True, help="Listen at each server's first name only.")
@click.option("--store", default=STORE, show_default=True, help="Folder of the servers' streams.")
@click.option("--installed-at", default="", help="Path of a server's folder on its host.")
@local
def command(
    invocation: Invocation,
    directory: str,
    hosts: tuple[str, ...],
    servers: str,
    nodes: tuple[str, ...],
    bridges: tuple[str, ...],
    **more: Any,
) -> None:
    """Write the complete configuration of a production bus into DIRECTORY.

    It contains a CA, a certificate per server, an account per node, keys, limits, and a credentials
    file per user. If DIRECTORY already has a bus, the settings of that bus are used, and options
    are ignored.
    """
    prepared = BusDirectory(Path(directory))
    with refusals():
        if prepared.exists:
            changed = prepared.write(prepared.plan())
            value = {"url": prepared.plan().url, "changed": [str(path) for path in changed]}
            invocation.show(value, lambda: written(changed))
            return
        if not hosts:
            raise usage("a bus needs a name by which hosts reach it", "add --host bus.example.org")
        plan = BusPlan(
            parse_servers(hosts, int(servers)),
            nodes=[check_id(node) for node in nodes],
            bridges=[check_id(cluster) for cluster in bridges],
            **more,
        )
        changed = prepared.write(plan)
    value = {"url": plan.url, "changed": [str(path) for path in changed]}
    invocation.show(value, lambda: "\n".join([written(changed), *_next(prepared, plan)]))


def _next(prepared: BusDirectory, plan: BusPlan) -> list[str]:
    lines = ["", "Next:"]
    for number, names in enumerate(plan.servers, start=1):
        at = plan.installed_at or str(prepared.folder(number))
        if plan.installed_at:
            lines.append(f"  scp -r {prepared.folder(number)} root@{names[0]}:{at}")
        lines.append(f"  on {names[0]}: nats-server -c {at}/nats-server.conf")
    lines += [
        f"  virtbus bus declare --dir {prepared.base}",
        f"  virtbus bus add-node NAME --dir {prepared.base}",
        f"Keep {prepared.base} off the servers: it has the CA's key and everybody's seeds.",
    ]
    return lines
