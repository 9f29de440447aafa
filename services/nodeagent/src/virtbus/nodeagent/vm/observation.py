"""Keeps the observed state of a VM, from its domain, its last status and its state machine."""

from dataclasses import dataclass, field
from typing import Literal

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.freezes import Frozen
from virtbus.nodeagent.core.guest_nics import GuestNic, at_start
from virtbus.nodeagent.core.metadata import disk_hashes
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.core.ports import DomainChange, DomainFacts, DomainState, Ending
from virtbus.nodeagent.vm.machine import ENDINGS, UP, WAY_DOWN, MachineEvent, VmPhase
from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.events import EventKind
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.network import InterfaceStatus, LinkState
from virtbus.schemas.resources import ResourcesInForce
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy, VmRecord
from virtbus.schemas.vm_status import GUEST_ENDED, FailureStage, VmStatus

READY = "Ready"
"""The type of the condition that shows if a guest is ready."""
ONE_REBOOT_S = 3
"""Resets within this time of each other are one reboot."""
HOW: dict[MachineEvent, Literal["shut down", "ended", "crashed"]] = {
    "shut down": "shut down",
    "ended": "ended",
    "crashed": "crashed",
}
GUEST_FAULTS = {
    DomainChange.PANICKED: "",
    DomainChange.WATCHDOG_POWEROFF: "poweroff",
    DomainChange.WATCHDOG_RESET: "reset",
    DomainChange.WATCHDOG_SHUTDOWN: "shutdown",
}
"""Failures of a guest, each with the action of its watchdog; empty for a panic."""
WORDS = {"watchdog": "was powered off by its watchdog"}
FOUND: dict[DomainState, MachineEvent] = {
    DomainState.RUNNING: "started",
    DomainState.SHUTTING_DOWN: "started",
    DomainState.STARTING: "found starting",
    DomainState.PAUSED: "paused",
    DomainState.LOST: "started",
}
ENDED: dict[Ending, MachineEvent] = {
    Ending.SHUT_DOWN: "shut down",
    Ending.ENDED: "ended",
    Ending.CRASHED: "crashed",
}
ONCE_ONLY = frozenset({RunStrategy.ONCE, RunStrategy.MANUAL, RunStrategy.HALTED})
"""Strategies that do not start a guest again after it ended by itself, or with its host."""
WAS_UP = frozenset({VmState.RUNNING, VmState.PAUSED})
MISSED: dict[tuple[VmPhase, DomainState], MachineEvent] = {
    ("running", DomainState.PAUSED): "paused",
    ("paused", DomainState.RUNNING): "resumed",
    ("stopped", DomainState.RUNNING): "started",
    ("succeeded", DomainState.RUNNING): "started",
    ("failed", DomainState.RUNNING): "started",
    ("backing off", DomainState.RUNNING): "started",
}
"""The event that an actor missed, by the VM's phase and the domain's state."""


@dataclass
class Observed:
    """The observed state of a VM other than its phase."""

    reason: str = ""
    message: str = ""
    started_ns: int | None = None
    restarts: int = 0
    reboots: int = 0
    rebooted_ns: int | None = None
    rebooted: bool = False
    """True after a reboot, so that earlier console output is no sign of readiness."""
    last_exit: GuestExit | None = None
    ran: bool = False
    """True if a guest was up since the last end. If False, a stop reports no end of a guest."""
    fault: Literal["", "panicked", "watchdog"] = ""
    """The failure that explains a crash of this run."""
    end_reported: bool = False
    """True if an earlier agent reported the guest's end, so that `last_exit` is kept."""
    attempt: int = 0
    ready: str = ""
    ready_ns: int = 0
    domain_hash: str = ""
    accelerator: str = ""
    interfaces: tuple[InterfaceStatus, ...] = ()
    """The interfaces of a guest that an earlier agent started, shown until netd reports them."""
    image_digest: str = ""
    """The image of a guest that an earlier agent started, shown until imaged reports it."""
    network_lost: str = ""
    """The reason why the running guest has no network, reported by netd."""
    network_error: ErrorBody | None = None
    """The reason why the network of a VM that is off is not as its record says."""
    nics: dict[str, GuestNic] = field(default_factory=dict)
    """The NICs of the running guest, by name."""
    nics_error: ErrorBody | None = None
    """The error of the last change of the NICs. The agent retries the change."""
    links: dict[str, LinkState] = field(default_factory=dict)
    """The known links of the running guest's NICs, by the NIC's name."""
    lost_pid: int = 0
    """The pid of the QEMU of a running guest that libvirt has lost."""
    disk_waits: str = ""
    """The reason why the guest waits for a disk: QEMU has paused it, or a server is away."""
    directories_lost: tuple[str, ...] = ()
    """The tags of directories whose virtiofsd has ended under the running guest."""
    disk_limits: dict[str, dict[str, int]] = field(default_factory=dict)
    """The limits in force by disk, as libvirt reports them."""
    resources: ResourcesInForce | None = None
    """The limits of the guest on its host that are in force."""
    resources_error: ErrorBody | None = None
    """The error of the last change of the limits on the host."""
    disks: GuestDisks = field(default_factory=GuestDisks)
    """The addresses and volumes of this or the last run, and the pending changes."""
    drives_error: ErrorBody | None = None
    """The error of the last change of a medium. The agent retries the change."""
    frozen: Frozen | None = None
    """The freeze of the guest's file systems."""
    stage: FailureStage = ""

    def failed(self, stage: FailureStage, reason: str, message: str) -> None:
        """Store a failure until `recovered` is called."""
        self.stage, self.reason, self.message = stage, reason, message

    def recovered(self) -> None:
        self.failed("", "", "")

    def started(self, record: VmRecord, addresses: Addresses) -> None:
        """Note the devices of a guest that was started with `record` at these addresses."""
        self.disks = GuestDisks(addresses, disk_hashes(record))
        self.nics, self.links = at_start(record), all_up(record)


def all_up(record: VmRecord) -> dict[str, LinkState]:
    """Return the links of a guest that has just been started."""
    return {nic.name: LinkState.UP for nic in record.spec.domain.devices.interfaces}


def note(
    event: MachineEvent,
    before: VmPhase,
    phase: VmPhase,
    record: VmRecord,
    seen: Observed,
    tools: AgentPorts,
) -> None:
    """Update `seen` after a step of the table, and emit the step's event if it has one."""
    if phase in {"preparing", "starting"}:
        seen.reboots, seen.rebooted_ns, seen.rebooted = 0, None, False
        seen.ready, seen.started_ns, seen.network_lost, seen.fault = "", None, "", ""
        seen.ran = False
        seen.disk_limits, seen.drives_error, seen.nics_error = {}, None, None
        seen.resources, seen.resources_error = None, None
        seen.directories_lost = ()
        seen.disks = GuestDisks(seen.disks.addresses)
        _forget_freeze(record, seen, tools)
    elif phase in {"stopped", "releasing"}:
        seen.recovered()
    elif phase in UP and before not in {*UP, "new"}:
        seen.started_ns = tools.bus.sources.time_ns()
        seen.recovered()
    elif phase in UP and before in UP and phase != before:
        paused = phase == "paused"
        tools.events.emit(EventKind.DOMAIN_PAUSED if paused else EventKind.DOMAIN_RESUMED, record)
    if phase in UP or event in {"started", "paused"}:  # also a guest that is being stopped
        seen.ran = True
    if event in ENDINGS:
        _note_ending(event, before, phase, record, seen, tools)


def _note_ending(
    event: MachineEvent,
    before: VmPhase,
    phase: VmPhase,
    record: VmRecord,
    seen: Observed,
    tools: AgentPorts,
) -> None:
    seen.started_ns, seen.ready = None, ""
    _forget_freeze(record, seen, tools)
    # one end may be reported by libvirt's event, by a comparison and by our own call
    if phase == before:
        return
    how = (event == "crashed" and seen.fault) or HOW[event]
    words = WORDS.get(how, how)
    no_run = before in WAY_DOWN and not seen.ran
    if not (seen.end_reported if before == "new" else no_run):
        tools.events.emit(EventKind.DOMAIN_STOPPED, record, reason=how)
        at_ns = tools.bus.sources.time_ns()
        seen.last_exit = GuestExit(how=how, asked=before in WAY_DOWN, at_ns=at_ns)
    seen.ran = False
    if phase == "waiting":
        seen.restarts += 1
        seen.failed("guest", GUEST_ENDED, f"the guest {words}; restarting")
    elif phase == "failed":
        message = f"the guest {words}; `virtbus vm start` starts it again"
        seen.failed("guest", GUEST_ENDED, message)


def _forget_freeze(record: VmRecord, seen: Observed, tools: AgentPorts) -> None:
    """Forget a freeze, because it has ended with the guest's run."""
    seen.frozen = None
    tools.freezes.ended(record.uid)


def note_reboot(record: VmRecord, seen: Observed, tools: AgentPorts) -> bool:
    """Handle a machine reset; return False if it belongs to the previous reboot.

    Some firmware resets the machine once more when it detects a second start.
    """
    at_ns = tools.bus.sources.time_ns()
    again = seen.rebooted_ns is not None and at_ns - seen.rebooted_ns < ONE_REBOOT_S * 10**9
    seen.rebooted_ns = at_ns
    if again:
        return False
    seen.reboots += 1
    seen.ready, seen.rebooted = "", True
    _forget_freeze(record, seen, tools)
    tools.events.emit(EventKind.GUEST_REBOOTED, record)
    return True


def note_fault(change: DomainChange, record: VmRecord, seen: Observed, tools: AgentPorts) -> None:
    """Handle a panic or watchdog: emit the event, and record the cause for the coming end."""
    if change is DomainChange.PANICKED:
        seen.fault = "panicked"
        tools.events.emit(EventKind.GUEST_PANICKED, record)
        return
    if change is DomainChange.WATCHDOG_POWEROFF:
        seen.fault = "watchdog"
    tools.events.emit(EventKind.GUEST_WATCHDOG, record, reason=GUEST_FAULTS[change])


def found(facts: DomainFacts | None, *, powered: bool) -> MachineEvent | None:
    """Return the event for a domain that the agent finds at its start.

    If there is no event, return None, and the record decides (I16). A shut-off domain counts as an
    end only if the VM should run and the way of the end is known. An agent that died between define
    and create leaves a domain that never ran, whose end is unknown.
    """
    if facts is None:
        return None
    if facts.state is not DomainState.SHUT_OFF:
        return FOUND[facts.state]
    return ENDED.get(facts.ending) if powered else None


def missed(phase: VmPhase, facts: DomainFacts | None) -> MachineEvent | None:
    """Return the event that the actor of a VM in `phase` missed, by the current domain."""
    state = facts.state if facts else DomainState.SHUT_OFF
    if phase in UP and state is DomainState.SHUT_OFF:
        return ENDED.get(facts.ending if facts else Ending.ENDED, "ended")
    return MISSED.get((phase, state))


def ended_before(
    last_status: VmStatus | None, record: VmRecord, first: MachineEvent | None, *, readable: bool
) -> MachineEvent | None:
    """Return how the guest ended, from its last status, if its domain does not show the end.

    libvirt forgets why a domain is shut off when libvirt or the host restarts. Without this
    function a guest that had powered itself off, or that runs only once, would be started again.

    If the last status shows a running guest, the end of the domain (`first`) is that guest's end,
    even if the domain was defined for an earlier start. If the status is unreadable, a guest that
    runs only once counts as crashed, because it may have run.
    """
    once = record.spec.run_strategy in ONCE_ONLY
    if not record.powered or record.ending:
        return None
    if not readable:
        return "crashed" if once else None
    if last_status is None or last_status.power_epoch != record.power_epoch:
        return None
    if last_status.state is VmState.SUCCEEDED:
        return "shut down"
    if last_status.state in WAS_UP and first in ENDINGS:
        return first
    return "crashed" if once and (last_status.ended or last_status.state in WAS_UP) else None


def recall_end(last_status: VmStatus, seen: Observed) -> None:
    """Restore how the last run ended, from the last status."""
    seen.last_exit = last_status.last_exit
    seen.end_reported = last_status.last_exit is not None and last_status.state not in WAS_UP


def recall_run(last_status: VmStatus, seen: Observed) -> None:
    """Restore the state of a guest that was up, from the last status."""
    seen.reboots, seen.rebooted_ns = last_status.reboots, last_status.rebooted_ns
    seen.started_ns, seen.restarts = last_status.started_ns, last_status.restarts
    seen.accelerator, seen.resources = last_status.accelerator, last_status.resources
    seen.interfaces, seen.image_digest = last_status.interfaces, last_status.image_digest
    for condition in last_status.conditions:
        if condition.type == READY and condition.status:
            seen.ready, seen.ready_ns = condition.reason, condition.since_ns
