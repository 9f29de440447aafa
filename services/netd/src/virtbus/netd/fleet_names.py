"""Asks the controllers for names of VMs on other hosts, with a cache and bounds.

A question that is open is never asked twice at the same time. While no controller answers, an
earlier answer is used again: guests keep their names while the bus is away.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.recent import Recent
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""Age at which an answer is asked again."""
ASK_S = 2.0
SILENT_S = 5.0
"""Time after a failed question in which no other is asked, so that guests need not wait for it."""
ASKED_AT_ONCE = 64
KEPT = 4096
"""Maximum stored answers that a VM exists. Answers that none exists are stored separately."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question of a guest: a VM by `vm` and its namespace, or by its address.

    `asker` is the namespace of the guest, because the answer depends on it.
    """

    asker: str
    namespace: str = ""
    vm: str = ""
    address: str = ""


class FleetNames:
    """The names that controllers know."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._subject = subjects.names_ask(node)
        self._found: Recent[Lookup, tuple[float, NameAnswer]] = Recent(KEPT)
        self._absent: Recent[Lookup, tuple[float, NameAnswer]] = Recent(KEPT)
        self._asked: dict[Lookup, asyncio.Future[NameAnswer | None]] = {}
        self._silent_until_s = -math.inf

    async def find(
        self, want: Lookup, uid: str, may_ask: Callable[[float], bool]
    ) -> NameAnswer | None:
        """Return the VM that a guest of the VM `uid` asks for; None if nobody can answer now.

        `may_ask` is called with the time before a controller is asked.
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
        answer: NameAnswer | None = None
        try:
            answer = await self._ask(want, uid)
        finally:
            del self._asked[want]
            answered.set_result(answer or stale)
        return answer or stale

    async def _ask(self, want: Lookup, uid: str) -> NameAnswer | None:
        loop = asyncio.get_running_loop()
        ask = NameAsk(uid=uid, namespace=want.namespace, name=want.vm, address=want.address)
        try:
            data = await self._bus.request(self._subject, ask, timeout_s=ASK_S)
            answer = validate(NameAnswer, data)
        except VirtbusError as error:
            extra = {"code": "names_refused", "uid": uid}
            log.debug("a controller refused to answer for a name: %s", error, extra=extra)
            return None
        except BusError as error:
            if loop.time() > self._silent_until_s:
                extra = {"code": "names_unknown"}
                log.warning("names of other hosts are unknown: %s", error, extra=extra)
            self._silent_until_s = loop.time() + SILENT_S
            return None
        self._keep(want, answer, loop.time())
        return answer

    def _keep(self, want: Lookup, answer: NameAnswer, now_s: float) -> None:
        self._found.pop(want, None)
        self._absent.pop(want, None)
        (self._found if answer.found else self._absent)[want] = (now_s, answer)
