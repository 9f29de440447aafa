"""Entry point of `virtbus-cri`: connects settings, bus and service."""

from virtbus.bus.client import connection
from virtbus.bus.runtime import process, state_version
from virtbus.bus.runtime.settings import load
from virtbus.cri.service import Cri
from virtbus.cri.settings import Settings


async def serve(settings: Settings) -> None:
    """Serve until cancelled."""
    state_version.check(settings.state_dir)
    await Cri(settings, lambda: connection.connect(settings.bus(), name="cri")).run()


def main() -> None:
    """Run the console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
