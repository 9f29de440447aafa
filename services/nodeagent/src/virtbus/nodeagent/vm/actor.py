"""Implements the actor of one VM, which takes events in order and runs the tables' actions.

Operations run as child tasks and post an event at their end. So the actor can handle a delete
while an operation waits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_nics import at_start, numbered
from virtbus.nodeagent.core.metadata import disk_hashes, domain_hash
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.core.ports import DomainChange, DomainFacts
from virtbus.nodeagent.vm import observation
from virtbus.nodeagent.vm.actions import Actions, follow_network
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.intent import Applied, applied_by
from virtbus.nodeagent.vm.machine import (
    DROPPED,
    HELD_BACK,
    ON_HOLD,
    RECALLS,
    REQUESTS,
    UP,
    Action,
    Effect,
    MachineEvent,
    Signal,
    accepts,
    control,
    react,
)
from virtbus.nodeagent.vm.operations.release import purge_status
from virtbus.nodeagent.vm.state import ActorState, Reasons
from virtbus.nodeagent.vm.status import StatusWriter, status
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus

log = logging.getLogger(__name__)


class VmActor:
    """The actor of one VM. Only `run` waits. The other methods change state or enqueue events."""

    def __init__(
        self, record: VmRecord, tools: AgentPorts, *, resumed: bool, held: str = ""
    ) -> None:
        """`resumed` is True if the VM was on this host before the agent's start.

        `held` is the reason why the VM is held from the start; empty if it is not held.
        """
        self.vm = ActorState(
            record,
            domain_hash(record),
            disk_hashes(record),
            at_start(record),
            Dependency(
                tools.bus,
                "imaged",
                ImageReady,
                lambda: self.vm.record,
                self.report,
                tools.disk_work,
            ),
            Dependency(tools.bus, "netd", NetReady, lambda: self.vm.record, self.report),
            resumed=resumed,
            control="held" if held else "following",
            reasons=Reasons(held=held),
        )
        self.vm.observed.frozen = tools.freezes.of(record.uid)
        self._tools = tools
        self._first: MachineEvent | None = None
        self._events: list[MachineEvent] = []
        self._posted = SmallEvent()
        self._deferred: list[MachineEvent] = []
        self._queued_requests = 0
        self._unreported = False
        self.status_writer = StatusWriter(tools.bus)
        self._writer: asyncio.Task[None] | None = None
        self._does = Actions(self.vm, tools, self.post, self.report)

    # --- the second table ------------------------------------------------------------------------
    def _signal(self, signal: Signal) -> None:
        self.vm.control, effects = control(self.vm.control, signal, self.vm.phase)
        if self.vm.control not in ON_HOLD and self.vm.reasons.held:
            self.vm.reasons = replace(self.vm.reasons, held="")
        for effect in effects:
            self._EFFECTS[effect](self)

    def begin(self, facts: DomainFacts | None, first: MachineEvent | None) -> None:
        """Begin with the host's state. `first` is the event for the domain's state, if any."""
        self._first = first
        if facts is not None and facts.metadata is not None:
            self.vm.observed.disks = GuestDisks(facts.metadata.addresses, facts.metadata.disks)
        if first is not None:
            self.vm.applied = applied_by(facts, first, self.vm.record)
            if facts is not None and facts.metadata is not None:
                self.vm.observed.domain_hash = facts.metadata.domain_hash
                self.vm.observed.nics = dict(numbered(facts.metadata.nics))
                if facts.metadata.generation == self.vm.record.generation:
                    self.vm.observed.links = observation.all_up(self.vm.record)
            self.post(first)
        recall = self.vm.resumed and (first is None or self.vm.applied.behind(self.vm.record))
        self._signal("recall" if recall else "settled")

    def refuse(self, why: str) -> None:
        """Reject a VM that is new on this node, and release its disks and network."""
        self.vm.reasons = replace(self.vm.reasons, refused=why)
        self._signal("refuse")

    def hold(self, why: str) -> None:
        """Start and end no guest from now on.

        An accepted delete, observation and status continue.
        """
        if self.vm.reasons.held != why:
            self.vm.reasons = replace(self.vm.reasons, held=why)
            self._signal("hold")

    def resume(self) -> None:
        """End the hold. The deferred events come first, then the record's current requests."""
        self._signal("resume")

    def terminate(self, why: str, *, at_once: bool = False, deleted: bool = False) -> None:
        """End the VM and release everything of it, because its record is gone.

        With `at_once`, the guest gets no grace, because another node may run the VM (I1). `deleted`
        is True if a user's delete purged the record.
        """
        before = self.vm.reasons
        self.vm.reasons = replace(
            before,
            terminated=before.terminated or why,
            at_once=before.at_once or at_once,
            deleted=before.deleted or deleted,
        )
        if not before.terminated:
            self._signal("terminate")

    def set_desired(self, record: VmRecord) -> None:
        """Take a new version of the record; ignore a version with a lower epoch."""
        if record.epoch < self.vm.record.epoch:
            return
        if record.generation != self.vm.record.generation:
            self.vm.wanted_hash, self.vm.wanted_nics = domain_hash(record), at_start(record)
            self.vm.wanted_disks = disk_hashes(record)
        self.vm.record = record
        self._signal("record")

    def _apply(self, *, or_report: bool = False) -> None:
        """Post the record's requests that are not applied yet."""
        events = self.vm.applied.events(self.vm.record, self.vm.phase)
        for event in events:
            self.post(event)
        if self.vm.phase in UP:
            self._does.sync_links()
        follow_network(self.vm, self._tools, self.report, self._does.tasks)
        if or_report and not events:
            self.report()

    def _replay(self) -> None:
        for event in self._deferred:
            self._enqueue(event)
        self._deferred.clear()

    # --- inputs ----------------------------------------------------------------------------------
    def post(self, event: MachineEvent | None) -> None:
        """Enqueue the event if the table's guard accepts it; do nothing for None."""
        late = self._tools.hypervisor.start_under_way(self.vm.record.uid)
        starting = late or self._does.tasks.running("start") is not None
        powered = self.vm.record.powered
        if event and accepts(self.vm.phase, event, starting=starting, powered=powered):
            self._enqueue(event)

    def _enqueue(self, event: MachineEvent) -> None:
        self._queued_requests += event in REQUESTS
        self._events.append(event)
        self._posted.set()

    def on_dependency(self, ready: ImageReady | NetReady) -> None:
        if isinstance(ready, ImageReady):
            self.vm.image.receive(ready)
        elif self.vm.phase not in UP:
            self.vm.net.receive(ready)
            follow_network(self.vm, self._tools, self.report, self._does.tasks)
        elif ready.error is not None or ready.generation >= self.vm.record.generation:
            self.vm.observed.network_lost = ready.error.message if ready.error else ""
            if ready.error is None:
                self.vm.net.receive(ready)
            self.report()

    def on_change(self, change: DomainChange) -> None:
        """Handle a change that is not an event of TABLE: a reboot, a panic or a fired watchdog.

        A rebooted guest is ready once it answers again. If a fault ends the guest, libvirt reports
        that end separately.
        """
        vm = self.vm
        if change in observation.GUEST_FAULTS:
            observation.note_fault(change, vm.record, vm.observed, self._tools)
        elif (
            change is DomainChange.REBOOTED
            and vm.phase in UP
            and observation.note_reboot(vm.record, vm.observed, self._tools)
        ):
            if vm.phase == "running":
                self._does.watch()
            self.report()

    # --- main loop -------------------------------------------------------------------------------
    async def run(self) -> None:
        """Handle events until nothing of the VM is left."""
        async with asyncio.TaskGroup() as group:
            self._does.tasks.group = group
            try:
                if self.vm.resumed:
                    await self._recall(decisive=self.vm.control in RECALLS)
                    self._signal("recalled")
                # the writer starts after `_recall`, because it could overwrite the last status
                self._writer = group.create_task(self.status_writer.run())
                while self.vm.phase != "gone":
                    if not self._events:
                        self._posted.clear()
                        await self._posted.wait()
                    await self._take(self._events.pop(0))
                    if self._unreported:
                        self.report()
            finally:
                self._does.tasks.cancel()
                if self._writer is not None:
                    self._writer.cancel()

    async def _recall(self, *, decisive: bool) -> None:
        """Restore the observed state of a running guest from the last status.

        With `decisive`, the status decides if the guest is started, so a failed read is retried.
        """
        last_status, readable = await self.status_writer.read_last(self.vm.record, insist=decisive)
        vm, ended = self.vm, None
        if decisive:
            ended = observation.ended_before(last_status, vm.record, self._first, readable=readable)
        if ended is not None:
            vm.applied = Applied(vm.record.power_epoch, vm.record.generation, powered=True)
            self.post(ended)
        if last_status is not None:
            observation.recall_end(last_status, vm.observed)
        if last_status is None or ended is not None or last_status.state not in observation.WAS_UP:
            return
        if last_status.epoch == vm.record.epoch:
            # pauses after the start are not in the domain's metadata
            vm.applied.pause_epoch = max(vm.applied.pause_epoch, last_status.pause_epoch)
        observation.recall_run(last_status, vm.observed)

    async def _take(self, event: MachineEvent) -> None:
        self._queued_requests -= event in REQUESTS
        if self.vm.control in ON_HOLD and event in HELD_BACK | DROPPED:
            self._deferred += {event} - DROPPED
            return
        vm, before = self.vm, self.vm.phase
        vm.phase, actions = react(before, event, vm.record.spec.run_strategy)
        extra = {"uid": vm.record.uid}
        log.debug("%s: %s -> %s %s", event, before, vm.phase, list(actions), extra=extra)
        vm.applied.taken(event, before)
        observation.note(event, before, vm.phase, vm.record, vm.observed, self._tools)
        for action in actions:
            if action not in self._ACTIONS:
                Actions.TABLE[action](self._does)
            elif (waits := self._ACTIONS[action](self)) is not None:
                await waits

    async def _purge_status(self) -> None:
        """Stop the writer, which could write the status again, and then purge the status."""
        assert self._writer is not None  # noqa: S101  `run` made it
        async with self.status_writer.putting:
            self._writer.cancel()
        await purge_status(self.vm.record, self._tools.bus)

    # --- outputs ---------------------------------------------------------------------------------
    def report(self) -> None:
        """Write the status once no request of the record is queued.

        A queued request already counts as applied, so the status would show it as applied too
        early.
        """
        self._unreported = self._queued_requests > 0
        if not self._unreported:
            self.status_writer.report(self.status())

    def status(self) -> VmStatus:
        return status(self.vm, self._tools.bus.sources.time_ns())

    _ACTIONS: ClassVar[Mapping[Action, Callable[["VmActor"], Awaitable[None] | None]]] = {
        "purge status": _purge_status,
        "defer purge": lambda self: self._deferred.append("purged"),
        "replay": _replay,
        "report": report,
        "settle": lambda self: self._signal("settled"),
    }
    """The actor's own actions; `Actions` has the others. All VMs share this table."""
    _EFFECTS: ClassVar[Mapping[Effect, Callable[["VmActor"], None]]] = {
        "apply": _apply,
        "apply or report": lambda self: self._apply(or_report=True),
        "report": report,
        "save": lambda self: self._does.save(),
        "replay": _replay,
        "discard": lambda self: self._deferred.clear(),
        "delete": lambda self: self.post("delete"),
        "purge": lambda self: self.post("purged"),
    }
