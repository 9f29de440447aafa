"""Poller of the guest agents, whose answers become part of the status of VMIs.

The answers give the condition AgentConnected, the guest's operating system and its addresses.

A guest that answered is polled each minute. Its answer stays if the node fails, or if the guest,
which may be busy, is silent once. A guest that did not answer may still be booting, or may have no
agent. Such a guest is polled at growing intervals: half of its running time, within the bounds of
`Delays`. A guest that cannot have an agent is polled at the longest interval.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.kubebridge.core.runtime.controller import BUS_VM, VMI, Key, KeyMapping, Notify
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.kubebridge.edge.runtime.workqueue import Lane
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestAsk, GuestInfo, GuestQuestion
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import encode, read, validate

log = logging.getLogger(__name__)

ANSWER_S, SLACK_S = 5.0, 5.0
AT_ONCE = 16
SILENT = "guest_agent_silent"
"""Reason of an error: the guest agent runs, but has not answered in time."""
ABOUT = (GuestQuestion.OS, GuestQuestion.INTERFACES)
WATCHES = (KeyMapping(BUS_VM), KeyMapping(VMI))
"""Changes that cause a poll. A VM that is stored from the answer to a call causes no change of
BUS_VM. The status of its VMI then changes, so changes of VMIs are included."""


class Delays(NamedTuple):
    """Intervals between polls, in seconds.

    A guest that does not answer is polled at intervals from `first_s` to `longest_s`. A guest that
    answers is polled every `each_s`.
    """

    first_s: float = 10.0
    longest_s: float = 300.0
    each_s: float = 60.0

    def silent_s(self, up_s: float) -> float:
        return min(max(up_s / 2, self.first_s), self.longest_s)


NORMAL = Delays()


@dataclass(slots=True)
class _Asked:
    """The polling state of one guest. Times are of the event loop's clock.

    `due_s` is the time of the next poll. `since_s` is the time at which the guest was first seen
    running, or 0. `answer` is the encoded last answer: empty if the guest did not answer or did not
    run, None before the first poll. `silent` counts the polls since the last answer in which the
    guest agent was silent.
    """

    due_s: float
    since_s: float = 0.0
    answer: bytes | None = None
    silent: int = 0


class GuestAgentPoller:
    """Polls guest agents and keeps their last answers.

    `notify` gets the `namespace/name` of a VM whose answer changed.
    """

    def __init__(self, bus: Bus, views: VmInformer, delays: Delays = NORMAL) -> None:
        self._bus = bus
        self._views = views
        self._delays = delays
        self._asked: dict[str, _Asked] = {}
        self._uids: dict[str, set[str]] = {}
        """The uids of the polled VMs, by `namespace/name`."""
        self.notify: Notify = lambda _: None

    def get(self, uid: str) -> GuestInfo | None:
        one = self._asked.get(uid)
        return read(GuestInfo, one.answer) if one is not None and one.answer else None

    def asked(self, uid: str) -> bool:
        """Return True once the guest has been polled, or was found not running."""
        one = self._asked.get(uid)
        return one is not None and one.answer is not None

    def paths(self) -> Iterable[str]:
        return tuple(self._uids)

    def lane(self) -> Lane:
        return Lane(self.poll, AT_ONCE)

    async def poll(self, key: Key) -> float:
        """Poll those VMs of a name whose poll is due.

        Return the seconds before the next poll; 0 if no VM has this name.
        """
        uids = set(self._views.named(key.path))
        for uid in self._uids.pop(key.path, set()) - uids:
            self._asked.pop(uid, None)
        if uids:
            self._uids[key.path] = uids
        return min([await self._poll(uid, key.path) for uid in uids], default=0.0)

    async def _poll(self, uid: str, path: str) -> float:
        now_s = asyncio.get_running_loop().time()
        one = self._asked.setdefault(uid, _Asked(now_s + self._delays.first_s))
        if now_s < one.due_s:
            return one.due_s - now_s
        view = self._views.get(uid)
        if view is not None and view.state is VmState.RUNNING:
            one.since_s = one.since_s or now_s
            after_s = await self._ask(one, view, path)
        else:
            one.since_s, after_s = 0.0, self._delays.first_s
            self._take(one, path, b"")
        one.due_s = asyncio.get_running_loop().time() + after_s
        return after_s

    async def _ask(self, one: _Asked, view: VmView, path: str) -> float:
        want = GuestAsk(uid=view.uid, about=ABOUT, timeout_s=ANSWER_S)
        subject = subjects.rpc(view.node, "agent", "guest")
        after_s, answer = self._delays.each_s, b""
        try:
            reply = await self._bus.request(subject, want, timeout_s=ANSWER_S + SLACK_S)
            answer = encode(validate(GuestInfo, reply))
            one.silent = 0
        except VirtbusError as error:
            of_guest = error.reason == SILENT or error.code < Code.EXHAUSTED
            one.silent += error.reason == SILENT
            if not of_guest or (one.answer and one.silent == 1):
                return self._again(path, error)
            up_s = asyncio.get_running_loop().time() - one.since_s
            never = error.code == Code.UNSUPPORTED
            after_s = self._delays.longest_s if never else self._delays.silent_s(up_s)
        except BusError as error:
            return self._again(path, error)
        self._take(one, path, answer)
        return after_s

    def _again(self, path: str, error: Exception) -> float:
        """Return the seconds before the next poll, after a failure that proves nothing."""
        log.debug("agent of %s: %s", path, error)
        return self._delays.first_s

    def _take(self, one: _Asked, path: str, answer: bytes) -> None:
        if answer != one.answer:
            one.answer = answer
            self.notify(path)
