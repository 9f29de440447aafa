"""Derives the status of a VM, and repeats the write of the latest status until it succeeds."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.nodeagent.core.freezes import Frozen
from virtbus.nodeagent.core.lost_guests import lost_message
from virtbus.nodeagent.vm.machine import UP, VmPhase
from virtbus.nodeagent.vm.observation import READY, WAS_UP, Observed
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas import subjects
from virtbus.schemas.errors import ErrorBody, VirtbusError
from virtbus.schemas.fitting import fitted_bytes
from virtbus.schemas.network import NetworkState
from virtbus.schemas.records import read_stored
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import NETWORK_READY, Condition, VmStatus

log = logging.getLogger(__name__)

RETRY_S = (0.1, 5.0)
PASSING = frozenset({VmState.SCHEDULED, VmState.PREPARING, VmState.STARTING})
PASSING_S = 1.0
"""The delay before a transient state is written. A create takes half this time, so its transient
states are not written. This saves durable writes."""


RESTART_REQUIRED, HELD = "RestartRequired", "Held"
NETWORK_LOST = "NetworkLost"
PAUSED = "Paused"
FROZEN = "Frozen"
MEDIA_PENDING = "MediaChangePending"
NICS_PENDING = "NicChangePending"
NIC_REASONS = {"nic_held": "NotReleased", "no_port": "NoSlot", "nic_waits": "Waiting"}
"""Reasons of the condition NICS_PENDING, by the reason of the error."""
RESOURCES_PENDING = "ResourcesPending"
DISKS_PENDING = "DisksPending"
DISK_STALLED = "DiskStalled"
DIRECTORY_LOST = "DirectoryLost"
GUEST_LOST = "GuestLost"
OFF = frozenset[VmPhase]({"stopped", "succeeded", "failed"})
"""Phases in which no guest runs or starts."""
VISIBLE: dict[VmPhase, VmState] = {
    "new": VmState.SCHEDULED,
    "preparing": VmState.PREPARING,
    "starting": VmState.STARTING,
    "running": VmState.RUNNING,
    "paused": VmState.PAUSED,
    "stopping": VmState.STOPPING,
    "stopped": VmState.STOPPED,
    "succeeded": VmState.SUCCEEDED,
    "waiting": VmState.PREPARING,
    "backing off": VmState.FAILED,
    "failed": VmState.FAILED,
    "ending": VmState.DELETING,
    "releasing": VmState.DELETING,
    "released": VmState.DELETING,
    "gone": VmState.DELETING,
}


def status(vm: ActorState, updated_ns: int) -> VmStatus:
    """Return the VM's status, with the time `updated_ns`."""
    record, phase, reasons, observed = vm.record, vm.phase, vm.reasons, vm.observed
    image, net = vm.image.latest, vm.net.latest
    power_epoch, pause_epoch = vm.applied.epochs(record, phase)
    earlier = observed if phase in UP and not observed.network_lost else Observed()
    silence = "; ".join(filter(None, (vm.image.silence, vm.net.silence)))
    waits = silence if phase == "preparing" else ""
    message = reasons.refused or reasons.held or observed.message or observed.disk_waits or waits
    return VmStatus(
        uid=record.uid,
        node=record.node,
        epoch=record.epoch,
        generation=record.generation,
        power_epoch=power_epoch,
        pause_epoch=pause_epoch,
        state=VISIBLE[phase],
        reason="refused" if reasons.refused else observed.reason,
        message=message,
        failure_stage=observed.stage,
        conditions=conditions(vm),
        interfaces=net.interfaces if net else earlier.interfaces,
        accelerator=observed.accelerator,
        disk_limits=observed.disk_limits if phase in UP else {},
        resources=observed.resources if phase in UP else None,
        disks_pending=dict(observed.disks.pending) if phase in UP else {},
        detached=_detached(vm),
        image_digest=image.digest if image else earlier.image_digest,
        started_ns=observed.started_ns,
        updated_ns=updated_ns,
        restarts=observed.restarts,
        reboots=observed.reboots,
        rebooted_ns=observed.rebooted_ns,
        last_exit=observed.last_exit,
        released=phase in {"released", "gone"},
        refused=bool(reasons.refused),
    )


def conditions(vm: ActorState) -> tuple[Condition, ...]:
    """Return the conditions of a VM."""
    runs, observed = vm.phase == "running", vm.observed
    found = [
        Condition(
            type=READY,
            status=bool(observed.ready) and runs,
            reason=(observed.ready or "Booting") if runs else "NotRunning",
            since_ns=observed.ready_ns,
        )
    ]
    if vm.phase == "paused":
        found.append(_paused(observed, asked=vm.record.paused))
    if runs and observed.disk_waits:
        found.append(Condition(type=DISK_STALLED, status=True, message=observed.disk_waits))
    if runs and (message := _restart_required(vm)):
        found.append(Condition(type=RESTART_REQUIRED, status=True, message=message))
    if vm.phase in UP:
        found.extend(_of_guest(observed))
    found.extend(_network(vm))
    if observed.network_lost and vm.phase in UP:
        found.append(Condition(type=NETWORK_LOST, status=True, message=observed.network_lost))
    if vm.reasons.held:
        found.append(Condition(type=HELD, status=True, message=vm.reasons.held))
    if observed.attempt and not runs:
        reason, attempt = observed.reason, observed.attempt
        found.append(Condition(type="Retrying", status=True, reason=reason, attempt=attempt))
    return tuple(found)


def _of_guest(observed: Observed) -> Iterator[Condition]:
    if observed.lost_pid:
        yield Condition(type=GUEST_LOST, status=True, message=lost_message(observed.lost_pid))
    if observed.frozen is not None:
        yield _frozen(observed.frozen)
    if observed.directories_lost:
        yield _directories_lost(observed.directories_lost)
    if observed.disks.pending:
        yield _disks_pending(observed.disks.pending)
    if observed.drives_error is not None:
        yield _media_pending(observed.drives_error)
    if observed.resources_error is not None:
        why = observed.resources_error
        reason = "GuestKeepsMemory" if why.reason == "memory_kept" else "NotChanged"
        yield Condition(type=RESOURCES_PENDING, status=True, reason=reason, message=why.message)
    if observed.nics_error is not None:
        yield _nics_pending(observed.nics_error)


def _network(vm: ActorState) -> Iterator[Condition]:
    """Yield the condition of the network of a VM that is off, once the network's state is known."""
    state, error = vm.record.spec.network_state, vm.observed.network_error
    if vm.phase not in OFF or state is None:
        return
    if vm.net.reached:
        held = state is NetworkState.HELD
        yield Condition(type=NETWORK_READY, status=held, reason=state)
    elif error is not None:
        why, text = error.reason, error.message
        yield Condition(type=NETWORK_READY, status=False, reason=why, message=text)


def _directories_lost(tags: Sequence[str]) -> Condition:
    message = (
        f"virtiofsd has ended, so the guest waits for ever in {', '.join(tags)}; restart the VM: "
        "`virtbus vm restart`"
    )
    return Condition(type=DIRECTORY_LOST, status=True, message=message)


def _detached(vm: ActorState) -> tuple[str, ...]:
    """Return the names of volumes that are being detached and that no guest of the VM uses."""
    leaving = vm.record.detaching
    gone = leaving if vm.phase in OFF else vm.observed.disks.detached & leaving.keys()
    return tuple(sorted(gone))


def _other_disks(vm: ActorState) -> bool:
    """Return True if the record and the guest have different properties of a volume's disk."""
    seen = vm.observed.disks.hashes
    return any(seen.get(name, one) != one for name, one in vm.wanted_disks.items())


def _disks_pending(pending: Mapping[str, str]) -> Condition:
    (name, why), *more = sorted(pending.items())
    reason = why.partition(":")[0]
    message = f"{name}: {why}" + (f"; and {len(more)} more" if more else "")
    return Condition(type=DISKS_PENDING, status=True, reason=reason, message=message)


def _paused(observed: Observed, *, asked: bool) -> Condition:
    """Return the condition with the cause of the pause, in KubeVirt's words."""
    if observed.disk_waits and not asked:
        why = observed.disk_waits
        return Condition(type=PAUSED, status=True, reason="PausedIOError", message=why)
    why = "" if asked else "paused on its host, not by virtbus; `virtbus vm unpause` resumes it"
    return Condition(type=PAUSED, status=True, reason="PausedByUser", message=why)


def _frozen(frozen: Frozen) -> Condition:
    until = datetime.fromtimestamp(frozen.until_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    reason, message = "Requested", f"its file systems are frozen until {until}"
    if frozen.trouble:
        reason, message = "NotThawed", f"not thawed yet, the agent retries: {frozen.trouble}"
    since_ns = frozen.since_ns
    return Condition(type=FROZEN, status=True, reason=reason, message=message, since_ns=since_ns)


def _media_pending(error: ErrorBody) -> Condition:
    reason = "TrayLocked" if error.reason == "tray_locked" else "NotChanged"
    return Condition(type=MEDIA_PENDING, status=True, reason=reason, message=error.message)


def _nics_pending(error: ErrorBody) -> Condition:
    reason = NIC_REASONS.get(error.reason, "NotChanged")
    return Condition(type=NICS_PENDING, status=True, reason=reason, message=error.message)


def _restart_required(vm: ActorState) -> str:
    """Return why the running guest must be restarted to match its record; empty if it matches."""
    seen, wanted = vm.observed, vm.wanted_nics
    if seen.nics_error is not None and seen.nics_error.reason == "no_port":
        return seen.nics_error.message
    other = any(wanted.get(name, nic).hardware != nic.hardware for name, nic in seen.nics.items())
    if other or _other_disks(vm) or seen.domain_hash not in {"", vm.wanted_hash}:
        return "stop and start the VM to apply its new spec"
    return ""


class StatusWriter:
    """Writes one VM's status. `report` never waits; `run` is a task of the VM."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._latest: VmStatus | None = None
        self._written: VmStatus | None = None
        self._up = False
        """True if the status on the bus shows a guest that is up."""
        self._revision = 0
        """The revision that the next put expects.

        A put that hangs in a broken connection may arrive late, even after the status was purged.
        The server then refuses the put, because the revision has changed.
        """
        self._doubtful = False
        """True if the status on the bus may differ from the last written one."""
        self._dirty = SmallEvent()
        self._soon: asyncio.TimerHandle | None = None
        self.putting = asyncio.Lock()
        """Locked during a put.

        A caller takes this lock before it cancels `run`. Without the lock, a cancelled put could be
        stored after later requests.
        """

    def report(self, status: VmStatus) -> None:
        """Set the status to write; an unchanged status is not written again.

        A transient state is written after PASSING_S if it still applies. Other states are written
        at once. So is a transient state while the bus still shows a guest that is up.
        """
        self._latest = status
        if self._up or status.state not in PASSING:
            self._tell()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(PASSING_S, self._tell)

    def verify(self) -> None:
        """Read the status back, and write it again if it differs.

        A corrupt write can be stored and acknowledged. Without a change of the VM, the status would
        stay unreadable.
        """
        if self._written is not None:
            self._doubtful = True
            self._dirty.set()

    def _tell(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._dirty.set()

    async def run(self) -> None:
        """Write each new status; never returns by itself."""
        delay_s = RETRY_S[0]
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            status = self._latest
            kept = self._written if status is not None and _same(status, self._written) else None
            if status is None or (kept is not None and not self._doubtful):
                continue
            try:
                async with self.putting:
                    if kept is None or await self._differs(kept):
                        self._revision = await self._put(status)
                        self._written, self._up = status, status.state in WAS_UP
            except BusError as error:
                log.info(
                    "writing the status failed, retry in %.1f s: %s",
                    delay_s,
                    error,
                    extra={"code": "status_retry", "uid": status.uid},
                )
                await asyncio.sleep(delay_s * self._bus.sources.uniform(0.8, 1.2))
                delay_s = min(delay_s * 2, RETRY_S[1])
                self._dirty.set()
                continue
            self._doubtful, delay_s = False, RETRY_S[0]

    async def _differs(self, written: VmStatus) -> bool:
        """Return True if another value than the written one is on the bus; raises BusError."""
        stored = await self._read(subjects.vm_status(written.node, written.uid))
        if stored is None or stored.kind is not EntryKind.PUT:
            return False  # purged by a controller, because the node's statuses exceeded a limit
        if stored.value == fitted_bytes(written):
            return False
        log.warning(
            "the status on the bus is not the one that was written; writing it again",
            extra={"code": "status_repaired", "uid": written.uid},
        )
        return True

    async def _put(self, status: VmStatus) -> int:
        """Write the status over any value; return the new revision.

        Overwriting is safe, because only this process writes the VM's status on this node.
        """
        key, body = subjects.vm_status(status.node, status.uid), fitted_bytes(status)
        try:
            return await self._bus.put(key, body, expect=self._revision)
        except ConflictError:
            await self._read(key)
            return await self._bus.put(key, body, expect=self._revision)

    async def _read(self, key: str) -> Entry | None:
        """Return the last message at `key`. The next put expects its revision."""
        entry = await self._bus.get(key)
        self._revision = entry.revision if entry is not None else 0
        return entry

    async def read_last(self, record: VmRecord, *, insist: bool) -> tuple[VmStatus | None, bool]:
        """Return the last status of a VM, and True if the read succeeded.

        With `insist`, the read is repeated until the bus answers.
        """
        extra = {"code": "not_recalled", "uid": record.uid}
        for delay_s in delays(*RETRY_S, self._bus.sources):
            try:
                key = subjects.vm_status(record.node, record.uid)
                entry = await self._read(key)
                body = entry.value if entry is not None else b""
                return self._recalled(read_stored(VmStatus, key, body) if body else None), True
            except VirtbusError as error:
                log.warning("an earlier status is unreadable: %s", error, extra=extra)
                break
            except BusError as error:
                log.info("cannot read the earlier status: %s", error, extra=extra)
                if not insist:
                    break
            await asyncio.sleep(delay_s)
        return None, False

    def _recalled(self, last: VmStatus | None) -> VmStatus | None:
        """Return `last`. If its guest was up, `run` writes a status that was reported meanwhile."""
        self._up = last is not None and last.state in WAS_UP
        if self._up and self._latest is not None:
            self._tell()
        return last


def _same(one: VmStatus, other: VmStatus | None) -> bool:
    return other is not None and one.model_copy(update={"updated_ns": other.updated_ns}) == other
