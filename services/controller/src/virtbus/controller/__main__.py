"""`virtbus-controller`: connects settings, bus and service."""

from virtbus.bus import client, declaration, joining, process, tracing
from virtbus.bus.settings import load
from virtbus.controller.service import Controller
from virtbus.controller.settings import Settings
from virtbus.schemas.ids import UNPLACED


async def serve(settings: Settings) -> None:
    """Connect and serve until cancelled."""
    async with client.connect(settings.bus(), name="controller") as bus:
        with tracing.recording("controller", UNPLACED, bus.emit, settings.otlp_endpoint):
            await Controller(
                bus,
                settings,
                lambda: declaration.keep(bus),
                lambda nodes: joining.keep(bus, nodes),
            ).run()


def main() -> None:
    """The console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
