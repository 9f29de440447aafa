"""The API of backups as a client sees it: the directories of the nodes are the truth."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_operation_api import off
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.backup import (
    BackupCheck,
    BackupDisk,
    BackupManifest,
    BackupsAsk,
    HeldBackup,
    HeldBackups,
)
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.states import VmState
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import encode, read, validate

ID = uid(90)
DEVICE = {"volumes": [{"name": "data", "host_device": {"path": "/dev/loop0"}}]}


def manifest(number: int = 90, **more: Any) -> BackupManifest:
    fields: dict[str, Any] = {"id": uid(number), "uid": uid(1), "name": "web", "node": "n1"}
    fields |= {"namespace": "default", "created_ns": number, "spec": {"volumes": []}}
    fields["disks"] = [BackupDisk(name="root", virtual_size_bytes=5, size_bytes=3)]
    return BackupManifest.model_validate(fields | more)


@asynccontextmanager
async def holding(made: World, *held: HeldBackup) -> AsyncIterator[list[BackupsAsk]]:
    """imaged of n1, which has these backups, in pages of one."""
    asked: list[BackupsAsk] = []
    there = {one.id: one for one in held}

    async def answer(request: Request) -> HeldBackups:
        want = validate(BackupsAsk, request.data)
        asked.append(want)
        if want.do == "list":
            left = [one for id_, one in sorted(there.items()) if id_ > want.after]
            return HeldBackups(items=tuple(left[:1]), more=len(left) > 1)
        found = there.get(want.id or "")
        if want.do == "delete" and found is not None and found.children:
            raise VirtbusError(Code.CONFLICT, "backup_needed", "others rest on it")
        if want.do == "delete":
            there.pop(want.id or "", None)
        return HeldBackups(items=() if found is None else (found,))

    endpoints = [Endpoint("backups", subjects.rpc("n1", "imaged", "backups"), answer)]
    async with MemoryBus(made.server, "n1").serve(ServiceInfo("imaged", "1"), endpoints):
        yield asked


@asynccontextmanager
async def hanging(made: World, *nodes: str) -> AsyncIterator[None]:
    """imaged of some nodes, which never answers about backups."""

    async def answer(_: Request) -> HeldBackups:
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncExitStack() as stack:
        for node in nodes:
            endpoints = [Endpoint("backups", subjects.rpc(node, "imaged", "backups"), answer)]
            info = ServiceInfo("imaged", "1")
            await stack.enter_async_context(MemoryBus(made.server, node).serve(info, endpoints))
        yield


async def operation(made: World, id_: str = ID) -> OperationRecord:
    entry = await made.host.get(subjects.operation_record("n1", id_))
    assert entry is not None
    return read(OperationRecord, entry.value)


@played()
async def test_a_backup_is_an_operation_of_the_node_of_its_vm(made: World) -> None:
    one = await off(made)
    for _ in range(2):  # it may be repeated
        view = await made.ask("create", "backup", vm="web", id=ID, mode="full", chain=3)
        assert (view["kind"], view["id"]) == ("backup", ID)
    op = await operation(made)
    assert (op.uid, op.epoch, op.mode, op.chain) == (one.uid, one.epoch, "full", 3)
    asking = made.ask("create", "backup", vm="other", id=uid(91))
    assert (await refused(asking)).reason == "vm_not_found"


@played()
async def test_a_node_without_a_directory_refuses_a_backup_at_once(made: World) -> None:
    await made.say(status(await off(made), VmState.FAILED))
    await settle()

    async def answer(_: Request) -> HeldBackups:
        return HeldBackups(enabled=False)

    endpoints = [Endpoint("backups", subjects.rpc("n1", "imaged", "backups"), answer)]
    async with MemoryBus(made.server, "n1").serve(ServiceInfo("imaged", "1"), endpoints):
        error = await refused(made.ask("create", "backup", vm="web", id=ID))
    assert (error.code, error.reason) == (422, "backups_off")
    assert "n1 has no directory for backups; set backup_dir" in error.body.message
    assert await made.host.get(subjects.operation_record("n1", ID)) is None


@played()
async def test_a_node_that_does_not_say_if_it_makes_backups_refuses_none(made: World) -> None:
    await off(made)
    async with hanging(made, "n1"):
        view = await made.ask("create", "backup", vm="web", id=ID)
    assert view["id"] == ID


@played()
async def test_a_vm_with_a_device_of_its_node_has_no_backups(made: World) -> None:
    await off(made, spec=DEVICE)
    error = await refused(made.ask("create", "backup", vm="web", id=ID))
    assert (error.reason, "disk data is a device" in error.body.message) == ("no_snapshots", True)


@played()
async def test_backups_of_all_nodes_are_listed_shown_and_deleted(made: World) -> None:
    await off(made)
    check = BackupCheck(operation=uid(3), at_ns=7, problem="bad")
    old = HeldBackup(id=ID, manifest=manifest(), check=check, children=(uid(91),))
    new = HeldBackup(id=uid(91), manifest=manifest(91, parent=ID, name="db"))
    bad = HeldBackup(id=uid(92))
    async with holding(made, old, new, bad):
        page = await made.ask("list", "backup")
        assert [one["id"] for one in page["items"]] == [ID, uid(91), uid(92)]
        assert not page.get("silent")
        page = await made.ask("list", "backup", vm="db")
        assert [one["id"] for one in page["items"]] == [uid(91)]
        assert "spec" not in page["items"][0]
        view = await made.ask("get", "backup", id=ID)
        assert (view["vm"], view["problem"], view["size_bytes"]) == ("web", "bad", 3)
        assert view["spec"] == {"volumes": []}
        unreadable = await made.ask("get", "backup", id=uid(92))
        assert "cannot be read" in unreadable["problem"]
        deleting = made.ask("delete", "backup", id=ID)
        assert (await refused(deleting)).reason == "backup_needed"
        await made.ask("delete", "backup", id=uid(91))
        assert (await refused(made.ask("get", "backup", id=uid(91)))).reason == "backup_not_found"


@played()
async def test_a_verification_runs_on_a_node_that_has_the_backup(made: World) -> None:
    await off(made)
    async with holding(made, HeldBackup(id=ID, manifest=manifest())):
        view = await made.ask("verify", "backup", id=ID, operation=uid(95))
        assert (view["kind"], view["node"], view["backup"]) == ("verify", "n1", ID)
    op = await operation(made, uid(95))
    assert (op.uid, op.backup) == (ID, ID)


@played()
async def test_nodes_that_do_not_answer_are_named(made: World) -> None:
    await off(made)
    page = await made.ask("list", "backup")
    assert page["silent"] == ["n1"]
    error = await refused(made.ask("get", "backup", id=ID))
    assert "n1 did not answer" in error.body.message
    assert (error.code, error.body.retry) == (Code.UNAVAILABLE, Retry.LATER)


@played(nodes=2)
async def test_a_node_that_is_down_may_have_the_backup(made: World) -> None:
    await off(made)
    async with holding(made):
        await asyncio.sleep(60)
        await made.hear(node("n1"))
        await settle()
        assert (await made.ask("list", "backup"))["silent"] == ["n2"]
        error = await refused(made.ask("get", "backup", id=ID))
        assert (error.code, "n2 did not answer" in error.body.message) == (Code.UNAVAILABLE, True)


@played(nodes=3)
async def test_a_node_that_never_answers_delays_no_other_one(made: World) -> None:
    await off(made)
    loop = asyncio.get_running_loop()
    async with hanging(made, "n2", "n3"), holding(made, HeldBackup(id=ID, manifest=manifest())):
        began_s = loop.time()
        assert (await made.ask("get", "backup", id=ID))["vm"] == "web"
        assert loop.time() - began_s < 1
        page = await made.ask("list", "backup")
        assert ([one["id"] for one in page["items"]], page["silent"]) == ([ID], ["n2", "n3"])


@played()
async def test_a_volume_is_filled_with_a_disk_of_a_backup(made: World) -> None:
    await off(made)
    spec = {"size": 0, "source": {"backup": ID, "disk": "root"}}
    asking = made.ask("create", "volume", name="v", spec=spec)
    assert (await refused(asking)).reason == "invalid"
    answer = await made.ask("create", "volume", name="v", spec=spec, node="n1")
    entry = await made.host.get(subjects.volume_record("default", "v"))
    assert entry is not None
    record = read(VolumeRecord, entry.value)
    assert record.fill is not None
    assert (record.fill.source.backup, record.fill.source.disk) == (ID, "root")
    op = await operation(made, answer["volume"]["fill_operation"])
    assert op.source == record.fill.source


@played()
async def test_a_reading_is_an_operation_of_a_running_vm_and_its_reader_ends_it(
    made: World,
) -> None:
    one = await off(made)
    asking = made.ask("serve", "backup", vm="web", id=ID)
    assert (await refused(asking)).reason == "vm_off"
    await made.say(status(one, VmState.RUNNING))
    await settle()
    asked = {"vm": "web", "id": ID, "since": uid(89), "within_s": 60}
    for _ in range(2):  # it may be repeated
        view = await made.ask("serve", "backup", **asked)
        assert (view["kind"], view["id"]) == ("serve", ID)
    op = await operation(made)
    assert (op.uid, op.since, op.within_s, op.finish) == (one.uid, uid(89), 60, False)
    assert (await refused(made.ask("serve", "backup", **asked | {"since": uid(88)}))).code == 409

    assert (await refused(made.ask("finish", "backup", id=ID))).reason == "not_served"
    seen = OperationStatus(id=ID, node="n1", phase=OperationPhase.RUNNING, step="serve")
    key = subjects.operation_status("n1", ID)
    await made.host.put(key, encode(seen))
    for _ in range(2):
        await made.ask("finish", "backup", id=ID)
    assert (await operation(made)).finish
    await made.host.put(key, encode(seen.after("fail", 1)))
    assert (await refused(made.ask("finish", "backup", id=ID))).reason == "operation_ended"
    assert (await refused(made.ask("finish", "backup", id=uid(91)))).code == 404
