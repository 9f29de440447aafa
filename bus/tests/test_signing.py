"""Every controller signs its records, and nobody else can."""

import asyncio

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Bus, EntryKind, Write
from virtbus.bus.client.signing import RecordKeys, Signer, signing
from virtbus.bus.provisioning import backup
from virtbus.documents.examples import full, minimal
from virtbus.schemas import subjects
from virtbus.schemas.hosts import SigningKey
from virtbus.schemas.record_signature import unsigned
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.wire import encode, read

RECORDS = [
    pytest.param(make(VmRecord).model_copy(update={"signature": ""}), id=make.__name__)
    for make in (full, minimal)
]


def controller() -> tuple[MemoryServer, Bus, RecordKeys]:
    server = MemoryServer()
    return server, *signing(MemoryBus(server))


async def stored(bus: Bus, record: VmRecord) -> VmRecord:
    key = subjects.vm_record(record.node, record.uid)
    await bus.put(key, encode(record))
    entry = await bus.get(key)
    assert entry is not None
    return read(VmRecord, entry.value)


@pytest.mark.parametrize("record", RECORDS)
async def test_a_controllers_write_is_unchanged_and_signed(record: VmRecord) -> None:
    _, bus, keys = controller()
    there = await stored(bus, record)
    assert there.signature
    assert there.model_copy(update={"signature": ""}) == record
    assert await keys.good([there]) == {(record.node, record.uid)}


@pytest.mark.parametrize("record", RECORDS)
async def test_a_change_of_any_field_makes_the_signature_another_records(record: VmRecord) -> None:
    _, bus, keys = controller()
    there = await stored(bus, record)
    for update in (
        {"node": "n9"},
        {"uid": "0192f0c1-2d3e-7abc-8def-000000000000"},
        {"epoch": record.epoch + 1},
        {"generation": record.generation + 1},
        {"powered": not record.powered},
        {"labels": {"forged": "yes"}},
        {"signature": ""},
        {"signature": there.signature[:-2] + "AA"},
        {"signature": f"00000000:{there.signature[9:]}"},
    ):
        assert await keys.good([there.model_copy(update=update)]) == set(), update


@pytest.mark.parametrize("record", RECORDS)
async def test_a_changed_record_is_signed_again(record: VmRecord) -> None:
    _, bus, keys = controller()
    first = await stored(bus, record)
    second = await stored(bus, first.model_copy(update={"epoch": first.epoch + 1}))
    assert second.signature != first.signature
    assert await keys.good([first, second])
    assert unsigned(encode(second)) == encode(second.model_copy(update={"signature": ""}))


async def test_records_in_batches_are_signed_and_nothing_else_is() -> None:
    server, bus, keys = controller()
    record: VmRecord = RECORDS[0].values[0]  # type: ignore[assignment]  # a parameter set
    tombstone = encode(Tombstone(uid=record.uid))
    key = subjects.vm_record(record.node, record.uid)
    await bus.batch([Write(key, encode(record), 0), Write("$KV.vm.n1._spec", b"\x80", 0)])
    await bus.put(subjects.vm_record("_", record.uid), tombstone)
    values = {one.key: one.value for one in server.shelf(key).entries.values()}
    assert await keys.good([read(VmRecord, values.pop(key))])
    assert set(values.values()) == {b"\x80", tombstone}


async def test_controllers_that_start_at_once_accept_each_others_keys() -> None:
    server = MemoryServer()
    buses = [signing(MemoryBus(server)) for _ in range(4)]
    record: VmRecord = RECORDS[0].values[0]  # type: ignore[assignment]  # a parameter set
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stored(bus, record.model_copy(update={"node": f"n{number}"})))
            for number, (bus, _) in enumerate(buses)
        ]
    there = [task.result() for task in tasks]
    for _, keys in buses:
        assert len(await keys.good(there)) == 4


async def test_a_backup_has_the_key_and_a_copy_without_secrets_has_not() -> None:
    server, bus, _ = controller()
    record: VmRecord = RECORDS[0].values[0]  # type: ignore[assignment]  # a parameter set
    there = await stored(bus, record)
    copy = await backup.take(MemoryBus(server))
    assert copy.secrets == []
    assert not any("_signing" in key for key in (await backup.take(bus, secrets=False)).values)
    server, bus, keys = controller()
    await stored(bus, record.model_copy(update={"node": "n9"}))  # a key of its own came first
    await bus.purge(subjects.vm_record("n9", record.uid))
    assert await keys.good([there]) == set()
    for key, value in copy.values.items():
        if "_signing" in key:
            await bus.put(key, value)
    assert await keys.good([there]) == {(there.node, there.uid)}


async def test_a_damaged_key_affects_only_its_own_signatures() -> None:
    server, bus, keys = controller()
    record: VmRecord = RECORDS[0].values[0]  # type: ignore[assignment]  # a parameter set
    there = await stored(bus, record)
    await bus.put(subjects.signing_key("damaged"), b"\xc1")
    await bus.put(subjects.signing_key("empty"), encode(SigningKey(seed="")))
    assert await keys.good([there])
    kept = [e for e in server.shelf("$KV.sec.x").entries.values() if e.kind is EntryKind.PUT]
    assert len(kept) == 3


def test_a_seed_has_one_id() -> None:
    assert Signer(b"s" * 32).id == Signer(b"s" * 32).id != Signer(b"t" * 32).id
