"""Handles `node.quarantine`: a person's decisions on VMs and disks without a record (ADR 0033).

The node's agent lists, ends, purges and restores VMs and disks. This module writes the record of an
adopted VM. An adopt may be repeated: the node holds an adopted VM until its record is on the bus.
"""

import asyncio
import logging

from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.claims import UidState
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import node_not_found
from virtbus.controller.core.rebuild_plan import Known
from virtbus.controller.core.unrecorded_vms import is_held
from virtbus.controller.edge.address_claims import AddressClaims
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.quarantine import (
    NodeQuarantine,
    NodeQuarantined,
    Quarantine,
    QuarantineAsk,
    QuarantineEntry,
)
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ASK_S = 30.0
LOOK_S = 30.0
ADOPTED = "adopted from the quarantine of its node"


class Quarantines:
    """The handler of `node.quarantine`."""

    def __init__(
        self, bus: Bus, fleet: Fleet, events: FleetEvents, addresses: AddressClaims
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._addresses = addresses
        self._commits = Commits(bus, fleet)
        self._volumes = VolumeWrites(bus)
        self._networks = NetworkWrites(bus)

    async def quarantine(self, request: Request) -> NodeQuarantined:
        want = validate(NodeQuarantine, request.data)
        if not self._fleet.has_node(want.node):
            raise node_not_found(want.node)
        ask_s = request.deadline_s - asyncio.get_running_loop().time() - 1.0
        if want.do == "adopt":
            return await self._adopt(want, ask_s)
        found = await self._ask(want.node, QuarantineAsk(do=want.do, entry=want.entry), ask_s)
        return NodeQuarantined(node=want.node, entries=found.entries, total=found.total)

    async def _ask(self, node: str, ask: QuarantineAsk, ask_s: float) -> Quarantine:
        subject = subjects.rpc(node, "agent", "quarantine")
        timeout_s = max(min(ask_s, ASK_S), 1.0)
        return validate(Quarantine, await self._bus.request(subject, ask, timeout_s=timeout_s))

    async def _adopt(self, want: NodeQuarantine, ask_s: float) -> NodeQuarantined:
        listed = await self._ask(want.node, QuarantineAsk(do="list"), ask_s)
        kept = _entry(listed, want)
        await self._check_name(want, kept)
        new_uid = None
        if want.name is not None and not kept.held:
            new_uid = self._bus.sources.uuid7()
        else:
            _check_place(want, kept, await self._commits.known(kept.uid))
        ask = QuarantineAsk(do="adopt", entry=want.entry, name=want.name, new_uid=new_uid)
        record = (await self._ask(want.node, ask, ask_s)).record
        if record is None:
            message = f"{want.node} gave no record of {want.entry}; see its log"
            raise VirtbusError(Code.INTERNAL, "internal", message)
        await self._write(record, held=kept.held)
        left = tuple(one for one in listed.entries if one.entry != want.entry)
        total = listed.total - 1
        return NodeQuarantined(node=want.node, entries=left, total=total, adopted=record.uid)

    async def _check_name(self, want: NodeQuarantine, kept: QuarantineEntry) -> None:
        """Raise 409 if another VM has the name; called before the host moves a disk."""
        name = want.name or kept.name
        if not (name and kept.namespace):
            return  # the entry has no saved record: its name is unknown
        holder = await self._commits.holder(kept.namespace, name)
        if holder is not None and holder != kept.uid and await self._commits.latest(holder):
            message = f"VM {holder} has the name {kept.namespace}/{name}; give another: --name"
            raise VirtbusError(Code.CONFLICT, "name_taken", message)

    async def _write(self, record: VmRecord, *, held: bool) -> None:
        """Write an adopted VM's record if the bus has no record of the VM on this node.

        With a record, the adoption has only replaced disks: nothing is written.

        A `held` VM still has its volumes and addresses: lost records of its volumes and networks
        are written first. A VM that is made from quarantined disks gets new addresses, because
        another VM may have its former addresses by now.
        """
        known = await self._commits.known(record.uid)
        if known.record is not None and known.node == record.node:
            return
        try:
            if held:
                await self._volumes.restore(record)
                await self._networks.restore(record)
            else:
                bare = record.model_copy(update={"address_claims": {}})
                record = await self._addresses.claim(bare)
            await self._commits.write_back(record, known)
        except (ConflictError, NodeFullError) as error:
            message = f"{record.name} is held on {record.node} now; repeat: {error}"
            raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=500) from error
        self._events.emit(EventKind.VM_UPDATED, record, ADOPTED)


class Overtaken:
    """Ends VMs that a node still holds after they were moved to another node.

    A record with a higher epoch on another node shows the move. Usually a purge marker makes the
    old node release the VM. The marker is missing if the host was off for more than a day, or if
    the bus was rebuilt. The VM's disks on the old node go to the quarantine.
    """

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def run(self, tenure: LeaderTerm) -> None:
        """Check all statuses each LOOK_S, while the fleet lease is held."""
        while True:
            await asyncio.sleep(LOOK_S)
            for node, uid, epoch in self._found():
                tenure.check()
                subject = subjects.rpc(node, "agent", "quarantine")
                ask = QuarantineAsk(do="keep", entry=uid, below_epoch=epoch)
                try:
                    await self._bus.request(subject, ask, timeout_s=ASK_S)
                except (BusError, VirtbusError) as error:
                    extra = {"code": "overtaken_stays", "uid": uid, "node": node}
                    log.info("cannot end a moved VM that is still held: %s", error, extra=extra)
                else:
                    extra = {"code": "overtaken", "uid": uid, "node": node}
                    log.warning(
                        "ended a VM that was moved elsewhere; its disks are kept", extra=extra
                    )

    def _found(self) -> list[tuple[str, str, int]]:
        """Return old node, uid and current epoch of each moved VM that its old node still holds."""
        fleet, now_s = self._fleet, asyncio.get_running_loop().time()
        found = []
        for (node, uid), (status, _) in fleet.statuses.items():
            held = fleet.vms.get(uid)
            if held is None or held.record.node == node or held.record.epoch <= status.epoch:
                continue
            if is_held(status) and not fleet.silent(node, now_s):
                found.append((node, uid, held.record.epoch))
        return found


def _entry(listed: Quarantine, want: NodeQuarantine) -> QuarantineEntry:
    for kept in listed.entries:
        if kept.entry == want.entry:
            return kept
    message = f"{want.node} has no {want.entry}; `virtbus node quarantine list {want.node}`"
    raise VirtbusError(Code.NOT_FOUND, "no_entry", message)


def _check_place(want: NodeQuarantine, kept: QuarantineEntry, known: Known) -> None:
    """Raise 410 if the VM was deleted, or 409 if it is on another node."""
    if known.where is UidState.MARKER:
        message = f"VM {kept.uid} was deleted; adopt its disks as a new VM: --name NAME"
        raise VirtbusError(Code.GONE, "deleted", message)
    if known.record is not None and known.node != want.node:
        message = (
            f"{kept.name or kept.uid} is on {known.node} by now; adopt these disks as a new VM: "
            "--name NAME"
        )
        raise VirtbusError(Code.CONFLICT, "vm_elsewhere", message)
