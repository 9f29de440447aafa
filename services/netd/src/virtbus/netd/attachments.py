"""Makes, removes and recovers the networks of this node's VMs.

Work is serial per VM, and parallel across VMs. To survive a crash, the state file is written first
and removed last, and the tap comes up last. Every namespace of this netd therefore has a state
file. A namespace without a state file belongs to another netd, and stays.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.netd.builder import BUILDS_AT_ONCE, Begun, Builder, HostPorts, silent, write_ports
from virtbus.netd.core import names
from virtbus.netd.core.address_assignment import carried_over, check_macs, refusal
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.dhcp_offer import DhcpSettings
from virtbus.netd.core.epochs import ReleasedEpochs, check_epoch
from virtbus.netd.core.finding import NetworkFinding
from virtbus.netd.core.hotplug import first_nics
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.hot_nics import HotNics, changed
from virtbus.netd.late_links import LateLinks
from virtbus.netd.network_check import examined
from virtbus.netd.network_entry import NetworkEntry
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)


class Attachments:
    """All networks of VMs on this host."""

    def __init__(self, doors: HostPorts, site: DhcpSettings) -> None:
        self._doors = doors
        self._builder = Builder(doors, site)
        doors.attachers.tunnels.guests = self._guests
        doors.attachers.plugin_reach.nics = self.nics
        self._hot = HotNics(doors, self._builder)
        self._entries: dict[str, NetworkEntry] = {}
        self._used = UsedNics(doors.files.releases)
        self._released = ReleasedEpochs()
        self._locks = KeyedLock()
        self._bridge_seen = 0
        self._builds = asyncio.Semaphore(BUILDS_AT_ONCE)
        self.host_side = asyncio.Lock()  # held while bridges are removed
        self._late_links = LateLinks()
        self.recovering = True
        self.built: Callable[[str], None] = lambda _uid: None
        """Called with the uid of each network that was built and is ready now."""
        self.given_up: Callable[[Attachment, VirtbusError], None] = lambda _vm, _error: None
        """Called with a network that a forced release could not remove wholly, and the error."""
        self.untidy = asyncio.Event()
        """Set if `tidy` has something to do."""

    async def ensure(self, record: VmRecord, begun: Begun = silent) -> NetReady:
        """Make the network that `record` needs, or return an existing one at once.

        `begun` is called when the MACs are known and a CNI plugin is about to run. A failed build
        keeps only the addresses.

        Raises:
            VirtbusError: 503 while recovering. 409 for an older or released epoch, for a MAC in
                use, and `network_lost`. 429: no address is free. Errors of kernel and plugins.
        """
        self.refuse_while_recovering()
        plan = plan_of(record)
        async with self._locks.of(plan.uid):
            entry = self._entries.get(plan.uid)
            known = entry.attachment if entry is not None else None
            check_epoch(plan.uid, plan.epoch, known)
            self._released.check(plan.uid, plan.epoch)
            if entry is not None:
                if entry.phase is NetPhase.READY and await self._serves(entry, plan):
                    return entry.ready()
                if entry.attachment.joined.nics and await self._builder.runs(plan.uid):
                    raise entry.cut_off([]).refusal
            if await self._hot.is_bare(plan, known):
                entry = self._entries[plan.uid] = NetworkEntry(first_nics(known, plan))
                self._keep(entry, entry.attachment)
                entry.settle(NetPhase.READY)
                return entry.ready()
            if entry is not None and known and (known.has_cni or self._builder.stands(known)):
                entry.mark_unbuilt()
                await self._builder.unmake(known)
            return await self._make(plan, known, begun)

    async def _serves(self, entry: NetworkEntry, plan: Attachment) -> bool:
        """Update a network that is in use or equals `plan`; return False to make it again."""
        attachment = entry.attachment
        if not await self._builder.found(attachment):
            return False
        in_use = await self._hot.in_use(attachment)
        if attachment.changing and not in_use:
            return False  # the guest has ended, and its next start has the record's interfaces
        whole = not attachment.joined.nics or await self._builder.completes(attachment)
        if not whole and not in_use:
            return False
        wanted = carried_over(plan, attachment, self._builder.insistent)
        if not in_use and not attachment.same_for_guest(wanted):
            return False
        after = changed(attachment, wanted) if in_use else attachment
        update = {one: getattr(plan, one) for one in ("epoch", "generation", "labels", "owner")}
        tuned = after.tuned_as(wanted).model_copy(update=update)
        if tuned.joined.nics != attachment.joined.nics:  # before `_keep`: a crash repeats this step
            await self._builder.tune(tuned.joined)
        entry.relabelled |= tuned.labels != attachment.labels
        if tuned != attachment:
            self._keep(entry, tuned)
        await self._guard_relabelled(entry)
        return True

    async def _guard_relabelled(self, entry: NetworkEntry) -> None:
        if entry.relabelled and entry.attachment.joined.nics:
            await self._builder.guard(entry.attachment.joined)
        entry.relabelled = False

    async def change_nic(self, want: NicWork) -> NicDone:
        """Do one step of a hot-plug or unplug. Raises as `HotNics.change`; 503 while recovering."""
        self.refuse_while_recovering()
        async with self._locks.of(want.uid):
            entry = self._entries.get(want.uid)
            check_epoch(want.uid, want.epoch, entry.attachment if entry is not None else None)
            async with self.host_side:
                pass  # wait until no bridge is being removed; later removals see this interface
            done = await self._hot.change(entry, want, self._used, self._keep)
        await self._replug_new()
        self.untidy.set()  # a drop may have removed the bridge's last interface
        return done

    async def _make(self, plan: Attachment, known: Attachment | None, begun: Begun) -> NetReady:
        wanted = carried_over(plan, known, self._builder.insistent)
        attachment = self._doors.attachers.plan(wanted, self._used)
        check_macs(attachment, self._used)
        entry = self._entries[plan.uid] = NetworkEntry(attachment, NetPhase.BEGUN)
        self._used.put(plan.uid, attachment.nics)
        try:
            async with self._builds:
                await self._build(entry, begun)
        except (VirtbusError, OSError) as error:
            refused = refusal(error)
            await self._abandon(entry)
            entry.settle(NetPhase.FAILED, refused.body)
            raise refused from error
        entry.settle(NetPhase.READY)
        self.built(plan.uid)
        return entry.ready()

    async def _build(self, entry: NetworkEntry, begun: Begun) -> None:
        attachment = entry.attachment
        if not attachment.nics:
            self._doors.files.remove(attachment.uid)  # the VM had interfaces before
            self.untidy.set()
            return
        async with self.host_side:
            pass  # wait until no bridge is being removed; later removals see this VM
        self._keep(entry, attachment)
        if attachment.has_cni:
            await self._builder.with_cni(
                attachment, lambda more: self._keep(entry, more), lambda: begun(entry.ready())
            )
            check_macs(entry.attachment, self._used)
        else:
            await self._builder.built_in(attachment)
        await self._replug_new()

    async def _abandon(self, entry: NetworkEntry) -> None:
        """Remove a failed attachment. Its file keeps the addresses for the next attempt."""
        attachment = entry.attachment
        try:
            await self._builder.unmake(attachment)
        except (VirtbusError, OSError) as error:
            extra = {"code": "unmake_failed", "uid": attachment.uid}
            log.warning("the release will remove the rest: %s", error, extra=extra)
            return
        self._late_links.add(attachment.nics)
        self.untidy.set()
        nics = tuple(nic.model_copy(update={"cni": None}) for nic in attachment.nics)
        self._keep(entry, attachment.model_copy(update={"nics": nics}))

    async def amend(self, uid: str, change: Callable[[Attachment], Attachment]) -> NetReady | None:
        """Change a ready network and apply its filters. Return its state if `change` changed it."""
        async with self._locks.of(uid):
            entry = self._entries.get(uid)
            if entry is None or entry.phase is not NetPhase.READY:
                return None
            before, after = entry.attachment, change(entry.attachment)
            if after != before:
                self._keep(entry, after)
            if after.joined.nics and await self._builder.found(after):
                await self._builder.guard(after.joined)
            return entry.ready() if after != before else None

    async def release(
        self, uid: str, epoch: int, *, forced: bool = False, unused: bool = False
    ) -> bool:
        """Remove the network of `uid`; return False if there was none.

        With `unused`, refuse if a guest uses the network, and permit `ensure` for the same epoch.

        Raises:
            VirtbusError: 409 for an older epoch. 503 `network_used`: a guest uses the network.
                Errors of `Builder.unmake`: the state file stays, so a further release tries again.
                With `forced`, only the first two failures of `unmake` are raised.
        """
        self.refuse_while_recovering()
        async with self._locks.of(uid):
            entry = self._entries.get(uid)
            check_epoch(uid, epoch, entry.attachment if entry is not None else None)
            if not unused:
                self._released.add(uid, epoch)
            if entry is None:
                return False
            if unused and await self._builder.runs(uid):
                raise entry.used
            if entry.attachment.has_cni:  # after a crash, `recover` removes the remaining resources
                self._keep(entry, entry.attachment.model_copy(update={"made": False}))
            try:
                await self._builder.unmake(entry.attachment)
            except VirtbusError as error:
                if not entry.gives_up(forced=forced):
                    raise
                self.given_up(entry.attachment, error)
            self._doors.files.remove(uid)
            self._late_links.add(entry.attachment.nics)
            del self._entries[uid]
            self._used.drop(uid)
            self.untidy.set()
            if entry.attachment.has_cni:  # plugins may give its addresses to others at once
                await in_thread(self._doors.attachers.plugin_reach.sync)
            return True

    async def take_taps(self, uid: str, timeout_s: float) -> tuple[Attachment, list[int]]:
        """Return the attachment and new tap descriptors, which the caller closes.

        Waits at most `timeout_s` for a network that is being built.

        Raises:
            VirtbusError: 503 recovering, 404 unknown, 504 not ready in time, 409 tap busy, or the
                attachment's error.
        """
        self.refuse_while_recovering()
        entry = self._entries.get(uid)
        if entry is None or entry.phase is None:
            message = "netd has no network of this VM; start it again"
            raise VirtbusError(Code.NOT_FOUND, "not_attached", message)
        attachment = await entry.attached(timeout_s)
        if not attachment.nics:
            return attachment, []
        return attachment, await in_thread(lambda: self._builder.links.open_taps(attachment))

    async def tidy(self) -> None:
        """Remove host bridges, published ports and host links that no VM needs any more.

        The kernel frees namespaces asynchronously. A link that still exists at the second call is
        deleted, because a process may hold its namespace. During the recovery, do nothing.
        """
        self.untidy.clear()
        if self.recovering:
            return
        if late := self._late_links.due({nic.host_link for nic in self.nics()}):
            await in_thread(lambda: self._builder.links.delete_host_links(late))
        if self._late_links.waiting or not await write_ports(self._doors.ports.settle):
            self.untidy.set()
        async with self.host_side:
            await in_thread(lambda: self._doors.attachers.detach(self.nics()))

    async def _replug_new(self) -> None:
        """Attach every host link again if a bridge was made. A new bridge has no links of VMs."""
        times_made = self._doors.attachers.bridges.times_made()
        if self._bridge_seen != times_made:
            self._bridge_seen = times_made
            await self.replug()

    async def replug(self) -> None:
        if nics := [nic for each in self.ready() for nic in each.joined.nics]:
            await in_thread(lambda: self._doors.attachers.verify(nics, mend=True))

    async def compare(self, uids: Collection[str] = ()) -> list[NetworkFinding]:
        """Check and repair networks, by default all; return a finding for each incomplete one."""
        findings = []
        running = await in_thread(lambda: self._doors.emulators.running(self._entries))
        for uid in list(uids or self._entries):
            async with self._locks.of(uid):
                entry = self._entries.get(uid)
                if entry is None or entry.phase is not NetPhase.READY:
                    continue
                if entry.attachment.joined.nics:
                    findings.append(await examined(self._builder, entry, runs=uid in running))
        return [finding for finding in findings if finding is not None]

    async def recover(self) -> None:
        """Compare state files and host: adopt complete networks, finish or remove others.

        virtbus namespaces without a state file belong to another netd on this host. They are logged
        once, and stay. Requests are refused until this method has returned.

        Raises:
            VirtbusError: 409 `netd_running`, `bridge_in_use`; 422 `state_newer`, `state_older`.
        """
        self._doors.files.prepare()
        await in_thread(self._doors.bridge.check_owner)
        self._doors.attachers.bridges.recover()
        self._doors.namespaces.prepare()
        self._used.recall()
        for each in self._doors.files.all():
            self._entries[each.uid] = NetworkEntry(each)
            self._used.put(each.uid, each.nics)
        for name in self._doors.namespaces.names():
            uid = names.uid_of_netns(name)
            if uid is not None and uid not in self._entries:
                extra = {"code": "foreign_netns", "uid": uid}
                log.warning("%s belongs to another netd; it is left alone", name, extra=extra)
        await in_thread(lambda: self._builder.links.delete_orphans(self.links_known()))
        await self._builder.end_plugins(entry.attachment for entry in self._entries.values())
        async with asyncio.TaskGroup() as group:
            for entry in self._entries.values():
                group.create_task(self._recover(entry))
        await write_ports(self._doors.ports.settle)  # after a failure, `tidy` tries again
        self.recovering = False
        self.untidy.set()

    async def _recover(self, entry: NetworkEntry) -> None:
        attachment = entry.attachment
        if not await self._builder.found(attachment):
            if attachment.joined.nics and await self._builder.runs(attachment.uid):
                entry.cut_off([f"{attachment.netns} is gone"])
            return
        async with self._builds:
            if attachment.has_cni and not attachment.made:
                await self._abandon(entry)
                return
            try:
                await self._builder.adopt(attachment, keeps_running=True)
            except (VirtbusError, OSError) as error:
                entry.settle(NetPhase.FAILED, refusal(error).body)
                extra = {"code": "recover_failed", "uid": attachment.uid}
                log.warning("network not adopted: %s", error, extra=extra)
            else:
                entry.settle(NetPhase.READY)

    def resources(self) -> dict[str, tuple[str, ...]]:
        there = set(self._doors.namespaces.names())
        found = {}
        for uid, entry in self._entries.items():
            attachment = entry.attachment
            netns = [f"netns {attachment.netns}"] if attachment.netns in there else []
            addresses = (f"address {one}" for nic in attachment.nics for one in nic.addresses)
            found[uid] = (*netns, *addresses)
        return found

    def state_of(self, uid: str) -> NetReady | None:
        return self.look(uid)[1]

    def look(self, uid: str) -> tuple[Attachment | None, NetReady | None]:
        entry = self._entries.get(uid)
        return (None, None) if entry is None else (entry.attachment, entry.ready())

    def _keep(self, entry: NetworkEntry, attachment: Attachment) -> None:
        entry.attachment = attachment
        self._used.put(attachment.uid, attachment.nics)
        self._doors.files.write(attachment)

    def ready(self) -> list[Attachment]:
        return [each.attachment for each in self._entries.values() if each.phase is NetPhase.READY]

    def begun(self) -> set[str]:
        return {uid for uid, each in self._entries.items() if each.phase is NetPhase.BEGUN}

    def nics(self) -> list[Nic]:
        """Return the interfaces of all networks. Safe in any thread."""
        return [nic for entry in list(self._entries.values()) for nic in entry.attachment.nics]

    def _guests(self) -> list[Nic]:
        """Return the interfaces of networks that are ready or being built. Safe in any thread."""
        there = NetPhase.READY, NetPhase.BEGUN
        entries = (each for each in list(self._entries.values()) if each.phase in there)
        return [nic for each in entries for nic in each.attachment.joined.nics]

    def links_known(self) -> set[str]:
        """Return host ends that a VM needs, or that the kernel is about to free."""
        return {nic.host_link for nic in self.nics()} | self._late_links.known()

    def refuse_while_recovering(self) -> None:
        if self.recovering:
            message = "netd is comparing its state with the host; try again in a second"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=500)
