"""Asks the controllers for names of VMs on other hosts, with a cache and limits.

Equal questions at the same time share one request. While no controller answers, earlier answers
that name a VM stay valid, so known names resolve without the bus.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from virtbus.bus.runtime.recent import Recent
from virtbus.netd.core.resolver_messages import FoundName, Lookup, NobodyAnswersError

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""The age from which an answer is requested again."""
SILENT_S = 5.0
"""The pause of all questions after an unanswered question, so that guests do not wait in vain."""
ASKED_AT_ONCE = 64
KEPT = 4096
"""Maximum number of stored answers: of those that name a VM, and of those that no VM exists."""


Ask = Callable[[Lookup, str], Awaitable[FoundName | None]]
"""Asks a controller a guest's question. The second argument is the uid of the guest's VM.

Returns None if the controller refuses. Raises NobodyAnswersError.
"""


class FleetNames:
    """The controllers' names of VMs."""

    def __init__(self, ask: Ask) -> None:
        self._ask_controller = ask
        self._found: Recent[Lookup, tuple[float, FoundName]] = Recent(KEPT)
        self._absent: Recent[Lookup, tuple[float, FoundName]] = Recent(KEPT)
        self._asked: dict[Lookup, asyncio.Future[FoundName | None]] = {}
        self._silent_until_s = -math.inf

    def ask_again(self) -> None:
        """End the pause of SILENT_S, because a new netd has connected."""
        self._silent_until_s = -math.inf

    async def find(
        self, want: Lookup, uid: str, may_ask: Callable[[float], bool]
    ) -> FoundName | None:
        """Return the answer to a guest of the VM `uid`: a VM, or the fact that no such VM exists.

        Return None if no answer is available. `may_ask`, called with the time, may forbid a request
        to a controller.
        """
        now_s = asyncio.get_running_loop().time()
        asked_s, known = self._found.get(want) or self._absent.get(want) or (-math.inf, None)
        if now_s - asked_s < FRESH_S:
            return known
        stale = known if known is not None and known.found else None
        waiting = self._asked.get(want)
        if waiting is not None:
            return await asyncio.shield(waiting)
        silent = now_s < self._silent_until_s or len(self._asked) >= ASKED_AT_ONCE
        if silent or not may_ask(now_s):
            return stale
        answered = self._asked[want] = asyncio.get_running_loop().create_future()
        answer: FoundName | None = None
        try:
            answer = await self._ask(want, uid)
        finally:
            del self._asked[want]
            answered.set_result(answer or stale)
        return answer or stale

    async def _ask(self, want: Lookup, uid: str) -> FoundName | None:
        loop = asyncio.get_running_loop()
        try:
            answer = await self._ask_controller(want, uid)
        except NobodyAnswersError:
            if loop.time() > self._silent_until_s:
                extra = {"code": "names_unknown"}
                log.warning("names of other hosts are unknown: nobody answers", extra=extra)
            self._silent_until_s = loop.time() + SILENT_S
            return None
        if answer is not None:
            self._keep(want, answer, loop.time())
        return answer

    def _keep(self, want: Lookup, answer: FoundName, now_s: float) -> None:
        self._found.pop(want, None)
        self._absent.pop(want, None)
        (self._found if answer.found else self._absent)[want] = (now_s, answer)
