"""Matches answers to requests: a connection's requests share one inbox, with a token each."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from virtbus.bus.client.link import Raw
from virtbus.bus.errors import BusError

_Answer = asyncio.Future[Raw | Exception]
"""An error is a result as well: sending may have failed with no waiter left."""

TOKEN_BYTES = 12
"""Length of a request's random token.

A service that sees one reply subject cannot forge the answer of another request. It costs 1 us a
request.
"""


class Replies:
    """The pending answers."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[_Answer, str]] = {}

    async def to(
        self, subject: str, ask: Callable[[str], Awaitable[None]], *, timeout_s: float
    ) -> Raw:
        """Return the answer to the request that `ask` sends with a token.

        Raises:
            TimeoutError: none arrived within `timeout_s`.
            BusError: `fail` reported that none will arrive.
        """
        token = secrets.token_hex(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        answer: _Answer = loop.create_future()
        self._waiting[token] = (answer, subject.lower())
        # 1 to 2 us; asyncio.timeout takes 6, five times in a create
        limit = loop.call_later(max(0.0, timeout_s), _give_up, answer)
        try:
            await ask(token)
            came = await answer
        finally:
            limit.cancel()
            del self._waiting[token]
        if isinstance(came, Exception):
            raise came
        return came

    def came(self, token: str, raw: Raw) -> None:
        """Deliver an answer."""
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(raw)

    def fail(self, kind: type[BusError], why: str, subject: str = "") -> None:
        """Fail all requests, or those on a subject (lower case)."""
        for answer, asked in self._waiting.values():
            if (not subject or asked == subject) and not answer.done():
                answer.set_result(kind(why))


def _give_up(answer: _Answer) -> None:
    if not answer.done():
        answer.set_result(TimeoutError())
