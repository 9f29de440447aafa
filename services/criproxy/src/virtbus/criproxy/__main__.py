"""Entry point of `virtbus-criproxy`: connects settings and service."""

from virtbus.bus.runtime import process, state_version
from virtbus.bus.runtime.settings import load
from virtbus.criproxy.service import CriProxy
from virtbus.criproxy.settings import Settings


async def serve(settings: Settings) -> None:
    """Serve until cancelled."""
    state_version.check(settings.state_dir)
    await CriProxy(settings).run()


def main() -> None:
    """Run the console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
