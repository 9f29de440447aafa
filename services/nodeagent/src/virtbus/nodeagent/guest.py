"""The actor of one VM: takes its events in order, steps the table, runs the actions.

Long actions run as children of the VM's task group and report by an event. So a delete reaches a VM
even while it waits.
"""

import asyncio
import logging
from collections.abc import Callable

from virtbus.nodeagent.asked import Asked
from virtbus.nodeagent.core.lifecycle import (
    ASKED_AGAIN,
    ASKED_FOR,
    ENDINGS,
    GOING,
    HELD_BACK,
    STABLE_S,
    UP,
    VISIBLE,
    WAY_DOWN,
    Action,
    Event,
    Phase,
    backoff_s,
    step,
)
from virtbus.nodeagent.core.metadata import domain_hash
from virtbus.nodeagent.core.ports import DomainChange, DomainFacts
from virtbus.nodeagent.core.recovery import WAS_UP, ended_before, missed, untold
from virtbus.nodeagent.core.seen import READY, Seen, conditions
from virtbus.nodeagent.core.wishes import MOVED, SETTLED, comes_at_rest, grace_s
from virtbus.nodeagent.doing import Doing
from virtbus.nodeagent.noting import Happened, mishap, note, rebooted
from virtbus.nodeagent.parts import Awaited
from virtbus.nodeagent.status import StatusWriter
from virtbus.nodeagent.tools import Tools
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.nodework import ImageReady, NetReady
from virtbus.schemas.vm import VmRecord, VmStatus

log = logging.getLogger(__name__)

SOON_S = 1.0


class Guest:
    """The actor of one VM. All methods except `run` only enqueue, and never wait."""

    def __init__(self, record: VmRecord, tools: Tools, *, resumed: bool) -> None:
        self.record = record
        self.wanted_hash = domain_hash(record)
        self.phase = Phase.NEW
        self.seen = Seen()
        self.image: Awaited[ImageReady] = Awaited(tools.bus, "imaged", ImageReady, self)
        self.net: Awaited[NetReady] = Awaited(tools.bus, "netd", NetReady, self)
        self.resumed = resumed
        self.held = ""
        """The reason why nothing may be started or ended now; empty: not on hold."""
        self._tools = tools
        self._held_back: list[Event] = []
        self._why, self._deleted = "", False  # why it has no record, and if a delete removed it
        self._found: Event | None = None
        self._recalling = False
        """True while the earlier status is read, which decides if the record asks for anything."""
        self._at_once = self._unreported = False
        self._asked_for = 0
        self.refused = ""
        """The reason why this node rejects the VM; empty: it accepts it."""
        self._asked = Asked()
        self._purged = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._status = StatusWriter(tools.bus)
        self._writer: asyncio.Task[None] | None = None
        self._doing = Doing(self, tools)
        self._timer: asyncio.TimerHandle | None = None
        self._actions: dict[Action, Callable[[], None]] = {
            Action.PREPARE: self._doing.prepare,
            Action.SAVE: self._doing.save,
            Action.START: self._doing.start,
            Action.AWAIT_START: self._doing.await_start,
            Action.FOLLOW_PAUSE: self._doing.follow_pause,
            Action.SHUTDOWN: self._begin_shutdown,
            Action.DESTROY: self._doing.destroy,
            Action.RELEASE: self._begin_release,
            Action.RETRY_SOON: lambda: self._set_timer(Event.RETRY, SOON_S),
            Action.RETRY_BACKED_OFF: self._retry_backed_off,
            Action.RESET_ATTEMPTS: self._reset_attempts,
            Action.CONFIRM: self._doing.confirm,
            Action.AWAIT_STABLE: lambda: self._set_timer(Event.STABLE, STABLE_S),
        }

    def begin(self, facts: DomainFacts | None, first: Event | None) -> None:
        """Begin with the host's state: `first` is the event for the domain's state, if any."""
        record, self._found = self.record, first
        if first is not None:
            self._asked.found(facts, first, record)
            if facts is not None and facts.metadata is not None:
                self.seen.domain_hash = facts.metadata.domain_hash
            self.post(first)
        self._recalling = self.resumed and (first is None or self._asked.behind(record))
        self._wish()

    def refuse(self, why: str) -> None:
        """Begin nothing: the node rejects this VM, and releases what others made for it."""
        self.refused = why
        self.post(Event.DELETE)

    def _wish(self) -> None:
        """Post the unapplied requests of the record; nothing while on hold."""
        if not (self.held or self.refused or self._recalling):
            self._ask()

    def _ask(self) -> bool:
        """Post the requests of the record; return False if there are none."""
        events = self._asked.events(self.record, self.phase)
        for event in events:
            self.post(event)
        return bool(events)

    def started(self, record: VmRecord, *, paused: bool) -> None:
        """Handle a start for `record` that created a guest, running or paused."""
        self._asked.started(record)
        self.post(Event.PAUSED if paused else Event.STARTED)

    @property
    def ends(self) -> bool:
        """Return True if nothing of the VM should stay."""
        return bool(self._why or self.refused) or self.record.ending

    @property
    def keeps(self) -> str:
        """Return why its disks go to the quarantine (ADR 0033).

        Empty if a user's delete allows removal.
        """
        return "" if self.record.ending or self._deleted else self._why or self.refused

    # --- hold ------------------------------------------------------------------------------------
    def hold(self, why: str) -> None:
        """Start and end nothing from now on; observation and status continue."""
        if self.held != why and self.phase not in GOING and not self._why:
            self.held = why
            self.report()

    def let_go(self) -> None:
        """Resume: first the deferred events, then the record's current requests."""
        if not self.held:
            return
        self.held = ""
        for event in self._held_back:
            self.post(event)
        self._held_back.clear()
        self._wish()
        self.report()

    def end(self, why: str) -> None:
        """End and forget the VM on a person's request: it has no record."""
        if self._why:
            return
        self.held, self._why = "", why
        self._held_back.clear()
        self.post(Event.DELETE)
        self.post(Event.PURGED)  # remembered until it is released

    def end_purged(self, *, deleted: bool) -> None:
        """End it without grace: its record was purged, and another node may run it (I1)."""
        self._at_once, self._deleted = True, self._deleted or deleted
        self.end(MOVED)

    def compare(self, facts: DomainFacts | None) -> None:
        """Post the events that were missed, from the domain's current state."""
        event = missed(self.phase, facts)
        if event is not None:
            self.post(event)

    def confirmed(self, facts: DomainFacts | None) -> None:
        """Handle the check after a start request: a running domain confirms the start."""
        self.compare(facts)
        if facts is not None and facts.active and not self.record.ending and self.record.powered:
            self._asked.confirmed(self.record)
            self.report()

    # --- inputs ----------------------------------------------------------------------------------
    def wanted(self, record: VmRecord) -> None:
        """Apply a new version of the record; ignore older epochs and repeated requests."""
        if record.epoch < self.record.epoch:
            return
        if record.generation != self.record.generation:
            self.wanted_hash = domain_hash(record)
        self.record = record
        if self.held or self.refused:
            self.report()
            return
        self._doing.save()
        if self._recalling or not self._ask():  # _wish() follows once the last status is known
            self.report()

    def post(self, event: Event) -> None:
        """Enqueue an event; during a start, only the code that stops the guest reports its end."""
        if event in ENDINGS and self.phase in WAY_DOWN and self._doing.starting:
            return
        self._asked_for += event in ASKED_FOR
        self._events.put_nowait(event)

    def part(self, ready: ImageReady | NetReady) -> None:
        """Handle a report of imaged or netd."""
        if isinstance(ready, ImageReady):
            self.image.told(ready)
        elif self.phase not in UP:
            self.net.told(ready)
        elif ready.error is not None:
            self.cut_off(ready.error.message)
        else:
            self.seen.network_lost = ""
            self.net.told(ready)
            self.report()

    def rebooted(self) -> None:
        """Handle a reboot of the guest: it is ready once it answers again."""
        if self.phase in UP and rebooted(self.record, self.seen, self._tools):
            if self.phase is Phase.RUNNING:
                self._doing.running()
            self.report()

    def mishap(self, change: DomainChange) -> None:
        """Handle a kernel panic or a fired watchdog; the end of the guest is a separate event."""
        mishap(change, self.record, self.seen, self._tools)

    def cut_off(self, why: str) -> None:
        """Report that the running guest has no network any more; no other reaction."""
        self.seen.network_lost = why
        self.report()

    # --- main loop -------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until nothing of the VM is left; then the task ends."""
        async with asyncio.TaskGroup() as group:
            self._doing.group = group
            try:
                if self.resumed:
                    await self._recall()
                    self._recalling = False
                    self._wish()
                # start only after _recall(), so it cannot overwrite the restored status
                self._writer = group.create_task(self._status.run())
                while self.phase is not Phase.GONE:
                    await self._take(await self._events.get())
                    if self._unreported:
                        self.report()
            finally:
                self._set_timer(None, 0)
                self._doing.cancel()
                if self._writer is not None:
                    self._writer.cancel()

    async def _recall(self) -> None:
        """Restore the running guest's state from the last status.

        If the status decides whether the guest is started, retry until it is read.
        """
        told, readable = await self._status.told_before(self.record, insist=self._recalling)
        ended = ended_before(told, self.record, self._found) if self._recalling else None
        if not readable and self._recalling:
            ended = untold(self.record)
        if ended is not None:
            self._asked.ended(self.record)
            self.post(ended)
        if told is not None:
            self.seen.last_end = told.last_end
            self.seen.end_told = told.last_end is not None and told.state not in WAS_UP
        if told is None or ended is not None or told.state not in WAS_UP:
            return
        self.seen.reboots, self.seen.rebooted_ns = told.reboots, told.rebooted_ns
        if told.epoch == self.record.epoch:
            self._asked.told(told)
        self.seen.started_ns, self.seen.restarts = told.started_ns, told.restarts
        self.seen.accelerator = told.accelerator
        for condition in told.conditions:
            if condition.type == READY and condition.status:
                self.seen.ready, self.seen.ready_ns = condition.reason, condition.since_ns

    async def _take(self, event: Event) -> None:
        self._asked_for -= event in ASKED_FOR
        if self.held and event in HELD_BACK | ASKED_AGAIN:
            self._held_back += {event} - ASKED_AGAIN
            return
        before = self.phase
        self.phase, actions = step(before, event, self.record.spec.run_strategy)
        extra = {"uid": self.record.uid}
        log.debug("%s: %s -> %s %s", event, before, self.phase, list(actions), extra=extra)
        if comes_at_rest(event, before):
            self._asked.rests()
        self._note(event, before)
        self._purged = self._purged or event is Event.PURGED
        for action in actions:
            if action is Action.FORGET:
                await self._forget()
            else:
                self._actions[action]()
        if self.phase is not before or actions:
            self.report()
        if self.phase in SETTLED and before is not self.phase:
            self._wish()  # requests that arrived meanwhile count now
        if self.phase is Phase.RELEASED and before is not self.phase and self._purged:
            self.post(Event.PURGED)  # already purged, according to the previous agent's status

    async def _forget(self) -> None:
        """Purge the status after the writer has ended, because it could repeat a put."""
        assert self._writer is not None  # noqa: S101  `run` made it
        async with self._status.putting:
            self._writer.cancel()
        await self._doing.forget()

    def _note(self, event: Event, before: Phase) -> None:
        """Record times and events, and start or stop the tasks of a running guest."""
        note(Happened(event, before, self.phase), self.record, self.seen, self._tools)
        self._doing.moved(before, self.phase)
        if event in ENDINGS:
            self._doing.ended()

    def _begin_shutdown(self) -> None:
        grace = 0 if self._at_once else grace_s(self.record)
        self._tools.facts.emit(Kind.DOMAIN_STOPPING, self.record, message=f"grace {grace} s")
        if grace:
            self._doing.shutdown()
            self._set_timer(Event.GRACE_OVER, grace)
        else:
            self._doing.destroy()

    def _begin_release(self) -> None:
        self._set_timer(None, 0)
        self._doing.release()

    def _retry_backed_off(self) -> None:
        self.seen.attempt += 1
        self._set_timer(Event.RETRY, backoff_s(self.seen.attempt))

    def _reset_attempts(self) -> None:
        self.seen.attempt = 0

    def _set_timer(self, event: Event | None, after_s: float) -> None:
        """Set the VM's timer; it replaces an earlier one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if event is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(after_s, self.post, event)

    # --- outputs ---------------------------------------------------------------------------------
    def failed(self, error: VirtbusError, kind: Kind) -> None:
        """Record the failure, and emit an event."""
        self.seen.reason, self.seen.message = error.reason, str(error)
        self._tools.facts.emit(kind, self.record, reason=error.reason, message=str(error))
        level = logging.INFO if error.expected else logging.WARNING
        log.log(level, "%s: %s", kind, error, extra={"code": error.reason, "uid": self.record.uid})

    def report(self) -> None:
        """Write the status after the record's queued requests, which count as applied already."""
        self._unreported = self._asked_for > 0
        if not self._unreported:
            self._status.report(self.status())

    def status(self) -> VmStatus:
        """Return the VM's current status."""
        seen, net, image = self.seen, self.net.latest, self.image.latest
        anew = seen.domain_hash not in {"", self.wanted_hash}
        power_epoch, pause_epoch = self._asked.acted_on(self.record, self.phase)
        return VmStatus(
            uid=self.record.uid,
            node=self.record.node,
            epoch=self.record.epoch,
            generation=self.record.generation,
            power_epoch=power_epoch,
            pause_epoch=pause_epoch,
            state=VISIBLE[self.phase],
            reason="refused" if self.refused else seen.reason,
            message=self.refused or self.held or seen.message or seen.disk_waits or self._silence(),
            conditions=conditions(
                seen, self.phase, held=self.held, anew=anew, paused=self.record.paused
            ),
            interfaces=net.interfaces if net else (),
            accelerator=seen.accelerator,
            image_digest=image.digest if image else "",
            started_ns=seen.started_ns,
            updated_ns=self._tools.bus.sources.time_ns(),
            restarts=seen.restarts,
            reboots=seen.reboots,
            rebooted_ns=seen.rebooted_ns,
            last_end=seen.last_end,
            released=self.phase in {Phase.RELEASED, Phase.GONE},
            refused=bool(self.refused),
        )

    def _silence(self) -> str:
        if self.phase is not Phase.PREPARING:
            return ""
        return "; ".join(filter(None, (self.image.silent, self.net.silent)))
