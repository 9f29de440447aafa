"""Makes running servers reload their configuration, over the system account."""

import asyncio
import json
from typing import Any

from virtbus.bus.client.connection import NatsLink
from virtbus.bus.client.link import Raw
from virtbus.bus.errors import BusError, OutcomeUnknownError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import background, wait_for_event

GATHER_S = 1.0
"""Time to wait for further servers after the last answer."""
FIRST_S = 10.0
"""Time to wait for the first server."""
RELOAD_S = 60.0


async def reload_servers(settings: BusSettings) -> list[str]:
    """Make all servers that answer reload their configuration; return the servers' names.

    `settings` has the credentials of the user `sys`. Each server reloads twice, because nats-server
    2.15 activates the imports of a new account at the second reload.

    Raises:
        UnavailableError, DeniedError: as `connection.connect`.
        BusError: a server rejects its configuration.
        OutcomeUnknownError: a server does not answer within RELOAD_S.
    """
    link = NatsLink(settings, "reload")
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        found: dict[str, str] = {}
        came = asyncio.Event()

        def receive(raw: Raw) -> None:
            server = _read(raw.body).get("server") or {}
            if server.get("id"):
                found[str(server["id"])] = str(server.get("name"))
                came.set()

        inbox = link.inbox()
        subscription = await link.open(inbox, receive)
        await link.send("$SYS.REQ.SERVER.PING", b"", reply=inbox)
        while await wait_for_event(came, GATHER_S if found else FIRST_S):
            came.clear()
        await subscription.close()
        for _ in range(2):
            for identity, name in found.items():
                subject = f"$SYS.REQ.SERVER.{identity}.RELOAD"
                try:
                    raw = await link.ask(subject, b"", timeout_s=RELOAD_S)
                except TimeoutError:
                    msg = f"{name} has not answered within {RELOAD_S:g} s; it may have reloaded"
                    raise OutcomeUnknownError(msg) from None
                error = _read(raw.body).get("error")
                if error:
                    msg = f"{name} rejects its configuration: {error.get('description')}"
                    raise BusError(msg)
        tasks.cancel()
    return sorted(found.values())


def _read(body: bytes) -> dict[str, Any]:
    value = json.loads(body or b"{}")
    return value if isinstance(value, dict) else {}
