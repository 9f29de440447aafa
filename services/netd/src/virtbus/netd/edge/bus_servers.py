"""Resolves the addresses of the bus' servers on this host."""

import socket
from urllib.parse import urlsplit

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings


def server_addresses(settings: BusSettings) -> set[str]:
    """Return the addresses of the bus' servers. Names that do not resolve are left out. Blocks."""
    try:
        servers = settings.resolved().servers
    except BusError:
        return set()
    found: set[str] = set()
    for server in servers:
        host = urlsplit(server if "://" in server else f"nats://{server}").hostname
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        except OSError:
            continue
        found.update(str(info[4][0]) for info in infos)
    return found
