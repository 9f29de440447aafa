"""Implements `virtbus vm vnc`."""

import asyncio
import sys

import click

from virtbus.cli import output
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.port_forward import complain, taken
from virtbus.cli.vm.serial import node_subject, owner
from virtbus.cli.vm.target import name_argument, namespace_option


@click.command(
    epilog=examples(
        """
        virtbus vm vnc web                    then, elsewhere: vncviewer 127.0.0.1::PORT
        virtbus vm vnc web --port 5901        a port of your choice: vncviewer :1
        virtbus vm create web --image tiny --display
        """
    )
)
@name_argument
@click.option(
    "--port",
    default=0,
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Local port.  [default: any free port]",
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Local address.")
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, port: int, address: str, namespace: str) -> None:
    """Forward the display of the VM NAME to a VNC viewer on this computer.

    The command prints the address for the viewer, and forwards the display over the bus until
    Ctrl-C. There is no password: anybody who can connect to the address sees the display and can
    type.
    """
    view = fetch(invocation, name, namespace)
    subject = node_subject(view, "vnc")
    asyncio.run(_listen(invocation, subject, str(view.get("uid")), (address, port)))


async def _listen(invocation: Invocation, subject: str, uid: str, local: tuple[str, int]) -> None:
    from virtbus.bus.runtime.tasks import background  # slow import
    from virtbus.cli.vm import forwarding
    from virtbus.schemas.streams import StreamOpen

    async with (
        forwarding.reaching(invocation.client(), subject, uid, owner()) as target,
        background() as tasks,
    ):
        want = StreamOpen(uid=uid, owner=owner())
        try:
            bound = await forwarding.listen_tcp(target, tasks, local, want, complain)
        except OSError as error:
            raise taken(*local, error) from None
        address = local[0]
        invocation.show({"address": address, "port": bound}, lambda: f"{address}:{bound}")
        invocation.note(f"for example: vncviewer {output.safe(address)}::{bound}")
        sys.stdout.flush()
        await asyncio.Event().wait()
