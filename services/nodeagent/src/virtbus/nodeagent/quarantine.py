"""Answers `rpc.agent.quarantine`: a person's decisions on VMs and disks that the bus does not know.

For each entry of the quarantine, imaged keeps the disks and a copy of the VM's record, and the
agent keeps the seeds. The agent holds an adopted VM until the requester has written the VM's record
to the bus.
"""

import asyncio
import logging

from virtbus.bus.client.ports import Request
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.assignments import Assignments
from virtbus.nodeagent.audit import Auditor
from virtbus.nodeagent.core.uid_table import ABSENT
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.intent import MOVED
from virtbus.nodeagent.vm.machine import VmPhase
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid
from virtbus.schemas.quarantine import (
    LIST_MAX,
    Quarantine,
    QuarantineAsk,
    QuarantineEntry,
    QuarantineRequest,
    QuarantineWork,
)
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

IMAGED_S = 10.0
LOOK_S = 0.1
ANSWER_BEFORE_S = 0.5
BY_HAND = "a person ended the VM, of which the bus had no record"
OFF = frozenset[VmPhase]({"stopped", "succeeded", "failed"})


class QuarantineDesk:
    """Answers `rpc.agent.quarantine`."""

    def __init__(self, tools: AgentPorts, auditor: Auditor, vms: Assignments) -> None:
        self._tools = tools
        self._auditor = auditor
        self._vms = vms
        self._node = tools.settings.node
        self._one = asyncio.Lock()

    def _absent(self, uid: str) -> bool:
        """Return True if the node has joined the bus, and the bus has no record of the VM."""
        return self._vms.join.trusted and self._vms.listings[uid] in ABSENT

    async def answer(self, request: Request) -> Quarantine:
        """Carry out one decision; return all entries, or only the adopted entry."""
        want = validate(QuarantineAsk, request.data)
        if want.do == "list":
            return await self._list()
        async with self._one:
            match want.do:
                case "adopt":
                    return await self._adopted(want)
                case "keep":
                    await self._keep(want, request.deadline_s - ANSWER_BEFORE_S)
                case _:
                    await self._purge(want.entry or "")
        return await self._list()

    async def _imaged(self, work: QuarantineWork) -> Quarantine:
        subject = subjects.rpc(self._node, "imaged", "quarantine")
        answer = await self._tools.bus.request(subject, work, timeout_s=IMAGED_S)
        return validate(Quarantine, answer)

    async def _list(self) -> Quarantine:
        """Return the VMs that are held without a record, then the entries of imaged."""
        kept = await self._imaged(QuarantineWork(do="list"))
        held = [_held(g) for uid, g in sorted(self._vms.actors.items()) if self._absent(uid)]
        entries = (*held, *kept.entries)[:LIST_MAX]
        return Quarantine(entries=entries, total=len(held) + kept.total)

    # --- adopt -------------------------------------------------------------------------------
    async def _adopted(self, want: QuarantineAsk) -> Quarantine:
        entry = want.entry or ""
        guest = self._vms.actors.get(entry)
        if guest is not None and self._absent(entry):
            return Quarantine(
                entries=(_held(guest),), total=1, record=_named(guest.vm.record, want)
            )
        found = await self._imaged(QuarantineWork(do="get", entry=entry))
        (kept,) = found.entries
        uid = check_uid(want.new_uid or kept.uid)
        guest = self._vms.actors.get(uid)
        if guest is not None:
            record = self._off(guest)
        elif found.record is None:
            raise _no_record(kept, self._node)
        else:
            epoch = max(self._tools.files.epoch(uid), found.record.epoch) + 1
            record = _stopped_here(_named(found.record, want), uid, self._node, epoch)
            await self._tools.files.write(record)
        await self._tools.files.bring_back(entry, uid)
        keep = QuarantineRequest(why=f"the disks of {entry} took their place", record=record)
        self._tools.disk_work.begin()
        await self._imaged(QuarantineWork(do="restore", entry=entry, uid=uid, keep=keep))
        if uid not in self._vms.actors:
            self._vms.restore(record)
        extra = {"code": "adopted", "uid": uid}
        log.warning("%s is adopted as %s", entry, record.name, extra=extra)
        return Quarantine(entries=(kept,), total=1, record=record)

    def _off(self, guest: VmActor) -> VmRecord:
        """Return the record of the VM that gets an entry's disks; raise 409 `not_off` if it is on.

        A person has created this VM in place of the VM without a record.
        """
        record = guest.vm.record
        if guest.vm.phase not in OFF or record.powered:
            message = f"{record.name} is not off; `virtbus vm stop {record.name}`, then repeat"
            raise VirtbusError(Code.CONFLICT, "not_off", message)
        return record

    # --- keep, purge -------------------------------------------------------------------------
    async def _keep(self, want: QuarantineAsk, until_s: float) -> None:
        """End a VM that has no record; return once the VM is released.

        With `below_epoch`, end only a VM of an earlier epoch, which was moved to another node.
        """
        uid = (want.entry or "").partition(".")[0]
        guest = self._vms.actors.get(uid)
        overtaken = guest is not None and guest.vm.record.epoch < want.below_epoch
        if guest is not None and not self._absent(uid):
            message = f"the bus has a record of {guest.vm.record.name}; `virtbus vm delete` ends it"
            raise VirtbusError(Code.CONFLICT, "record_stands", message)
        if guest is None and not want.below_epoch:
            await self._auditor.end(uid, BY_HAND)
        elif guest is not None and (overtaken or not want.below_epoch):
            why = "moved elsewhere" if overtaken else "ended by hand"
            log.warning("%s", why, extra={"code": "ended_without_record", "uid": uid})
            # a moved VM gets no grace: its copy on the other node may run by now (I1)
            guest.terminate(MOVED if overtaken else BY_HAND, at_once=overtaken)
            await self._gone(uid, until_s)

    async def _gone(self, uid: str, until_s: float) -> None:
        while uid in self._vms.actors:
            if asyncio.get_running_loop().time() >= until_s:
                message = (
                    "the guest still uses its grace to power off; it still runs, list it again"
                )
                raise VirtbusError(Code.DEADLINE, "ending", message)
            await asyncio.sleep(LOOK_S)

    async def _purge(self, entry: str) -> None:
        """Remove an entry permanently; raise 409 `held` for a held VM, which has no entry yet."""
        if self._absent(entry) and entry in self._vms.actors:
            message = (
                f"{entry} is held with its guest; `virtbus node quarantine keep {self._node} "
                f"{entry}` ends it first"
            )
            raise VirtbusError(Code.CONFLICT, "held", message)
        await self._imaged(QuarantineWork(do="purge", entry=entry))
        await self._tools.files.purge_kept(entry)
        log.warning("%s is purged", entry, extra={"code": "purged", "uid": entry.partition(".")[0]})


def _held(guest: VmActor) -> QuarantineEntry:
    record = guest.vm.record
    return QuarantineEntry(
        entry=record.uid,
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        epoch=record.epoch,
        held=True,
        adoptable=True,
        disks=tuple(record.spec.local_disks),
        why=f"{guest.vm.phase}; {guest.vm.reasons.held}",
    )


def _named(record: VmRecord, want: QuarantineAsk) -> VmRecord:
    return record if want.name is None else record.model_copy(update={"name": want.name})


def _stopped_here(record: VmRecord, uid: str, node: str, epoch: int) -> VmRecord:
    """Return the saved record, changed so that the VM is stopped and on this node."""
    requests = dict.fromkeys(("powered", "paused", "deleting", "evacuating"), False)
    place = {"uid": uid, "node": node, "epoch": epoch, "evacuation_target": None}
    return record.model_copy(update=place | requests)


def _no_record(kept: QuarantineEntry, node: str) -> VirtbusError:
    message = (
        f"no record was saved with {kept.entry}; create the VM, switched off, on {node} with "
        f"`virtbus vm create -f FILE --uid {kept.uid}`, then adopt it again: its disks take the "
        "place of the new ones"
    )
    return VirtbusError(Code.CONFLICT, "no_record_saved", message)
