"""`virtbus up`: options, what must be so before, and the run."""

import asyncio
import os
from pathlib import Path

import click

from virtbus.cli import output
from virtbus.cli.doctor.finding import FAIL, OK, Finding
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.lazy import examples
from virtbus.cli.up.plan import Place, choose, simulated_data

DEFAULT_PORT = 4222


@click.command(
    name="up",
    epilog=examples(
        """
        virtbus up                              as root: a real node
        virtbus up --simulate                   no root, no QEMU: libvirt's test driver
        virtbus up --data /srv/vb --node n2     another place and name
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
    help="The bus' port, if free; -1: any free one.",
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
    simulate: bool,
    log_level: str,
    force: bool,
) -> None:
    """Run a NATS bus, the controller and this host's node services on this terminal.

    Ctrl-C stops the services, then the bus, and leaves VMs running; the next `virtbus up` on the
    same directories takes them up again. A service that dies is started again.

    A second instance on one host needs --data, --node, and a bridge and subnet of its own:
    VIRTBUS_BRIDGE=virtbus1 VIRTBUS_SUBNET=10.128.0.1/16.
    """
    if simulate and not (data or state_dir or run_dir):
        data = str(simulated_data(os.environ))
    state, run = choose(data=data, state_dir=state_dir, run_dir=run_dir, environ=os.environ)
    place = Place(state, run, node or _node_name(state), simulate, log_level)
    _check_name(place.node)
    if not simulate:
        _preflight(place, force=force)
    # from here on heavy imports: they would only slow down --help and refusals
    from virtbus.bus.logs import setup
    from virtbus.cli.up.run import up
    from virtbus.cli.up.terminal import Terminal

    setup("up", place.node, level="WARNING", style="text")
    asyncio.run(up(place, port, Terminal(log_level), os.environ))


def _node_name(state: Path) -> str:
    from virtbus.bus.settings import node_id  # imports pydantic

    return os.environ.get("VIRTBUS_NODE") or node_id(state)


def _check_name(node: str) -> None:
    from virtbus.schemas.ids import check_id  # imports pydantic

    try:
        check_id(node)
    except ValueError as error:
        raise CliError(Exit.USAGE, "usage", f"--node {node!r}: {error}") from None


def _preflight(place: Place, *, force: bool) -> None:
    """Say what is wrong before anything starts.

    Raises:
        CliError: something without which no VM can run is missing.
    """
    from virtbus.cli.doctor.command import quick  # runs virsh

    findings = quick(place.state_dir)
    for finding in findings:
        if finding.level != OK:
            output.write(finding.as_text())
    broken: list[Finding] = [finding for finding in findings if finding.level == FAIL]
    if broken and not force:
        raise CliError(
            Exit.UNAVAILABLE,
            "not_ready",
            "this host is not ready for virtbus: " + ", ".join(f.name for f in broken),
            hint="mend what is shown above (`virtbus doctor` shows all), or try --simulate",
        )
