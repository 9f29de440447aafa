"""Runs libvirt's event loop in a thread, and translates its events to `DomainChange`."""

import contextlib
import threading
from collections.abc import Callable

import libvirt

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent
from virtbus.nodeagent.edge.libvirt_domains import is_ours

_CHANGES: dict[int, DomainChange] = {
    libvirt.VIR_DOMAIN_EVENT_STARTED: DomainChange.STARTED,
    libvirt.VIR_DOMAIN_EVENT_SUSPENDED: DomainChange.PAUSED,
    libvirt.VIR_DOMAIN_EVENT_PMSUSPENDED: DomainChange.PAUSED,
    libvirt.VIR_DOMAIN_EVENT_RESUMED: DomainChange.RESUMED,
    libvirt.VIR_DOMAIN_EVENT_CRASHED: DomainChange.CRASHED,
}
_STOPS: dict[int, DomainChange] = {
    libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: DomainChange.SHUT_DOWN,
    libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: DomainChange.CRASHED,
    # QEMU was killed, or a start failed. Only the caller of the start can tell the two apart.
    libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: DomainChange.CRASHED,
}
_WATCHDOGS: dict[int, DomainChange] = {
    libvirt.VIR_DOMAIN_EVENT_WATCHDOG_POWEROFF: DomainChange.WATCHDOG_POWEROFF,
    libvirt.VIR_DOMAIN_EVENT_WATCHDOG_RESET: DomainChange.WATCHDOG_RESET,
    libvirt.VIR_DOMAIN_EVENT_WATCHDOG_SHUTDOWN: DomainChange.WATCHDOG_SHUTDOWN,
}
_RUNNING = threading.Event()


def start_event_loop() -> None:
    """Start libvirt's event loop in a daemon thread, once per process. The loop cannot be ended.

    Call this function before the first connection. It also stops libvirt from printing errors to
    stderr, because the calls raise the same errors.
    """
    if _RUNNING.is_set():
        return
    _RUNNING.set()
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def turn() -> None:
        while True:
            with contextlib.suppress(libvirt.libvirtError):
                libvirt.virEventRunDefaultImpl()

    threading.Thread(target=turn, name="libvirt-events", daemon=True).start()


def listen(connection: libvirt.virConnect, hear: Callable[[DomainEvent], None]) -> None:
    """Call `hear` in libvirt's thread for lifecycle, reboot and watchdog events of our domains."""
    changes_of: dict[int, Callable[..., DomainChange | None]] = {
        libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE: change_of,
        libvirt.VIR_DOMAIN_EVENT_ID_REBOOT: lambda: DomainChange.REBOOTED,
        libvirt.VIR_DOMAIN_EVENT_ID_WATCHDOG: _WATCHDOGS.get,
    }

    def arrived(
        _connection: libvirt.virConnect, domain: libvirt.virDomain, *details_and_kind: int
    ) -> None:
        *details, kind = details_and_kind
        change = changes_of[kind](*details)
        if change is not None and is_ours(domain):
            hear(DomainEvent(domain.UUIDString(), change))

    for kind in changes_of:
        connection.domainEventRegisterAny(None, kind, arrived, kind)


def change_of(event: int, detail: int) -> DomainChange | None:
    """Return the change that a lifecycle event means; None if the agent ignores the event."""
    if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
        return _STOPS.get(detail, DomainChange.ENDED)
    panicked = libvirt.VIR_DOMAIN_EVENT_CRASHED_PANICKED
    if event == libvirt.VIR_DOMAIN_EVENT_CRASHED and detail == panicked:
        return DomainChange.PANICKED
    return _CHANGES.get(event)
