"""Updates the observed state of a VM and emits events for its steps."""

from dataclasses import dataclass
from typing import Literal

from virtbus.nodeagent.core.lifecycle import ENDINGS, UP, WAY_DOWN, Event, Phase
from virtbus.nodeagent.core.ports import DomainChange
from virtbus.nodeagent.core.seen import Seen
from virtbus.nodeagent.tools import Tools
from virtbus.schemas.events import Kind
from virtbus.schemas.guest_end import GuestEnd
from virtbus.schemas.vm import GUEST_ENDED, VmRecord

ONE_REBOOT_S = 3
HOW: dict[Event, Literal["shut down", "ended", "crashed"]] = {
    Event.SHUT_DOWN: "shut down",
    Event.ENDED: "ended",
    Event.CRASHED: "crashed",
}
MISHAPS = {
    DomainChange.PANICKED: "",
    DomainChange.WATCHDOG_POWEROFF: "poweroff",
    DomainChange.WATCHDOG_RESET: "reset",
    DomainChange.WATCHDOG_SHUTDOWN: "shutdown",
}
"""Failures that may precede an end or a reboot; with the watchdog's action."""
WORDS = {"watchdog": "was powered off by its watchdog"}


@dataclass(frozen=True, slots=True)
class Happened:
    """One step of a VM's life."""

    event: Event
    before: Phase
    phase: Phase


def note(what: Happened, record: VmRecord, seen: Seen, tools: Tools) -> None:
    """Update `seen`, and emit the step's event if it has one."""
    phase, before = what.phase, what.before
    if phase in {Phase.PREPARING, Phase.STARTING}:
        seen.reboots, seen.rebooted_ns, seen.boots_anew = 0, None, False
        seen.ready, seen.started_ns, seen.network_lost, seen.mishap = "", None, "", ""
    elif phase in {Phase.STOPPED, Phase.RELEASING}:
        seen.reason = seen.message = ""
    elif phase in UP and before not in {*UP, Phase.NEW}:
        seen.started_ns = tools.bus.sources.time_ns()
        seen.reason = seen.message = ""
    elif phase in UP and before in UP and phase is not before:
        paused = phase is Phase.PAUSED
        tools.facts.emit(Kind.DOMAIN_PAUSED if paused else Kind.DOMAIN_RESUMED, record)
    if what.event in ENDINGS:
        _note_ending(what, record, seen, tools)


def rebooted(record: VmRecord, seen: Seen, tools: Tools) -> bool:
    """Handle a machine reset; return False if it belongs to the previous reboot.

    Firmware that finds itself started a second time resets the machine once more.
    """
    at_ns = tools.bus.sources.time_ns()
    again = seen.rebooted_ns is not None and at_ns - seen.rebooted_ns < ONE_REBOOT_S * 10**9
    seen.rebooted_ns = at_ns
    if again:
        return False
    seen.reboots += 1
    seen.ready, seen.boots_anew = "", True
    tools.facts.emit(Kind.GUEST_REBOOTED, record)
    return True


def mishap(change: DomainChange, record: VmRecord, seen: Seen, tools: Tools) -> None:
    """Handle a panic or watchdog: emit the event, and record the cause for the coming end."""
    if change is DomainChange.PANICKED:
        seen.mishap = "panicked"
        tools.facts.emit(Kind.GUEST_PANICKED, record)
        return
    if change is DomainChange.WATCHDOG_POWEROFF:
        seen.mishap = "watchdog"
    tools.facts.emit(Kind.GUEST_WATCHDOG, record, reason=MISHAPS[change])


def _note_ending(what: Happened, record: VmRecord, seen: Seen, tools: Tools) -> None:
    seen.started_ns, seen.ready = None, ""
    # libvirt's event, a comparison and our own call may all report it
    if what.phase is what.before:
        return
    how = (what.event is Event.CRASHED and seen.mishap) or HOW[what.event]
    words = WORDS.get(how, how)
    tools.facts.emit(Kind.DOMAIN_STOPPED, record, reason=how)
    if what.before is not Phase.NEW or not seen.end_told:
        at_ns = tools.bus.sources.time_ns()
        seen.last_end = GuestEnd(how=how, asked=what.before in WAY_DOWN, at_ns=at_ns)
    if what.phase is Phase.WAITING:
        seen.restarts += 1
        seen.reason = GUEST_ENDED
        seen.message = f"the guest {words}; restarting"
    elif what.phase is Phase.FAILED:
        seen.reason = GUEST_ENDED
        seen.message = f"the guest {words}; `virtbus vm start` starts it again"
