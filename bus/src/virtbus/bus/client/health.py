"""Checks a service in its container: `python -m virtbus.bus.client.health CREDS [--alive FILE] …`.

The check logs in to the bus with the service's own credentials, and looks at the service's files
and sockets. The exit code is 0, or 1 after a printed reason.
"""

import argparse
import asyncio
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from virtbus.bus.client import probes
from virtbus.bus.errors import BusError, UnavailableError
from virtbus.bus.runtime.bus_settings import BusSettings

if TYPE_CHECKING:
    from virtbus.bus.client.nats_bus import NatsBus

MAX_AGE_S = 12.0
"""Greatest age of the `--alive` file. A service touches this file every 3 s."""
TIMEOUT_S = 4.0
SO_ACCEPTCON = 0x10000
"""Flag of a listening socket in /proc/net/unix (linux/net.h)."""
_LISTED = re.compile(
    rb"^[0-9a-f]+: [0-9A-F]{8} [0-9A-F]{8} ([0-9A-F]{8}) [0-9A-F]{4} [0-9A-F]{2} +[0-9]+ (.+)$",
    re.MULTILINE,
)
"""A named socket in /proc/net/unix. Abstract names may contain any byte, even a line break."""


async def unhealthy(arguments: argparse.Namespace) -> str:
    """Return the reason why the service is not healthy; empty if it is healthy."""
    if arguments.ready is not None and not arguments.ready.exists():
        return f"{arguments.ready} is not written yet"
    if arguments.alive is not None and (why := _stale(arguments.alive)):
        return why
    if arguments.socket is not None and (why := _unserved(arguments.socket)):
        return why
    try:
        settings = BusSettings(creds=arguments.creds).resolved()
    except BusError as error:
        return str(error)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _bus(settings, arguments.asks)
    except TimeoutError:
        return f"{settings.url} does not answer within {TIMEOUT_S:g} s"


def _stale(path: Path) -> str:
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return "the service is not ready yet"
    return f"the event loop has not run for {age_s:.0f} s" if age_s > MAX_AGE_S else ""


def _unserved(path: Path) -> str:
    """Return the reason if no process listens on the socket; empty if a process listens.

    A connection is no test, because the service would log a peer that sends nothing. The kernel
    lists the path to which a socket was bound. netd binds `wrapper.part` and then renames the
    socket, so the suffix is not compared.
    """
    for listed in _LISTED.finditer(Path("/proc/net/unix").read_bytes()):
        bound = Path(os.fsdecode(listed[2]))
        is_same = (bound.parent, bound.stem) == (path.parent, path.stem)
        if is_same and int(listed[1], 16) & SO_ACCEPTCON:
            return ""
    return f"nobody listens on {path}"


async def _bus(settings: BusSettings, subject: str) -> str:
    if settings.nkey_seed or settings.ca:
        return await _secured_bus(settings, subject)
    who = (settings.user, settings.password)
    for url in settings.servers:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 4222
        try:
            async with asyncio.timeout(TIMEOUT_S / len(settings.servers)):
                logged_in = await probes.logs_in(host, port, *who)
        except TimeoutError:
            continue  # a silent server must not hide the next one
        if not logged_in:
            continue
        inbox = f"{settings.inbox_prefix}.health"
        if subject and not await probes.is_heard(host, port, *who, subject, inbox):
            return f"nobody listens on {subject}"
        return ""
    return f"no login as {settings.user} at {settings.url}"


async def _secured_bus(settings: BusSettings, subject: str) -> str:
    """Check with the services' own client. It loads slowly, but `probes` lacks TLS and nkeys."""
    from virtbus.bus.client.connection import connect

    brief = replace(settings, connect_timeout_s=TIMEOUT_S / 2)
    try:
        async with connect(brief, name="health") as bus:
            return await _unheard(bus, subject) if subject else ""
    except BusError as error:
        return str(error)


async def _unheard(bus: "NatsBus", subject: str) -> str:
    """Return the reason if a request has no responder. Any answer is enough, even a timeout."""
    from virtbus.schemas.errors import VirtbusError

    try:
        await bus.request(subject, {}, timeout_s=TIMEOUT_S / 4)
    except UnavailableError:
        return f"nobody listens on {subject}"
    except (BusError, VirtbusError):
        return ""
    return ""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(prog="virtbus.bus.client.health")
    one.add_argument("creds", type=Path, help="credentials of the service")
    one.add_argument("--ready", type=Path, help="file that has to exist")
    one.add_argument("--alive", type=Path, help="file that the service touches every 3 s")
    one.add_argument("--socket", type=Path, help="unix socket that has to be listened on")
    one.add_argument("--asks", default="", help="subject on which the service has to listen")
    return one


def main(argv: list[str] | None = None) -> int:
    """Check once; return the exit code."""
    why = asyncio.run(unhealthy(parser().parse_args(argv)))
    if why:
        sys.stdout.write(f"{why}\n")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
