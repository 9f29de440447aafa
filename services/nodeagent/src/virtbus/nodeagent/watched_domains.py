"""Observes libvirt's domains: by events, and by periodic comparison."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from virtbus.nodeagent.core.lifecycle import Event, Phase
from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState, Hypervisor
from virtbus.nodeagent.disk_room import go_on
from virtbus.nodeagent.guest import Guest
from virtbus.nodeagent.noting import MISHAPS
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 5.0
CHANGES: dict[DomainChange, Event] = {
    DomainChange.STARTED: Event.STARTED,
    DomainChange.PAUSED: Event.PAUSED,
    DomainChange.RESUMED: Event.RESUMED,
    DomainChange.SHUT_DOWN: Event.SHUT_DOWN,
    DomainChange.ENDED: Event.ENDED,
    DomainChange.CRASHED: Event.CRASHED,
    DomainChange.START_FAILED: Event.START_FAILED,
}

ACTIVE = {DomainChange.STARTED, DomainChange.PAUSED, DomainChange.RESUMED}
OF_A_START = {DomainChange.STARTED, DomainChange.RESUMED}
"""QEMU is started with its CPUs stopped, so libvirt reports both."""


class WatchedDomains:
    """Notifies each actor of `guests`, the agent's own, live map, of its domain's changes."""

    def __init__(self, hypervisor: Hypervisor, guests: Mapping[str, Guest]) -> None:
        self._hypervisor = hypervisor
        self._guests = guests

    async def hear(self, events: AsyncIterator[DomainEvent]) -> None:
        """Pass on libvirt's events; never returns by itself."""
        async for event in events:
            if event.change is None:
                await self.compare()
                continue
            try:
                await self._heard(event)
            except VirtbusError as error:  # about one domain; the next comparison finds it
                extra = {"code": error.reason, "uid": event.uid}
                log.warning(
                    "an event will be handled by the next comparison: %s", error, extra=extra
                )

    async def _heard(self, event: DomainEvent) -> None:
        """Handle a hint: libvirt's current state decides, because an event may be late."""
        guest = self._guests.get(event.uid)
        if guest is None or event.change is None:
            return
        if guest.phase is Phase.STARTING and event.change in OF_A_START:
            return  # the start itself reports, including its error
        _tell(guest, event.change)
        if event.change not in CHANGES:
            return
        facts = await self._hypervisor.facts(event.uid)
        active = facts is not None and facts.active
        if active != (event.change in ACTIVE):
            return
        if facts is not None and facts.state is DomainState.PAUSED:
            guest.post(Event.PAUSED)
        elif event.change is not DomainChange.PAUSED:
            guest.post(CHANGES[event.change])

    async def look(self, interval_s: float) -> None:
        """Compare with libvirt periodically, which corrects lost events (F11)."""
        while True:
            await asyncio.sleep(interval_s)
            await self.compare()

    async def compare(self) -> None:
        """Notify each actor of its domain's current state (F11)."""
        try:
            domains = {d.uid: d for d in await self._hypervisor.list_domains()}
        except VirtbusError as error:
            log.warning(
                "comparison failed, will be retried: %s", error, extra={"code": error.reason}
            )
            return
        for uid, guest in list(self._guests.items()):
            guest.compare(domains.get(uid))
        await go_on(domains.values(), self._guests, self._hypervisor)

    async def stay_healthy(self) -> None:
        """End when too many libvirt calls hang: a new agent adopts all with fresh threads (F10)."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if not self._hypervisor.healthy:
                break
        message = "too many libvirt calls never came back; the agent starts anew"
        raise VirtbusError(Code.INTERNAL, "libvirt_stuck", message)


def _tell(guest: Guest, change: DomainChange) -> None:
    """Notify the actor of changes that do not depend on the domain's current state."""
    if change is DomainChange.REBOOTED:
        guest.rebooted()
    elif change in MISHAPS:
        guest.mishap(change)
