"""Claim, then commit (ADR 0003): one winner of every race, and no crash leaves anything."""

import hashlib
from typing import Any

import pytest
from services.controller.tests.fleets import record, uid

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.secret_inputs import secret_bytes
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.commit import Commits, Committed
from virtbus.controller.edge.finalizer import Finalizer
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.vm import NameClaim, VmRecord, VmSecrets, VmSpec
from virtbus.schemas.wire import decode, encode, read

CLAIM = subjects.name_claim("default", "web")


def secrets(number: int, text: str = "#cloud-config\n") -> VmSecrets:
    return VmSecrets(uid=uid(number), cloud_init={"cloudinit": CloudInit(user_data=text)})


def standing(server: MemoryServer) -> dict[str, Any]:
    """Return the stored values, without markers and tombstones."""
    return {
        entry.key: value
        for shelf in server.shelves.values()
        for entry in shelf.entries.values()
        if entry.kind is EntryKind.PUT and not (value := decode(entry.value)).get("tombstone")
    }


def records(server: MemoryServer) -> list[VmRecord]:
    """Return the records."""
    return [
        VmRecord.model_validate(value)
        for key, value in standing(server).items()
        if key.startswith("$KV.vm.") and "spec" in value
    ]


def check_names(server: MemoryServer) -> None:
    """No name or address is held by two VMs; each holds its own, and has its own secrets."""
    found = standing(server)
    there = records(server)
    assert len({(one.namespace, one.name) for one in there}) == len(there), "a name twice"
    assert len({one.uid for one in there}) == len(there), "a uid twice"
    for one in there:
        claim = found.get(subjects.name_claim(one.namespace, one.name))
        assert claim is not None, "a VM without its claim"
        assert claim["uid"] == one.uid, "a VM whose name another holds"
        for key in addresses_of(one):
            holder = found.get(key, {}).get("vm")
            assert holder == one.uid, f"a VM whose address {key} is held by {holder}"
        if one.sec_digest is not None:
            held = found.get(subjects.vm_secret(one.node, one.uid))
            assert held is not None, "a VM without its secrets"
            body = secret_bytes(VmSecrets.model_validate(held))
            assert hashlib.sha256(body).hexdigest() == one.sec_digest, "another's secrets"


def check_clean(server: MemoryServer) -> None:
    """Every stored value belongs to a VM."""
    check_names(server)
    uids = {one.uid: one for one in records(server)}
    for key, value in standing(server).items():
        if key.startswith("$KV.vm._name."):
            assert value["uid"] in uids, f"an orphan claim: {key}"
        if key.startswith(subjects.ADDRESS_KEYS):
            assert key in addresses_of(uids[value["vm"]]), f"an orphan claim: {key}"
        if key.startswith("$KV.sec."):
            assert value["uid"] in uids, f"an orphan secret: {key}"
            assert key.split(".")[2] == uids[value["uid"]].node, f"a stray secret: {key}"


async def swept(server: MemoryServer) -> None:
    """Sweep with a controller that has just read the whole bus."""
    bus = MemoryBus(server, "sweeper")
    await sweep(bus)


async def sweep(bus: MemoryBus) -> None:
    fleet = Fleet()
    for entry in bus.server.shelf(CLAIM).listed(("$KV.vm.>",)):
        if entry.kind is EntryKind.PUT:
            fleet.put_vm(entry.key, entry.value, entry.revision, entry.time_ns)
    await Finalizer(bus, fleet, FleetEvents(bus)).sweep(grace_s=0.0)


def created(result: Any) -> bool:
    return isinstance(result, Committed) and result.created


# --- one controller --------------------------------------------------------------------------
async def test_a_create_claims_the_name_puts_the_secrets_and_commits() -> None:
    server = MemoryServer()
    done = await Commits(MemoryBus(server)).create(record(), secrets(1))
    assert done.created
    assert done.held.record.sec_digest is not None
    assert set(standing(server)) == {
        CLAIM,
        subjects.vm_secret("n1", uid(1)),
        subjects.vm_record("n1", uid(1)),
    }
    check_clean(server)


async def test_the_same_create_again_is_the_same_vm() -> None:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    first = await commits.create(record(), secrets(1))
    again = await commits.create(record(node="n2"), secrets(1))
    assert (again.created, again.held) == (False, first.held)
    await swept(server)
    check_clean(server)


@pytest.mark.parametrize(
    ("rival", "reason"),
    [
        (record(2, labels={"a": "b"}), "exists_unchanged"),
        (record(2, spec_hash="other"), "name_taken"),
        (record(1), "uid_taken"),
        (record(1, spec=VmSpec()), "uid_taken"),
        (record(1, "db"), "uid_taken"),
        (record(1, namespace="shop"), "uid_taken"),
    ],
)
async def test_a_name_and_a_uid_have_one_vm(rival: VmRecord, reason: str) -> None:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    first = await commits.create(record(), secrets(1, "first"))
    with pytest.raises(VirtbusError) as caught:
        await commits.create(rival, secrets(int(rival.uid[-1]), "second"))
    assert (caught.value.code, caught.value.reason) == (409, reason)
    assert records(server) == [first.held.record]
    kept = await MemoryBus(server).get(subjects.vm_secret("n1", uid(1)))
    assert kept is not None
    assert read(VmSecrets, kept.value) == secrets(1, "first")
    check_clean(server)


async def test_a_vm_that_is_being_deleted_is_not_created_again() -> None:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    first = await commits.create(record(), secrets(1))
    await commits.replace(first.held, first.held.record.model_copy(update={"deleting": True}))
    for number in (1, 2):
        with pytest.raises(VirtbusError) as caught:
            await commits.create(record(number), None)
        assert caught.value.code == 409
        assert "deleted" in str(caught.value)


async def test_a_deleted_uid_never_comes_back_and_its_name_is_free() -> None:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    first = await commits.create(record(), secrets(1))
    await commits.finish(first.held)
    assert standing(server) == {}
    with pytest.raises(VirtbusError) as caught:
        await commits.create(record(), secrets(1))
    assert caught.value.code == 410
    check_clean(server)
    assert (await commits.create(record(2), None)).created
    check_clean(server)


async def test_a_claim_of_a_uid_with_another_name_is_taken() -> None:
    """Left by a create that named another VM's uid and died; it must not block the name."""
    server = MemoryServer()
    bus = MemoryBus(server)
    commits = Commits(bus)
    await commits.create(record(1, "db"), None)
    await bus.put(CLAIM, encode(NameClaim(uid=uid(1))), expect=0)
    assert (await commits.create(record(2), None)).created
    check_clean(server)


async def test_a_claim_of_a_uid_with_another_name_is_swept() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    await Commits(bus).create(record(1, "db"), None)
    await bus.put(CLAIM, encode(NameClaim(uid=uid(1))), expect=0)
    await swept(server)
    check_clean(server)
    assert len(records(server)) == 1


async def test_a_replace_of_a_newer_object_is_a_conflict_and_changes_nothing() -> None:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    first = (await commits.create(record(), None)).held
    second = await commits.replace(first, first.record.model_copy(update={"powered": False}))
    with pytest.raises(Exception, match="wrong last sequence"):
        await commits.replace(StoredVm(first.record, first.revision), first.record)
    assert await commits.latest(uid(1)) == second


async def test_the_place_that_a_record_left_in_a_rebuild_is_forgotten_after_a_day() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    commits, old = Commits(bus), record()
    await commits.create(old, None)
    newer = old.model_copy(update={"node": "n2", "epoch": 2})
    await commits.write_back(newer, await commits.known(old.uid))
    former = subjects.vm_record("n1", old.uid)
    (shelf,) = [one for one in server.shelves.values() if former in one.entries]
    assert shelf.entries[former].kind is EntryKind.PURGE
    assert former in shelf.expires_ns
