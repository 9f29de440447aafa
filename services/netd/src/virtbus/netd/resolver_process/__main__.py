"""Entry point of the resolver's process; netd starts it (`edge/resolver_launch.py`)."""

import asyncio
import os
import socket
import sys

from virtbus.netd.core.resolver_messages import site_of
from virtbus.netd.edge.resolver_channel import FIRST_CHANNEL, channel_on
from virtbus.netd.resolver_process.service import ResolverService


async def _serve() -> None:
    first = await channel_on(socket.socket(fileno=FIRST_CHANNEL))
    await ResolverService(site_of(sys.argv[1])).run(first)


def main() -> None:
    """Serve until nobody needs the process."""
    os.closerange(FIRST_CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    if os.fork():
        os._exit(0)
    os.chdir("/")  # lets netd's working directory be unmounted
    asyncio.run(_serve())
    os._exit(0)  # at once: to netd, a closed connection means an ended process


if __name__ == "__main__":
    main()
