"""Shared code of the `virtbus bus` verbs: the option --dir, errors, checks of servers."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from virtbus.bus.client.connection import connect
from virtbus.bus.errors import BusError, DeniedError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning.bus_directory import BusDirectory, BusPlan
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.schemas.errors import VirtbusError

DEFAULT = "/etc/virtbus/bus"
WAIT_S = 3.0
BUSY_S = 10.0
"""Time limit for a connection to each server after a reload. A busy server takes seconds."""

directory = click.option(
    "--dir", "place", default=DEFAULT, show_default=True, metavar="DIR", help="The bus's directory."
)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Convert errors of the bus into CliError."""
    try:
        yield
    except (UnavailableError, DeniedError) as error:
        raise CliError(Exit.UNAVAILABLE, "bus", str(error)) from error
    except OutcomeUnknownError as error:
        raise unknown(str(error), "repeat the command; revoke-node with --check") from error
    except VirtbusError as error:
        raise CliError(Exit.REFUSED, error.reason, str(error)) from error
    except (BusError, ValueError) as error:
        raise CliError(Exit.REFUSED, "bus", str(error)) from error


def written(changed: Sequence[Path]) -> str:
    """Return a text that lists the changed files."""
    return "\n".join(f"written: {path}" for path in changed) or "nothing changed"


async def knows(prepared: BusDirectory, plan: BusPlan, user: str) -> dict[str, str]:
    """Return, by server, the errors of the servers that do not accept `user`."""
    errors = await answers(prepared, plan, user)
    return {server: str(error) for server, error in errors.items() if error is not None}


async def answers(prepared: BusDirectory, plan: BusPlan, user: str) -> dict[str, BusError | None]:
    """Log in to each server as `user`; return each server's error, None for success."""
    servers = [names[0] for names in plan.servers]

    async def answer(server: str) -> BusError | None:
        url = f"tls://{server}:{plan.port}"
        settings = BusSettings(url=url, creds=prepared.creds(user), connect_timeout_s=BUSY_S)
        try:
            async with connect(settings, name="check"):
                return None
        except BusError as error:
            return error

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(answer(server)) for server in servers]
    return dict(zip(servers, [task.result() for task in asked], strict=True))


def copy_hint(prepared: BusDirectory, plan: BusPlan, servers: Sequence[str]) -> list[str]:
    """Return the commands that copy a changed accounts.conf to `servers` on other hosts."""
    at = plan.installed_at or "/etc/virtbus/nats"
    numbers = {names[0]: n for n, names in enumerate(plan.servers, start=1)}
    return [
        f"  scp {prepared.folder(numbers[name]) / 'accounts.conf'} root@{name}:{at}/"
        for name in servers
    ]
