"""Claim, then commit: the writes that make, change and end a VM's record (ADR 0003)."""

import hashlib
import logging
from dataclasses import dataclass

from virtbus.bus.ports import Bus, BusError, ConflictError, Entry, EntryKind, Write
from virtbus.controller.core.claims import (
    CommitStep,
    NameStep,
    bears,
    commit_step,
    name_step,
    name_taken,
    standing,
    uid_taken,
)
from virtbus.controller.core.fleet import Fleet, Held
from virtbus.controller.core.rebuilding import Known
from virtbus.controller.core.secret_inputs import secret_bytes
from virtbus.controller.core.vm_keys import read_vm_key
from virtbus.controller.edge.reservations import NodeFullError, Reservations
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeWish
from virtbus.schemas.records import DELETED
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord, VmSecrets
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""Each lost race is another writer's progress; eight in a row is a storm to be told of."""
MARKER_TTL_S = 86_400.0
"""How long a deleted uid is remembered, so that a late create cannot bring it back (I3)."""


Fenced = tuple[NodeWish, int]
"""The wish by which a node is off for sure, and its revision."""


def guarded(fence: Fenced | None, *writes: Write) -> list[Write]:
    """The writes as a batch that fails once `fence` does not stand any more at its revision.

    A node that was unfenced meanwhile keeps its VMs. The wish comes right before the writes.
    """
    if fence is None:
        return list(writes)
    wish, revision = fence
    return [Write(subjects.node_wish(wish.node), encode(wish), revision), *writes]


@dataclass(frozen=True, slots=True)
class Committed:
    """Where the record stands; `created` False: it was there already, the same."""

    held: Held
    created: bool


class Commits:
    """The controller's writes to `$KV.vm` and `$KV.sec`."""

    def __init__(self, bus: Bus, fleet: Fleet | None = None) -> None:
        self._bus = bus
        self._reservations = Reservations(bus, fleet or Fleet())

    async def create(self, record: VmRecord, secrets: VmSecrets | None) -> Committed:
        """Claim the name, put the secrets, commit the record. Safe to repeat with the same uid.

        Raises:
            VirtbusError: 409 name or uid taken, 410 uid deleted, 503 too many lost races.
            NodeFullError: a strict VM, and its node has no room by now.
            BusError: nothing happened, or the outcome is unknown.
        """
        body = secret_bytes(secrets) if secrets is not None else None
        if body is not None:
            digest = hashlib.sha256(body).hexdigest()
            record = record.model_copy(update={"sec_digest": digest})
        await self._claim(record)
        if body is not None:
            await self._put_secrets(record, body)
        try:
            return await self._commit(record, body)
        except (VirtbusError, NodeFullError):
            await self._withdraw(record)
            raise

    async def _put_secrets(self, record: VmRecord, body: bytes) -> None:
        """Store the secrets, under a revision that nobody read yet. Those of a VM that exists stay.

        Who takes others away buries the uid between reading and replacing them: so whoever put
        them cannot commit a record that has ours, and comes here again.
        """
        key = subjects.vm_secret(record.node, record.uid)
        there: Entry | None = None
        for _ in range(ATTEMPTS):
            try:
                if there is not None:
                    others = there.kind is EntryKind.PUT and there.value != body
                    if not await self.buried(record.uid, bury=others):
                        return  # the commit finds what is there, too, and says what that means
                await self._bus.put(key, body, expect=there.revision if there else 0)
            except ConflictError:
                there = await self._bus.get(key)
            else:
                return
        raise _storm()

    async def buried(self, uid: str, *, bury: bool = True) -> bool:
        """True where `uid` has no record and was not deleted; with `bury` no commit is under way.

        ConflictError when one was.
        """
        last = await self._bus.get(subjects.vm_anywhere(uid))
        if _purged(last) or isinstance(_message(last), VmRecord):
            return False
        if bury:
            await self._bury(uid, last)
        return True

    # --- the name -------------------------------------------------------------------------
    async def _claim(self, record: VmRecord, *, anew: bool = False) -> None:
        """Hold the name for the record's uid; with `anew` under a revision that nobody read yet."""
        key = subjects.name_claim(record.namespace, record.name)
        body = encode(NameClaim(uid=record.uid))
        for _ in range(ATTEMPTS):
            try:
                await self._bus.put(key, body, expect=0)
            except ConflictError:
                if not await self._take_over(key, body, record, anew=anew):
                    continue
            return
        raise _storm()

    async def _take_over(self, key: str, body: bytes, record: VmRecord, *, anew: bool) -> bool:
        """One try at a claim that stands; False when somebody else moved meanwhile."""
        claim = await self._bus.get(key)
        if claim is None:
            return False
        try:
            if claim.kind is not EntryKind.PURGE:
                holder = read(NameClaim, claim.value).uid
                if holder != record.uid:
                    await self._step_over(holder, record)
                elif not anew:
                    return True
            await self._bus.put(key, body, expect=claim.revision)
        except ConflictError:
            return False
        return True

    async def _step_over(self, holder: str, record: VmRecord) -> None:
        """Make sure that `holder` can never commit, or raise 409."""
        last = await self._bus.get(subjects.vm_anywhere(holder))
        message = _message(last)
        match name_step(standing(message, purged=_purged(last)), message, record):
            case NameStep.REFUSE:
                raise name_taken(record, message)
            case NameStep.BURY_THEN_TAKE:
                await self._bury(holder, last)
            case NameStep.TAKE:
                pass

    async def _bury(self, uid: str, last: Entry | None) -> None:
        """A fresh tombstone over what was read of the uid; ConflictError when that moved."""
        await self._bus.put(
            subjects.vm_record(UNPLACED, uid),
            encode(Tombstone(uid=uid)),
            expect=last.revision if last else 0,
            expect_over=subjects.vm_anywhere(uid),
            ttl_s=MARKER_TTL_S,
        )

    # --- the record -----------------------------------------------------------------------
    async def _commit(self, record: VmRecord, body: bytes | None) -> Committed:
        key, anywhere = (
            subjects.vm_record(record.node, record.uid),
            subjects.vm_anywhere(record.uid),
        )
        first = Write(key, encode(record), expect=0, expect_over=anywhere)
        for _ in range(ATTEMPTS):
            try:
                revision = await self._reservations.write(None, record, [first])
                return Committed(Held(record, revision), created=True)
            except ConflictError:
                done = await self._settle(record, body, await self._bus.get(anywhere))
            except NodeFullError:  # of itself, perhaps: then it is there already
                last = await self._bus.get(anywhere)
                if not isinstance(_message(last), VmRecord):
                    raise
                done = await self._settle(record, body, last)
            if done is not None:
                return done
        raise _storm()

    async def _settle(
        self, record: VmRecord, body: bytes | None, last: Entry | None
    ) -> Committed | None:
        """One try at a commit that met an earlier message; None to try again."""
        message = _message(last)
        step = commit_step(standing(message, purged=_purged(last)), message, record)
        if step is CommitStep.SAME and last is not None and isinstance(message, VmRecord):
            return Committed(Held(message, last.revision), created=False)
        if step is CommitStep.MOVE and last is not None:
            # Who buried us goes on to take the claim over at the revision that it read before.
            # A new revision, made after we saw the tombstone, lets only one of us succeed.
            await self._claim(record, anew=True)
            if body is not None:  # a sweep, or another create, may have taken them away
                await self._put_secrets(record, body)
            try:
                revision = await self._unbury(record, last)
            except ConflictError:
                return None
            return Committed(Held(record, revision), created=True)
        if step is CommitStep.REFUSE:
            raise uid_taken(record, message)
        if step is CommitStep.ENDING:
            message_text = f"{record.name} is being deleted; wait for vm.deleted, then create anew"
            raise VirtbusError(Code.CONFLICT, "deleting", message_text)
        if step is CommitStep.GONE:
            message_text = f"uid {record.uid} was deleted; create the VM under a new uid"
            raise VirtbusError(Code.GONE, "deleted", message_text)
        return None

    async def _unbury(self, record: VmRecord, tombstone: Entry) -> int:
        """Put the record where its tombstone stands, or move from there to its node."""
        key, body = subjects.vm_record(record.node, record.uid), encode(record)
        if key == tombstone.key:
            anywhere = subjects.vm_anywhere(record.uid)
            over = Write(key, body, expect=tombstone.revision, expect_over=anywhere)
            return await self._reservations.write(None, record, [over])
        move = [
            Write(tombstone.key, None, expect=tombstone.revision, ttl_s=MARKER_TTL_S),
            Write(key, body, expect=0),
        ]
        return await self._reservations.write(None, record, move)

    async def _withdraw(self, record: VmRecord) -> None:
        """Give back what a refused create took, where nobody can commit it any more."""
        try:
            last = await self._bus.get(subjects.vm_anywhere(record.uid))
            there = _message(last)
            other = isinstance(there, VmRecord) and not bears(there, record.namespace, record.name)
            if other or _purged(last):
                key = subjects.name_claim(record.namespace, record.name)
                await self.release_name(key, record.uid)
            stray = isinstance(there, VmRecord) and (
                there.node != record.node or there.sec_digest is None
            )
            if record.sec_digest is not None and (stray or _purged(last)):
                key = subjects.vm_secret(record.node, record.uid)
                await self._bus.purge(key, marker_ttl_s=MARKER_TTL_S)
        except BusError as error:
            _left(error, record.uid)

    async def replace(self, held: Held, record: VmRecord) -> Held:
        """CAS the record over the revision that was read; raises ConflictError when it moved.

        NodeFullError where a strict VM grows beyond what its node has.
        """
        key = subjects.vm_record(held.record.node, record.uid)
        write = Write(key, encode(record), expect=held.revision)
        return Held(record, await self._reservations.write(held.record, record, [write]))

    async def known(self, uid: str) -> Known:
        """What the leader has of a uid, whatever it is."""
        last = await self._bus.get(subjects.vm_anywhere(uid))
        message = _message(last)
        return Known(
            standing(message, purged=_purged(last)),
            message if isinstance(message, VmRecord) else None,
            last.revision if last else 0,
            last.key.split(".")[2] if last else "",
        )

    async def write_back(self, record: VmRecord, known: Known) -> None:
        """Put a host's newer copy in the place of the bus's, with its name; CAS over `known`.

        Raises:
            VirtbusError: another VM has the name, or the uid is gone for good.
            ConflictError: the record moved meanwhile.
        """
        if known.record is None:
            await self.create(record, None)
            return
        await self._claim(record)
        key, old = subjects.vm_record(record.node, record.uid), known.record
        if known.node == record.node:
            write = Write(key, encode(record), expect=known.revision)
            await self._reservations.write(old, record, [write])
            return
        secret = await self._bus.get(subjects.vm_secret(known.node, record.uid))
        if secret is not None and secret.kind is EntryKind.PUT and old.sec_digest:
            await self._bus.put(subjects.vm_secret(record.node, record.uid), secret.value)
        former = subjects.vm_record(known.node, record.uid)
        move = [Write(former, None, expect=known.revision), Write(key, encode(record), expect=0)]
        await self._reservations.write(old, record, move)

    async def ensure_name(self, record: VmRecord) -> None:
        """Hold the name for a record that stands; raises as `create`."""
        await self._claim(record)

    async def latest(self, uid: str) -> Held | None:
        """The record as the leader has it."""
        last = await self._bus.get(subjects.vm_anywhere(uid))
        message = _message(last)
        if last is None or not isinstance(message, VmRecord):
            return None
        return Held(message, last.revision)

    async def holder(self, namespace: str, name: str) -> str | None:
        """The uid that holds a name, from the leader."""
        claim = await self._bus.get(subjects.name_claim(namespace, name))
        if claim is None or claim.kind is EntryKind.PURGE:
            return None
        return read(NameClaim, claim.value).uid

    # --- the end --------------------------------------------------------------------------
    async def finish(self, held: Held, *, fence: Fenced | None = None) -> int:
        """Purge secrets, record, then claim: a crash in between leaves only what a sweep finds.

        `fence` as in `guarded`. Returns the record's last revision.
        """
        record = held.record
        if record.sec_digest is not None:
            await self._bus.purge(
                subjects.vm_secret(record.node, record.uid), marker_ttl_s=MARKER_TTL_S
            )
        key = subjects.vm_record(record.node, record.uid)
        end = Write(key, None, held.revision, ttl_s=MARKER_TTL_S, why=DELETED)
        revision = await self._reservations.write(record, None, guarded(fence, end))
        try:
            name = subjects.name_claim(record.namespace, record.name)
            await self.release_name(name, record.uid)
        except BusError as error:
            _left(error, record.uid)
        return revision

    async def purged(self, uid: str) -> bool:
        """True for a VM that is deleted for sure, not merely unknown to this bus."""
        return _purged(await self._bus.get(subjects.vm_anywhere(uid)))

    async def release_name(self, key: str, uid: str) -> bool:
        """Purge a claim that `uid` holds; False when another holds it by now."""
        claim = await self._bus.get(key)
        if (
            claim is None
            or claim.kind is EntryKind.PURGE
            or read(NameClaim, claim.value).uid != uid
        ):
            return False
        await self._bus.purge(key, expect=claim.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def free_name(self, key: str) -> bool:
        """Purge a claim whose holder has no record of that name; False if it has, or moved.

        The claim's revision is read first, and the tombstone is a fresh one: a create of the
        buried uid that comes back renews the claim, and then this purge fails (ADR 0003).
        """
        claim = await self._bus.get(key)
        if claim is None or claim.kind is EntryKind.PURGE:
            return False
        holder = read(NameClaim, claim.value).uid
        last = await self._bus.get(subjects.vm_anywhere(holder))
        message = _message(last)
        if isinstance(message, VmRecord):
            if subjects.name_claim(message.namespace, message.name) == key:
                return False
        elif not _purged(last):
            await self._bury(holder, last)
        await self._bus.purge(key, expect=claim.revision, marker_ttl_s=MARKER_TTL_S)
        return True


def _left(error: BusError, uid: str) -> None:
    log.info("left to the sweep: %s", error, extra={"code": "claim_left", "uid": uid})


def _purged(entry: Entry | None) -> bool:
    return entry is not None and entry.kind is EntryKind.PURGE


def _message(entry: Entry | None) -> VmRecord | Tombstone | None:
    if entry is None or entry.kind is EntryKind.PURGE:
        return None
    message = read_vm_key(entry.key, entry.value)
    return message if isinstance(message, VmRecord | Tombstone) else None


def _storm() -> VirtbusError:
    message = "too many writers on this name or uid; repeat the request with the same uid"
    return VirtbusError(Code.UNAVAILABLE, "contended", message, retry=Retry.SAME_ID, after_ms=200)
