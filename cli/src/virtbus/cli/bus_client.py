"""Connects to the bus with the asynchronous client of the services, which few verbs need."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from virtbus.bus.client.connection import connect
from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.cli.failures import CliError, Exit
from virtbus.schemas.errors import VirtbusError


@asynccontextmanager
async def connected(settings: BusSettings) -> AsyncIterator[Bus]:
    """Connect to the bus while the context is open.

    Errors of the bus and of services become CliError, also errors from the context's body.
    """
    try:
        async with connect(settings, name="virtbus-cli") as bus:
            yield bus
    except VirtbusError as error:
        raise CliError.answered(error.body.model_dump(mode="json")) from None
    except BusError as error:
        raise CliError(Exit.UNAVAILABLE, "bus", str(error)) from None
