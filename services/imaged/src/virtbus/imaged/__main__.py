"""`virtbus-imaged`: connects settings, bus and service."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from virtbus.bus.client import connection, tracing
from virtbus.bus.client.local_agent import LocalAgent, word_in
from virtbus.bus.runtime import process, state_version
from virtbus.bus.runtime.settings import load
from virtbus.imaged.service import Imaged
from virtbus.imaged.settings import Settings

LOOKUP_THREADS = 64
"""An unanswered look-up outlives the turn of its pull by half a minute. With asyncio's default of
few threads, four such names would delay all other look-ups."""


async def serve(settings: Settings) -> None:
    """Connect, and serve while this host's agent holds the node, until cancelled."""
    lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
    asyncio.get_running_loop().set_default_executor(lookups)
    state_version.check(settings.state_dir)
    async with connection.connect(settings.bus(), name="imaged") as bus:
        with tracing.recording("imaged", settings.node, bus.emit, settings.otlp_endpoint):
            agent = LocalAgent(bus, settings.node, word_in(settings.run_dir))
            await agent.begin()
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.keep())
                await Imaged(bus, settings, tracing.span, agent.gate).run()


def main() -> None:
    """The console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
