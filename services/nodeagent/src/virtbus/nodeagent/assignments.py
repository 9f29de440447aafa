"""Keeps an actor for each VM of the node.

The tables in `core.uid_table` decide the reaction to each record, purge and list of the bus.
"""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.owners import node_of
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.capacity_check import no_room, promised_bytes
from virtbus.nodeagent.core.ports import DomainFacts, HostFacts
from virtbus.nodeagent.core.uid_table import (
    AFTER_LIST,
    PURGED,
    REACTIONS,
    Holding,
    Listings,
    Reaction,
    Word,
)
from virtbus.nodeagent.early_events import EarlyEvents
from virtbus.nodeagent.layer_keeper import LayerKeeper
from virtbus.nodeagent.live_backups import LiveBackups
from virtbus.nodeagent.live_merges import LiveMerges
from virtbus.nodeagent.live_reads import LiveReads
from virtbus.nodeagent.live_snapshots import LiveSnapshots
from virtbus.nodeagent.node_spec import OTHER_BUS, JoinCheck, NodeSpecFollower
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.nodeagent.status_gc import StatusCollector
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.intent import MOVED, overtaken
from virtbus.nodeagent.vm.observation import found
from virtbus.schemas import subjects
from virtbus.schemas.equal_domains import EqualDomains
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import is_uid
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.records import DELETED, of_node_group, of_operation, read_record
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

_OF_OTHERS = frozenset({subjects.HOST_KEY, subjects.HOSTS_KEY, subjects.PEER_KEY})
"""Keys below the node for other services. This module ignores them."""

LOOK_AGAIN_S = 2.0
COMPARING = "the agent compares host and records; nothing is started or ended yet"
NO_RECORD = (
    "the bus has no record of this VM: nothing is started or ended until a person decides; "
    "`virtbus bus rebuild` or `virtbus node quarantine adopt` writes the record back from this "
    "host, `virtbus node quarantine keep` ends the VM and keeps its disks"
)


class Assignments:
    """The VMs of one node, each with its actor."""

    def __init__(self, tools: AgentPorts, host: Callable[[], HostFacts]) -> None:
        self._tools = tools
        self._host = host
        self.actors: dict[str, VmActor] = {}
        self.on_disk: dict[str, VmRecord] = {}
        self.domains: dict[str, DomainFacts] = {}
        self.listings = Listings()
        self.join = JoinCheck(tools.files)
        self.listed = False
        """True after the first complete list since the agent's start."""
        self.layers = LayerKeeper(tools)
        self.operations = OperationRunner(
            tools.bus,
            tools.settings.node,
            lambda: [actor.vm for actor in self.actors.values()],
            lambda: self.listed and self.join.trusted,
            LiveWork(
                LiveSnapshots(tools, self.layers.wake),
                LiveBackups(tools),
                LiveReads(tools),
                LiveMerges(tools),
            ),
            tools.disk_work,
        )
        self.left = StatusCollector(tools.bus, tools.settings.node)
        self.sweep_due = asyncio.Event()
        """Set when the end of a purged record may have left orphans on this host."""
        self.group: asyncio.TaskGroup | None = None
        self.relist: Callable[[], None] = lambda: None
        self._next: dict[str, VmRecord] = {}
        self._early = EarlyEvents()
        self._domains = EqualDomains()
        self._node_spec = NodeSpecFollower(tools.files)
        self._looking = False
        self._promised: dict[str, int] = {}
        """Guest memory of each VM in bytes, by uid. `_cannot_take` adds these up."""
        self._of_record: dict[Reaction, Callable[[str, VmRecord], None]] = {
            "adopt": lambda _, record: self._adopt(record),
            "reject": self._reject,
            "update": self._update,
            "queue": self._queue,
            "replace next": self._next.__setitem__,
        }
        self._of_uid: dict[Reaction, Callable[[str], object]] = {
            "forget next": self._next.pop,
            "end": self._end,
            "sweep": lambda _: self.sweep_due.set(),
            "purge status": self.left.purged,
            "resume": lambda uid: self._resume(self.actors[uid]),
            "hold": lambda uid: self.actors[uid].hold(NO_RECORD),
        }

    def _holding(self, uid: str) -> Holding:
        if uid in self.actors:
            return "actor and next" if uid in self._next else "actor"
        return "on disk" if uid in self.on_disk else "nothing"

    # --- the list --------------------------------------------------------------------------------
    def take(self, item: Entry | WatchMark) -> None:
        if item is WatchMark.RESET:
            self.join.nonce = ""
            self.listings.begin()
            self.operations.list_begins()
            self._node_spec.reset()
        elif item is WatchMark.SYNCED:
            self._synced()
        elif isinstance(item, Entry):
            self._tools.files.seen(item.time_ns)
            uid = item.key.rsplit(".", maxsplit=1)[-1]
            try:
                self._take_entry(uid, item)
            except VirtbusError as error:
                # The last readable record stays in force (MSG-16).
                log.error("unreadable record: %s", error, extra={"code": "bad_record", "uid": uid})
                if is_uid(uid) and not of_operation(item.key):
                    self.listings.hear(uid, "unreadable")

    def _take_entry(self, uid: str, entry: Entry) -> None:
        if of_operation(entry.key):
            self.operations.take(entry)
        elif uid == subjects.JOIN_KEY:
            self.join.take(entry)
        elif uid == subjects.NODE_SPEC_KEY:
            self._take_node_spec(entry)
        elif uid in _OF_OTHERS or of_node_group(entry.key):
            return
        elif entry.kind is EntryKind.PURGE:
            self._take_purge(uid, "deleted" if entry.why == DELETED else "moved")
        else:
            record = read_record(entry.key, entry.value)
            if isinstance(record, VmRecord):
                self._take_record(uid, self._domains.shared(record))

    def _take_node_spec(self, entry: Entry) -> None:
        """A fenced node starts nothing."""
        self._node_spec.take(entry)
        if self.join.trusted:
            self._node_spec.keep()
            for uid, actor in self.actors.items():
                if AFTER_LIST.get(self.listings[uid]) == "resume":
                    self._resume(actor)

    def _take_record(self, uid: str, record: VmRecord) -> None:
        if record.epoch < self._tools.files.epoch(uid):
            self.listings.hear(uid, "stale")
            extra = {"code": "stale_epoch", "uid": uid}
            log.warning(
                "rejected epoch %d: this node acted on a newer one", record.epoch, extra=extra
            )
            for reaction in REACTIONS.get((self._holding(uid), "stale"), ()):
                self._of_record[reaction](uid, self.on_disk[uid])
            return
        self.listings.hear(uid, "record")
        actor = self.actors.get(uid)
        host_record = actor.vm.record if actor is not None else self.on_disk.get(uid)
        if host_record is not None and overtaken(record, host_record):
            extra = {"code": "stale_record", "uid": uid}
            log.warning("the bus has an older record than this host", extra=extra)
            record = host_record
        for reaction in REACTIONS[self._holding(uid), self._word(record, actor)]:
            self._of_record[reaction](uid, record)

    def _word(self, record: VmRecord, actor: VmActor | None) -> Word:
        if actor is None:
            left = not record.ending and record.epoch <= self._tools.files.left(record.uid)
            return "left" if left else "record"
        successor = actor.vm.ends and record.epoch > actor.vm.record.epoch
        return "successor" if successor else "record"

    def _take_purge(self, uid: str, purge: Word) -> None:
        """Handle the purge of a record after a delete or a move. A purge never starts a VM.

        An actor ends its VM if the bus is the joined one.
        """
        self.listings.hear(uid, purge)
        self._early.take(uid)
        for reaction in REACTIONS[self._holding(uid), purge]:
            self._of_uid[reaction](uid)

    def _synced(self) -> None:
        """Handle the end of a list.

        Each VM on this host's disk gets an actor, even without a readable record in the list. A VM
        without a record on the joined bus is held. If the list is of another bus, all VMs are held.
        """
        trusted = self.join.synced()
        self._node_spec.synced()
        if trusted:
            self._node_spec.keep()
        for uid, record in list(self.on_disk.items()):
            if self.listings[uid] != "listed":
                self._adopt(record)
        for uid, actor in self.actors.items():
            state = self.listings.hear(uid, "complete" if trusted else "other bus")
            if trusted:
                self._of_uid[AFTER_LIST[state]](uid)
            else:
                actor.hold(OTHER_BUS)
        if trusted and self.listings.count(PURGED):
            self.sweep_due.set()
        self.operations.list_ends()
        if not (trusted or self.join.nonce or self._looking or self.group is None):
            self._looking = True
            self.group.create_task(self._look_again())
        self.listed = True

    async def _look_again(self) -> None:
        """List again after 2 s: the bus lacks a join record, or its server still loads data."""
        await asyncio.sleep(LOOK_AGAIN_S)
        self._looking = False
        self.relist()

    # --- reactions -------------------------------------------------------------------------------
    def _reject(self, uid: str, _: VmRecord) -> None:
        """Start nothing. The VM's disk has left this host, and no new disk may take its place."""
        extra = {"code": "left_before", "uid": uid}
        log.warning("rejected: it left this host already", extra=extra)

    def _update(self, uid: str, record: VmRecord) -> None:
        self.actors[uid].set_desired(record)
        self._promised[uid] = promised_bytes(self.actors[uid].vm.record)
        if self.join.trusted:
            self._resume(self.actors[uid])

    def _queue(self, uid: str, record: VmRecord) -> None:
        """Release the VM's previous copy, and then start the VM from `record`."""
        self._next[uid] = record
        self.actors[uid].post("purged")

    def _end(self, uid: str) -> None:
        actor = self.actors[uid]
        if actor.vm.reasons.refused:
            self.sweep_due.set()
        if self.join.trusted:
            actor.terminate(MOVED, at_once=True, deleted=bool(self.listings.purged(uid)))

    def _resume(self, actor: VmActor) -> None:
        """End the hold of an actor. On a fenced node, only VMs that end are resumed."""
        if self._node_spec.fence and not actor.vm.record.ending:
            actor.hold(self._node_spec.fence)
        else:
            actor.resume()

    def restore(self, record: VmRecord) -> None:
        """Create an actor for a VM from the quarantine.

        The VM is held until the bus has its record.
        """
        self.listings.hear(record.uid, "restored")
        self.on_disk[record.uid] = record
        self._adopt(record, held=NO_RECORD)

    def _adopt(self, record: VmRecord, held: str = "") -> None:
        """Create a VM's actor, and pass it the VM's domain. Refuse a new VM that does not fit."""
        assert self.group is not None  # noqa: S101  set before the watch begins
        facts = self.domains.pop(record.uid, None)
        was_on_disk = self.on_disk.pop(record.uid, None) is not None
        held = held or (self._node_spec.fence if self.join.trusted else COMPARING)
        resumed = was_on_disk or facts is not None
        actor = VmActor(record, self._tools, resumed=resumed, held=held)
        self.actors[record.uid] = actor
        for part in self._early.take(record.uid):
            actor.on_dependency(part)
        why = "" if resumed else self._cannot_take(record)
        if why:
            extra = {"code": "refused", "uid": record.uid}
            log.info("refused %s: %s", record.name, why, extra=extra)
            actor.refuse(f"{self._tools.settings.node} {why}")
        else:
            actor.begin(facts, found(facts, powered=record.powered and not record.ending))
        self._promised[record.uid] = promised_bytes(record)
        self.group.create_task(self._live(actor))

    def _cannot_take(self, record: VmRecord) -> str:
        """Return the reason to refuse a VM that is new to this node; empty to take the VM.

        Controllers place VMs by caches, which may be outdated.
        """
        files = self._tools.files
        refused = files.refused(record.uid)
        if record.ending or files.epoch(record.uid) > refused:
            return ""
        # refused before under this epoch; a controller may be reassigning the VM now
        if record.epoch <= refused:
            return "refused it before"
        if node_of(record.owner):  # kubelet decides about the pods of its node
            return self._node_spec.fence
        return self._node_spec.closed or no_room(record, sum(self._promised.values()), self._host())

    async def _live(self, actor: VmActor) -> None:
        uid = actor.vm.record.uid
        try:
            await actor.run()
        finally:
            self.actors.pop(uid, None)
            self._promised.pop(uid, None)
            self.listings.hear(uid, "gone")
        record = self._next.pop(uid, None)
        if record is not None:
            self._adopt(record)

    def ready(self, part: ImageReady | NetReady) -> None:
        actor = self.actors.get(part.uid)
        if actor is not None:
            actor.on_dependency(part)
        elif self.listings.purged(part.uid) is None:
            self._early.add(part)
