"""Implements `virtbus bus check` and `virtbus bus declare`."""

import asyncio
from pathlib import Path

import click

from virtbus.bus.client.connection import connect
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import stream_setup
from virtbus.bus.provisioning.bus_directory import BusDirectory
from virtbus.bus.provisioning.server import binary
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.cli.bus.place import directory, refusals
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples

DECLARE_S = 60.0


@click.command(epilog=examples("virtbus bus check\nvirtbus bus check --dir bus"))
@directory
@local
def check(invocation: Invocation, place: str) -> None:
    """Check a bus's files: file modes, certificates, unauthenticated access."""
    prepared = BusDirectory(Path(place))
    with refusals():
        found = list(prepared.problems(binary()))
    if found:
        details = [{"path": place, "message": one} for one in found]
        raise CliError(
            Exit.REFUSED, "bus_config", "the bus is not as it should be", details=details
        )
    invocation.show({"ok": True}, lambda: "ok")


@click.command(epilog=examples("virtbus bus declare\nvirtbus bus declare --dir bus"))
@directory
@local
def declare(invocation: Invocation, place: str) -> None:
    """Create the streams of a new bus, or update them to this version. It changes nothing else."""
    prepared = BusDirectory(Path(place))
    with refusals():
        asyncio.run(_declared(BusSettings(creds=prepared.creds("admin"))))
    invocation.show({"declared": True}, lambda: "declared")


async def _declared(settings: BusSettings) -> None:
    async with connect(settings, name="declare") as admin:
        until_s = asyncio.get_running_loop().time() + DECLARE_S
        while True:
            try:
                await stream_setup.ensure(admin)
            except (UnavailableError, OutcomeUnknownError):
                # The servers of a new cluster are still electing a leader.
                if asyncio.get_running_loop().time() > until_s:
                    raise
                await asyncio.sleep(1)
            else:
                return
