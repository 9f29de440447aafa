"""Checks the connection to a remote bus before `virtbus node up` starts services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from virtbus.bus.client.connection import connect
from virtbus.bus.errors import BusError, DeniedError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.up.plan import Place
from virtbus.cli.wire.access import parse_url

CONNECT_S = 10.0


class RemoteBus:
    """Implements `run.Keeper` for a remote bus, which needs no work here."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def url(self) -> str:
        return self._place.server

    async def keep(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def vms_here(self) -> int | None:
        """Count the record copies on this host, because a node is not allowed to call the API."""
        return sum(1 for _ in (self._place.state_dir / "vms").glob("*/record"))


@asynccontextmanager
async def remote_bus(place: Place) -> AsyncIterator[RemoteBus]:
    """Connect to the bus at `place.server` once, to check the credentials.

    Raises:
        CliError: the bus does not answer, or refuses the credentials.
    """
    settings = BusSettings(url=place.server, creds=place.node_creds, connect_timeout_s=CONNECT_S)
    try:
        async with connect(settings, name=f"node-{place.node}"):
            pass
    except DeniedError as error:
        raise CliError(
            Exit.REFUSED,
            "denied",
            f"the bus at {place.server} refuses {place.node_creds}: {error}",
            hint="check that the file is current and of this bus; or make a new one on the host "
            "of the bus, and copy it here",
        ) from error
    except BusError as error:
        raise CliError(
            Exit.UNAVAILABLE,
            "bus",
            str(error),
            hint="is the URL right, and does that server listen on an address that this host"
            " reaches? (`virtbus up --listen ADDRESS`)",
        ) from error
    yield RemoteBus(place)


def settle(place: Place) -> Place:
    """Return `place` with the node id, and by default the URL, from its credentials file.

    Raises:
        CliError: the file cannot be read or is not this node's, or there is no valid URL.
    """
    try:
        found = BusSettings(url=place.server, creds=place.node_creds).resolved()
    except BusError as error:
        raise CliError(Exit.UNAVAILABLE, "credentials", str(error)) from error
    if not found.node:
        raise usage(
            f"{place.node_creds} holds the credentials of {found.user or 'nobody'}, not of a node",
            "take node-NAME.creds from where the bus runs",
        )
    if place.node and place.node != found.node:
        raise usage(
            f"{place.node_creds} holds the credentials of node {found.node}, not of {place.node}",
            f"take node-{place.node}.creds from where the bus runs, or give --name {found.node}",
        )
    if not found.url:
        raise usage("no bus is named", "for example --nats nats://10.0.0.1:4222")
    parse_url(found.url)
    return replace(place, node=found.node, server=found.url)
