"""Matches answers to requests by token. All requests of a connection share one inbox."""

import asyncio
from collections.abc import Awaitable, Callable

from virtbus.bus.client.link import Raw
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import random_token

_Answer = asyncio.Future[Raw | Exception]
"""The answer to a request, or an error.

An error is set as the result, because asyncio logs an exception that no task awaits.
"""


class Replies:
    """The requests of one connection that wait for an answer."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[_Answer, str]] = {}

    async def to(
        self, subject: str, ask: Callable[[str], Awaitable[None]], *, timeout_s: float
    ) -> Raw:
        """Send a request by `ask(token)` and return its answer.

        Raises:
            TimeoutError: no answer arrived within `timeout_s`.
            BusError: `fail` was called for this request.
        """
        # Random: a service knows the tokens of its requests, and must not guess other tokens.
        token = random_token().hex()
        loop = asyncio.get_running_loop()
        answer: _Answer = loop.create_future()
        self._waiting[token] = (answer, subject.lower())
        # call_later takes 1 to 2 us, asyncio.timeout takes 6 us. A create sends five requests.
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
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(raw)

    def fail(self, kind: type[BusError], why: str, subject: str = "") -> None:
        """Fail the waiting requests on `subject`, in lower case; if empty, fail all requests."""
        for answer, asked in self._waiting.values():
            if (not subject or asked == subject) and not answer.done():
                answer.set_result(kind(why))


def _give_up(answer: _Answer) -> None:
    if not answer.done():
        answer.set_result(TimeoutError())
