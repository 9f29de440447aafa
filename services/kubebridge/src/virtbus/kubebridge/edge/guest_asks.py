"""Polls the guest agents for the condition AgentConnected, the guest's system and its addresses.

A guest that answered is polled each minute. One that did not may still be booting, or may have no
agent. It is polled at growing intervals: half of the time that it has run.
"""

import asyncio
import logging
from dataclasses import dataclass

from virtbus.bus.ports import Bus, BusError
from virtbus.bus.tasks import Background, background
from virtbus.kubebridge.edge.objects import Changed
from virtbus.kubebridge.edge.views import Views
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestAsk, GuestInfo, GuestQuestion
from virtbus.schemas.states import VmState
from virtbus.schemas.wire import encode, read, validate

log = logging.getLogger(__name__)

TICK_S = 1.0
FIRST_S, LONGEST_S = 10.0, 300.0
"""Shortest and longest interval for a guest that does not answer."""
EACH_S = 60.0
ANSWER_S, SLACK_S = 5.0, 5.0
AT_ONCE = 16
ABOUT = (GuestQuestion.OS, GuestQuestion.INTERFACES)


@dataclass(slots=True)
class _Asked:
    """The state of one guest, in loop time. `told` is its encoded answer, empty for none."""

    due_s: float
    since_s: float = 0.0
    told: bytes = b""
    known: bool = False
    busy: bool = False


def pause_s(up_s: float) -> float:
    """Return the interval for a guest that has run for `up_s` and did not answer."""
    return min(max(up_s / 2, FIRST_S), LONGEST_S)


class GuestAsks:
    """Polls while `acts` is set. Listeners get the key of a VM whose answer changed."""

    def __init__(self, bus: Bus, views: Views, acts: asyncio.Event) -> None:
        self._bus = bus
        self._views = views
        self._acts = acts
        self._asked: dict[str, _Asked] = {}
        self.listeners: list[Changed] = []

    def get(self, uid: str) -> GuestInfo | None:
        """Return the last answer of the guest agent, or None."""
        one = self._asked.get(uid)
        return read(GuestInfo, one.told) if one is not None and one.told else None

    def asked(self, uid: str) -> bool:
        """Return True once the guest was polled, with or without an answer."""
        one = self._asked.get(uid)
        return one is not None and one.known

    async def run(self) -> None:
        """Poll until cancelled."""
        time = asyncio.get_running_loop().time
        async with background() as tasks:
            while True:
                await self._acts.wait()
                self._round(tasks, time())
                await asyncio.sleep(TICK_S)

    def _round(self, tasks: Background, now_s: float) -> None:
        """Start the polls that are due, within the limit."""
        keys = dict(self._views)
        for uid in self._asked.keys() - keys.keys():
            del self._asked[uid]
        room = AT_ONCE - sum(one.busy for one in self._asked.values())
        for uid in keys.keys() - self._asked.keys():
            self._asked[uid] = _Asked(now_s + FIRST_S)
        asked = self._asked.items()
        due = [(one.due_s, uid) for uid, one in asked if one.due_s <= now_s and not one.busy]
        for _, uid in sorted(due):  # the longest overdue first
            if room <= 0:
                break
            one, key = self._asked[uid], keys[uid]
            view = self._views.get(uid)
            if view is None or view.state is not VmState.RUNNING:
                one.since_s, one.due_s = 0.0, now_s + FIRST_S
                self._take(one, key, b"")
                continue
            one.since_s = one.since_s or now_s
            one.busy = True
            room -= 1
            tasks.start(self._ask(one, uid, key, view.node))

    async def _ask(self, one: _Asked, uid: str, key: str, node: str) -> None:
        loop = asyncio.get_running_loop()
        want = GuestAsk(uid=uid, about=ABOUT, timeout_s=ANSWER_S)
        after_s, told = EACH_S, b""
        try:
            said = await self._bus.request(
                subjects.rpc(node, "agent", "guest"), want, timeout_s=ANSWER_S + SLACK_S
            )
            told = encode(validate(GuestInfo, said))
        except VirtbusError as error:
            never = error.code == Code.UNSUPPORTED
            after_s = LONGEST_S if never else pause_s(loop.time() - one.since_s)
        except BusError as error:  # it says nothing about the guest
            log.debug("agent of %s: %s", key, error)
            one.due_s = loop.time() + FIRST_S
            return
        finally:
            one.busy = False
        one.due_s = loop.time() + after_s
        self._take(one, key, told)

    def _take(self, one: _Asked, key: str, told: bytes) -> None:
        if told != one.told or not one.known:
            one.told, one.known = told, True
            for changed in self.listeners:
                changed(key)
