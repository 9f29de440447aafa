"""Holds the two runtimes of the node, with their connections, last answers and absences."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from virtbus.criproxy.core import calls
from virtbus.criproxy.core.entries import Entry
from virtbus.criproxy.core.routing import CONTAINERS, VMS, Name
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.last_answers import AnswerFolder, LastAnswers, Read
from virtbus.criproxy.edge.runtime_client import CallFailedError, RuntimeClient
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

WHOLE = (*calls.FIRST, calls.STATUS_OF_ALL, calls.FILESYSTEMS)
"""Calls whose complete answer is kept as one entry."""
NO_ANSWER = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""The gRPC status codes which mean that a runtime is away."""
NO_LIST = NO_ANSWER | {"INTERNAL", "UNKNOWN", "DATA_LOSS", "RESOURCE_EXHAUSTED", "CANCELLED"}
"""The gRPC status codes which mean that a runtime is away or cannot list. Then its last list is
served."""


class Mark(NamedTuple):
    """The changes of a runtime at the time when a call for a list began.

    `turn` is the number of changes that had ended. `quiet` is True if no change was running.
    """

    turn: int
    quiet: bool


class NodeRuntime:
    """One runtime. `away` is the reason why the runtime does not answer; empty if it answers."""

    def __init__(
        self, name: Name, client: RuntimeClient, folder: AnswerFolder, limit_s: float
    ) -> None:
        self.name = name
        self.client = client
        self.away = ""
        self.away_since_s = 0.0
        self._limit_s = limit_s
        self._changing = self._turn = 0
        kept = (*calls.LISTS, *calls.STATUS.values(), *WHOLE)
        self.last: dict[str, LastAnswers] = {call: folder.kind(name, call) for call in kept}

    def load(self) -> None:
        for call, last in self.last.items():
            last.load(_reader(call))

    # --- calls ----------------------------------------------------------------------------
    async def passed(self, call: Call) -> bytes:
        path = calls.PATHS[call.name]
        return await self.client.call(path, call.body, call.left_s, call.metadata)

    async def told(self, call: Call, no_answer: frozenset[str] = NO_ANSWER) -> bytes | None:
        """Return the answer to a call that changes nothing; None if the runtime is away.

        The runtime counts as away if it answers with a status of `no_answer`, or takes too long.

        Raises:
            CallFailedError: another error of the runtime.
        """
        left_s = self._limit_s if call.left_s is None else min(self._limit_s, call.left_s / 2)
        try:
            answer = await self.passed(call._replace(left_s=left_s))
        except CallFailedError as error:
            if error.code not in no_answer:
                self._answers()
                raise
            self._left(error)
            return None
        self._answers()
        return answer

    def _left(self, error: CallFailedError) -> None:
        if not self.away:
            self.away_since_s = asyncio.get_running_loop().time()
            log.warning(
                "the runtime of %s is away: %s", self.name, error, extra={"code": "runtime_away"}
            )
        self.away = f"the runtime of {self.name} does not answer: {error.code}: {error.text:.200}"

    def _answers(self) -> None:
        if self.away:
            log.info("the runtime of %s answers", self.name, extra={"code": "runtime_answers"})
        self.away = ""

    # --- lists ----------------------------------------------------------------------------
    def entries(self, call: str) -> dict[str, Entry]:
        """Return the last entries of a list, to find an id's runtime. Some may be missing."""
        return self.last[call].all

    def last_list(self, call: str) -> dict[str, Entry]:
        if not self.last[call].known:
            message = (
                f"{self.away or f'the runtime of {self.name} does not answer'}, and its last "
                f"{call} is not known; start it, and repeat the call"
            )
            raise VirtbusError(Code.UNAVAILABLE, "list_unknown", message)
        return self.last[call].all

    @contextmanager
    def changing(self) -> Iterator[None]:
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1
            self._turn += 1

    def mark(self) -> Mark:
        return Mark(self._turn, not self._changing)

    async def remember(self, call: str, entries: dict[str, Entry], begun: Mark) -> None:
        """Keep a complete list.

        A list that was read during a change may lack an added entry, or still have a removed entry.
        So such a list only updates known entries. The change adds or removes its own entries.
        """
        last = self.last[call]
        if last.known and (not begun.quiet or begun != self.mark()):
            entries = {key: entries.get(key, one) for key, one in last.all.items()}
        await last.replace(entries)
        for of in calls.LIST:
            if call == calls.LIST[of]:
                statuses = self.last[calls.STATUS[of]]
                await statuses.drop(statuses.all.keys() - entries.keys())

    async def forget(self, of: calls.Of, key: str) -> None:
        inside = [key]
        if of == "sandbox":
            containers = self.entries(calls.LIST["container"])
            inside = [one.key for one in containers.values() if one.sandbox_id == key]
            for call in (calls.LIST["sandbox"], calls.STATUS["sandbox"]):
                await self.last[call].drop([key])
        for call in (calls.LIST["container"], calls.STATUS["container"]):
            await self.last[call].drop(inside)

    async def restate(self, of: calls.Of, body: bytes) -> None:
        """Keep an object's status, and note its state in the list; raises UnreadableError."""
        status = messages.status_entry(calls.STATUS[of], body)
        known = self.last[calls.LIST[of]].all.get(status.key)
        if known is None:
            return  # the object was removed meanwhile, or no list has named it yet
        kept = self.last[calls.STATUS[of]]
        if kept.all.get(status.key) != status:
            kept.known = True
            await kept.put(status)
        if known.state != status.state:
            newer = messages.restated(calls.LIST[of], known, status)
            self._turn += 1
            await self.last[calls.LIST[of]].put(newer)


class Runtimes(NamedTuple):
    """Both runtimes. In a merged answer, the part of `containers` comes first."""

    containers: NodeRuntime
    vms: NodeRuntime

    def named(self, name: Name) -> NodeRuntime:
        return self.vms if name == VMS else self.containers


def open_runtimes(
    containers: RuntimeClient, vms: RuntimeClient, folder: AnswerFolder, limit_s: float
) -> Runtimes:
    """Return both runtimes with the last answers from the disk."""
    both = Runtimes(
        NodeRuntime(CONTAINERS, containers, folder, limit_s), NodeRuntime(VMS, vms, folder, limit_s)
    )
    for one in both:
        one.load()
    return both


def _reader(call: str) -> Read:
    if call in calls.LISTS:
        return lambda raw: messages.stored(call, raw)
    if call in WHOLE:
        return lambda raw: messages.whole(call, raw)
    return lambda raw: messages.status_entry(call, raw)
