"""Carries out the actions of the table in `machine.py`, as named child tasks of one VM."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.vm import live_changes
from virtbus.nodeagent.vm.intent import due_links, grace_s
from virtbus.nodeagent.vm.machine import EVACUATING, UNEXPLAINED, Action, MachineEvent
from virtbus.nodeagent.vm.observation import Observed, missed
from virtbus.nodeagent.vm.operations.network import until_network
from virtbus.nodeagent.vm.operations.outcome import Outcome, backoff_s
from virtbus.nodeagent.vm.operations.pause import pause
from virtbus.nodeagent.vm.operations.prepare import RecordCopy, prepare, without_guest
from virtbus.nodeagent.vm.operations.release import Leaving, release
from virtbus.nodeagent.vm.operations.start import (
    Machine,
    await_ready,
    await_start,
    learn_dependencies,
    start,
    verify_running,
)
from virtbus.nodeagent.vm.operations.stop import destroy, shutdown
from virtbus.nodeagent.vm.repeated_steps import Work, until_done
from virtbus.nodeagent.vm.state import ActorState
from virtbus.nodeagent.vm.status import OFF
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

SOON_S = 1.0
STABLE_S = 60.0
"""The time after which a running guest counts as stable, which resets the backoff. The time equals
the longest backoff, so that a reset never makes the retries of a crashing guest faster."""
SYNCS = ("pause", "disks", "limits", "resources", "drives", "links", "nics")
"""Tasks that bring a running guest to the state of its record."""

WRITING = frozenset({"prepare", "save"})
"""Tasks that write the VM's files in threads. A cancellation does not end such a thread."""

Operation = Callable[[], Awaitable[Outcome | MachineEvent | None]]
"""A step. Its result is posted: an event, or the event of an `Outcome`."""
Change = Callable[[ActorState, AgentPorts, VmRecord], Awaitable[None]]


class Tasks:
    """The child tasks of one VM, by name, in its task group."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def run(self, name: str, work: Work, failed: Callable[[], None] | None = None) -> None:
        """Run `work` as the VM's child task `name`; cancel an earlier task of that name.

        An unexpected error is logged, and `failed` is called to give the VM a defined phase. The
        error does not affect other VMs.
        """
        assert self.group is not None  # noqa: S101  set before the first event is taken
        self.stop(name)
        task = self._tasks[name] = self.group.create_task(self._guarded(work, failed))
        if name in WRITING:
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _guarded(self, work: Work, failed: Callable[[], None] | None) -> None:
        try:
            await work()
        except Exception:
            extra = {"code": "action_failed", "uid": self._uid}
            log.exception("an action failed unexpectedly", extra=extra)
            if failed is not None:
                failed()

    def stop(self, *names: str) -> None:
        for name in names:
            if name in self._tasks:
                self._tasks[name].cancel()

    def set_timer(self, after_s: float, then: Callable[[], None] | None) -> None:
        """Set the VM's only timer: call `then` after `after_s`. With None, only cancel it."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if then is None else loop.call_later(after_s, then)

    def cancel(self) -> None:
        self.set_timer(0, None)
        self.stop(*self._tasks)

    def running(self, name: str) -> asyncio.Task[None] | None:
        """Return the task of that name; None if it has ended or never began."""
        task = self._tasks.get(name)
        return task if task is not None and not task.done() else None

    def begun(self, *names: str) -> list[asyncio.Task[None]]:
        """Return the tasks of these names, including tasks that have ended."""
        return [self._tasks[name] for name in names if name in self._tasks]

    async def written(self) -> None:
        """Wait until all tasks of WRITING have ended, cancelled tasks included."""
        if self._writing:
            await asyncio.wait(self._writing)


class Actions:
    """The actions of one VM. Each action posts its result as an event."""

    def __init__(
        self,
        vm: ActorState,
        tools: AgentPorts,
        post: Callable[[MachineEvent | None], None],
        report: Callable[[], None],
    ) -> None:
        self._vm, self._tools = vm, tools
        self._post, self._report = post, report
        self.tasks = Tasks(vm.record.uid)
        self._copy = RecordCopy(tools.files, lambda: vm.record)
        self._asks_netd = self._asks_imaged = vm.resumed
        """True if the next `_prepare` drops the last report of that service, which may be old, and
        asks the service again. When `_prepare` asks netd, it also asks imaged if imaged's report is
        not `valid`: imaged answers only after all operations on the disks of the VM have ended."""
        self._again: dict[str, SmallEvent] = {}
        self._ended = SmallEvent()
        """Set when the current `shutdown` or `destroy` must stop repeating its request."""

    # --- operations ------------------------------------------------------------------------------
    def _work(self, operation: Operation) -> Work:
        """Return a function that runs `operation`, records its error and posts its event."""

        async def work() -> None:
            outcome = await operation()
            if isinstance(outcome, Outcome):
                self._explain(outcome)
                outcome = outcome.event
            self._post(outcome)

        return work

    def _run(self, name: str, operation: Operation, broken: MachineEvent | None = None) -> None:
        """Run `operation` as the child task `name`. An unexpected error posts `broken`."""
        failed = None if broken is None else partial(self._post, broken)
        self.tasks.run(name, self._work(operation), failed)

    def _until_done(self, name: str, operation: Operation, over: SmallEvent | None = None) -> None:
        """Run `operation` as the child task `name`, and repeat it until it succeeds."""
        again = self._again[name] = SmallEvent()
        work = self._work(operation)
        self.tasks.run(name, partial(until_done, work, self._vm, self._report, over, again))

    def _keep(self, name: str, operation: Operation) -> None:
        """Like `_until_done`; if the task runs already, only end its delay before the next try."""
        if self.tasks.running(name) is None:
            self._until_done(name, operation)
        else:
            self._again[name].set()

    def _explain(self, outcome: Outcome) -> None:
        error, vm = outcome.error, self._vm
        if error is None or (vm.phase, outcome.event) in UNEXPLAINED:
            return
        vm.observed.failed(outcome.stage, error.reason, str(error))
        self._tools.events.emit(outcome.kind, vm.record, reason=error.reason, message=str(error))
        level = logging.INFO if error.expected else logging.WARNING
        extra = {"code": error.reason, "uid": vm.record.uid}
        log.log(level, "%s: %s", outcome.kind, error, extra=extra)

    def save(self) -> None:
        """Write the latest record to disk in the background, if the copy there is old."""
        may = self.tasks.group is not None and self._vm.phase not in EVACUATING
        if may and self._copy.stale and self.tasks.running("save") is None:
            self.tasks.run("save", self._copy.save_soon)

    async def _prepare(self) -> Outcome:
        vm, settings = self._vm, self._tools.settings
        self.tasks.stop("network")
        after_s = 0.0 if self._asks_netd else settings.ask_after_s
        if self._asks_netd:
            vm.net.reset()
            if self._asks_imaged or not vm.image.valid:
                vm.image.reset(needs_answer=True)
        self._asks_netd = self._asks_imaged = True
        try:
            gone = await without_guest(vm.record, self._tools)
        except VirtbusError as error:
            return Outcome("dependencies failed", error)
        if gone:
            vm.observed.disks = replace(vm.observed.disks, detached=gone)
            self._report()
        parts = self._copy, vm.image, vm.net
        return await prepare(vm.record, *parts, self._tools, ask_after_s=after_s)

    def _start(self) -> None:
        """Start the guest once earlier calls to end it are over: they could end the new run."""
        before = self.tasks.begun("shutdown", "destroy")
        self._run("start", partial(self._start_vm, before), "start failed")

    async def _start_vm(self, before: list[asyncio.Task[None]]) -> Outcome:
        vm, record = self._vm, self._vm.record
        if before:
            await asyncio.wait(before)
        accelerator = self._tools.accelerator(record)
        if vm.image.latest is not None:  # without disks, `start` defines no domain
            vm.observed.accelerator = accelerator
        kept = vm.observed.disks.addresses
        outcome = await start(
            record,
            vm.image,
            vm.net,
            self._tools,
            machine=Machine(accelerator, kept),
            paused=lambda: vm.record.paused,
        )
        if outcome.error is None:
            vm.observed.domain_hash = vm.wanted_hash
            vm.observed.started(record, assigned(record.spec.domain, kept))
            vm.applied.started(record)
            self.sync_links()
        return outcome

    async def _verify_running(self) -> MachineEvent | None:
        """Read the domain of a guest that should run, and return the event that was missed, if any.

        A running domain confirms that the record's start request was applied.
        """
        facts = await verify_running(self._vm.record.uid, self._tools)
        record = self._vm.record
        if facts is not None and facts.active and record.powered and not record.ending:
            self._vm.applied.update(record)
            self._report()
        return missed(self._vm.phase, facts)

    def watch(self) -> None:
        """Wait in the background until the running guest is ready."""
        self.tasks.stop("prepare")
        self._run("ready", self._await_ready)

    async def _await_ready(self) -> None:
        vm, seen = self._vm, self._vm.observed
        if vm.net.latest is None or vm.image.latest is None:
            error = await learn_dependencies(vm.record, vm.image, vm.net)
            if error is not None and error.reason == "network_lost":
                seen.network_lost = error.body.message
            self._report()
        if seen.ready:
            return  # the guest was ready before a pause or before the agent's restart
        record = vm.record
        seen.ready = await await_ready(record, vm.net, self._tools, rebooted=seen.rebooted)
        seen.ready_ns = self._tools.bus.sources.time_ns()
        self._tools.events.emit(EventKind.GUEST_READY, record, reason=seen.ready)
        self._report()

    def sync_links(self) -> None:
        """Set the links of the guest's NICs as the record says, in the background."""
        seen = self._vm.observed
        due = due_links(self._vm.record, seen.nics, seen.links)
        if due:
            self._keep("links", partial(live_changes.set_links, self._vm, self._tools))

    async def _pause(self) -> None:
        """Pause or resume the guest until it agrees with the record.

        One task does this, because two calls in two threads could overtake each other.
        """
        paused = not self._vm.record.paused
        while self._vm.record.paused != paused:
            paused = self._vm.record.paused
            facts = await pause(self._vm.record.uid, self._tools.hypervisor, paused=paused)
            self._post(missed(self._vm.phase, facts))

    def _sync(self, name: str, apply: Change) -> None:
        """Run `apply` in one task until `apply` has run with the latest record."""

        async def until_same() -> None:
            record: VmRecord | None = None
            while record is not self._vm.record:
                record = self._vm.record
                await apply(self._vm, self._tools, record)
                self._report()

        self._keep(name, until_same)

    def _shutdown(self) -> None:
        record, tools = self._vm.record, self._tools
        grace = 0 if self._vm.reasons.at_once else grace_s(record)
        tools.events.emit(EventKind.DOMAIN_STOPPING, record, message=f"grace {grace} s")
        if grace:
            if self.tasks.running("destroy") is None:
                self._ended = SmallEvent()
            end = partial(shutdown, record.uid, tools.hypervisor, tools.freezes, self._ended)
            self._run("shutdown", end)
            self.tasks.set_timer(grace, partial(self._post, "grace expired"))
        else:
            self._destroy()

    def _destroy(self) -> None:
        self._ended.set()  # ends the repetition of `shutdown`
        self._ended = SmallEvent()
        uid, hypervisor = self._vm.record.uid, self._tools.hypervisor
        self._until_done(
            "destroy",
            lambda: destroy(uid, hypervisor, self.tasks.running("start"), forced=self._vm.forced),
            self._ended,
        )

    def _release(self) -> None:
        self.tasks.set_timer(0, None)
        self.tasks.stop("prepare", "network", "shutdown", "ready")
        self._until_done(
            "release",
            lambda: release(
                self._vm.record,
                self._tools,
                starting=self.tasks.running("start"),
                written=self.tasks.written,
                keep_reason=lambda: self._vm.keep_reason,
                leaving=Leaving(bool(self._vm.reasons.refused), self._vm.forced),
            ),
        )

    def _retry_backed_off(self) -> None:
        self._vm.observed.attempt += 1
        self.tasks.set_timer(backoff_s(self._vm.observed.attempt), partial(self._post, "retry"))

    TABLE: ClassVar[dict[Action, Callable[["Actions"], None]]] = {
        "prepare": lambda self: self._run("prepare", self._prepare, "dependencies failed"),
        "save": save,
        "start": _start,
        "await start": lambda self: self._run(
            "start",
            partial(await_start, self._vm.record.uid, self._tools),
            "start later",
        ),
        "sync pause": lambda self: self._keep("pause", self._pause),
        "sync disks": lambda self: _sync_disks(self._vm, self._tools, self._report, self.tasks),
        "sync limits": lambda self: self._sync("limits", live_changes.set_limits),
        "sync resources": lambda self: self._sync("resources", live_changes.set_resources),
        "sync drives": lambda self: self._sync("drives", live_changes.change_media),
        "sync nics": lambda self: self._sync(
            "nics", partial(live_changes.change_nics, changed=self.sync_links)
        ),
        "shutdown": _shutdown,
        "destroy": _destroy,
        "release": _release,
        "retry soon": lambda self: self.tasks.set_timer(SOON_S, partial(self._post, "retry")),
        "retry backed off": _retry_backed_off,
        "reset attempts": lambda self: _begin_again(self, self._vm.observed),
        "verify running": lambda self: self._run("confirm", self._verify_running),
        "await stable": lambda self: self.tasks.set_timer(STABLE_S, partial(self._post, "stable")),
        "watch": watch,
        "unwatch": lambda self: self.tasks.stop("ready", "confirm", *SYNCS),
        "stop ending": lambda self: self._ended.set(),
    }


def _begin_again(actions: Actions, seen: Observed) -> None:
    """Reset the backoff, after a stable run or before the start of a VM that was off."""
    seen.attempt = 0
    actions._asks_netd, actions._asks_imaged = True, False


def _sync_disks(
    vm: ActorState, tools: AgentPorts, report: Callable[[], None], tasks: Tasks
) -> None:
    """Start the task that changes the disks, or wake it for the latest record."""
    vm.disks_changed.set()
    if tasks.running("disks") is None:
        tasks.run("disks", partial(live_changes.keep_disks, vm, tools, report))


def follow_network(
    vm: ActorState, tools: AgentPorts, report: Callable[[], None], tasks: Tasks
) -> None:
    """Report the network of a VM that is off, or start a task that waits for it.

    The network is reported once it is in the state of the record.
    """
    if vm.record.spec.network_state is None or vm.phase not in OFF or vm.ends:
        return
    if vm.net.reached:
        report()
    elif tasks.group is not None and tasks.running("network") is None:
        tasks.run("network", partial(until_network, vm, tools, report))
