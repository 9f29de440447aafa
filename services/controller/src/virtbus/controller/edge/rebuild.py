"""Handles `bus.rebuild`: collects hosts' copies, writes back lost records, and joins the nodes.

A rebuild can be interrupted at any step, and repeated: each write is a CAS over the value that was
read, and a node joins the bus only after its VMs are on the bus.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress

from virtbus.bus.client.ports import Bus, Entry, EntryKind, Request, WatchMark
from virtbus.bus.client.signing import RecordKeys
from virtbus.bus.errors import BusError, ConflictError, OversizeError
from virtbus.controller.core.claims import UidState, claims_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.group_rebuild import accepted_copies
from virtbus.controller.core.mutations import deleting
from virtbus.controller.core.rebuild_plan import (
    Known,
    RebuildAction,
    Rebuilt,
    believed,
    plan,
    unsigned,
)
from virtbus.controller.core.vm_keys import StoredVm, read_vm_key
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.group_rebuild import GroupRebuild
from virtbus.controller.edge.host_records import PAGES, record_pages
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.api import BusRebuild, BusRebuilt, RebuiltNode, RebuiltVm
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import JoinBus, JoinedBus, KnownRecords
from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import JoinNonce, VmRecord
from virtbus.schemas.wire import encode, validate

log = logging.getLogger(__name__)

ASK_S = 5.0
ASK_AGAIN_S = 0.5
ANSWER_BEFORE_S = 10.0
"""Time before the deadline that is reserved for the writes, after the nodes' reports."""
ANSWER_S = 2.0
"""Time before the deadline that is reserved for the answer, after the rebuild of groups."""
WRITTEN = {
    RebuildAction.ADD: "the bus had lost it",
    RebuildAction.RAISE: "its host had a newer copy",
    RebuildAction.MOVE: "its host had a newer copy",
}


class Rebuilds:
    """The handler of `bus.rebuild`. Several controllers may run it at the same time."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents, keys: RecordKeys) -> None:
        self._bus = bus
        self._keys = keys
        self._fleet = fleet
        self._events = events
        self._commits = Commits(bus, fleet)
        self._volumes = VolumeWrites(bus)
        self._networks = NetworkWrites(bus)
        self._groups = GroupRebuild(bus, fleet, events)

    async def rebuild(self, request: Request) -> BusRebuilt:
        want = validate(BusRebuild, request.data)
        accepted = accepted_copies(want.accept_groups)
        now_s = asyncio.get_running_loop().time()
        nodes = sorted(n for n in self._fleet.nodes if not self._fleet.silent(n, now_s))
        reports, failed = await self._ask(nodes, request.deadline_s - ANSWER_BEFORE_S)
        silent = {*failed, *(set(self._fleet.known_nodes()) - set(nodes))}
        bus = await self._known(reports.values())
        records = [record for report in reports.values() for record in report.records]
        sure, doubtful = believed(reports, await self._keys.good(records), want.accept_unsigned)
        steps = plan(sure, bus, silent)
        steps += unsigned(doubtful, steps, bus)
        done: list[Rebuilt] = []
        for step in steps:
            known = bus.get(step.record.uid, Known(UidState.NOTHING))
            done.append(step if want.dry_run else await self._do(step, known))
        disputed = {
            step.record.node
            for step in done
            if step.step in {RebuildAction.CONFLICT, RebuildAction.UNSIGNED}
        }
        results = [
            await self._follow(report, dry=want.dry_run, disputed=report.node in disputed)
            for report in reports.values()
        ]
        results += [
            RebuiltNode(node=node, message=failed.get(node, "is silent")) for node in silent
        ]
        groups = await self._groups.rebuild(
            reports, accepted, request.deadline_s - ANSWER_S, dry=want.dry_run
        )
        return BusRebuilt(
            vms=tuple(
                _shown(step) for step in done if step.step is not RebuildAction.KEEP or step.why
            ),
            nodes=tuple(sorted(results, key=lambda each: each.node)),
            groups=groups.groups,
            groups_omitted=groups.omitted,
            groups_message=groups.message,
            kept=sum(step.step is RebuildAction.KEEP and not step.why for step in done),
        )

    # --- collect ---------------------------------------------------------------------------------
    async def _ask(
        self, nodes: Collection[str], until_s: float
    ) -> tuple[dict[str, KnownRecords], dict[str, str]]:
        """Return the nodes' reports and errors, each by node.

        Agents that are still starting are asked repeatedly until `until_s` (loop's time).
        """
        reports: dict[str, KnownRecords] = {}
        failed: dict[str, str] = {}

        async def ask(node: str) -> None:
            while True:
                try:
                    # a node has at least ASK_S for all pages, even if the client waits only briefly
                    pages_until_s = max(until_s, loop.time() + ASK_S)
                    reports[node] = await self._report(node, pages_until_s)
                except (BusError, VirtbusError) as error:
                    if _soon(error) and loop.time() + ASK_AGAIN_S < until_s:
                        await asyncio.sleep(ASK_AGAIN_S)
                        continue
                    failed[node] = str(error)
                return

        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
        return reports, failed

    async def _report(self, node: str, until_s: float) -> KnownRecords:
        """Return all pages of a node as one report, without records of other nodes.

        Raises the errors of `record_pages`, and VirtbusError 503 `too_many_records`.
        """
        whole, more = KnownRecords(node=node), False
        async for page in record_pages(self._bus, node, ask_s=ASK_S, until_s=until_s):
            own = tuple(record for record in page.records if record.node == node)
            whole = KnownRecords(
                node=node,
                nonce=page.nonce,
                node_spec=page.node_spec,
                records=(*whole.records, *own),
                removed={**whole.removed, **page.removed},
            )
            more = page.more and bool(page.records)
        if more:
            message = f"{node} has more than {PAGES} pages of records; is its agent intact?"
            raise VirtbusError(Code.UNAVAILABLE, "too_many_records", message)
        return whole

    async def _known(self, reports: Collection[KnownRecords]) -> dict[str, Known]:
        """Return by uid what the bus knows of each VM that the bus lists or a host reports."""
        known = await self._listed()
        for uid in {record.uid for report in reports for record in report.records}:
            known[uid] = await self._commits.known(uid)
        return known

    async def _listed(self) -> dict[str, Known]:
        """Return the bus' records by uid, from a new list: the cache may lag behind."""
        found: dict[str, Known] = {}
        async with self._bus.watch("$KV.vm.>") as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    break
                if item is WatchMark.RESET:
                    found = {}
                elif isinstance(item, Entry) and item.kind is EntryKind.PUT:
                    with suppress(VirtbusError):  # the informers report unreadable values
                        record = read_vm_key(item.key, item.value)
                        if isinstance(record, VmRecord):
                            known = Known(UidState.RECORD, record, item.revision, record.node)
                            found[record.uid] = known
        return found

    # --- apply -----------------------------------------------------------------------------------
    async def _do(self, step: Rebuilt, known: Known) -> Rebuilt:
        """Apply a step and return it; return a CONFLICT step if the write is refused."""
        record = step.record
        try:
            await self._write(step.step, record, known)
        except ConflictError:
            return Rebuilt(RebuildAction.CONFLICT, record, "it changed meanwhile; repeat")
        except (VirtbusError, NodeFullError, OversizeError) as error:
            return Rebuilt(RebuildAction.CONFLICT, record, str(error))
        if step.step in {*WRITTEN, RebuildAction.END}:
            extra = {"code": "rebuilt", "uid": record.uid}
            log.info("%s %s of %s", step.step, record.name, record.node, extra=extra)
        return step

    async def _write(self, step: RebuildAction, record: VmRecord, known: Known) -> None:
        if step in WRITTEN:
            await self._volumes.restore(record)
            await self._networks.restore(record)
            await self._commits.write_back(record, known)
            self._events.emit(EventKind.VM_UPDATED, record, f"written back: {WRITTEN[step]}")
        elif step is RebuildAction.END:
            # A normal delete, because an immediate purge could hide the delete from the agent.
            # Only the agent releases what imaged and netd may have made for the VM meanwhile.
            ending = deleting(record, grace_s=0)
            await self._commits.replace(StoredVm(record, known.revision), ending)
            self._events.emit(EventKind.VM_DELETING, record, "its host had released it")
        elif (
            step is RebuildAction.KEEP
            and known.record is not None
            and not self._fleet.claims.keys() >= set(claims_of(known.record))
        ):
            await self._commits.claim(known.record)

    async def _follow(self, report: KnownRecords, *, dry: bool, disputed: bool) -> RebuiltNode:
        """Let a node join this bus. If the node has joined before, it only lists its VMs again.

        A node with a VM in conflict (`disputed`) does not join: it has VMs that the bus lacks.
        """
        node, vms = report.node, len(report.records)
        try:
            nonce = await self._nonce(node)
            if nonce != report.nonce and (dry or disputed):
                why = "it has a VM in conflict" if disputed else "it had joined another bus"
                return RebuiltNode(node=node, vms=vms, message=f"holds its VMs: {why}")
            if not dry:
                await self._restore_node_spec(report)
                subject = subjects.rpc(node, "agent", "join")
                answer = await self._bus.request(subject, JoinBus(nonce=nonce), timeout_s=ASK_S)
                validate(JoinedBus, answer)
        except (BusError, VirtbusError) as error:
            return RebuiltNode(node=node, vms=vms, message=str(error))
        return RebuiltNode(node=node, vms=vms, joined=True)

    async def _restore_node_spec(self, report: KnownRecords) -> None:
        """Write the node spec of a report to the bus if the bus has no spec of the node."""
        if report.node_spec is None or report.node_spec.node != report.node:
            return
        node_spec = report.node_spec.model_copy(
            update={"lease_revision": 0}
        )  # a rebuilt bus starts new leases
        with suppress(ConflictError):  # the bus has a spec, which stays
            await self._bus.put(subjects.node_spec(report.node), encode(node_spec), expect=0)

    async def _nonce(self, node: str) -> str:
        """Return this bus' nonce for a node.

        If the join record was lost, write a new join record, and raise 503 `not_joined`.
        """
        key = subjects.join_nonce(node)
        entry = await self._bus.get(key)
        try:
            if entry is not None and entry.kind is EntryKind.PUT:
                return read_stored(JoinNonce, key, entry.value).nonce
        except VirtbusError as error:
            log.warning("unreadable %s: %s", key, error, extra={"code": "bad_record"})
        nonce = JoinNonce(nonce=self._bus.sources.uuid7())
        await self._bus.put(key, encode(nonce), expect=entry.revision if entry else 0)
        message = "its join record was lost and is made again; repeat in a moment"
        raise VirtbusError(Code.UNAVAILABLE, "not_joined", message, after_ms=1000)


def _soon(error: BusError | VirtbusError) -> bool:
    """Return True for the error of an agent that is still starting: ask it again soon."""
    return isinstance(error, VirtbusError) and error.reason == "recovering"


def _shown(step: Rebuilt) -> RebuiltVm:
    record = step.record
    return RebuiltVm(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        node=record.node,
        step=str(step.step),
        message=step.why,
    )
