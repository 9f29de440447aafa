"""`virtbus-imaged`: settings, bus, service; everything is wired here."""

from virtbus.bus import client, process, tracing
from virtbus.bus.settings import load
from virtbus.imaged.service import Imaged
from virtbus.imaged.settings import Settings


async def serve(settings: Settings) -> None:
    """Connect and serve until cancelled."""
    async with client.connect(settings.bus(), name="imaged") as bus:
        with tracing.recording("imaged", settings.node, bus.emit, settings.otlp_endpoint):
            await Imaged(bus, settings, tracing.span).run()


def main() -> None:
    """The console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
