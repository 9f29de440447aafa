"""Starts `virtbus-imaged` with its settings and its connection to the bus."""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

import asyncio
from concurrent.futures import ThreadPoolExecutor

from virtbus.bus.client import tracing
from virtbus.bus.client.local_agent import serve_with_agent
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.imaged.service import Imaged
from virtbus.imaged.settings import Settings

LOOKUP_THREADS = 64
"""Threads for DNS look-ups. A look-up cannot be cancelled: without an answer, it keeps its thread
for about half a minute after its pull has failed. asyncio's default is only four threads more than
CPUs: a few such look-ups would delay all other look-ups."""


async def serve(settings: Settings) -> None:
    """Serve until cancelled."""
    lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
    asyncio.get_running_loop().set_default_executor(lookups)
    await serve_with_agent(
        settings, lambda bus, gate: Imaged(bus, settings, tracing.span, gate).run()
    )


def main() -> None:
    """Run the console script `virtbus-imaged`."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
