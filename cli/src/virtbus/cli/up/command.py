"""Implements `virtbus up`."""

import os
from typing import TYPE_CHECKING

import click

from virtbus.cli.failures import usage
from virtbus.cli.lazy import examples
from virtbus.cli.up import preflight
from virtbus.cli.up.plan import ALL, BUS_ONLY, Place, choose

if TYPE_CHECKING:
    from virtbus.bus.provisioning.cluster import ClusterMember

DEFAULT_PORT = 4222
LOCALHOST = "127.0.0.1"


@click.command(
    name="up",
    epilog=examples(
        """
        virtbus up                              as root: a real node
        virtbus up --simulate                   no root, no QEMU: libvirt's test driver
        virtbus up --data /srv/vb --node n2     another place and name
        virtbus up --listen 10.0.0.1 --nodes n2,n3
        |                                        a bus for other hosts too: `virtbus node up --help`
        """
    ),
)
@click.option("--data", metavar="DIR", help="Keep state and run files below DIR.")
@click.option("--state-dir", metavar="DIR", help="[default: /var/lib/virtbus]")
@click.option("--run-dir", metavar="DIR", help="[default: /run/virtbus]")
@click.option("--node", metavar="NAME", help="This node's id.  [default: from the hostname]")
@click.option(
    "--port",
    type=click.IntRange(-1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="The bus's port. If the default is taken, another one is used; -1: any free port.",
)
@click.option(
    "--listen",
    metavar="ADDRESS",
    default=LOCALHOST,
    show_default=True,
    help="The address of the bus. Other hosts, if any, must reach it.",
)
@click.option(
    "--nodes",
    metavar="NAME,…",
    default="",
    help="Further nodes of this bus; each gets RUN_DIR/node-NAME.creds, to be copied to its host.",
)
@click.option("--no-node", is_flag=True, help="Run no VMs here: only the bus and a controller.")
@click.option(
    "--cluster",
    metavar="ADDRESS:PORT",
    help="Run one of three NATS servers. The others reach this one at ADDRESS:PORT.",
)
@click.option(
    "--routes", metavar="ADDRESS:PORT,…", help="The --cluster addresses of all three servers."
)
@click.option("--simulate", is_flag=True, help="Run libvirt's test driver: no root, no real VMs.")
@click.option("--log-level", type=click.Choice(("DEBUG", "INFO", "WARNING")), default="INFO")
@click.option("--force", is_flag=True, help="Start although the preflight fails.")
def command(  # noqa: PLR0913, PLR0917  one parameter for each option
    data: str | None,
    state_dir: str | None,
    run_dir: str | None,
    node: str | None,
    port: int,
    listen: str,
    nodes: str,
    no_node: bool,
    cluster: str | None,
    routes: str | None,
    simulate: bool,
    log_level: str,
    force: bool,
) -> None:
    """Run a NATS bus, the controller and this host's node services on this terminal.

    Ctrl-C stops the services, then the bus, and leaves VMs running; the next `virtbus up` on the
    same directories adopts them. A service that dies is restarted.

    A second instance on one host needs --data, --node, and a bridge and subnet of its own:
    VIRTBUS_BRIDGE=virtbus1 VIRTBUS_SUBNET=10.128.0.1/16.
    """
    state, run = choose(
        data=data, state_dir=state_dir, run_dir=run_dir, environ=os.environ, simulate=simulate
    )
    runs = BUS_ONLY if no_node else ALL
    place = Place(state, run, node or preflight.node_name(state), simulate, log_level, runs)
    more = tuple(name.strip() for name in nodes.split(",") if name.strip())
    preflight.check_name(place.node)
    for name in more:
        preflight.check_name(name, "--nodes")
    if more and listen in _EVERY_ADDRESS:
        raise usage(
            f"--listen {listen} names no host, and the credentials of {', '.join(more)} need one",
            "the address by which they reach this host, such as --listen 10.0.0.1",
        )
    place_in_cluster = _cluster(cluster, routes, port)
    if not simulate and not no_node:
        preflight.preflight(place, force=force)
    from virtbus.cli.up.bus_keeper import Wanted, bus  # slow import

    wanted = Wanted(port, listen, more, place_in_cluster)
    preflight.run(place, lambda terminal: bus(place, wanted, terminal))


_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not bound


def _cluster(listen: str | None, routes: str | None, port: int) -> "ClusterMember | None":
    """Return this server's membership from --cluster and --routes; None if neither is given.

    Raises:
        CliError: one option is missing, an address has no port, `listen` is not in `routes`, there
            are not three servers, or `port` is not a fixed port.
    """
    if listen is None and routes is None:
        return None
    members = tuple(part.strip() for part in (routes or "").split(",") if part.strip())
    wrong = [one for one in (listen or "", *members) if not one.rpartition(":")[2].isdigit()]
    if listen is None or wrong or listen not in members or len(set(members)) != 3 or port < 1:
        raise usage(
            "--cluster and --routes are given together, with the ADDRESS:PORT of all three servers,"
            " and with the same --port on each",
            "virtbus up --listen 10.0.0.1 --cluster 10.0.0.1:6222"
            " --routes 10.0.0.1:6222,10.0.0.2:6222,10.0.0.3:6222",
        )
    from virtbus.bus.provisioning.cluster import ClusterMember  # slow import

    return ClusterMember(listen, members)
