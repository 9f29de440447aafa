"""The nodeagent's loop: handles records and host events, runs an actor per VM, sends heartbeats."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.hearing import hear
from virtbus.bus.ports import Bus, Endpoint, Entry, EntryKind, WatchMark
from virtbus.bus.process import notify
from virtbus.nodeagent.audit import Auditor
from virtbus.nodeagent.commands import Commands
from virtbus.nodeagent.core.lifecycle import Event
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.core.recovery import found
from virtbus.nodeagent.core.room import no_room
from virtbus.nodeagent.core.wishes import overtaken
from virtbus.nodeagent.early_parts import EarlyParts
from virtbus.nodeagent.guest import Guest
from virtbus.nodeagent.left_statuses import LeftStatuses
from virtbus.nodeagent.liveness import Liveness
from virtbus.nodeagent.node_wish import WishHere
from virtbus.nodeagent.quarantine import QuarantineDesk
from virtbus.nodeagent.rebuilding import Rebuilding
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.tools import Tools
from virtbus.nodeagent.watched_domains import WatchedDomains
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import is_uid
from virtbus.schemas.node import NodeState
from virtbus.schemas.nodework import ImageReady, NetReady
from virtbus.schemas.records import DELETED, read_record, read_stored
from virtbus.schemas.vm import JoinNonce, VmRecord

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
COMPARING = "the agent compares host and records; nothing is started or ended yet"
NO_RECORD = (
    "the bus has no record of this VM: nothing is started or ended until a person decides; "
    "`virtbus bus rebuild` or `virtbus node quarantine adopt` writes the record back from this "
    "host, `virtbus node quarantine keep` ends the VM and keeps its disks"
)
OTHER_BUS = (
    "this bus is not the one that the node joined: its VMs are held, nothing is started or ended; "
    "`virtbus bus rebuild` restores the bus from the hosts"
)


def _part(subject: str) -> type[ImageReady] | type[NetReady]:
    return ImageReady if subject.endswith(".image") else NetReady


class NodeAgent:
    """The VMs of one node."""

    def __init__(
        self,
        tools: Tools,
        liveness: Liveness,
        rpc: AgentRpc,
        up: Callable[[], None] = lambda: notify("READY=1"),
        auditor: Auditor | None = None,
    ) -> None:
        self._tools = tools
        self._auditor = auditor
        self._up = up
        self._bus: Bus = tools.bus
        self._node = tools.settings.node
        self._liveness = liveness
        self._rpc = rpc
        self._guests: dict[str, Guest] = {}
        self._watched = WatchedDomains(tools.hypervisor, self._guests, liveness.blind)
        self._group: asyncio.TaskGroup | None = None
        self._domains: dict[str, DomainFacts] = {}
        self._on_disk: dict[str, VmRecord] = {}
        self._early = EarlyParts(lambda: asyncio.get_running_loop().time())
        self._absent: set[str] = set()
        """VMs that the bus does not have; only a person ends them (ADR 0033)."""
        self._listed: set[str] = set()
        self._unread: set[str] = set()
        """VMs with an unreadable record on the bus: the last good one stays in force."""
        self._marked: dict[str, bool] = {}
        """Purged on the bus: True by a delete, False by a move."""
        self._next: dict[str, VmRecord] = {}
        """VMs that are assigned to this node again while their previous copy is being released."""
        self._wish = WishHere(tools.files)
        self._nonce = ""
        self._trusted = False
        """The bus is the joined one, and was listed completely: only then VMs leave hold."""
        self._told_ready = self._looking = False
        self._relist: Callable[[], None] = lambda: None
        self._left = LeftStatuses(self._bus, self._node)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._liveness.run())
            group.create_task(self._left.run())
            async with (
                self._bus.subscribe(subjects.ready_all(self._node)) as ready,
                self._tools.hypervisor.events() as events,
                self._bus.node_watch(self._node, "agent", self._tools.gate) as watch,
                self._rpc.serve(
                    self._guests,
                    self._more_endpoints(watch.relist),
                    lambda: not self._told_ready,
                ),
            ):
                self._relist = watch.relist
                group.create_task(hear(ready, _part, self._ready))
                self._on_disk = dict(await self._tools.files.list())
                self._domains = {d.uid: d for d in await self._domains_when_up()}
                group.create_task(self._watched.hear(events))
                group.create_task(self._resync(watch.relist))
                group.create_task(self._watched.look(self._tools.settings.compare_s))
                group.create_task(self._watched.stay_healthy())
                if self._auditor is not None:
                    settings = self._tools.settings
                    group.create_task(
                        self._auditor.sweep(settings.resync_s, settings.orphan_grace_s)
                    )
                async for item in watch:
                    self._take(item)

    def _more_endpoints(self, relist: Callable[[], None]) -> list[Endpoint]:
        """Return the endpoints that concern all VMs of the agent."""
        rebuilding = Rebuilding(
            self._node,
            self._tools.files,
            self._guests,
            lambda: self._nonce if self._told_ready else None,
            relist,
        )
        commands = Commands(self._tools, self._guests, self._rpc.known).endpoint()
        more = [commands, *rebuilding.endpoints()]
        if self._auditor is not None:
            self._auditor.over(
                self._guests, lambda: self._trusted, self._marked, self._unread.__contains__
            )
            quarantine = QuarantineDesk(
                self._tools,
                self._auditor,
                self._guests,
                lambda uid: self._trusted and uid in self._absent,
                self._adopt_kept,
            )
            more += [self._auditor.endpoint(), quarantine.endpoint()]
        return more

    def _adopt_kept(self, record: VmRecord) -> None:
        """Create an actor for a VM from the quarantine: on hold until the bus has its record."""
        self._absent.add(record.uid)
        self._on_disk[record.uid] = record
        self._adopt(record, held=NO_RECORD)

    async def _domains_when_up(self) -> list[DomainFacts]:
        """Return libvirt's domains; wait for libvirt, without which nothing is known."""
        while True:
            try:
                return await self._tools.hypervisor.list_domains()
            except VirtbusError as error:
                log.warning("waiting for libvirt: %s", error, extra={"code": error.reason})
                self._liveness.say(str(error))
                await asyncio.sleep(1.0)

    # --- records --------------------------------------------------------------------------
    def _take(self, item: Entry | WatchMark) -> None:
        if item is WatchMark.RESET:
            self._listed, self._nonce = set(), ""
            self._marked.clear()
            self._unread.clear()
            self._wish.reset()
        elif item is WatchMark.SYNCED:
            self._synced()
        elif isinstance(item, Entry):
            self._tools.files.seen(item.time_ns)
            uid = item.key.rsplit(".", maxsplit=1)[-1]
            try:
                self._take_entry(uid, item)
            except VirtbusError as error:
                # The last good record stays in force (MSG-16).
                log.error("unreadable record: %s", error, extra={"code": "bad_record", "uid": uid})
                self._cannot_read(uid)

    def _take_entry(self, uid: str, entry: Entry) -> None:
        if uid == subjects.JOIN_KEY:
            if entry.kind is EntryKind.PUT:
                if self._trusted:  # an unreadable one does not make it another bus
                    self._nonce = self._tools.files.nonce()
                self._nonce = read_stored(JoinNonce, entry.key, entry.value).nonce
                self._trusted = self._trusted and self._nonce == self._tools.files.nonce()
            return
        if uid == subjects.WISH_KEY:
            self._wished(entry)
            return
        if uid in {subjects.HOST_KEY, subjects.HOSTS_KEY}:
            return  # for controllers and netd
        if entry.kind is EntryKind.PURGE:
            self._purged(uid, deleted=entry.why == DELETED)
            return
        record = read_record(entry.key, entry.value)
        if isinstance(record, VmRecord):
            self._take_record(uid, record)

    def _cannot_read(self, uid: str) -> None:
        """Handle an unreadable record: its VM is not absent, so the local copy stays in force."""
        if is_uid(uid):
            self._listed.add(uid)
            self._unread.add(uid)
            self._absent.discard(uid)

    def _take_record(self, uid: str, record: VmRecord) -> None:
        self._listed.add(uid)
        self._unread.discard(uid)
        self._absent.discard(uid)
        if record.epoch < self._tools.files.epoch(uid):
            log.warning(
                "rejected epoch %d: this node acted on a newer one",
                record.epoch,
                extra={"code": "stale_epoch", "uid": uid},
            )
            return
        self._marked.pop(uid, None)
        guest = self._guests.get(uid)
        known = guest.record if guest is not None else self._on_disk.get(uid)
        if known is not None and overtaken(record, known):
            extra = {"code": "stale_record", "uid": uid}
            log.warning("the bus has an older record than this host", extra=extra)
            record = known
        if guest is None and not record.ending and record.epoch <= self._tools.files.left(uid):
            # From a restored backup: nothing is left of it here, and an empty disk must not
            # replace it.
            log.warning(
                "rejected: it left this host already", extra={"code": "left_before", "uid": uid}
            )
        elif guest is None:
            self._adopt(record)
        elif guest.ends and record.epoch > guest.record.epoch:
            # it left, and returns: it starts as new once the old one is released
            self._next[uid] = record
            guest.post(Event.PURGED)
        elif uid in self._next:
            self._next[uid] = record
        else:
            guest.wanted(record)
            if self._trusted:
                self._let_go(guest)

    def _purged(self, uid: str, *, deleted: bool) -> None:
        """Handle a delete or a move: release the VM, and start nothing."""
        self._next.pop(uid, None)
        self._listed.discard(uid)
        self._unread.discard(uid)
        self._marked[uid] = deleted
        self._early.take(uid)
        guest = self._guests.get(uid)
        if (guest is None or guest.refused) and self._auditor is not None:
            self._auditor.sweep_soon()
        if guest is None:
            if uid not in self._on_disk:
                self._left.purged(uid)
        elif self._trusted:
            guest.end_purged(deleted=deleted)

    def _wished(self, entry: Entry) -> None:
        """Handle the desired state of this node: a fenced node starts nothing."""
        self._wish.take(entry)
        if self._trusted:
            self._wish.keep()
            for uid, guest in self._guests.items():
                if uid in self._listed:
                    self._let_go(guest)

    def _let_go(self, guest: Guest) -> None:
        """End the hold of the comparison; a fence may still apply."""
        if self._wish.fence and not guest.record.ending:
            guest.hold(self._wish.fence)
        else:
            guest.let_go()

    def _adopt(self, record: VmRecord, held: str = "") -> Guest:
        """Create an actor for a VM, and pass the existing domain to it."""
        assert self._group is not None  # noqa: S101  set before the watch begins
        facts = self._domains.pop(record.uid, None)
        known = record.uid in self._on_disk
        self._on_disk.pop(record.uid, None)
        guest = Guest(record, self._tools, resumed=known or facts is not None)
        guest.held = held or (self._wish.fence if self._trusted else COMPARING)
        self._guests[record.uid] = guest
        for part in self._early.take(record.uid):
            guest.part(part)
        why = "" if known or facts is not None else self._cannot_take(record)
        if why:
            extra = {"code": "refused", "uid": record.uid}
            log.info("refused %s: %s", record.name, why, extra=extra)
            guest.refuse(f"{self._node} {why}")
        else:
            first = found(facts, powered=record.powered and not record.ending)
            guest.begin(facts, first)
        self._group.create_task(self._live(guest))
        return guest

    def _cannot_take(self, record: VmRecord) -> str:
        """Return why a new VM is rejected: the controller's cache was outdated."""
        files = self._tools.files
        refused = files.refused(record.uid)
        if record.ending or files.epoch(record.uid) > refused:
            return ""
        # already rejected under this epoch; a controller may be reassigning it now
        if record.epoch <= refused:
            return "refused it before"
        held = [g.record for g in self._guests.values() if g.record.uid != record.uid]
        return self._wish.closed or no_room(record, held, self._liveness.host())

    async def _live(self, guest: Guest) -> None:
        uid = guest.record.uid
        try:
            await guest.run()
        finally:
            self._guests.pop(uid, None)
            self._absent.discard(uid)
        record = self._next.pop(uid, None)
        if record is not None:
            self._adopt(record)

    # --- after a complete list -----------------------------------------------------------------
    def _synced(self) -> None:
        """Handle the end of a list: adopt VMs of the host only, hold those that the bus lost."""
        self._trusted = self._same_bus()
        self._wish.synced()
        if self._trusted:
            self._wish.keep()
        for uid, record in list(self._on_disk.items()):
            if uid not in self._listed or uid in self._unread:
                self._adopt(record)
        for uid, guest in self._guests.items():
            if not self._trusted:
                self._absent.discard(uid)
                guest.hold(OTHER_BUS)
            elif uid in self._listed:
                self._let_go(guest)
            elif uid in self._marked:
                guest.end_purged(deleted=self._marked[uid])
            else:
                self._absent.add(uid)
                guest.hold(NO_RECORD)
        self._tell()

    def _tell(self) -> None:
        """Report the result of the comparison, and readiness to the supervisor."""
        count, self._liveness.held = len(self._guests), len(self._absent)
        if self._trusted and self._marked and self._auditor is not None:
            self._auditor.sweep_soon()
        if self._trusted:
            absent = sum(bool(guest.held) for guest in self._guests.values())
            if self._liveness.state is NodeState.RECOVERING:
                log.info("ready: %d VM(s)", count, extra={"code": "ready"})
            self._liveness.ready(f"{absent} VM(s) here have no record on the bus" if absent else "")
        else:
            self._liveness.recovering(f"{count} VM(s) held: {OTHER_BUS}" if count else OTHER_BUS)
        if not self._told_ready:
            self._told_ready = True
            self._up()

    def _same_bus(self) -> bool:
        """Return True if this bus is the one that the node joined; otherwise report it."""
        known = self._tools.files.nonce()
        if known == "" and self._nonce:
            self._tools.files.set_nonce(self._nonce)
            return True
        if known == self._nonce:
            return True
        found = "it has another join record" if self._nonce else "its list has no join record"
        log.error("%s (%s)", OTHER_BUS, found, extra={"code": "other_bus"})
        if self._nonce == "" and self._group is not None and not self._looking:
            self._looking = True
            self._group.create_task(self._look_again())
        return False

    async def _look_again(self) -> None:
        """List again if there is no join record: the server probably still reads its store."""
        await asyncio.sleep(LOOK_AGAIN_S)
        self._looking = False
        self._relist()

    async def _resync(self, relist: Callable[[], None]) -> None:
        """Compare bus and host completely, periodically."""
        while True:
            await asyncio.sleep(self._tools.settings.resync_s)
            relist()

    # --- host events ----------------------------------------------------------------------------
    def _ready(self, part: ImageReady | NetReady) -> None:
        guest = self._guests.get(part.uid)
        if guest is not None:
            guest.part(part)
        elif part.uid not in self._marked:
            self._early.add(part)
