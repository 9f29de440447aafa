"""Clients that do not read, and clients that break the protocol: plain sockets to the server."""

import asyncio
import json
import random
from contextlib import suppress
from urllib.parse import urlsplit

from tests.fuzz.attackers import Coverage
from tests.fuzz.ground import Ground
from tests.fuzz.pool import Pool

USERS = ("client", "observer")
OVERSIZE_BYTES = 2 * 1024 * 1024
STAYS_S = 12.0
STALLED = ("stalled", "watches that nobody reads")
OVERSIZE = ("stalled", "payloads over the server's limit")


async def stalled(ground: Ground, pool: Pool, coverage: Coverage) -> None:
    """Open streams and read nothing of them, repeatedly, until cancelled."""
    rng = random.Random(f"{pool.seed}/stalled")
    while True:
        user = rng.choice(USERS)
        await _one(ground, user, coverage, oversize=rng.random() < 0.3)


async def _one(ground: Ground, user: str, coverage: Coverage, *, oversize: bool) -> None:
    login = ground.login(user)
    where = urlsplit(login["url"].split(",")[0])
    _reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1024)
    try:
        hello = {"user": login["user"], "pass": login["password"], "verbose": False}
        hello |= {"headers": True, "lang": "fuzz", "version": "1", "protocol": 1}
        inbox = f"{login['inbox_prefix']}.stalled"
        lines = [f"CONNECT {json.dumps(hello)}", f"SUB {inbox}.> 1"]
        writer.write("".join(f"{line}\r\n" for line in lines).encode())
        if oversize:
            head = f"PUB virtbus.api.v1.vm.list {inbox}.o {OVERSIZE_BYTES}\r\n"
            writer.write(head.encode() + b"x" * OVERSIZE_BYTES + b"\r\n")
            coverage.sent[OVERSIZE] += 1
        else:
            for number in range(50):
                body = b'{"limit":500}'
                verb = ("watch", "events", "list")[number % 3]
                head = f"PUB virtbus.api.v1.vm.{verb} {inbox}.{number} "
                body = b"{}" if verb == "watch" else body
                writer.write(f"{head}{len(body)}\r\n".encode() + body + b"\r\n")
            coverage.sent[STALLED] += 50
        with suppress(OSError):
            await writer.drain()
        transport = writer.transport
        if isinstance(transport, asyncio.ReadTransport):
            transport.pause_reading()
        await asyncio.sleep(1.0 if oversize else STAYS_S)
        coverage.answer(OVERSIZE if oversize else STALLED, "unread")
    finally:
        writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()
