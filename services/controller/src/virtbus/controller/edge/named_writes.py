"""Writes named objects to the bus: each create, change and end is one compare-and-set."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.mutations import with_request
from virtbus.controller.core.named_creates import CreateStep
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import Stored
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.security_group import SecurityGroupRecord
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import encode

NamedT = TypeVar(
    "NamedT",
    VolumeRecord,
    NetworkRecord,
    SnapshotRecord,
    SecurityGroupRecord,
    BackupScheduleRecord,
)


class NamedWrites(Generic[NamedT]):
    """Reads and writes the objects of one kind, for example volumes."""

    def __init__(
        self,
        bus: Bus,
        kind: str,
        key: Callable[[str, str], str],
        read: Callable[[str, bytes], NamedT],
        step: Callable[[NamedT | None, str, NamedT], CreateStep],
    ) -> None:
        """`key` maps namespace and name to a key; `step` decides about a create that conflicts."""
        self._bus = bus
        self._kind = kind
        self._key = key
        self._read: Callable[[str, bytes], NamedT] = read
        self._step: Callable[[NamedT | None, str, NamedT], CreateStep] = step

    async def create(self, record: NamedT) -> tuple[Stored[NamedT], bool]:
        """Write a new object; return the object and True.

        If `step` finds that the create is a repeat, return the existing object and False.

        Raises:
            VirtbusError: 503: too many races were lost. Also the errors of `step`.
            BusError: nothing happened, or the outcome is unknown.
        """
        key, expect = self._key(record.namespace, record.name), 0
        for _ in range(ATTEMPTS):
            try:
                revision = await self._bus.put(key, encode(record), expect=expect)
                return Stored(record, revision), True
            except ConflictError:
                entry = await self._bus.get(key)
            held = stored_in(entry, self._read)
            ended = entry.why.decode(errors="replace") if entry is not None else ""
            step = self._step(held.record if held else None, ended, record)
            if step is CreateStep.SAME and held is not None:
                return held, False
            expect = entry.revision if entry is not None else 0
        raise contended(f"the {self._kind} {record.name}")

    async def latest(self, namespace: str, name: str) -> Stored[NamedT] | None:
        """Return an object from the stream's leader; raises UnreadableValueError."""
        return stored_in(await self._bus.get(self._key(namespace, name)), self._read)

    async def replace(self, held: Stored[NamedT], record: NamedT) -> Stored[NamedT]:
        """CAS the object over the revision that was read; raises ConflictError if it changed."""
        key = self._key(record.namespace, record.name)
        return Stored(record, await self._bus.put(key, encode(record), expect=held.revision))

    async def change(
        self,
        find: Callable[[], Awaitable[Stored[NamedT]]],
        change: Callable[[NamedT], NamedT],
        request: Request,
    ) -> tuple[Stored[NamedT], bool]:
        """Apply a change once for each request id.

        Return the object, and True if this call has written the object.

        Raises:
            VirtbusError: 504: the deadline is over. 503: too many races were lost. Also the errors
                of `find` and `change`.
        """
        for _ in range(ATTEMPTS):
            held = await find()
            if request.id in held.record.requests:
                return held, False
            refuse_late(request.deadline_s)
            record = with_request(change(held.record), held.record, request.id)
            if record == held.record:
                return held, False
            try:
                return await self.replace(held, record), True
            except ConflictError:
                continue
        raise contended(f"the {self._kind}")

    async def mend(self, error: UnreadableValueError, record: NamedT) -> Stored[NamedT]:
        """Replace an unreadable value by `record` (ADR 0027).

        Raises:
            UnreadableValueError: a newer virtbus wrote the value; newer controllers can read it.
            VirtbusError: 503: the value changed meanwhile.
        """
        if error.found.reason == "newer_schema":
            raise error
        try:
            return await self.replace(Stored(record, error.found.revision), record)
        except ConflictError:
            raise contended(f"the {self._kind} {record.name}") from error

    async def end(self, held: Stored[NamedT]) -> int:
        """Purge the object at the revision that was read; raises ConflictError if it changed.

        The purge marker contains the uid, so that a late create of that uid is refused.
        """
        key, uid = self._key(held.record.namespace, held.record.name), held.record.uid
        return await self._bus.purge(
            key, expect=held.revision, marker_ttl_s=MARKER_TTL_S, why=uid.encode()
        )
