"""Starts guests through libvirt, and keeps a list of the starts that libvirt has not ended.

libvirt may work on a start after the start's time limit, or after its caller was cancelled.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import libvirt

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent
from virtbus.nodeagent.edge.libvirt_domains import facts_of, on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.errors import Code, VirtbusError

START_TIMEOUT_S = 120.0
SLOT_S = 1.0
"""A start that takes longer gives its slot back, because it no longer waits for CPUs."""
_STOPPED = {DomainChange.SHUT_DOWN, DomainChange.ENDED, DomainChange.CRASHED}


class LibvirtStarts:
    """Starts guests. At most `at_once` starts hold a slot, the right to use CPUs."""

    def __init__(self, links: LibvirtLinks, at_once: int, *, in_process: bool) -> None:
        """`in_process` means libvirt's test driver, without support for flags and descriptors."""
        self._links = links
        self._slots = asyncio.Semaphore(at_once)
        self._in_process = in_process
        self._loop = asyncio.get_running_loop()
        self._starting: set[str] = set()
        """The uids of starts that have begun, before libvirt reports STARTED."""
        self._calls = Counter[str]()

    async def run(self, uid: str, *, paused: bool, files: Mapping[str, int]) -> None:
        """Start the guest. Return once the guest runs, or at once if it already runs."""
        flags = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        async with self._slot():
            held, ended = self._begun(uid, files)

            def run(domain: libvirt.virDomain) -> bool:
                try:
                    if self._in_process:
                        domain.create()
                        if paused:
                            domain.suspend()
                    else:
                        for name, descriptor in held.items():
                            domain.FDAssociate(name, [descriptor])
                        domain.createWithFlags(flags)
                except libvirt.libvirtError:
                    now = facts_of(domain)
                    if now is None or not now.active or now.starting:
                        raise
                return True

            doing = "start the guest"
            started = await on_ours(
                self._links, uid, run, doing, timeout_s=START_TIMEOUT_S, ended=ended
            )
        if not started:
            message = "start the guest: no such domain; the agent defines it again"
            raise VirtbusError(Code.NOT_FOUND, "no_domain", message)

    def under_way(self, uid: str) -> bool:
        """Return True while libvirt may still carry out a start of the guest."""
        return uid in self._calls

    def event(self, event: DomainEvent) -> DomainEvent:
        """Return `event`; the stop of a domain that is being started becomes START_FAILED."""
        if event.change is DomainChange.STARTED:
            self._starting.discard(event.uid)
        elif event.uid in self._starting and event.change in _STOPPED:
            return DomainEvent(event.uid, DomainChange.START_FAILED)
        return event

    def _begun(
        self, uid: str, files: Mapping[str, int]
    ) -> tuple[dict[str, int], Callable[[], None]]:
        """Note a start; return copies of the descriptors, and a function that notes the end.

        Without copies, a late start could use descriptor numbers that now belong to files of
        another guest. Raise VirtbusError 503 `no_descriptors` if no copy can be made.
        """
        held: dict[str, int] = {}

        def ended() -> None:
            for descriptor in held.values():
                os.close(descriptor)
            self._calls[uid] -= 1
            if not self._calls[uid]:
                del self._calls[uid]
                self._starting.discard(uid)

        self._starting.add(uid)
        self._calls[uid] += 1
        try:
            for name, descriptor in files.items():
                held[name] = os.dup(descriptor)
        except OSError as error:
            ended()
            message = f"start the guest: {error.strerror}; the agent tries again"
            raise VirtbusError(Code.UNAVAILABLE, "no_descriptors", message) from error
        return held, ended

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        await self._slots.acquire()
        taken = True

        def give_back() -> None:
            nonlocal taken
            if taken:
                taken = False
                self._slots.release()

        timer = self._loop.call_later(SLOT_S, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()
