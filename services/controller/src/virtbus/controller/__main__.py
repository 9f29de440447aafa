"""Starts `virtbus-controller` with its settings and its connection to the bus."""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

from virtbus.bus.client import connection, tracing
from virtbus.bus.provisioning import node_join, stream_setup
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings
from virtbus.schemas.ids import UNPLACED


async def serve(settings: Settings) -> None:
    """Connect and serve until cancelled."""
    async with connection.connect(settings.bus(), name="controller") as bus:
        with tracing.recording("controller", UNPLACED, bus.emit, settings.otlp_endpoint):
            await ControllerService(
                bus,
                settings,
                lambda: stream_setup.keep(bus),
                lambda nodes: node_join.keep(bus, nodes),
            ).run()


def main() -> None:
    """Run the console script `virtbus-controller`."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
