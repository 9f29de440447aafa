"""Implements `virtbus node up`, which runs this host's services on a remote bus."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from virtbus.cli.failures import usage
from virtbus.cli.lazy import examples
from virtbus.cli.up import preflight
from virtbus.cli.up.plan import NODE_ONLY, OURS_ALONE, Place, choose


@click.command(
    name="up",
    epilog=examples(
        """
        virtbus node up --nats nats://10.0.0.1:4222 --creds node-n2.creds
        virtbus node up --name n2 --nats nats://10.0.0.1,nats://10.0.0.2,nats://10.0.0.3 \\
        |    --creds /etc/virtbus/node-n2.creds

        virtbus node up --simulate --count 200 --name sim --creds /run/virtbus

        Where the bus runs: virtbus up --listen 10.0.0.1 --nodes n2
        writes /run/virtbus/node-n2.creds, to be copied to the host n2.
        """
    ),
)
@click.option("--name", metavar="NAME", help="This node's id.  [default: from --creds]")
@click.option(
    "--nats",
    metavar="URL,…",
    help="The bus's servers; unreachable ones are skipped.  [default: from --creds]",
)
@click.option(
    "--creds",
    metavar="FILE",
    required=True,
    envvar="VIRTBUS_CREDS",
    help="This node's credentials: node-NAME.creds from the host of the bus. [env: VIRTBUS_CREDS]",
)
@click.option("--data", metavar="DIR", help="Keep state and run files below DIR.")
@click.option("--state-dir", metavar="DIR", help="[default: /var/lib/virtbus]")
@click.option("--run-dir", metavar="DIR", help="[default: /run/virtbus]")
@click.option("--simulate", is_flag=True, help="Run libvirt's test driver: no root, no real VMs.")
@click.option(
    "--count",
    type=click.IntRange(1, 1000),
    default=1,
    help=(
        "With --simulate: number of nodes, NAME-000 and so on, in one process; --creds is "
        "then the folder with node-NAME-000.creds and so on."
    ),
)
@click.option("--log-level", type=click.Choice(("DEBUG", "INFO", "WARNING")), default="INFO")
@click.option("--force", is_flag=True, help="Start although the preflight fails.")
def command(  # noqa: PLR0913, PLR0917  one parameter for each option
    name: str | None,
    nats: str | None,
    creds: str,
    data: str | None,
    state_dir: str | None,
    run_dir: str | None,
    simulate: bool,
    count: int,
    log_level: str,
    force: bool,
) -> None:
    """Run this host's services on a remote bus, whose controllers then place VMs here too.

    A controller adds the node as soon as the node reports itself. Ctrl-C stops the services and
    leaves VMs running; the next `virtbus node up` adopts them. A service that dies is restarted.
    While the bus is unreachable, the services wait for it.
    """
    if count > 1:
        if data or state_dir or run_dir or force or log_level != "INFO":
            raise usage(
                "--count excludes --data, --state-dir, --run-dir, --log-level and --force",
                "simulated nodes keep no files",
            )
        fleet(simulate=simulate, name=name, nats=nats, creds=creds, count=count)
    state, run = choose(
        data=data, state_dir=state_dir, run_dir=run_dir, environ=os.environ, simulate=simulate
    )
    file = Path(creds).absolute()
    place = Place(state, run, name or "", simulate, log_level, NODE_ONLY, nats or "", file)
    from virtbus.cli.up.remote_bus import remote_bus, settle  # slow import

    place = settle(place)
    preflight.check_name(place.node, "--name")
    if not simulate:
        preflight.preflight(place, force=force)
    preflight.run(place, lambda _: remote_bus(place))


def fleet(
    *, simulate: bool, name: str | None, nats: str | None, creds: str, count: int
) -> NoReturn:
    """Replace this process by the simulator, which runs many simulated nodes.

    Raises:
        CliError: a required option is missing.
    """
    folder = Path(creds).absolute()
    if not simulate or not name or not folder.is_dir():
        raise usage(
            "--count needs --simulate and --name, and --creds with the folder of "
            "node-NAME-000.creds, node-NAME-001.creds and so on; "
            "`virtbus up --nodes NAME-000,NAME-001` writes them"
        )
    argv = [sys.executable, "-m", "virtbus.simulator", "--node", name]
    argv += ["--count", str(count), "--run-dir", str(folder)]
    argv += ["--server", nats] if nats else []
    env = {key: value for key, value in os.environ.items() if key not in OURS_ALONE}
    os.execve(sys.executable, argv, env)  # noqa: S606  our own interpreter, our own module
