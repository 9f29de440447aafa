"""Who waits for which answer: a connection's requests share one inbox, each has a token in it."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from virtbus.bus.link import Raw
from virtbus.bus.ports import BusError

_Answer = asyncio.Future[Raw | Exception]
"""An error is a result, too: what was asked may have failed to be sent, and then nobody looks."""

TOKEN_BYTES = 12
"""Of the random token of a request. Who sees the reply subject of one request (each service that
is asked) cannot answer another one in its place. It costs 1 us a request."""


class Replies:
    """The answers that are waited for."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[_Answer, str]] = {}

    async def to(
        self, subject: str, ask: Callable[[str], Awaitable[None]], *, timeout_s: float
    ) -> Raw:
        """The answer to what `ask` sends with the token that it is given.

        Raises:
            TimeoutError: none came within `timeout_s`.
            BusError: none will come, as `fail` was told.
        """
        token = secrets.token_hex(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        answer: _Answer = loop.create_future()
        self._waiting[token] = (answer, subject.lower())
        # 1 to 2 us; asyncio.timeout takes 6, and a create would pay it five times.
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
        """Somebody answered."""
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(raw)

    def fail(self, kind: type[BusError], why: str, subject: str = "") -> None:
        """No answer will come to any request, or to those on a subject (lower case)."""
        for answer, asked in self._waiting.values():
            if (not subject or asked == subject) and not answer.done():
                answer.set_result(kind(why))


def _give_up(answer: _Answer) -> None:
    if not answer.done():
        answer.set_result(TimeoutError())
