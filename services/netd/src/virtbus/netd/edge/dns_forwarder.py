"""Forwards queries to other DNS servers under a new id, and returns the answers.

A query leaves by the transport (UDP or TCP) by which it came, so truncation and EDNS need no code
here. Each query has its own socket and random id, against forged answers.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence

from virtbus.netd.core.dns_message import answers, asked_again
from virtbus.netd.core.reach import Address

PORT = 53
ANSWER_S = 4.5
"""Time for all servers together. A guest's resolver repeats its query after 5 s."""


class Forwarder:
    """Asks the servers in turn, beginning with the server that answered last."""

    def __init__(self, servers: Callable[[], Sequence[Address]]) -> None:
        self._servers = servers
        self._best: Address | None = None

    async def ask(self, query: bytes, *, tcp: bool) -> bytes | None:
        servers = sorted(self._servers(), key=lambda server: server != self._best)
        for server in servers:
            sent = asked_again(query, secrets.token_bytes(2))
            try:
                async with asyncio.timeout(ANSWER_S / len(servers)):
                    answer = await (_by_tcp if tcp else _by_udp)(server, sent)
            except (OSError, EOFError, TimeoutError):
                continue
            self._best = server
            return asked_again(answer, query[:2])
        return None


async def _by_udp(server: Address, query: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET if server.version == 4 else socket.AF_INET6
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(family, kind) as datagrams:
        datagrams.connect((str(server), PORT))  # the kernel drops datagrams of other senders
        datagrams.send(query)
        while not answers(answer := await loop.sock_recv(datagrams, 65535), query):
            pass
    return answer


async def _by_tcp(server: Address, query: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(str(server), PORT)
    try:
        writer.write(len(query).to_bytes(2, "big") + query)
        size = int.from_bytes(await reader.readexactly(2), "big")
        answer = await reader.readexactly(size)
    finally:
        writer.transport.abort()
    if not answers(answer, query):
        raise EOFError
    return answer
