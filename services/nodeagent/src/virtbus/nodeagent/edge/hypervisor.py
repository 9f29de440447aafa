"""libvirt behind the agent's port: connections by kind of work, events, reconnects (design §5).

libvirtd serves at most five requests of one connection at a time, so starts, which take long, have
connections of their own; reads, events and destroys use another and are never behind a start.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import libvirt

from virtbus.nodeagent.core.domain_xml import DOMAIN_PREFIX
from virtbus.nodeagent.core.metadata import NAMESPACE, parse
from virtbus.nodeagent.core.ports import (
    DomainChange,
    DomainEvent,
    DomainFacts,
    DomainMetadata,
    DomainState,
    Ending,
)
from virtbus.nodeagent.edge.libvirt_calls import Lane
from virtbus.nodeagent.edge.libvirt_errors import translated
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
READ_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
RECONNECT_S = 1.0
STARTS_A_CONNECTION = 4
EVENT_BACKLOG = 10_000

_STATES: dict[int, DomainState] = {
    libvirt.VIR_DOMAIN_RUNNING: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: DomainState.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF: DomainState.SHUT_OFF,
    libvirt.VIR_DOMAIN_CRASHED: DomainState.SHUT_OFF,
}
_ENDINGS: dict[int, Ending] = {
    libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN: Ending.SHUT_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED: Ending.ENDED,
    libvirt.VIR_DOMAIN_SHUTOFF_CRASHED: Ending.CRASHED,
}
_CHANGES: dict[int, DomainChange] = {
    libvirt.VIR_DOMAIN_EVENT_STARTED: DomainChange.STARTED,
    libvirt.VIR_DOMAIN_EVENT_SUSPENDED: DomainChange.PAUSED,
    libvirt.VIR_DOMAIN_EVENT_RESUMED: DomainChange.RESUMED,
    libvirt.VIR_DOMAIN_EVENT_CRASHED: DomainChange.CRASHED,
}
_STOPS: dict[int, DomainChange] = {
    libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: DomainChange.SHUT_DOWN,
    libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: DomainChange.CRASHED,
    libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: DomainChange.CRASHED,
}


class LibvirtHypervisor:
    """The `Hypervisor` port on libvirt. Use as an async context manager."""

    def __init__(self, uri: str, *, starts_at_once: int) -> None:
        self._uri = uri
        self._reads = Lane("libvirt-read", 4)
        lanes = -(-starts_at_once // STARTS_A_CONNECTION)
        self._starts = [Lane(f"libvirt-start-{i}", STARTS_A_CONNECTION) for i in range(lanes)]
        self._connections: dict[Lane, libvirt.virConnect] = {}
        self._slots = asyncio.Semaphore(starts_at_once)
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[DomainEvent] = asyncio.Queue(EVENT_BACKLOG)
        self._lost = asyncio.Event()
        self._was_up = False

    # --- connections ----------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        _start_event_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(libvirt.libvirtError):
                connection.close()
        for lane in (self._reads, *self._starts):
            lane.close()

    async def keep_connected(self) -> None:
        """Connect, and again whenever libvirtd went away; never returns by itself."""
        while True:
            try:
                await self._connection(self._reads)
            except VirtbusError:
                await asyncio.sleep(RECONNECT_S)
                continue
            if self._was_up:
                log.warning("libvirt is back", extra={"code": "libvirt_back"})
                self._post(DomainEvent("", None))
            self._was_up = True
            await self._lost.wait()
            self._lost.clear()
            log.warning("libvirt went away; guests run on", extra={"code": "libvirt_down"})

    async def _connection(self, lane: Lane) -> libvirt.virConnect:
        if self._uri.startswith("test:"):
            lane = self._reads  # each connection to the test driver is a host of its own
        known = self._connections.get(lane)
        if known is not None:
            return known
        connection = await self._in(lane, lambda: libvirt.open(self._uri), "connect to libvirt")
        self._connections[lane] = connection
        if not self._uri.startswith("test:"):
            await self._in(lane, lambda: connection.setKeepAlive(5, 3), "connect to libvirt")
            connection.registerCloseCallback(self._closed, lane)
        self._listen(lane, connection)
        return connection

    def _listen(self, lane: Lane, connection: libvirt.virConnect) -> None:
        if lane is self._reads:
            kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
            connection.domainEventRegisterAny(None, kind, self._lifecycle, None)

    def _closed(self, _connection: libvirt.virConnect, _reason: int, lane: Lane) -> None:
        self._loop.call_soon_threadsafe(self._drop, lane)

    def _drop(self, lane: Lane) -> None:
        if self._connections.pop(lane, None) is not None and lane is self._reads:
            self._lost.set()

    async def _in(
        self, lane: Lane, work: Callable[[], Result], doing: str, timeout_s: float = READ_TIMEOUT_S
    ) -> Result:
        try:
            return await lane.call(work, timeout_s=timeout_s)
        except libvirt.libvirtError as error:
            problem = translated(error, doing)
            if problem.reason == "libvirt_down":
                self._drop(lane)
            raise problem from error

    async def _read(self, work: Callable[[libvirt.virConnect], Result], doing: str) -> Result:
        connection = await self._connection(self._reads)
        return await self._in(self._reads, lambda: work(connection), doing)

    async def _on(
        self, uid: str, work: Callable[[libvirt.virDomain], Result], doing: str
    ) -> Result | None:
        """`work` on the domain of `uid`; None where there is none."""

        def run(connection: libvirt.virConnect) -> Result | None:
            try:
                return work(connection.lookupByUUIDString(uid))
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise

        return await self._read(run, doing)

    # --- the port -------------------------------------------------------------------------
    async def list_domains(self) -> list[DomainFacts]:
        def run(connection: libvirt.virConnect) -> list[DomainFacts]:
            ours = (d for d in connection.listAllDomains() if d.name().startswith(DOMAIN_PREFIX))
            return [facts for domain in ours if (facts := _facts_or_none(domain)) is not None]

        return await self._read(run, "list domains")

    async def facts(self, uid: str) -> DomainFacts | None:
        return await self._on(uid, _facts_or_none, "read the domain")

    async def define(self, xml: str) -> None:
        await self._read(lambda connection: connection.defineXML(xml), "define the domain")

    async def start(self, uid: str) -> None:
        async with self._slots:
            self._turn = (self._turn + 1) % len(self._starts)
            lane = self._starts[self._turn]
            connection = await self._connection(lane)

            def run() -> None:
                domain = connection.lookupByUUIDString(uid)
                try:
                    domain.create()
                except libvirt.libvirtError:
                    if not domain.isActive():
                        raise

            await self._in(lane, run, "start the guest", START_TIMEOUT_S)

    async def shutdown(self, uid: str) -> bool:
        def run(domain: libvirt.virDomain) -> bool:
            if not domain.isActive():
                return False
            domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)
            return True

        return bool(await self._on(uid, run, "ask the guest to power off"))

    async def destroy(self, uid: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            try:
                domain.destroy()
            except libvirt.libvirtError:
                if domain.isActive():
                    raise

        await self._on(uid, run, "end the guest")

    async def undefine(self, uid: str) -> None:
        flags = (
            libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
            | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
        )

        def run(domain: libvirt.virDomain) -> None:
            if self._uri.startswith("test:"):
                domain.undefine()  # the test driver knows no flags
            else:
                domain.undefineFlags(flags)

        await self._on(uid, run, "undefine the domain")

    async def versions(self) -> dict[str, str]:
        """Of libvirt and of the hypervisor, as `9.0.0`."""

        def run(connection: libvirt.virConnect) -> dict[str, str]:
            return {
                "libvirt": _dotted(connection.getLibVersion()),
                "hypervisor": _dotted(connection.getVersion()),
            }

        return await self._read(run, "read versions")

    async def max_vcpus(self) -> int:
        """The most vCPUs a domain may have here."""
        return await self._read(lambda connection: connection.getMaxVcpus(None), "read limits")

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[DomainEvent]]:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self.keep_connected())
            try:
                yield self._heard()
            finally:
                keeper.cancel()

    async def _heard(self) -> AsyncIterator[DomainEvent]:
        while True:
            yield await self._queue.get()

    # --- events, from libvirt's thread --------------------------------------------------------
    def _lifecycle(
        self, _connection: Any, domain: libvirt.virDomain, event: int, detail: int, _opaque: Any
    ) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            change: DomainChange | None = _STOPS.get(detail, DomainChange.ENDED)
        else:
            change = _CHANGES.get(event)
        if change is not None and domain.name().startswith(DOMAIN_PREFIX):
            self._loop.call_soon_threadsafe(self._post, DomainEvent(domain.UUIDString(), change))

    def _post(self, event: DomainEvent) -> None:
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            # The next comparison of host and records makes good what is lost here.
            log.error("domain events lost", extra={"code": "events_lost"})


def _facts_or_none(domain: libvirt.virDomain) -> DomainFacts | None:
    """The domain's facts; None for one that vanished meanwhile."""
    try:
        state, reason = domain.state()
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise
    kind = _STATES.get(state, DomainState.SHUT_OFF)
    if kind is DomainState.PAUSED and reason == libvirt.VIR_DOMAIN_PAUSED_STARTING_UP:
        kind = DomainState.STARTING
    ending = (
        _ENDINGS.get(reason, Ending.UNKNOWN) if kind is DomainState.SHUT_OFF else Ending.UNKNOWN
    )
    return DomainFacts(domain.UUIDString(), kind, ending, _metadata(domain))


def _metadata(domain: libvirt.virDomain) -> DomainMetadata | None:
    try:
        return parse(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE))
    except libvirt.libvirtError:
        return None


def _dotted(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


_EVENT_LOOP = threading.Event()


def _start_event_loop() -> None:
    """Libvirt's own event loop in a daemon thread: one a process, for it cannot be ended."""
    if _EVENT_LOOP.is_set():
        return
    _EVENT_LOOP.set()
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def turn() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=turn, name="libvirt-events", daemon=True).start()
