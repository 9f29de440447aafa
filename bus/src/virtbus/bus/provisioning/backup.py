"""Copies the desired state of a bus to a backup file, and restores it.

A backup has records, claims, purge markers of deleted VMs, node specs and secrets. It also has the
named objects: volumes, snapshots, image names, networks, security groups and backup schedules. The
secrets include the keys by which controllers sign records, so that nodes trust restored records.
With the host records, no other host can take a node's name.

A backup excludes observed state (statuses, liveness), join records, tombstones, operations, events
and other keys that concern only this bus (`_lasts`). Values are copied as bytes.

Services write to the bus during the copy. The values of two keys may come from different times.
Such a copy can have the same inconsistencies as a bus after a crash (ADR 0003). Controllers repair
both in the same way.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError, ConflictError
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.records import of_node_group, of_operation, plain_stored
from virtbus.schemas.subjects import (
    BACKUP_SCHEDULE_KEYS,
    HOSTS_KEY,
    IMAGE_NAME_KEYS,
    JOIN_KEY,
    NETWORK_KEYS,
    PEER_KEY,
    SECURITY_GROUP_KEYS,
    SIGNING,
    SNAPSHOT_KEYS,
    VOLUME_KEYS,
    vm_anywhere,
)
from virtbus.schemas.version import check_version

QUIET_S = 0.3
"""Changes made during a list arrive within this time after the list."""
MARKER_TTL_S = 86_400.0

_SECRETS = "$KV.sec."
_NAMED = (
    *(VOLUME_KEYS, SNAPSHOT_KEYS, IMAGE_NAME_KEYS, NETWORK_KEYS, SECURITY_GROUP_KEYS),
    BACKUP_SCHEDULE_KEYS,
)


class BackupError(Exception):
    """The file is no complete backup, or cannot be restored into this bus."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup: values by key, and the keys of deleted VMs (`marked`). `taken_ns` is Unix time."""

    taken_ns: int
    values: Mapping[str, bytes]
    marked: frozenset[str] = frozenset()

    @property
    def records(self) -> list[str]:
        return [key for key in self.values if _is_record(key)]

    @property
    def secrets(self) -> list[str]:
        """The keys of VMs' secrets, without signing keys."""
        return [key for key in self.values if key.startswith(_SECRETS) and not _signs(key)]

    @property
    def is_secret(self) -> bool:
        return any(key.startswith(_SECRETS) for key in self.values)


@dataclass(slots=True)
class Restored:
    """The result of a restore: counts of keys that were written or already present."""

    written: int = 0
    present: int = 0
    vms: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    """Uids of VMs, then of named objects, that this bus has deleted and that stay deleted (I3)."""


async def take(bus: Bus, *, secrets: bool = True) -> Backup:
    """Copy the bus. The user needs read access to all of `$KV.vm` and `$KV.sec`.

    A create writes its secrets before its record. So secrets are read after the records. Secrets
    without a record are left out.
    """
    entries = await _listed(bus, "$KV.vm.>")
    values = {key: entry.value for key, entry in entries.items() if _lasts(entry)}
    uids = {_uid(key) for key in values if _is_record(key)}
    marked = frozenset(
        key
        for key, entry in entries.items()
        if entry.kind is EntryKind.PURGE and _is_record(key) and _uid(key) not in uids
    )
    if secrets:
        found = await _listed(bus, f"{_SECRETS}>")
        values |= {
            key: entry.value
            for key, entry in found.items()
            if entry.kind is EntryKind.PUT and (_uid(key) in uids or _signs(key))
        }
    return Backup(bus.sources.time_ns(), values, marked)


async def _listed(bus: Bus, keys: str) -> dict[str, Entry]:
    """Return the last message of each key, including changes during the list."""
    found: dict[str, Entry] = {}
    synced = False
    async with bus.watch(keys) as watch:
        items = aiter(watch)
        while True:
            try:
                async with asyncio.timeout(QUIET_S if synced else None):
                    item = await anext(items)
            except TimeoutError:
                return found
            if isinstance(item, Entry):
                found[item.key] = item
            elif item is WatchMark.RESET:
                found, synced = {}, False
            else:
                synced = True


async def put_back(bus: Bus, backup: Backup) -> Restored:
    """Write a backup into a bus that has no other VMs and named objects. Repeating is safe.

    The order is: purge markers, secrets, then claims, node specs and named objects. Records are
    last, because nodes act on them.

    Raises:
        BackupError: the bus has VMs or named objects that the backup lacks or has with another
            value.
        BusError: the connection was lost, or a key changed during the restore. Repeat the call.
    """
    there = await _listed(bus, "$KV.vm.>")
    _check_room(backup, there)
    done = Restored()
    for key in sorted(backup.marked):
        if key not in there:
            await bus.purge(key, marker_ttl_s=MARKER_TTL_S)
            done.written += 1
    gone = {
        _uid(key)
        for key, entry in there.items()
        if entry.kind is EntryKind.PURGE and _is_record(key)
    }
    gone -= {_uid(key) for key, entry in there.items() if _is_record(key) and _lasts(entry)}
    named = _deleted_by_name(backup, there)
    done.deleted = sorted(gone & {_uid(key) for key in backup.records}) + sorted(named.values())
    for key in sorted(backup.values, key=_order):
        if key in named or _uid(key) in done.deleted:
            continue
        if await _put(bus, key, backup.values[key]):
            done.written += 1
            if _is_record(key):
                done.vms.append(_uid(key))
        else:
            done.present += 1
    return done


def _deleted_by_name(backup: Backup, there: Mapping[str, Entry]) -> dict[str, str]:
    """Return, by key, the uids of the backup's named objects that this bus has deleted.

    A purge marker has the uid of the deleted object. An object of the same name with another uid is
    not in the result.
    """
    return {
        key: entry.why.decode(errors="replace")
        for key, entry in there.items()
        if key.startswith(_NAMED) and entry.kind is EntryKind.PURGE
        if entry.why and entry.why in backup.values.get(key, b"")
    }


def _check_room(backup: Backup, there: Mapping[str, Entry]) -> None:
    others = [
        key
        for key, entry in there.items()
        if (_is_record(key) or key.startswith(_NAMED))
        and _lasts(entry)
        and backup.values.get(key) != entry.value
    ]
    if others:
        message = (
            f"the bus has {len(others)} VM(s), volume(s), image name(s), network(s) or security "
            "group(s) that the backup lacks, "
            f"the first is {_uid(others[0])}; restore only into an empty bus. To restore "
            "lost records from running hosts: virtbus bus rebuild"
        )
        raise BackupError(message)


async def _put(bus: Bus, key: str, value: bytes) -> bool:
    over = vm_anywhere(_uid(key)) if _is_record(key) else None
    try:
        await bus.put(key, value, expect=0, expect_over=over)
    except ConflictError:
        entry = await bus.get(key)
        if entry is not None and entry.kind is EntryKind.PUT:
            return False
        if entry is None:
            message = f"{key} changed while it was restored; repeat"
            raise BusError(message) from None
        await bus.put(key, value, expect=entry.revision)
    return True


# --- file ------------------------------------------------------------------------------------
def lines(backup: Backup) -> Iterator[bytes]:
    """Yield the lines of a backup file: a head, a line for each key, and the checksum."""
    digest = hashlib.sha256()
    head = {"virtbus_backup": SCHEMA_VERSION, "taken_ns": backup.taken_ns}
    for value in (head, *_entries(backup)):
        line = json.dumps(value).encode() + b"\n"
        digest.update(line)
        yield line
    yield json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n"


def _entries(backup: Backup) -> Iterator[dict[str, str]]:
    for key in sorted(backup.marked):
        yield {"key": key}
    for key, value in sorted(backup.values.items()):
        yield {"key": key, "value": base64.b64encode(value).decode()}


def parse(file: Iterable[bytes], *, oldest: int = SCHEMA_VERSION) -> Backup:
    """Return a backup from the lines of its file.

    `oldest` is the oldest accepted version of a file. Only `specs` can use an older file.

    Raises:
        BackupError: the file is truncated, modified, or of another version.
    """
    digest = hashlib.sha256()
    values: dict[str, bytes] = {}
    marked: set[str] = set()
    taken_ns: int | None = None
    whole = ""
    try:
        for line in file:
            item = json.loads(line)
            if "sha256" in item:
                whole = str(item["sha256"])
                break
            digest.update(line)
            if taken_ns is None:
                taken_ns = _head(item, oldest)
            elif "value" in item:
                values[_key(item)] = base64.b64decode(item["value"], validate=True)
            else:
                marked.add(_key(item))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"it is not a backup of virtbus, or damaged: {error}"
        raise BackupError(message) from None
    if taken_ns is None or whole != digest.hexdigest():
        message = "the backup is cut short or changed; take another file"
        raise BackupError(message)
    return Backup(taken_ns, values, frozenset(marked))


def _head(item: Mapping[str, int], oldest: int) -> int:
    version = item["virtbus_backup"]
    if version != oldest:
        reasons, next_step = ("older_backup", "newer_backup"), "restore it with the newer virtbus"
        try:
            check_version("the backup", version, reasons=reasons, next_step=next_step)
        except VirtbusError as error:
            raise BackupError(str(error)) from None
    return item["taken_ns"]


def _key(item: Mapping[str, str]) -> str:
    key = item["key"]
    if not key.startswith(("$KV.vm.", _SECRETS)) or set(key) & set("*> \r\n"):
        message = f"{key!r} is no key of a backup"
        raise ValueError(message)
    return key


# --- keys ------------------------------------------------------------------------------------
def _uid(key: str) -> str:
    return key.rsplit(".", maxsplit=1)[-1]


def _is_record(key: str) -> bool:
    """Return True for `$KV.vm.<node>.<uid>`. Claims have more tokens, and `_join` is no uid."""
    tokens = key.split(".")
    return key.startswith("$KV.vm.") and len(tokens) == 4 and not tokens[3].startswith("_")


def _signs(key: str) -> bool:
    return key.startswith(f"{_SECRETS}{SIGNING}.")


def _lasts(entry: Entry) -> bool:
    """Return False for purge markers and for keys that concern only this bus.

    Keys that concern only this bus are join records, tombstones, addresses of hosts, peers of
    overlay networks, operations and groups of nodes.
    """
    if entry.kind is not EntryKind.PUT or _uid(entry.key) in {JOIN_KEY, HOSTS_KEY, PEER_KEY}:
        return False
    if of_operation(entry.key) or of_node_group(entry.key):
        return False
    try:
        value = plain_stored(entry.key, entry.value) if _is_record(entry.key) else {}
    except VirtbusError:
        return True  # an unreadable value is kept unchanged
    return not (isinstance(value, dict) and value.get("tombstone"))


def _order(key: str) -> tuple[int, str]:
    if key.startswith(_SECRETS):
        return 0, key
    return (2 if _is_record(key) else 1), key
