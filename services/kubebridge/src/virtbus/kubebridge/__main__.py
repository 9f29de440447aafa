"""Starts `virtbus-kubebridge` with its settings, and connects it to the bus and the cluster."""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

from virtbus.bus.client import connection, tracing
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.kubebridge.edge import cluster
from virtbus.kubebridge.service import Bridge, name_of
from virtbus.kubebridge.settings import Settings
from virtbus.schemas.ids import UNPLACED


async def serve(settings: Settings) -> None:
    """Connect to the bus and the cluster, and serve until cancelled."""
    async with (
        connection.connect(settings.bus(), name="kubebridge") as bus,
        cluster.connect(settings.kubeconfig) as kubernetes,
    ):
        with tracing.recording("kubebridge", UNPLACED, bus.emit, settings.otlp_endpoint):
            name = await name_of(kubernetes, settings)
            await Bridge(bus, kubernetes, settings, name).run()


def main() -> None:
    """Run the console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
