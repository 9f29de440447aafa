"""Implements the `Hypervisor` port with libvirt: calls, events, reconnections.

A start takes long, a destroy takes 200 ms, and a hung guest may block a call for ever. Each kind of
work therefore has its own connections, so that reads and events never wait for other work.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import libvirt

from virtbus.nodeagent.core.disks import DriveState
from virtbus.nodeagent.core.ports import NO_FILES, DomainChange, DomainEvent, DomainFacts
from virtbus.nodeagent.core.resource_values import ResourcesSet
from virtbus.nodeagent.edge.libvirt_backups import LibvirtBackups
from virtbus.nodeagent.edge.libvirt_calls import STUCK_LIMIT, Threads
from virtbus.nodeagent.edge.libvirt_devices import LibvirtDevices
from virtbus.nodeagent.edge.libvirt_disks import set_drives, set_limits
from virtbus.nodeagent.edge.libvirt_displays import LibvirtDisplays
from virtbus.nodeagent.edge.libvirt_domains import facts_of, is_ours, on_ours
from virtbus.nodeagent.edge.libvirt_events import listen, start_event_loop
from virtbus.nodeagent.edge.libvirt_guests import LibvirtGuests
from virtbus.nodeagent.edge.libvirt_layers import LibvirtLayers
from virtbus.nodeagent.edge.libvirt_limits import MAX_WORKERS, read_max_workers
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.libvirt_logins import LibvirtLogins
from virtbus.nodeagent.edge.libvirt_readings import LibvirtReadings
from virtbus.nodeagent.edge.libvirt_resources import DOING, pretended_resources, set_resources
from virtbus.nodeagent.edge.libvirt_sizes import LibvirtSizes
from virtbus.nodeagent.edge.libvirt_starts import LibvirtStarts
from virtbus.nodeagent.edge.lost_guests import LostGuests, lost_facts
from virtbus.nodeagent.edge.qemu_monitor import set_link
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.resources import Resources

log = logging.getLogger(__name__)

Result = TypeVar("Result")
READ_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 60.0
"""Time limit to define, undefine or destroy a domain. libvirt itself waits up to 30 s for a
domain's job lock, and 15 s for the end of QEMU.
"""
MONITOR_TIMEOUT_S = 15.0
"""Time limit of a call to a running QEMU. If QEMU hangs, the call may block for ever (F9)."""
RESERVED_WORKERS = 5
"""The number of libvirtd's worker threads that are closed to starts."""
STUCK_LIMIT_TO_MEND = 4 * STUCK_LIMIT
"""The limit of hanging calls for reads and destroys. Other calls have a lower limit, because a
destroy ends the calls that hang on its QEMU.
"""
READS_AT_ONCE = 8
CHANGES_AT_ONCE = 12
GUESTS_ASKED_AT_ONCE = 3
"""The limit of concurrent calls to quick guest agents. Slow guest agents and freezes have the same
limit each. A call to a silent guest agent takes 10 s.
"""
DISPLAYS_AT_ONCE = 3
RECONNECT_S = (0.2, 1.0)
EVENT_BACKLOG = 10_000
_STILL = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PMSUSPENDED)
"""The states of a guest with stopped CPUs: paused, or asleep (self-suspended to RAM)."""


class LibvirtHypervisor:
    """The `Hypervisor` port on libvirt. Use it as an async context manager."""

    def __init__(self, uri: str, *, starts_at_once: int, calls: Threads | None = None) -> None:
        self._uri = uri
        self._starts_at_once = starts_at_once
        self._loop = asyncio.get_running_loop()
        self._threads = calls or Threads("libvirt")
        self._queue: asyncio.Queue[DomainEvent | None] = asyncio.Queue(EVENT_BACKLOG)
        self._lost = LostGuests()
        self._make_links(MAX_WORKERS)

    def _make_links(self, max_workers: int) -> None:
        self._links: list[LibvirtLinks] = []

        def links(at_once: int, stuck_limit: int = STUCK_LIMIT) -> LibvirtLinks:
            made = LibvirtLinks(self._uri, self._threads, at_once=at_once, stuck_limit=stuck_limit)
            self._links.append(made)
            return made

        starts = max(max_workers - RESERVED_WORKERS, 1)
        self._reads = links(READS_AT_ONCE, STUCK_LIMIT_TO_MEND)
        self._in_process = self._uri.startswith("test:///")
        if self._in_process:
            self._changes = self._ends = self._events = self._asks = to_start = self._reads
        else:
            self._changes, to_start = links(CHANGES_AT_ONCE), links(starts)
            self._ends = links(CHANGES_AT_ONCE, STUCK_LIMIT_TO_MEND)
            self._events, self._asks = links(1), links(1)
        at_once = min(self._starts_at_once, starts)
        self._starts = LibvirtStarts(to_start, at_once, in_process=self._in_process)
        quick, slow, freezes, displays = (
            self._reads if self._in_process else links(at_once)
            for at_once in (*(GUESTS_ASKED_AT_ONCE,) * 3, DISPLAYS_AT_ONCE)
        )
        self.guests = LibvirtGuests(quick, slow, freezes)
        self.displays = LibvirtDisplays(displays)
        self.devices = LibvirtDevices(self._changes)
        self.logins = LibvirtLogins(self._changes)
        self.layers = LibvirtLayers(self._changes)
        self.backups = LibvirtBackups(self._changes)

    async def __aenter__(self) -> Self:
        start_event_loop()
        self._make_links(await read_max_workers(self._uri))
        return self

    async def __aexit__(self, *_: object) -> None:
        for links in self._links:
            links.close()
        self._threads.close()

    def readings(self, run_dir: Path) -> LibvirtReadings:
        return LibvirtReadings(self._changes, run_dir)

    def sizes(self, node: str) -> LibvirtSizes:
        return LibvirtSizes(self._asks, self._ends, self.logins, node)

    @property
    def healthy(self) -> bool:
        """False if so many calls hang that the agent should be restarted (F10)."""
        return self._threads.stuck < STUCK_LIMIT

    # --- domains --------------------------------------------------------------------------
    async def list_domains(self) -> list[DomainFacts]:
        def read(connection: libvirt.virConnect) -> list[DomainFacts]:
            ours = (domain for domain in connection.listAllDomains() if is_ours(domain))
            return [facts for domain in ours if (facts := facts_of(domain)) is not None]

        def run(connection: libvirt.virConnect) -> list[DomainFacts]:
            if self._in_process:
                return read(connection)
            return self._lost.compare(partial(read, connection))

        return await self._reads.run(run, "list domains", timeout_s=READ_TIMEOUT_S)

    async def uses(self, uid: str, folder: Path) -> bool:
        """Also covers a lost guest."""
        if (lost := self._lost.of(uid)) is not None:
            return lost.uses(folder)
        found = await on_ours(
            self._reads,
            uid,
            lambda domain: f"{folder}/" in domain.XMLDesc(),
            "read the domain",
            timeout_s=READ_TIMEOUT_S,
        )
        return bool(found)

    async def facts(self, uid: str) -> DomainFacts | None:
        found = await on_ours(
            self._reads, uid, facts_of, "read the domain", timeout_s=READ_TIMEOUT_S
        )
        if found is not None and found.active:
            return found
        lost = self._lost.of(uid)
        return found if lost is None else lost_facts(lost)

    async def define(self, xml: str) -> None:
        await self._changes.run(
            lambda connection: connection.defineXML(xml),
            "define the domain",
            timeout_s=CHANGE_TIMEOUT_S,
        )

    async def start(
        self, uid: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        """Return once the guest is up, at once for a guest that is already up."""
        self._lost.refuse(uid)
        await self._starts.run(uid, paused=paused, files=files)

    def start_under_way(self, uid: str) -> bool:
        return self._starts.under_way(uid)

    async def shutdown(self, uid: str) -> bool:
        self._lost.refuse(uid)

        def power_off(domain: libvirt.virDomain) -> object:
            if self._in_process:
                return domain.shutdown()  # the test driver supports no flags
            return domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)

        return await self._if_active(uid, power_off, "ask the guest to power off")

    async def reset(self, uid: str) -> bool:
        return await self._if_active(uid, lambda domain: domain.reset(0), "reset the guest")

    async def reboot(self, uid: str) -> bool:
        """Request a reboot by the guest agent, or by ACPI without a guest agent."""
        return await self._if_active(
            uid, lambda domain: domain.reboot(0), "ask the guest to reboot"
        )

    async def suspend(self, uid: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            if domain.isActive() and domain.state()[0] not in _STILL:
                domain.suspend()

        await self._ask(uid, run, "pause the guest")

    async def resume(self, uid: str) -> None:
        """Resume a paused guest, or wake a sleeping guest."""

        def run(domain: libvirt.virDomain) -> None:
            if domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
                domain.resume()
            elif domain.state()[0] == libvirt.VIR_DOMAIN_PMSUSPENDED:
                domain.pMWakeup()

        await self._ask(uid, run, "resume the guest")

    async def limit(
        self, uid: str, wanted: Mapping[str, Mapping[str, int]]
    ) -> Mapping[str, Mapping[str, int]] | None:
        return await self._ask(uid, partial(set_limits, wanted), "limit the disks")

    async def set_resources(self, uid: str, wanted: Resources) -> ResourcesSet:
        set_them = partial(set_resources, wanted)
        if self._in_process:  # the test driver has no cgroups
            set_them = partial(pretended_resources, wanted)
        return await self._ask(uid, set_them, DOING) or ResourcesSet(None)

    async def set_drives(self, uid: str, wanted: Mapping[str, DriveState]) -> None:
        await self._ask(uid, partial(set_drives, wanted), "change the medium")

    async def destroy(self, uid: str, *, forced: bool = False) -> None:
        await self._lost.end(uid, forced=forced)

        def run(domain: libvirt.virDomain) -> None:
            try:
                domain.destroy()
            except libvirt.libvirtError:
                if domain.isActive():
                    raise

        await on_ours(self._ends, uid, run, "end the guest", timeout_s=CHANGE_TIMEOUT_S)

    async def set_link(self, uid: str, device: str, *, up: bool) -> None:
        """Set the link of a NIC through QEMU's monitor.

        libvirt does not know the NICs of a guest's start.
        """
        if not self._in_process:  # the test driver has no QEMU
            order = set_link(device, up=up)
            await self._if_active(uid, order, "set the link of a NIC")

    async def undefine(self, uid: str) -> None:
        flags = (
            libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
            | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
        )
        if not self._in_process:  # the test driver has no checkpoints
            flags |= libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
        await on_ours(
            self._changes,
            uid,
            lambda domain: domain.undefineFlags(flags),
            "undefine the domain",
            timeout_s=CHANGE_TIMEOUT_S,
        )

    async def _if_active(
        self, uid: str, work: Callable[[libvirt.virDomain], object], doing: str
    ) -> bool:
        def run(domain: libvirt.virDomain) -> bool:
            active = bool(domain.isActive())
            if active:
                work(domain)
            return active

        return bool(await self._ask(uid, run, doing))

    async def _ask(
        self, uid: str, work: Callable[[libvirt.virDomain], Result], doing: str
    ) -> Result | None:
        return await on_ours(self._changes, uid, work, doing, timeout_s=MONITOR_TIMEOUT_S)

    # --- the host -------------------------------------------------------------------------
    async def versions(self) -> dict[str, str]:
        return await self._reads.run(
            lambda connection: {
                "libvirt": _dotted(connection.getLibVersion()),
                "hypervisor": _dotted(connection.getVersion()),
            },
            "read versions",
            timeout_s=READ_TIMEOUT_S,
        )

    async def max_vcpus(self) -> int:
        return await self._reads.run(
            lambda connection: connection.getMaxVcpus(None),
            "read limits",
            timeout_s=READ_TIMEOUT_S,
        )

    # --- events ---------------------------------------------------------------------------
    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[DomainEvent]]:
        """Yield an iterator of domain events. Entering the context enables the events.

        When libvirt is lost, the iterator yields AWAY without a uid. Once libvirt answers again, it
        yields an event without uid and change, because anything may have changed meanwhile. The
        iterator begins with such an event if libvirt does not answer at first.
        """
        yield self._heard(listening=await self._listen())

    async def _heard(self, *, listening: bool) -> AsyncIterator[DomainEvent]:
        while True:
            if not listening:
                await self._listen_again()
                listening = True
                yield DomainEvent("", None)
                continue
            event = await self._queue.get()
            if event is None:
                log.warning(
                    "libvirt is unreachable; guests keep running", extra={"code": "libvirt_down"}
                )
                listening = False
                yield DomainEvent("", DomainChange.AWAY)
            else:
                yield event

    async def _listen_again(self) -> None:
        delay_s = RECONNECT_S[0]
        while True:
            await asyncio.sleep(delay_s)
            if await self._listen():
                log.info("libvirt is reachable again", extra={"code": "libvirt_back"})
                return
            delay_s = min(delay_s * 2, RECONNECT_S[1])

    async def _listen(self) -> bool:
        def prepare(connection: libvirt.virConnect) -> None:
            listen(connection, self._from_thread)

        try:
            await self._events.reserve(prepare, lost=lambda: self._post(None))
        except VirtbusError:
            return False
        return True

    def _from_thread(self, event: DomainEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, without a listener
            self._loop.call_soon_threadsafe(self._post, event)

    def _post(self, event: DomainEvent | None) -> None:
        """Queue an event. None means a lost connection to libvirt."""
        try:
            self._queue.put_nowait(event and self._starts.event(event))
        except asyncio.QueueFull:
            # The next comparison with libvirt corrects lost events.
            log.error("domain events lost", extra={"code": "events_lost"})


def _dotted(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
