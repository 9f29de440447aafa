"""A backup holds desired state, and restores it only to an empty bus."""

import itertools
import json

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.provisioning.backup import Backup, BackupError, lines, parse, put_back, take
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.vm import JoinNonce, NameClaim, Tombstone
from virtbus.schemas.wire import encode

A, B, C, D = (f"0192f0c1-2d3e-7abc-8def-00000000000{n}" for n in "abcd")
RECORD = subjects.vm_record("n1", A)
CLAIM = subjects.name_claim("default", "web")
SECRET = subjects.vm_secret("n1", A)
WISH = subjects.node_spec("n1")
VOLUME = subjects.volume_record("default", "data")
IMAGE_NAME = subjects.image_name("default", "debian/12")
NETWORK = subjects.network_record("default", "blue")
SCHEDULE = subjects.backup_schedule_record("default", "nightly")
GROUP = subjects.security_group("default", "web")
ADDRESS, MAC = (subjects.address_claim(C, text) for text in ("10.9.0.7", "02:00:00:00:00:07"))


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(MemoryServer())


async def fill(bus: MemoryBus) -> None:
    """A VM with a secret; pending, deleted and moved ones; a tombstone, join, spec and volume."""
    await bus.put(subjects.join_nonce("n1"), encode(JoinNonce(nonce="x")))
    await bus.put(CLAIM, encode(NameClaim(uid=A)))
    await bus.put(SECRET, b"\x81\xa1s\x01")
    await bus.put(RECORD, encode({"uid": A}))
    await bus.put(subjects.vm_record("_", B), encode({"uid": B}))
    await bus.put(subjects.vm_record("n1", C), encode({"uid": C}))
    await bus.purge(subjects.vm_record("n1", C))
    await bus.purge(subjects.vm_record("n2", A))
    await bus.put(subjects.vm_record("_", D), encode(Tombstone(uid=D)))
    await bus.put(subjects.vm_secret("n1", D), b"\x80")
    await bus.put(WISH, encode({"cordoned": True}))
    await bus.put(VOLUME, encode({"uid": C, "name": "data"}))
    await bus.put(IMAGE_NAME, encode({"uid": C, "name": "debian/12"}))
    await bus.put(NETWORK, encode({"uid": C, "name": "blue"}))
    await bus.put(SCHEDULE, encode({"uid": C, "name": "nightly"}))
    await bus.put(GROUP, encode({"uid": C, "name": "web"}))
    for claim in (ADDRESS, MAC):
        await bus.put(claim, encode(AddressClaim(vm=A)))
    await bus.put(subjects.operation_record("n1", D), encode({"id": D}))  # a result


async def test_a_backup_contains_desired_state_and_nothing_specific_to_this_bus(
    bus: MemoryBus,
) -> None:
    await fill(bus)
    taken = await take(bus)
    records = {RECORD, subjects.vm_record("_", B)}
    named = {VOLUME, IMAGE_NAME, NETWORK, SCHEDULE, GROUP}
    claims = {CLAIM, ADDRESS, MAC}
    assert set(taken.values) == {*records, *claims, SECRET, WISH, *named}
    assert taken.marked == {subjects.vm_record("n1", C)}
    assert (len(taken.records), taken.secrets) == (2, [SECRET])


async def test_secrets_are_left_out_on_request(bus: MemoryBus) -> None:
    await fill(bus)
    assert (await take(bus, secrets=False)).secrets == []


async def test_restored_into_an_empty_bus_it_is_the_same_and_may_be_repeated(
    bus: MemoryBus,
) -> None:
    await fill(bus)
    taken = await take(bus)
    empty = MemoryBus(MemoryServer())
    await empty.put(subjects.join_nonce("n1"), encode(JoinNonce(nonce="y")))
    done = await put_back(empty, parse(list(lines(taken))))
    assert sorted(done.vms) == [A, B]
    again = await take(empty)
    assert (again.values, again.marked) == (taken.values, taken.marked)
    entry = await empty.get(subjects.vm_record("n1", C))
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    repeated = await put_back(empty, taken)
    assert (repeated.written, repeated.present) == (0, len(taken.values))


async def test_the_record_is_the_last_that_is_written_of_a_vm(bus: MemoryBus) -> None:
    await fill(bus)
    taken = await take(bus)
    empty = MemoryBus(MemoryServer())
    await put_back(empty, taken)
    revisions = {}
    for key in (CLAIM, ADDRESS, MAC, RECORD):
        entry = await empty.get(key)
        assert entry is not None
        revisions[key] = entry.revision
    assert max(revisions.values()) == revisions[RECORD]


async def test_a_bus_with_other_vms_is_refused_with_the_next_step(bus: MemoryBus) -> None:
    await fill(bus)
    taken = await take(bus)
    await bus.put(RECORD, encode({"uid": A, "epoch": 2}))
    with pytest.raises(BackupError, match="virtbus bus rebuild"):
        await put_back(bus, taken)


async def test_a_bus_with_another_holder_of_a_volume_is_refused(bus: MemoryBus) -> None:
    await fill(bus)
    taken = await take(bus)
    await bus.put(VOLUME, encode({"uid": C, "name": "data", "holder": A}))
    with pytest.raises(BackupError, match="volume"):
        await put_back(bus, taken)


async def test_a_named_object_that_this_bus_has_deleted_is_not_restored(
    bus: MemoryBus,
) -> None:
    await fill(bus)
    taken = await take(bus)
    cases = itertools.product(
        (VOLUME, IMAGE_NAME, NETWORK, SCHEDULE, GROUP), ((C, EntryKind.PURGE), (D, EntryKind.PUT))
    )
    for key, (deleted, kind) in cases:
        empty = MemoryBus(MemoryServer())
        await empty.purge(key, why=deleted.encode())
        done = await put_back(empty, taken)
        entry = await empty.get(key)
        assert entry is not None
        assert (entry.kind, done.deleted) == (kind, [C] if kind is EntryKind.PURGE else [])


async def test_a_bus_with_another_meaning_of_an_image_name_is_refused(bus: MemoryBus) -> None:
    await fill(bus)
    taken = await take(bus)
    assert (await put_back(bus, taken)).written == 0
    await bus.put(IMAGE_NAME, encode({"uid": D, "name": "debian/12"}))
    with pytest.raises(BackupError, match="image name"):
        await put_back(bus, taken)


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:-1],
        lambda text: text[1:],
        lambda text: [text[0], *text[2:]],
        lambda text: [*text[:1], text[1].replace(b"web", b"bew"), b"{}", *text[2:]],
        lambda _text: [b"\x00\x01"],
        lambda _text: [],
        lambda text: [json.dumps({"virtbus_backup": 9, "taken_ns": 1}).encode(), *text[1:]],
        lambda text: [text[0], b'{"key": "$KV.lease.x", "value": ""}\n', *text[1:]],
    ],
)
def test_a_file_that_is_not_whole_is_refused(harm: object) -> None:
    text = list(lines(Backup(1, {RECORD: b"1", CLAIM: b"2"}, frozenset({SECRET}))))
    assert parse(text).values == {RECORD: b"1", CLAIM: b"2"}
    assert callable(harm)
    with pytest.raises(BackupError):
        parse(harm(text))
