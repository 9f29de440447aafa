"""Writes creates (claims, then the record), changes and deletes of VMs (ADR 0003, 0064)."""

import hashlib
import logging
from collections.abc import Collection
from typing import NamedTuple

from virtbus.bus.client.ports import Bus, Entry, EntryKind, Write
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.claims import (
    AddressTakenError,
    CommitStep,
    NameStep,
    UidState,
    address_step,
    bears,
    claim_value,
    claims_of,
    commit_step,
    is_address,
    name_step,
    name_taken,
    uid_taken,
)
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import refuse_deleting
from virtbus.controller.core.rebuild_plan import Known
from virtbus.controller.core.secret_inputs import secret_bytes
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.key_states import holder_of, known_of, message_of, purged, stands
from virtbus.controller.edge.reservations import NodeFullError, Reservations
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.records import DELETED
from virtbus.schemas.vm import Tombstone, VmRecord, VmSecrets
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

Fenced = tuple[NodeSpec, int]
"""The desired state of a fenced node, and its revision."""


def guarded(fence: Fenced | None, *writes: Write) -> list[Write]:
    """Return the writes as a batch that fails if `fence` has changed meanwhile.

    So a node whose fence was removed keeps its VMs. The batch begins by a write of the same fence.
    """
    if fence is None:
        return list(writes)
    node_spec, revision = fence
    return [Write(subjects.node_spec(node_spec.node), encode(node_spec), revision), *writes]


class Committed(NamedTuple):
    """The stored record. `created` is False if the same record existed before."""

    held: StoredVm
    created: bool


class Commits:
    """The controller's writes to `$KV.vm` and `$KV.sec`."""

    def __init__(
        self, bus: Bus, fleet: Fleet | None = None, volumes: VolumeHolders | None = None
    ) -> None:
        self._bus = bus
        fleet = fleet or Fleet()
        self._own_writes = fleet.own_writes
        self._reservations = Reservations(bus, fleet, volumes)

    async def create(
        self, record: VmRecord, secrets: VmSecrets | None, claimed: Collection[str] = ()
    ) -> Committed:
        """Claim name and addresses, put the secrets, commit the record. Safe to repeat for a uid.

        `claimed` are the addresses that this uid already has claimed.

        Raises:
            VirtbusError: 409: name, address or uid is taken. 410: the uid was deleted. 503: too
                many races were lost.
            NodeFullError: the VM reserves capacity, and its node has none left.
            BusError: nothing happened, or the outcome is unknown.
        """
        body = secret_bytes(secrets) if secrets is not None else None
        if body is not None:
            digest = hashlib.sha256(body).hexdigest()
            record = record.model_copy(update={"sec_digest": digest})
        await self.claim(record, without=claimed)
        if body is not None:
            await self._put_secrets(record, body)
        try:
            return await self._commit(record, body)
        except (VirtbusError, NodeFullError):
            await self._withdraw(record)
            raise

    async def _put_secrets(self, record: VmRecord, body: bytes) -> None:
        """Store the secrets at a new revision. An existing VM keeps its secrets.

        Before it replaces the secrets of another create of this uid, it writes a tombstone. So that
        create cannot commit, and must store its secrets again.
        """
        key = subjects.vm_secret(record.node, record.uid)
        there: Entry | None = None
        for _ in range(ATTEMPTS):
            try:
                if there is not None:
                    others = there.kind is EntryKind.PUT and there.value != body
                    if not await self.buried(record.uid, bury=others):
                        # the commit will find the existing record and raise the right error
                        return
                await self._bus.put(key, body, expect=there.revision if there else 0)
            except ConflictError:
                there = await self._bus.get(key)
            else:
                return
        raise contended("this name or uid")

    async def buried(self, uid: str, *, bury: bool = True) -> bool:
        """Return True if `uid` has no record and was not deleted.

        With `bury`, write a tombstone, so that an unfinished create cannot commit. Raises
        ConflictError.
        """
        last = await self._bus.get(subjects.vm_anywhere(uid))
        where, _ = stands(last)
        if where in {UidState.MARKER, UidState.RECORD, UidState.UNREADABLE}:
            return False
        if bury:
            await self._bury(uid, last)
        return True

    # --- name and addresses ---------------------------------------------------------------
    async def claim(
        self, record: VmRecord, *, renew: bool = False, without: Collection[str] = ()
    ) -> None:
        """Claim name and addresses for `create`. With `renew`, write the uid's own claims again."""
        for key in claims_of(record):
            if key not in without:
                await self.claim_key(key, record, renew=renew)

    async def claim_key(self, key: str, record: VmRecord, *, renew: bool = False) -> None:
        body = encode(claim_value(key, record.uid))
        for _ in range(ATTEMPTS):
            try:
                await self._bus.put(key, body, expect=0)
            except ConflictError:
                if not await self._take_over(key, body, record, renew=renew):
                    continue
            return
        raise contended("this name, address or uid")

    async def _take_over(self, key: str, body: bytes, record: VmRecord, *, renew: bool) -> bool:
        """Try once to take over an existing claim; return False if another writer was faster."""
        claim = await self._bus.get(key)
        if claim is None:
            return False
        try:
            holder = holder_of(claim)
            if holder is not None:
                if holder != record.uid:
                    await self._step_over(key, holder, record)
                elif not renew:
                    return True
            await self._bus.put(key, body, expect=claim.revision)
        except ConflictError:
            return False
        return True

    async def _step_over(self, key: str, holder: str, record: VmRecord) -> None:
        """Make sure that the uid `holder` can never commit with this claim, or raise 409."""
        last = await self._bus.get(subjects.vm_anywhere(holder))
        where, message = stands(last)
        match address_step(where) if is_address(key) else name_step(where, message, record):
            case NameStep.REFUSE if is_address(key):
                raise AddressTakenError(record, key, holder)
            case NameStep.REFUSE:
                raise name_taken(record, message, holder)
            case NameStep.BURY_THEN_TAKE:
                await self._bury(holder, last)
            case NameStep.TAKE:
                pass

    async def _bury(self, uid: str, last: Entry | None) -> None:
        """Write a tombstone over the message `last`; raise ConflictError if the uid has changed."""
        await self._bus.put(
            subjects.vm_record(UNPLACED, uid),
            encode(Tombstone(uid=uid)),
            expect=last.revision if last else 0,
            expect_over=subjects.vm_anywhere(uid),
            ttl_s=MARKER_TTL_S,
        )

    # --- the record -----------------------------------------------------------------------
    async def _commit(self, record: VmRecord, body: bytes | None) -> Committed:
        key, value = subjects.vm_record(record.node, record.uid), encode(record)
        anywhere = subjects.vm_anywhere(record.uid)
        first = Write(key, value, expect=0, expect_over=anywhere)
        for _ in range(ATTEMPTS):
            try:
                with self._own_writes.writing(key, value, record):
                    revision = await self._reservations.write(None, record, [first])
                return Committed(StoredVm(record, revision), created=True)
            except ConflictError:
                done = await self._settle(record, body, await self._bus.get(anywhere))
            except NodeFullError:
                # an earlier attempt may have created the VM, whose own reservation fills the node
                last = await self._bus.get(anywhere)
                if stands(last)[0] is not UidState.RECORD:
                    raise
                done = await self._settle(record, body, last)
            if done is not None:
                return done
        raise contended("this name or uid")

    async def _settle(
        self, record: VmRecord, body: bytes | None, last: Entry | None
    ) -> Committed | None:
        """Try once to commit over an earlier message; return None if the caller must retry."""
        where, message = stands(last)
        step = commit_step(where, message, record)
        if step is CommitStep.SAME and last is not None and isinstance(message, VmRecord):
            return Committed(StoredVm(message, last.revision), created=False)
        if step is CommitStep.MOVE and last is not None:
            # The controller that wrote this tombstone next takes or purges a claim, at the revision
            # that it has read. Renewed claims make that write fail, so only one of the two wins.
            await self.claim(record, renew=True)
            if body is not None:  # a sweep or another create may have removed the secrets
                await self._put_secrets(record, body)
            try:
                revision = await self._unbury(record, last)
            except ConflictError:
                return None
            return Committed(StoredVm(record, revision), created=True)
        if step is CommitStep.REFUSE:
            raise uid_taken(record, message)
        if step is CommitStep.ENDING and isinstance(message, VmRecord):
            refuse_deleting(message)
        if step is CommitStep.GONE:
            why = f"uid {record.uid} was deleted; create the VM under a new uid"
            raise VirtbusError(Code.GONE, "deleted", why)
        return None

    async def _unbury(self, record: VmRecord, tombstone: Entry) -> int:
        """Put the record over its uid's tombstone, which a batch purges if it has another key."""
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
        """Release the claims and secrets of a refused create if no repeat can commit it."""
        try:
            last = await self._bus.get(subjects.vm_anywhere(record.uid))
            _, there = stands(last)
            other = isinstance(there, VmRecord) and not bears(there, record.namespace, record.name)
            if other or purged(last):
                kept = claims_of(there) if isinstance(there, VmRecord) else ()
                for key in claims_of(record):
                    if key not in kept:
                        await self.release_claim(key, record.uid)
            stray = isinstance(there, VmRecord) and (
                there.node != record.node or there.sec_digest is None
            )
            if record.sec_digest is not None and (stray or purged(last)):
                key = subjects.vm_secret(record.node, record.uid)
                await self._bus.purge(key, marker_ttl_s=MARKER_TTL_S)
        except BusError as error:
            _left(error, record.uid)

    async def replace(self, held: StoredVm, record: VmRecord) -> StoredVm:
        """CAS the record over the revision that was read; raises ConflictError, NodeFullError."""
        key = subjects.vm_record(held.record.node, record.uid)
        write = Write(key, value := encode(record), expect=held.revision)
        with self._own_writes.writing(key, value, record):
            revision = await self._reservations.write(held.record, record, [write])
        return StoredVm(record, revision)

    async def known(self, uid: str) -> Known:
        """Return the last message of a uid from the stream's leader."""
        return known_of(await self._bus.get(subjects.vm_anywhere(uid)))

    async def write_back(self, record: VmRecord, known: Known) -> None:
        """Write a host's newer copy of a record over the bus's copy, and claim its name.

        The write is a CAS over `known`. If the bus has no record, the copy is created.

        Raises:
            VirtbusError: another VM has the name, or the uid was deleted.
            ConflictError: the record changed meanwhile.
        """
        if known.record is None and known.where is not UidState.UNREADABLE:
            await self.create(record, None)
            return
        await self.claim(record)
        key, old = subjects.vm_record(record.node, record.uid), known.record or record
        if known.node == record.node:
            write = Write(key, encode(record), expect=known.revision)
            await self._reservations.write(old, record, [write])
            return
        secret = await self._bus.get(subjects.vm_secret(known.node, record.uid))
        if secret is not None and secret.kind is EntryKind.PUT and old.sec_digest:
            await self._bus.put(subjects.vm_secret(record.node, record.uid), secret.value)
        former = subjects.vm_record(known.node, record.uid)
        gone = Write(former, None, expect=known.revision, ttl_s=MARKER_TTL_S)
        await self._reservations.write(old, record, [gone, Write(key, encode(record), expect=0)])

    async def latest(self, uid: str) -> StoredVm | None:
        """Return a uid's record from the stream's leader, or None; raise UnreadableValueError."""
        last = await self._bus.get(subjects.vm_anywhere(uid))
        message = message_of(last)
        if last is None or not isinstance(message, VmRecord):
            return None
        return StoredVm(message, last.revision)

    async def holder(self, namespace: str, name: str) -> str | None:
        """Return the uid that has a name, from the stream's leader; raise UnreadableValueError."""
        return holder_of(await self._bus.get(subjects.name_claim(namespace, name)))

    # --- the end --------------------------------------------------------------------------
    async def finish(self, held: StoredVm, *, fence: Fenced | None = None) -> int:
        """Purge secrets, record and claims, in this order; return the revision of the record's end.

        After a crash between these steps, a sweep purges the rest. `guarded` describes `fence`.
        """
        record = held.record
        if record.sec_digest is not None:
            secret = subjects.vm_secret(record.node, record.uid)
            await self._bus.purge(secret, marker_ttl_s=MARKER_TTL_S)
        key = subjects.vm_record(record.node, record.uid)
        end = Write(key, None, held.revision, ttl_s=MARKER_TTL_S, why=DELETED)
        revision = await self._reservations.write(record, None, guarded(fence, end))
        try:
            for claim in claims_of(record):
                await self.release_claim(claim, record.uid, its_own=True)
        except BusError as error:
            _left(error, record.uid)
        return revision

    async def release_claim(self, key: str, uid: str, *, its_own: bool = False) -> bool:
        """Purge a claim that `uid` holds; return False if `uid` does not hold it.

        `its_own` means that the VM had this name or address. An unreadable claim is then purged,
        too.
        """
        claim = await self._bus.get(key)
        try:
            holder = holder_of(claim)
        except UnreadableValueError:
            holder = uid if its_own else None
        if claim is None or holder != uid:
            return False
        await self._bus.purge(key, expect=claim.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def free_claim(self, key: str) -> bool:
        """Purge a claim and return True; return False if its holder's record needs the claim.

        The claim is read before the tombstone is written. An unfinished create of the holder must
        then renew the claim, so that this purge fails (ADR 0003). A record without the address is
        written again, unchanged, so that a concurrent update that adds the address must start again
        (ADR 0064). The claims of an unreadable record stay. Raise UnreadableValueError for an
        unreadable claim.
        """
        claim = await self._bus.get(key)
        holder = holder_of(claim)
        if claim is None or holder is None:
            return False
        last = await self._bus.get(subjects.vm_anywhere(holder))
        where, message = stands(last)
        if where is UidState.UNREADABLE:
            return False
        if isinstance(message, VmRecord):
            if key in claims_of(message):
                return False
            if is_address(key):
                await self.replace(StoredVm(message, last.revision if last else 0), message)
        elif where is not UidState.MARKER:
            await self._bury(holder, last)
        await self._bus.purge(key, expect=claim.revision, marker_ttl_s=MARKER_TTL_S)
        return True


def _left(error: BusError, uid: str) -> None:
    log.info("left to the sweep: %s", error, extra={"code": "claim_left", "uid": uid})
