"""Addresses of the bus' servers, as this host resolves them."""

import socket
from urllib.parse import urlsplit

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings


def server_addresses(settings: BusSettings) -> tuple[set[str], bool]:
    """Return the addresses of the bus' servers, and True if all of their names resolve. Blocks."""
    try:
        servers = settings.resolved().servers
    except BusError:
        return set(), False
    found: set[str] = set()
    complete = True
    for server in servers:
        host = urlsplit(server if "://" in server else f"nats://{server}").hostname
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        except OSError:
            complete = False
            continue
        found.update(str(info[4][0]) for info in infos)
    return found, complete
