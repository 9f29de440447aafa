"""Keeps an actor for each VM of the node, as the bus' list and the tables of a uid say."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.ports import Entry, EntryKind, WatchMark
from virtbus.nodeagent.core.ports import DomainFacts, HostFacts
from virtbus.nodeagent.core.room import no_room
from virtbus.nodeagent.core.uid_table import (
    ABSENT,
    AFTER_LIST,
    FROM_ANY,
    LISTINGS,
    PURGED,
    REACTIONS,
    Holding,
    Listing,
    Reaction,
    Word,
)
from virtbus.nodeagent.early_parts import EarlyParts
from virtbus.nodeagent.node_wish import WishHere
from virtbus.nodeagent.tools import Tools
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.intent import overtaken
from virtbus.nodeagent.vm.machine import Event
from virtbus.nodeagent.vm.observation import found
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import is_uid
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


class Assignments:
    """The VMs of one node: an actor for each, as the tables say."""

    def __init__(
        self,
        tools: Tools,
        host: Callable[[], HostFacts],
        *,
        sweep_soon: Callable[[], None],
        purge_status: Callable[[str], None],
        synced: Callable[[], None],
    ) -> None:
        """`purge_status` purges a status that was left; `synced` is called after each list."""
        self._tools = tools
        self._node = tools.settings.node
        self._host = host
        self._synced_next = synced
        self.actors: dict[str, VmActor] = {}
        self.on_disk: dict[str, VmRecord] = {}
        self.domains: dict[str, DomainFacts] = {}
        self._next: dict[str, VmRecord] = {}
        self._listings: dict[str, Listing] = {}
        self._early = EarlyParts(lambda: asyncio.get_running_loop().time())
        self._wish = WishHere(tools.files)
        self.nonce = ""
        self.trusted = False
        """The bus is the joined one, and was listed completely: only then VMs leave hold."""
        self._looking = False
        self.group: asyncio.TaskGroup | None = None
        self.relist: Callable[[], None] = lambda: None
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
            "sweep": lambda _: sweep_soon(),
            "purge status": purge_status,
            "resume": lambda uid: self._resume(self.actors[uid]),
            "hold": lambda uid: self.actors[uid].hold(NO_RECORD),
        }
        self._sweep_soon = sweep_soon

    # --- state of a uid --------------------------------------------------------------------------
    def listing(self, uid: str) -> Listing:
        """Return the last word of the bus on a uid."""
        return self._listings.get(uid, "unknown")

    def absent(self, uid: str) -> bool:
        """Return True for a VM on this host that the joined bus does not have."""
        return self.listing(uid) in ABSENT

    def purged(self, uid: str) -> bool | None:
        """Return True if a delete purged the record, False if a move did, None if it was not."""
        return PURGED.get(self.listing(uid))

    def any_purged(self) -> bool:
        """Return True if a record was purged since the list began."""
        return any(state in PURGED for state in self._listings.values())

    def absences(self) -> int:
        """Return the number of VMs that the bus does not have."""
        return sum(state in ABSENT for state in self._listings.values())

    def _hear(self, uid: str, word: Word) -> Listing:
        before = self.listing(uid)
        state = self._listings[uid] = LISTINGS.get((before, word), FROM_ANY.get(word, before))
        if state == "unknown":
            del self._listings[uid]
        return state

    def _holding(self, uid: str) -> Holding:
        if uid in self.actors:
            return "actor and next" if uid in self._next else "actor"
        return "on disk" if uid in self.on_disk else "nothing"

    # --- the list --------------------------------------------------------------------------------
    def take(self, item: Entry | WatchMark) -> None:
        """Handle an item of the watch on this node's records."""
        if item is WatchMark.RESET:
            self.nonce = ""
            for uid in list(self._listings):
                self._hear(uid, "begin")
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
                if is_uid(uid):
                    self._hear(uid, "unreadable")

    def _take_entry(self, uid: str, entry: Entry) -> None:
        if uid == subjects.JOIN_KEY:
            self._take_nonce(entry)
        elif uid == subjects.WISH_KEY:
            self._take_wish(entry)
        elif uid in {subjects.HOST_KEY, subjects.HOSTS_KEY}:
            return  # for controllers and netd
        elif entry.kind is EntryKind.PURGE:
            self._take_purge(uid, "deleted" if entry.why == DELETED else "moved")
        else:
            record = read_record(entry.key, entry.value)
            if isinstance(record, VmRecord):
                self._take_record(uid, record)

    def _take_nonce(self, entry: Entry) -> None:
        if entry.kind is EntryKind.PUT:
            if self.trusted:  # an unreadable one does not make it another bus
                self.nonce = self._tools.files.nonce()
            self.nonce = read_stored(JoinNonce, entry.key, entry.value).nonce
            self.trusted = self.trusted and self.nonce == self._tools.files.nonce()

    def _take_wish(self, entry: Entry) -> None:
        """Handle the desired state of this node: a fenced node starts nothing."""
        self._wish.take(entry)
        if self.trusted:
            self._wish.keep()
            for uid, actor in self.actors.items():
                if AFTER_LIST.get(self.listing(uid)) == "resume":
                    self._resume(actor)

    def _take_record(self, uid: str, record: VmRecord) -> None:
        if record.epoch < self._tools.files.epoch(uid):
            self._hear(uid, "stale")
            extra = {"code": "stale_epoch", "uid": uid}
            log.warning(
                "rejected epoch %d: this node acted on a newer one", record.epoch, extra=extra
            )
            return
        self._hear(uid, "record")
        actor = self.actors.get(uid)
        known = actor.record if actor is not None else self.on_disk.get(uid)
        if known is not None and overtaken(record, known):
            extra = {"code": "stale_record", "uid": uid}
            log.warning("the bus has an older record than this host", extra=extra)
            record = known
        for reaction in REACTIONS[self._holding(uid), self._word(record, actor)]:
            self._of_record[reaction](uid, record)

    def _word(self, record: VmRecord, actor: VmActor | None) -> Word:
        if actor is None:
            left = not record.ending and record.epoch <= self._tools.files.left(record.uid)
            return "left" if left else "record"
        successor = actor.vm.ends and record.epoch > actor.record.epoch
        return "successor" if successor else "record"

    def _take_purge(self, uid: str, purge: Word) -> None:
        """Handle a delete or a move: release the VM, and start nothing."""
        self._hear(uid, purge)
        self._early.take(uid)
        for reaction in REACTIONS[self._holding(uid), purge]:
            self._of_uid[reaction](uid)

    def _synced(self) -> None:
        """Handle the end of a list: adopt VMs of the host only, hold those that the bus lost."""
        self.trusted = self._same_bus()
        self._wish.synced()
        if self.trusted:
            self._wish.keep()
        for uid, record in list(self.on_disk.items()):
            if self.listing(uid) != "listed":
                self._adopt(record)
        for uid, actor in self.actors.items():
            state = self._hear(uid, "complete" if self.trusted else "other bus")
            if self.trusted:
                self._of_uid[AFTER_LIST[state]](uid)
            else:
                actor.hold(OTHER_BUS)
        self._synced_next()

    def _same_bus(self) -> bool:
        """Return True if this bus is the one that the node joined; otherwise report it."""
        known = self._tools.files.nonce()
        if known == "" and self.nonce:
            self._tools.files.set_nonce(self.nonce)
            return True
        if known == self.nonce:
            return True
        why = "it has another join record" if self.nonce else "its list has no join record"
        log.error("%s (%s)", OTHER_BUS, why, extra={"code": "other_bus"})
        if self.nonce == "" and self.group is not None and not self._looking:
            self._looking = True
            self.group.create_task(self._look_again())
        return False

    async def _look_again(self) -> None:
        """List again if there is no join record: the server probably still reads its store."""
        await asyncio.sleep(LOOK_AGAIN_S)
        self._looking = False
        self.relist()

    # --- reactions -------------------------------------------------------------------------------
    def _reject(self, uid: str, _: VmRecord) -> None:
        """Start nothing: an empty disk must not replace the one that left."""
        extra = {"code": "left_before", "uid": uid}
        log.warning("rejected: it left this host already", extra=extra)

    def _update(self, uid: str, record: VmRecord) -> None:
        self.actors[uid].set_desired(record)
        if self.trusted:
            self._resume(self.actors[uid])

    def _queue(self, uid: str, record: VmRecord) -> None:
        """Start it as new once the old one is released."""
        self._next[uid] = record
        self.actors[uid].post(Event.PURGED)

    def _end(self, uid: str) -> None:
        actor = self.actors[uid]
        if actor.vm.reasons.refused:
            self._sweep_soon()
        if self.trusted:
            actor.terminate_purged(deleted=bool(self.purged(uid)))

    def _resume(self, actor: VmActor) -> None:
        """End the hold of the comparison; a fence may still apply."""
        if self._wish.fence and not actor.record.ending:
            actor.hold(self._wish.fence)
        else:
            actor.resume()

    def restore(self, record: VmRecord) -> None:
        """Create an actor for a VM from the quarantine: on hold until the bus has its record."""
        self._hear(record.uid, "restored")
        self.on_disk[record.uid] = record
        self._adopt(record, held=NO_RECORD)

    def _adopt(self, record: VmRecord, held: str = "") -> None:
        """Create an actor for a VM, and pass the existing domain to it."""
        assert self.group is not None  # noqa: S101  set before the watch begins
        facts = self.domains.pop(record.uid, None)
        known = self.on_disk.pop(record.uid, None) is not None
        held = held or (self._wish.fence if self.trusted else COMPARING)
        resumed = known or facts is not None
        actor = VmActor(record, self._tools, resumed=resumed, held=held)
        self.actors[record.uid] = actor
        for part in self._early.take(record.uid):
            actor.on_dependency(part)
        why = "" if resumed else self._cannot_take(record)
        if why:
            extra = {"code": "refused", "uid": record.uid}
            log.info("refused %s: %s", record.name, why, extra=extra)
            actor.refuse(f"{self._node} {why}")
        else:
            actor.begin(facts, found(facts, powered=record.powered and not record.ending))
        self.group.create_task(self._live(actor))

    def _cannot_take(self, record: VmRecord) -> str:
        """Return why a new VM is rejected: the controller's cache was outdated."""
        files = self._tools.files
        refused = files.refused(record.uid)
        if record.ending or files.epoch(record.uid) > refused:
            return ""
        # already rejected under this epoch; a controller may be reassigning it now
        if record.epoch <= refused:
            return "refused it before"
        others = [one.record for uid, one in self.actors.items() if uid != record.uid]
        return self._wish.closed or no_room(record, others, self._host())

    async def _live(self, actor: VmActor) -> None:
        uid = actor.record.uid
        try:
            await actor.run()
        finally:
            self.actors.pop(uid, None)
            self._hear(uid, "gone")
        record = self._next.pop(uid, None)
        if record is not None:
            self._adopt(record)

    def ready(self, part: ImageReady | NetReady) -> None:
        """Handle a ready event of imaged or netd."""
        actor = self.actors.get(part.uid)
        if actor is not None:
            actor.on_dependency(part)
        elif self.purged(part.uid) is None:
            self._early.add(part)
