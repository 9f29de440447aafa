"""`virtbus-netd`: connects settings, bus and service."""

import asyncio
import sys

from virtbus.bus.client import connection, tracing
from virtbus.bus.client.local_agent import LocalAgent, word_in
from virtbus.bus.runtime import process, state_version
from virtbus.bus.runtime.settings import load
from virtbus.netd.service import Netd, teardown
from virtbus.netd.settings import Settings


async def serve(settings: Settings) -> None:
    """Connect, and serve while this host's agent holds the node, until cancelled."""
    state_version.check(settings.state_dir)
    async with connection.connect(settings.bus(), name="netd") as bus:
        with tracing.recording("netd", settings.node, bus.emit, settings.otlp_endpoint):
            agent = LocalAgent(bus, settings.node, word_in(settings.run_dir))
            await agent.begin()
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.keep())
                await Netd(bus, settings, tracing.span, agent.gate).run()


def main() -> None:
    """Run the service; `--teardown` removes all networks of this host and exits."""
    arguments = sys.argv[1:]
    if "--teardown" in arguments:
        arguments.remove("--teardown")
        settings = load(Settings, arguments)
        raise SystemExit(process.run(settings, lambda: teardown(settings)))
    settings = load(Settings, arguments)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
