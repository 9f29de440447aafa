"""Reads entries of the bucket `vm`, and classifies the last entry of a uid or a claim."""

from collections.abc import Callable
from typing import TypeVar

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.claims import UidState, standing
from virtbus.controller.core.rebuild_plan import Known
from virtbus.controller.core.unreadable import Unreadable, UnreadableValueError
from virtbus.controller.core.vm_keys import NamedT, Stored, read_vm_key
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.records import DELETED
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord

T = TypeVar("T")


def purged(entry: Entry | None) -> bool:
    """Return True for the purge marker of a delete or a move."""
    return entry is not None and entry.kind is EntryKind.PURGE


def ended(entry: Entry | None) -> bool:
    """Return True if a uid was never written or was deleted; False for the marker of a move."""
    return entry is None or (purged(entry) and entry.why == DELETED)


def unreadable(entry: Entry, error: VirtbusError) -> Unreadable:
    """Describe an unreadable entry."""
    return Unreadable(entry.key, entry.revision, len(entry.value), error.reason, str(error)[:200])


def value_of(entry: Entry | None, read: Callable[[str, bytes], T]) -> T | None:
    """Return the value that `read` finds in an entry; None for no entry or a purge marker.

    Raises:
        UnreadableValueError: `read` raised VirtbusError.
    """
    if entry is None or entry.kind is EntryKind.PURGE:
        return None
    try:
        return read(entry.key, entry.value)
    except VirtbusError as error:
        raise UnreadableValueError(unreadable(entry, error)) from error


def stored_in(entry: Entry | None, read: Callable[[str, bytes], NamedT]) -> Stored[NamedT] | None:
    """Return the record in an entry with its revision, or None; raises as `value_of`."""
    record = value_of(entry, read)
    return None if entry is None or record is None else Stored(record, entry.revision)


def message_of(entry: Entry | None) -> VmRecord | Tombstone | None:
    """Return the record or tombstone in an entry, or None; raises UnreadableValueError."""
    message = value_of(entry, read_vm_key)
    return message if isinstance(message, VmRecord | Tombstone) else None


def stands(entry: Entry | None) -> tuple[UidState, VmRecord | Tombstone | None]:
    """Return a uid's state and its record or tombstone, by its last entry; never raises."""
    try:
        message = message_of(entry)
    except UnreadableValueError:
        return UidState.UNREADABLE, None
    return standing(message, purged=purged(entry)), message


def known_of(entry: Entry | None) -> Known:
    """Return the state of a uid by its last entry, for a rebuild; never raises."""
    where, message = stands(entry)
    record = message if isinstance(message, VmRecord) else None
    if entry is None:
        return Known(where, record)
    return Known(where, record, entry.revision, entry.key.split(".")[2])


def holder_of(claim: Entry | None) -> str | None:
    """Return the uid in a claim; None without a claim; raises UnreadableValueError."""
    there = value_of(claim, read_vm_key)
    return there.uid if isinstance(there, NameClaim | AddressClaim) else None
