"""Claim, then commit: the writes that make, change and end a VM's record (ADR 0003)."""

import hashlib
import logging
from dataclasses import dataclass

from virtbus.bus.ports import Bus, BusError, ConflictError, Entry, EntryKind, Write
from virtbus.controller.core.admission import secret_bytes
from virtbus.controller.core.claims import (
    NAME_STEPS,
    CommitStep,
    NameStep,
    Standing,
    commit_step,
    standing,
)
from virtbus.controller.core.fleet import Held, read_vm_key
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord, VmSecrets
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""Each lost race is another writer's progress; eight in a row is a storm to be told of."""
MARKER_TTL_S = 86_400.0
"""How long a deleted uid is remembered, so that a late create cannot bring it back (I3)."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Where the record stands; `created` False: it was there already, the same."""

    held: Held
    created: bool


class Commits:
    """The controller's writes to `$KV.vm` and `$KV.sec`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(self, record: VmRecord, secrets: VmSecrets | None) -> Committed:
        """Claim the name, put the secrets, commit the record. Safe to repeat with the same uid.

        Raises:
            VirtbusError: 409 name or uid taken, 410 uid deleted, 503 too many lost races.
            BusError: nothing happened, or the outcome is unknown.
        """
        claim_revision = await self._claim(record)
        if secrets is not None:
            body = secret_bytes(secrets)
            record = record.model_copy(update={"sec_digest": hashlib.sha256(body).hexdigest()})
            await self._bus.put(subjects.vm_secret(record.node, record.uid), body)
        try:
            return await self._commit(record)
        except VirtbusError:
            await self._withdraw(record, claim_revision)
            raise

    # --- the name -------------------------------------------------------------------------
    async def _claim(self, record: VmRecord) -> int:
        """Hold the name for the record's uid; the claim's revision."""
        key = subjects.name_claim(record.namespace, record.name)
        body = encode(NameClaim(uid=record.uid))
        for _ in range(ATTEMPTS):
            try:
                return await self._bus.put(key, body, expect=0)
            except ConflictError:
                revision = await self._take_over(key, body, record)
            if revision is not None:
                return revision
        raise _storm()

    async def _take_over(self, key: str, body: bytes, record: VmRecord) -> int | None:
        """One try at a claim that stands; None when somebody else moved meanwhile."""
        claim = await self._bus.get(key)
        if claim is None:
            return None
        try:
            if claim.kind is EntryKind.PURGE:
                return await self._bus.put(key, body, expect=claim.revision)
            holder = read(NameClaim, claim.value).uid
            if holder == record.uid:
                return claim.revision
            await self._step_over(holder, record)
            return await self._bus.put(key, body, expect=claim.revision)
        except ConflictError:
            return None

    async def _step_over(self, holder: str, record: VmRecord) -> None:
        """Make sure that `holder` can never commit, or raise 409."""
        last = await self._bus.get(subjects.vm_anywhere(holder))
        message = _message(last)
        match NAME_STEPS[standing(message, purged=_purged(last))]:
            case NameStep.REFUSE:
                raise _name_taken(record, message)
            case NameStep.BURY_THEN_TAKE:
                await self._bus.put(
                    subjects.vm_record(UNPLACED, holder),
                    encode(Tombstone(uid=holder)),
                    expect=last.revision if last else 0,
                    expect_over=subjects.vm_anywhere(holder),
                    ttl_s=MARKER_TTL_S,
                )
            case NameStep.TAKE:
                pass

    # --- the record -----------------------------------------------------------------------
    async def _commit(self, record: VmRecord) -> Committed:
        key, body = subjects.vm_record(record.node, record.uid), encode(record)
        anywhere = subjects.vm_anywhere(record.uid)
        for _ in range(ATTEMPTS):
            try:
                revision = await self._bus.put(key, body, expect=0, expect_over=anywhere)
                return Committed(Held(record, revision), created=True)
            except ConflictError:
                done = await self._settle(record, await self._bus.get(anywhere))
            if done is not None:
                return done
        raise _storm()

    async def _settle(self, record: VmRecord, last: Entry | None) -> Committed | None:
        """One try at a commit that met an earlier message; None to try again."""
        message = _message(last)
        step = commit_step(standing(message, purged=_purged(last)), message, record)
        if step is CommitStep.SAME and last is not None and isinstance(message, VmRecord):
            return Committed(Held(message, last.revision), created=False)
        if step is CommitStep.MOVE and last is not None:
            try:
                revision = await self._bus.batch(
                    [
                        Write(last.key, None, expect=last.revision),
                        Write(
                            subjects.vm_record(record.node, record.uid), encode(record), expect=0
                        ),
                    ]
                )
            except ConflictError:
                return None
            return Committed(Held(record, revision), created=True)
        if step is CommitStep.REFUSE:
            message_text = f"uid {record.uid} belongs to another VM; leave uid out to get a new one"
            raise VirtbusError(Code.CONFLICT, "uid_taken", message_text)
        if step is CommitStep.GONE:
            message_text = f"uid {record.uid} was deleted; create the VM under a new uid"
            raise VirtbusError(Code.GONE, "deleted", message_text)
        return None

    async def _withdraw(self, record: VmRecord, claim_revision: int) -> None:
        """Give back what a refused create took; a sweep does it where this is cut short."""
        last = await self._bus.get(subjects.vm_anywhere(record.uid))
        message = _message(last)
        if isinstance(message, VmRecord) and message.name == record.name:
            return  # the uid's own earlier create holds this very name
        try:
            key = subjects.name_claim(record.namespace, record.name)
            await self._bus.purge(key, expect=claim_revision, marker_ttl_s=MARKER_TTL_S)
            if record.sec_digest is not None and not isinstance(message, VmRecord):
                await self._bus.purge(subjects.vm_secret(record.node, record.uid))
        except BusError as error:
            log.info(
                "left to the sweep: %s", error, extra={"code": "claim_left", "uid": record.uid}
            )

    async def replace(self, held: Held, record: VmRecord) -> Held:
        """CAS the record over the revision that was read; raises ConflictError when it moved."""
        key = subjects.vm_record(held.record.node, record.uid)
        return Held(record, await self._bus.put(key, encode(record), expect=held.revision))

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
    async def finish(self, held: Held) -> None:
        """Purge secrets, record, then claim: a crash in between leaves only what a sweep finds."""
        record = held.record
        if record.sec_digest is not None:
            await self._bus.purge(
                subjects.vm_secret(record.node, record.uid), marker_ttl_s=MARKER_TTL_S
            )
        key = subjects.vm_record(record.node, record.uid)
        await self._bus.purge(key, expect=held.revision, marker_ttl_s=MARKER_TTL_S)
        await self.release_name(subjects.name_claim(record.namespace, record.name), record.uid)

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

    async def bury(self, uid: str) -> bool:
        """Tombstone a uid without a record, so that its claim may be swept; False if it has one."""
        last = await self._bus.get(subjects.vm_anywhere(uid))
        match standing(_message(last), purged=_purged(last)):
            case Standing.RECORD:
                return False
            case Standing.MARKER | Standing.TOMBSTONE:
                return True
            case Standing.NOTHING:
                await self._bus.put(
                    subjects.vm_record(UNPLACED, uid),
                    encode(Tombstone(uid=uid)),
                    expect=0,
                    expect_over=subjects.vm_anywhere(uid),
                    ttl_s=MARKER_TTL_S,
                )
                return True


def _purged(entry: Entry | None) -> bool:
    return entry is not None and entry.kind is EntryKind.PURGE


def _message(entry: Entry | None) -> VmRecord | Tombstone | None:
    if entry is None or entry.kind is EntryKind.PURGE:
        return None
    message = read_vm_key(entry.key, entry.value)
    return message if isinstance(message, VmRecord | Tombstone) else None


def _name_taken(wanted: VmRecord, holder: VmRecord | Tombstone | None) -> VirtbusError:
    if isinstance(holder, VmRecord) and holder.spec_hash == wanted.spec_hash:
        message = f"{wanted.name} exists, unchanged, with uid {holder.uid}"
        return VirtbusError(Code.CONFLICT, "exists_unchanged", message)
    uid = holder.uid if holder is not None else "unknown"
    message = (
        f"the name {wanted.name} is taken in namespace {wanted.namespace} by uid {uid}; "
        "choose another, or delete that VM first"
    )
    return VirtbusError(Code.CONFLICT, "name_taken", message)


def _storm() -> VirtbusError:
    message = "too many writers on this name or uid; repeat the request with the same uid"
    return VirtbusError(Code.UNAVAILABLE, "contended", message, retry=Retry.SAME_ID, after_ms=200)
