"""Merges the lists of both runtimes. For a runtime that is away, its last list is used."""

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from virtbus.criproxy.core import calls
from virtbus.criproxy.core.entries import Entry, Wanted, answer, selected
from virtbus.criproxy.core.routing import CONTAINERS
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.runtime_client import CallFailedError
from virtbus.criproxy.memory import Memory
from virtbus.criproxy.runtimes import NO_LIST, Mark, NodeRuntime, Runtimes

OF_STATISTICS = {"ListContainerStats": "ListContainers", "ListPodSandboxStats": "ListPodSandbox"}
"""By list of statistics: the list that the filter is applied to while a runtime is away, because a
kept statistic has only its id."""


class Told(NamedTuple):
    """The answer of one runtime to a list call: bytes, None if the runtime is away, or its error.

    `begun` marks the runtime's changes that had ended before the call.
    """

    runtime: NodeRuntime
    begun: Mark
    answer: bytes | CallFailedError | None


class Lists:
    """The handlers of lists and of ImageFsInfo."""

    def __init__(self, runtimes: Runtimes, memory: Memory) -> None:
        self._runtimes = runtimes
        self._memory = memory

    async def listed(self, call: Call) -> bytes:
        return b"".join(await self._parts(call))

    async def streamed(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield the list of each runtime; raises the errors of `_parts`.

        The runtimes get the older list call, which each runtime has.
        """
        for part in await self._parts(call._replace(name=calls.STREAMS[call.name])):
            if part:
                yield part

    async def _parts(self, call: Call) -> list[bytes]:
        """Return the lists of both runtimes.

        Raises:
            VirtbusError: 400: the request is unreadable. 503 `list_unknown`: a runtime is away, and
                its list was never read.
            CallFailedError: the error of a runtime. UNIMPLEMENTED of the runtime of VMs is ignored.
        """
        wanted = messages.asked_filter(call.name, call.body)
        parts = []
        for told in await ask_both(self._runtimes, call):
            if isinstance(told.answer, bytes):
                parts.append(told.answer)
                if wanted.everything:
                    self._memory.of_list(told.runtime, call.name, told.answer, told.begun)
            else:
                parts.append(_without(told, call.name, wanted))
        return parts

    async def filesystems(self, call: Call) -> bytes:
        parts = []
        for told in await ask_both(self._runtimes, call):
            if isinstance(told.answer, bytes):
                parts.append(told.answer)
                self._memory.of_whole(told.runtime, call.name, told.answer)
            else:
                parts.extend(one.raw for one in _last(told, call.name).values())
        return b"".join(parts)


async def ask_both(runtimes: Runtimes, call: Call) -> list[Told]:
    """Call both runtimes concurrently; return the answer of the runtime of containers first."""

    async def ask(one: NodeRuntime) -> Told:
        begun = one.mark()
        try:
            return Told(one, begun, await one.told(call, NO_LIST))
        except CallFailedError as error:
            return Told(one, begun, error)

    async with asyncio.TaskGroup() as group:
        second = group.create_task(ask(runtimes.vms))
        first = await ask(runtimes.containers)
    return [first, second.result()]


def _without(told: Told, call: str, wanted: Wanted) -> bytes:
    """Return the list of a runtime that gave none: its last entries that match the filter."""
    entries = _last(told, call)
    if call in OF_STATISTICS and not wanted.everything:
        owners = told.runtime.entries(OF_STATISTICS[call])
        chosen = {one.key for one in selected(owners.values(), wanted)}
        return answer(one for one in entries.values() if one.key in chosen)
    return answer(selected(entries.values(), wanted))


def _last(told: Told, call: str) -> dict[str, Entry]:
    """Return the last entries of a runtime that is away; raises the runtime's error, if any.

    If the runtime of VMs lacks the call, it has no entries. If the runtime of containers lacks the
    call, its error is raised, as on a node without this proxy.
    """
    error = told.answer
    if isinstance(error, CallFailedError):
        if told.runtime.name == CONTAINERS or error.code != "UNIMPLEMENTED":
            raise error
        return {}
    return told.runtime.last_list(call)
