"""Compares the host with the records, and removes orphans.

A finding counts only if two scans have it. Before a complete list of the joined bus, orphans are
unknown. The audit removes orphans in the order of a delete: guest, then network and disks, then
files and the status. It ignores resources of another agent on this host.

A missing record is no command (ADR 0033). Only a purge of its record lets the audit remove
resources of a running guest. If no user's delete purged the record, the disks go to the quarantine.
"""

import asyncio
import logging
from collections.abc import Collection

from virtbus.bus.client.ports import Request
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.assignments import Assignments
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.status_gc import purge_status
from virtbus.schemas import subjects
from virtbus.schemas.audit import Audit, Audited, AuditFinding
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import (
    ANY_EPOCH,
    HeldResources,
    Inspect,
    Release,
    ReleaseReply,
)
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""The delay between two scans. Most creates and deletes in progress end meanwhile."""
ASK_S = 5.0
RETRY_S = (2.0, 60.0)
LEFT_OVER = "neither the bus nor this host has a record of the VM"
KINDS = {"netd": "network", "imaged": "disk"}
REPAIRS = {
    "domain": "undefine it",
    "network": "netd releases it",
    "disk": "move it to the quarantine if it was written to",
    "file": "remove it",
    "status": "purge it",
    "fault": "netd repairs it",
}


class Auditor:
    """Answers `rpc.agent.audit`, and removes orphans that persist for `orphan_grace_s`."""

    def __init__(self, tools: AgentPorts, vms: Assignments) -> None:
        self._tools = tools
        self._vms = vms

    async def answer(self, request: Request) -> Audited:
        want = validate(Audit, request.data)
        found = await self.look(want.statuses)
        if want.repair and found:
            found = await self.repair(found)
        return Audited(findings=tuple(found))

    async def sweep(self) -> None:
        """Remove orphans that persist for `orphan_grace_s`, or whose record was purged.

        Never returns. Retries failed scans and repairs soon.
        """
        loop, settings = asyncio.get_running_loop(), self._tools.settings
        interval_s, grace_s = settings.resync_s, settings.orphan_grace_s
        since: dict[str, float] = {}
        pauses = delays(*RETRY_S, self._tools.bus.sources)
        wait_s = interval_s
        while True:
            if await wait_for_event(self._vms.sweep_due, wait_s):
                await asyncio.sleep(LOOK_AGAIN_S)  # imaged and netd see the purge in this time
            self._vms.sweep_due.clear()
            # netd repairs faults itself
            found = [finding for finding in await self.look(()) if finding.kind != "fault"]
            orphans = [finding for finding in found if finding.repair]
            since = {one.uid: since.get(one.uid, loop.time()) for one in orphans}
            late = {uid for uid, at_s in since.items() if loop.time() - at_s >= grace_s}
            purged = self._vms.listings.purged
            due = [one for one in orphans if one.uid in late or purged(one.uid) is not None]
            repaired = await self.repair(due) if due else []
            if all(f.repaired for f in repaired) and all(f.kind != "service" for f in found):
                pauses, wait_s = delays(*RETRY_S, self._tools.bus.sources), interval_s
            else:
                wait_s = min(next(pauses), interval_s)

    # --- scan --------------------------------------------------------------------------------
    async def look(self, statuses: Collection[str]) -> list[AuditFinding]:
        """Return the findings that two scans have in common.

        Services that do not answer come first; the other findings are in the order of uids. Without
        a complete list of the joined bus, the only finding reports that fact.
        """
        if not self._vms.join.trusted:
            what = "the bus is not the one that the node joined, or is not read yet"
            return [AuditFinding(kind="bus", what=f"{what}: orphans are unknown")]
        first = await self._once(statuses)
        if not first:
            return []
        await asyncio.sleep(LOOK_AGAIN_S)
        again = await self._once(statuses)
        return [finding for finding in first if finding in again]

    async def _once(self, statuses: Collection[str]) -> list[AuditFinding]:
        things: list[tuple[str, str, str]] = []
        silent: list[AuditFinding] = []
        faults: list[AuditFinding] = []
        for name, kind in KINDS.items():
            try:
                subject = subjects.rpc(self._tools.settings.node, name, "inspect")
                answer = await self._tools.bus.request(subject, Inspect(), timeout_s=ASK_S)
                resources = validate(HeldResources, answer)
                things += [
                    (kind, uid, what) for uid, these in resources.things.items() for what in these
                ]
                faults += [
                    AuditFinding(kind="fault", uid=uid, what=what, repair=REPAIRS["fault"])
                    for uid, these in resources.faults.items()
                    for what in these
                ]
            except (BusError, VirtbusError) as error:
                silent.append(AuditFinding(kind="service", what=f"{name} does not answer: {error}"))
        running: set[str] = set()
        try:
            domains = await self._domains()
            things += [("domain", one.uid, f"a domain, {one.state}") for one in domains]
            running = {
                one.uid
                for one in domains
                if one.active and self._vms.listings.purged(one.uid) is None
            }
        except VirtbusError as error:
            silent.append(AuditFinding(kind="service", what=f"libvirt does not answer: {error}"))
            running = {uid for _, uid, _ in things if self._vms.listings.purged(uid) is None}
        files = await self._tools.files.things()
        things += [("file", uid, what) for uid, these in files.items() for what in these]
        things += [("status", uid, "a status on the bus") for uid in statuses]
        found = [
            AuditFinding(
                kind=kind, uid=uid, what=what, repair="" if uid in running else REPAIRS[kind]
            )
            for kind, uid, what in things
            if uid not in self._vms.actors and self._vms.listings[uid] != "unreadable"
        ]
        found += [
            AuditFinding(kind="record", uid=uid, what=guest.vm.reasons.held)
            for uid, guest in self._vms.actors.items()
            if guest.vm.reasons.held
        ]
        return silent + sorted(faults + found, key=lambda each: (each.uid, each.kind, each.what))

    async def _domains(self) -> list[DomainFacts]:
        """Return the domains of this agent that have no actor."""
        return [
            facts
            for facts in await self._tools.hypervisor.list_domains()
            if facts.uid not in self._vms.actors
            and await self._tools.hypervisor.uses(facts.uid, self._tools.settings.state_dir)
        ]

    # --- repair ------------------------------------------------------------------------------
    async def repair(self, found: Collection[AuditFinding]) -> list[AuditFinding]:
        """Remove the orphans of each uid, and let netd repair faults.

        Return the findings with their `repaired` marks. If a service does not answer the last scan,
        no finding counts as repaired.
        """
        if any(finding.kind == "fault" for finding in found):
            await self._mend()
        gone = [finding for finding in found if finding.repair and finding.kind != "fault"]
        left_over = {finding.uid for finding in gone}
        for uid in sorted(left_over):
            kinds = {finding.kind for finding in gone if finding.uid == uid}
            if uid in self._vms.actors or not self._vms.join.trusted:
                continue
            try:
                await self._remove(uid, kinds)
            except (BusError, VirtbusError) as error:
                extra = {"code": "not_repaired", "uid": uid}
                log.warning("cannot remove orphans: %s", error, extra=extra)
            else:
                left_over.remove(uid)
                extra = {"code": "left_over_removed", "uid": uid}
                log.warning("removed orphans without a record: %s", sorted(kinds), extra=extra)
        left = await self._once(
            {one.uid for one in gone if one.kind == "status" and one.uid in left_over}
        )
        complete = all(finding.kind != "service" for finding in left)
        return [
            finding.model_copy(
                update={"repaired": complete and bool(finding.repair) and finding not in left}
            )
            for finding in found
        ]

    async def _mend(self) -> None:
        try:
            subject = subjects.rpc(self._tools.settings.node, "netd", "inspect")
            await self._tools.bus.request(subject, Inspect(mend=True), timeout_s=ASK_S)
        except (BusError, VirtbusError) as error:
            log.warning("cannot repair the network: %s", error, extra={"code": "not_repaired"})

    async def end(self, uid: str, why: str) -> None:
        """On a person's request, end the guest of a VM without record and actor, and remove the VM.

        Raises:
            VirtbusError: 409 `other_bus`: the agent follows no complete list of the joined bus.
            VirtbusError, BusError: a removal failed; a repeat of the call continues.
        """
        if not self._vms.join.trusted:
            node = self._tools.settings.node
            message = f"node {node} does not follow this bus; `virtbus bus rebuild` first"
            raise VirtbusError(Code.CONFLICT, "other_bus", message)
        found = [one for one in await self._once(()) if one.uid == uid]
        kinds = {one.kind for one in found if one.kind in REPAIRS}
        if "domain" in kinds:
            await self._tools.hypervisor.destroy(uid, forced=True)
        await self._remove(uid, kinds, why)

    async def _remove(self, uid: str, kinds: Collection[str], why: str = LEFT_OVER) -> None:
        """Remove a uid's orphans in the order of a delete."""
        if "domain" in kinds:
            if self._vms.listings.purged(uid) is not None:
                await self._tools.hypervisor.destroy(uid)
            await self._tools.hypervisor.undefine(uid)
        keep = None if self._vms.listings.purged(uid) else QuarantineRequest(why=why)
        for service, kind in KINDS.items():
            if kind in kinds:
                answer = await self._tools.bus.request(
                    subjects.rpc(self._tools.settings.node, service, "release"),
                    Release(uid=uid, epoch=ANY_EPOCH, keep=keep),
                    timeout_s=ASK_S,
                )
                if kept := validate(ReleaseReply, answer).kept:
                    await self._tools.files.keep_work(uid, kept)
        if "file" in kinds:
            await self._tools.files.remove_work(uid)
            await self._tools.files.forget(uid)
        if "status" in kinds:
            await purge_status(self._tools.bus, self._tools.settings.node, uid)
