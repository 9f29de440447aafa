"""`virtbus-imaged`: settings, bus, service; everything is wired here."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from virtbus.bus import client, process, tracing
from virtbus.bus.settings import load
from virtbus.imaged.service import Imaged
from virtbus.imaged.settings import Settings

LOOKUP_THREADS = 64
"""A look-up of a name that nobody answers outlives the turn of its pull by half a minute: with the
few threads of asyncio's default, four such names would hold up the look-ups of all others."""


async def serve(settings: Settings) -> None:
    """Connect and serve until cancelled."""
    lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
    asyncio.get_running_loop().set_default_executor(lookups)
    async with client.connect(settings.bus(), name="imaged") as bus:
        with tracing.recording("imaged", settings.node, bus.emit, settings.otlp_endpoint):
            await Imaged(bus, settings, tracing.span).run()


def main() -> None:
    """The console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
