"""Implements `virtbus vm port-forward`."""

import asyncio
import re
import sys
from typing import NamedTuple

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import node_subject, owner
from virtbus.cli.vm.target import name_argument, namespace_option

_PORT = re.compile(r"(?:(\d{1,5}):)?(\d{1,5})(?:/(tcp|udp))?")


class Forward(NamedTuple):
    """One port argument of the command line. `local` 0 means any free port."""

    local: int
    port: int
    protocol: str

    @classmethod
    def parse(cls, text: str) -> "Forward":
        """Parse `[LOCAL:]PORT[/udp]`; raise CliError for any other form."""
        match = _PORT.fullmatch(text)
        hint = "[LOCAL:]PORT[/udp], such as 8080:80 or 53/udp; a LOCAL of 0 is any free one"
        if match is None:
            raise usage(f"{text!r} is no port", hint)
        port = int(match[2])
        local = int(match[1]) if match[1] is not None else port
        if not (0 < port < 65536 and local < 65536):
            raise usage(f"{text!r}: ports are 1 to 65535", hint)
        return cls(local, port, match[3] or "tcp")


@click.command(
    "port-forward",
    epilog=examples(
        """
        virtbus vm port-forward web 8080:80          http://127.0.0.1:8080 is the guest's port 80
        virtbus vm port-forward web 2222:22 53/udp   several at once
        virtbus vm port-forward web 0:80             any free port here; it is printed
        scp -o ProxyCommand='virtbus vm port-forward web 22 --stdio' a.txt root@web:
        """
    ),
)
@name_argument
@click.argument("ports", nargs=-1, required=True, metavar="[LOCAL:]PORT[/udp]...")
@click.option(
    "--address", default="127.0.0.1", show_default=True, help=("Local address to listen on.")
)
@click.option("--stdio", is_flag=True, help="Connect one TCP port to standard input and output.")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    ports: tuple[str, ...],
    address: str,
    stdio: bool,
    namespace: str,
) -> None:
    """Reach PORTs of the guest of the VM NAME from this computer.

    The bytes travel over the bus: no route to the node or the guest is needed. The node connects to
    the guest, so the guest's firewall sees the node's address. Ctrl-C ends the forwarding.
    """
    forwards = [Forward.parse(text) for text in ports]
    if stdio and (len(forwards) > 1 or forwards[0].protocol == "udp"):
        raise usage("--stdio takes one TCP port", "for example: NAME 22 --stdio")
    view = fetch(invocation, name, namespace)
    subject = node_subject(view, "port")
    uid = str(view.get("uid"))
    if stdio:
        asyncio.run(_stdio(invocation, subject, uid, forwards[0].port))
    else:
        asyncio.run(_listen(invocation, subject, uid, forwards, address))


async def _stdio(invocation: Invocation, subject: str, uid: str, port: int) -> None:
    from virtbus.cli.vm import forwarding  # slow import

    async with forwarding.reaching(invocation.client(), subject, uid, owner()) as target:
        await forwarding.stdio(target, port)


async def _listen(
    invocation: Invocation, subject: str, uid: str, forwards: list[Forward], address: str
) -> None:
    from virtbus.bus.runtime.tasks import background
    from virtbus.cli.vm import forwarding

    listeners = {"tcp": forwarding.listen_tcp, "udp": forwarding.listen_udp}
    async with (
        forwarding.reaching(invocation.client(), subject, uid, owner()) as target,
        background() as tasks,
    ):
        for forward in forwards:
            listen = listeners[forward.protocol]
            try:
                want = target.port(forward.port, forward.protocol)
                bound = await listen(target, tasks, (address, forward.local), want, complain)
            except OSError as error:
                raise taken(address, forward.local, error) from None
            here = f"{address}:{bound}"
            value = {"local": here, "port": forward.port, "protocol": forward.protocol}
            if invocation.for_eyes:
                output.write(f"{here} -> {forward.port}/{forward.protocol} of the guest")
            else:
                output.write(output.render(value, invocation.style))
            sys.stdout.flush()
        await asyncio.Event().wait()


def taken(address: str, port: int, error: OSError) -> CliError:
    """Return the error for a local port that cannot be bound."""
    message = f"cannot listen on {address} port {port}: {error.strerror}"
    return CliError(Exit.REFUSED, "local_port", message, hint="0 takes any free port")


def complain(text: str) -> None:
    """Print to stderr why one forwarded connection failed."""
    output.write(output.safe(text), sys.stderr)
