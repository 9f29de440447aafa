"""Unreadable values are restored from hosts, kept in backups, and removed by a person."""

from pathlib import Path

from services.kubebridge.tests.manifests import vmi
from services.kubebridge.tests.test_given import credential, secret
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid
from tests.recovery.test_rebuild import ask, controller, on_bus, rebuild

from virtbus.bus.provisioning import backup
from virtbus.kubebridge.core.translation.mapping import translate
from virtbus.schemas import bounds, subjects
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode, read

A, B = uid(1), uid(2)
RECORD = subjects.vm_record(NODE, A)
GARBAGE = b"\xc1 no msgpack"


def damage(node: Node, key: str) -> None:
    """Put bytes at a key that no program of ours would write."""
    node.server.shelf(key).apply(key, GARBAGE)


async def test_a_rebuild_writes_a_damaged_record_back_from_its_host(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        for number in (1, 2):
            await node.put(record(number, name=f"vm-{number}"))
            await eventually(in_state(node, "Running", uid(number)))
        damage(node, RECORD)
        told = await rebuild(client)
        assert [(one.uid, one.step) for one in told.vms] == [(A, "raise")]
        written = await on_bus(node, A)
        assert written is not None
        assert written.name == "vm-1"
        assert (await ask(client, "vm.get", uid=A))["state"] == "Running"
        assert [deed for deed in node.domains.done if deed[0] != "start"] == []


async def test_a_rebuild_rewrites_a_damaged_join_record(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await node.put(record(1))
        await eventually(in_state(node, "Running"))
        damage(node, subjects.join_nonce(NODE))

        async def joined() -> bool:
            return all(one.joined for one in (await rebuild(client)).nodes)

        await eventually(joined)
        entry = await node.bus.get(subjects.join_nonce(NODE))
        assert entry is not None
        assert read(JoinNonce, entry.value).nonce == node.files.nonce()
        assert node.domains.done == [("start", A)]


async def test_a_rebuild_reads_hosts_whose_records_fill_many_answers(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    notes = {"a": "x" * 60_000, "b": "x" * 60_000}
    async with node.agent(), controller(node) as client:
        for number in range(1, 13):
            await node.put(record(number, name=f"vm-{number}", annotations=notes))
            await eventually(in_state(node, "Running", uid(number)))
        assert bounds.BUS_BYTES < 12 * 120_000
        damage(node, RECORD)
        assert [one.uid for one in (await rebuild(client)).vms] == [A]


async def test_a_person_deletes_a_damaged_vm_and_its_node_releases_everything(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        created = await ask(client, "vm.create", name="web", image="tiny", uid=A)
        assert created["vm"]["node"] == NODE
        await eventually(in_state(node, "Running"))
        damage(node, RECORD)
        assert (await ask(client, "vm.delete", name="web"))["deleting"]
        await eventually(lambda: A not in node.domains.there)
        assert (await ask(client, "vm.create", name="web", image="tiny"))["created"]


async def test_a_backup_keeps_unreadable_values_unchanged(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.bus.put(RECORD, encode(record(1)))
    await node.bus.put(subjects.vm_record(NODE, B), encode(record(2)))
    damage(node, RECORD)
    taken = await backup.take(node.bus)
    assert taken.values[RECORD] == GARBAGE
    assert set(taken.records) == {RECORD, subjects.vm_record(NODE, B)}
    await node.other_bus()
    assert sorted((await backup.put_back(node.bus, taken)).vms) == [A, B]


async def test_the_largest_secret_of_a_kubernetes_tenant_makes_a_vm_that_can_be_deleted(
    tmp_path: Path,
) -> None:
    """64 keys of 8 KiB in one Secret once made a record that ended all controllers (C1)."""
    node = Node(tmp_path)
    await node.join()
    keys = "\n".join(f"ssh-ed25519 {'A' * 8174}" for _ in range(63))
    manifest = vmi()
    manifest["spec"]["accessCredentials"] = [credential("keys", "noCloud")]
    create = translate(manifest, {("Secret", "keys"): secret(a=keys)}, "c1").create
    assert create is not None
    async with node.agent(), controller(node) as client:
        made = await client.request("virtbus.api.v1.vm.create", create, timeout_s=10)
        of = made["vm"]["uid"]
        await eventually(lambda: ("start", of) in node.domains.done)
        stored = await on_bus(node, of)
        assert stored is not None
        assert len(encode(stored)) < 4000
        await ask(client, "vm.delete", uid=of, grace_s=0)

        async def gone() -> bool:
            return await on_bus(node, of) is None

        await eventually(gone)
