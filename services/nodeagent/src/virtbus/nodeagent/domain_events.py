"""Reports changes of libvirt's domains to their actors, by events and periodic comparisons."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.network_disks import why_it_waits
from virtbus.nodeagent.core.ports import (
    DomainChange,
    DomainEvent,
    DomainFacts,
    DomainState,
    Hypervisor,
)
from virtbus.nodeagent.core.shares import SharedDirectories
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.machine import UP, MachineEvent
from virtbus.nodeagent.vm.observation import missed
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 5.0
BLIND_AFTER_S = 2.0
"""The delay of a report that libvirt does not answer. A restart of libvirtd takes less time."""
AGAIN_S = 1.0
WAITING_S = 4.0
"""The interval of the comparisons while a guest waits for a disk."""
BLIND = "libvirt does not answer, so nobody knows which guests run: {error}"
CHANGES: dict[DomainChange, MachineEvent] = {
    DomainChange.STARTED: "started",
    DomainChange.PAUSED: "paused",
    DomainChange.RESUMED: "resumed",
    DomainChange.SHUT_DOWN: "shut down",
    DomainChange.ENDED: "ended",
    DomainChange.CRASHED: "crashed",
    DomainChange.START_FAILED: "start failed",
}

ACTIVE = {DomainChange.STARTED, DomainChange.PAUSED, DomainChange.RESUMED}
OF_A_START = {DomainChange.STARTED, DomainChange.RESUMED}
"""libvirt starts QEMU with stopped CPUs, and then resumes them. It reports both changes."""


class DomainEvents:
    """Posts events of each domain to its actor in `guests`, the agent's live map by uid.

    `blind` gets the reason if libvirt does not answer for 2 s, and "" when libvirt answers again.
    """

    def __init__(
        self,
        hypervisor: Hypervisor,
        guests: Mapping[str, VmActor],
        blind: Callable[[str], None],
        servers: AwayServers,
        shares: SharedDirectories,
    ) -> None:
        self._hypervisor = hypervisor
        self._shares = shares
        self._servers = servers
        self._wake = asyncio.Event()
        servers.changed = self._wake.set
        self._guests = guests
        self._blind = blind
        self._blind_soon: asyncio.TimerHandle | None = None
        self._waiting: set[str] = set()
        """Uids of guests that wait for a disk."""

    async def hear(self, events: AsyncIterator[DomainEvent]) -> None:
        """Handle libvirt's events until `events` ends."""
        async for event in events:
            if event.change is DomainChange.AWAY:
                self._cannot_see("its connection is lost")
                continue
            if event.change is None:
                await self._see_again()
                continue
            try:
                await self._heard(event)
            except VirtbusError as error:  # the next comparison finds the change
                extra = {"code": error.reason, "uid": event.uid}
                log.warning(
                    "an event will be handled by the next comparison: %s", error, extra=extra
                )

    async def _heard(self, event: DomainEvent) -> None:
        """Handle an event. The domain's current state decides, because the event may be late."""
        guest = self._guests.get(event.uid)
        if guest is None or event.change is None:
            return
        if guest.vm.phase == "starting" and event.change in OF_A_START:
            return  # the start operation reports its own result
        guest.on_change(event.change)
        if event.change not in CHANGES:
            return
        facts = await self._hypervisor.facts(event.uid)
        active = facts is not None and facts.active
        if active != (event.change in ACTIVE):
            return
        if facts is not None and facts.state is DomainState.PAUSED:
            self._note_wait(guest, facts)
            guest.post("paused")
        elif event.change is not DomainChange.PAUSED:
            guest.post(CHANGES[event.change])

    async def look(self, interval_s: float) -> None:
        """Compare with libvirt periodically, to correct lost events (F11). Never returns.

        A change of a pool's server causes a comparison at once.
        """
        while True:
            pause_s = min(interval_s, WAITING_S) if self._waiting else interval_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s)
            self._wake.clear()
            await self._see_again()

    async def _see_again(self) -> None:
        seen = await self.compare()
        while not seen:
            await asyncio.sleep(AGAIN_S)
            seen = await self.compare()

    async def compare(self) -> bool:
        """Post the current state of each domain to its actor.

        Return False if libvirt does not answer.
        """
        try:
            domains = {d.uid: d for d in await self._hypervisor.list_domains()}
        except VirtbusError as error:
            log.warning(
                "comparison with libvirt failed, repeated later: %s",
                error,
                extra={"code": error.reason},
            )
            self._cannot_see(str(error))
            return False
        for uid, guest in list(self._guests.items()):
            facts = domains.get(uid)
            _tell_lost(guest, 0 if facts is None else facts.pid)
            guest.post(missed(guest.vm.phase, facts))
        for uid, facts in domains.items():
            if (waiting := self._guests.get(uid)) is not None:
                await self._resume_after_full_disk(waiting, facts)
                if facts.active:
                    await self._tell_lost_directories(waiting)
        self._sees()
        return True

    async def _resume_after_full_disk(self, guest: VmActor, facts: DomainFacts) -> None:
        """Report a waiting guest, and resume a guest that QEMU paused at an I/O error (F30).

        The usual cause is a full disk. Free space is not reported, so each comparison resumes the
        guest, and QEMU repeats the write. If the write fails again, QEMU pauses the guest again,
        without loss. A guest that a user paused stays paused.
        """
        self._note_wait(guest, facts)
        if not facts.waits_for_disk or guest.vm.record.paused:
            return
        try:
            await self._hypervisor.resume(facts.uid)
        except VirtbusError as error:
            extra = {"code": "not_resumed", "uid": facts.uid}
            log.info("paused because its disk is full: %s", error, extra=extra)

    def _note_wait(self, guest: VmActor, facts: DomainFacts) -> None:
        record, waits = guest.vm.record, ""
        if facts.waits_for_disk:
            waits = why_it_waits(record)
        elif facts.active:
            waits = self._servers.why_it_stalls(record)
        (self._waiting.add if waits else self._waiting.discard)(facts.uid)
        if waits != guest.vm.observed.disk_waits:
            guest.vm.observed.disk_waits = waits
            guest.report()

    async def _tell_lost_directories(self, guest: VmActor) -> None:
        """Report a running guest's directories whose virtiofsd has ended.

        libvirt does not report the end of a virtiofsd.
        """
        if guest.vm.phase not in UP:
            return
        lost = await self._shares.lost(guest.vm.record)
        if lost != guest.vm.observed.directories_lost:
            guest.vm.observed.directories_lost = lost
            extra = {"code": "directory_lost", "uid": guest.vm.record.uid}
            log.warning("virtiofsd has ended: %s", ", ".join(lost) or "none any more", extra=extra)
            guest.report()

    def _cannot_see(self, error: str) -> None:
        if self._blind_soon is None:
            loop, why = asyncio.get_running_loop(), BLIND.format(error=error)
            self._blind_soon = loop.call_later(BLIND_AFTER_S, self._blind, why)

    def _sees(self) -> None:
        if self._blind_soon is not None:
            self._blind_soon.cancel()
            self._blind_soon = None
            self._blind("")

    async def stay_healthy(self) -> None:
        """Raise VirtbusError once too many libvirt calls hang. The agent then restarts (F10)."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if not self._hypervisor.healthy:
                break
        message = "too many libvirt calls did not return; the agent restarts"
        raise VirtbusError(Code.INTERNAL, "libvirt_stuck", message)


def _tell_lost(guest: VmActor, pid: int) -> None:
    """Report a change of `pid`, the process of a lost guest, or 0."""
    if pid != guest.vm.observed.lost_pid:
        guest.vm.observed.lost_pid = pid
        if pid:
            extra = {"code": "guest_lost", "uid": guest.vm.record.uid}
            log.error("libvirt has lost a guest, process %d: left alone", pid, extra=extra)
        guest.report()
